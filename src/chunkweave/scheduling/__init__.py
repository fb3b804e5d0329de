"""Which request is served next, and what is computed ahead of its retrieval. Nothing here imports torch."""
