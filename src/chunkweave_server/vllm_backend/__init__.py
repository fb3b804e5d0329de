"""The vLLM backend: a front with documents, chunk order, conversations, a queue and routing (docs/vllm.md).

vLLM's servers run in separate processes; this package does not import vLLM.
"""
