"""The vLLM backend: documents, orders, conversations, a queue and routes to replicas (docs/vllm.md).

vLLM's own servers run in processes of their own; nothing of vLLM is imported here.
"""
