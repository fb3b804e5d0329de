"""Trains a model to read reused chunks: low-rank adapters, distilled from the model itself."""
