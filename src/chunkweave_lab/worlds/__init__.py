"""Worlds: small, consistent, invented places to ask questions about, made from a seed. Imports no torch."""
