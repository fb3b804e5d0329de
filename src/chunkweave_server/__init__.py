"""The OpenAI-compatible server around the engine, and what its operators see of it."""
