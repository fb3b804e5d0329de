"""Request scheduling: serving order, step budgets, and routing. Nothing here imports torch."""
