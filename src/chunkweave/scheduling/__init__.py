"""Request scheduling: serving order, step budgets, routing, and shadow checks. Nothing here imports torch."""
