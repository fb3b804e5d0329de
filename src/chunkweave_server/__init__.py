"""The OpenAI-compatible server with its two backends."""
