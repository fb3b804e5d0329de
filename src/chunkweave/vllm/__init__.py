"""Weaving inside vLLM, as a plug-in: stock layers, stock scheduler, no fork (docs/vllm.md).

Of this the rest of chunkweave imports what needs neither vLLM nor torch (`request`, `report_socket`), and nothing of
vLLM is imported before one of its modules is.
"""
