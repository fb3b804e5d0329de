"""Worlds: small, consistent, invented places for questions, generated from a seed. Imports no torch."""
