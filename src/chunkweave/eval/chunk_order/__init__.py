"""What chunk order does to reuse, over sequences of requests. Nothing here imports torch."""
