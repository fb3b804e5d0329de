"""Weaving inside vLLM, as a plug-in: stock layers, stock scheduler, no fork (docs/vllm.md).

Nothing here is imported by the rest of chunkweave, and nothing of vLLM is imported before one of its modules is.
"""
