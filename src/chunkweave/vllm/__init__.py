"""Weaving inside vLLM, as a plug-in: stock layers, stock scheduler, no fork (docs/vllm.md).

The rest of chunkweave imports only modules of this package that need neither vLLM nor torch (`request`,
`report_socket`). vLLM is imported only by the modules that use it.
"""
