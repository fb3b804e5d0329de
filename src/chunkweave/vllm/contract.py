"""What the plug-in relies on in vLLM, checked on the installed package: for releases that were not tested.

It needs no model and takes about a second. The names that a pass over the model's layers uses are not listed here: on
such a release any error of the start-up check (`model_check`) turns weaving off.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pkgutil import resolve_name
from typing import Any

from chunkweave.vllm.block_hashes import SaltedHasher

_CALLED: Mapping[str, str] = {
    "vllm.distributed.kv_events.BlockRemoved": "block_hashes medium",
    "vllm.distributed.kv_events.BlockStored": (
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": (
        "finished_sending finished_recving failed_recving"
    ),
    "vllm.lora.layers.LoRAMapping": "index_mapping prompt_mapping is_prefill",
    "vllm.v1.core.block_pool.BlockHashToBlockMap.get_one_block": "key",
    "vllm.v1.core.block_pool.BlockPool.evict_blocks": "block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids": "self",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": "request_id",
    "vllm.v1.core.kv_cache_utils.get_block_hash": "key",
    "vllm.v1.core.kv_cache_utils.maybe_convert_block_hash": "hash_bytes",
    "vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id": "block_hash group_id",
    "vllm.v1.request.Request.update_block_hashes": "self",
    "vllm.v1.sample.sampler.Sampler.gather_logprobs": "logprobs num_logprobs token_ids",
}
"""Functions and classes that are called, and their parameters that are given."""

_READ: Mapping[str, str] = {
    "vllm.config.CacheConfig": "gpu_memory_utilization kv_cache_memory_bytes",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events",
    "vllm.config.KVTransferConfig": "kv_connector_extra_config kv_load_failure_policy",
    "vllm.config.ModelConfig": (
        "dtype hf_config hf_text_config is_multimodal_model max_model_len model revision seed tokenizer "
        "tokenizer_revision trust_remote_code"
    ),
    "vllm.config.ParallelConfig": (
        "data_parallel_index data_parallel_size decode_context_parallel_size pipeline_parallel_size "
        "prefill_context_parallel_size tensor_parallel_size worker_cls"
    ),
    "vllm.config.SchedulerConfig": "max_num_batched_tokens max_num_seqs",
    "vllm.config.VllmConfig": (
        "cache_config compilation_config device_config kv_events_config kv_transfer_config load_config "
        "model_config parallel_config scheduler_config speculative_config"
    ),
    "vllm.v1.core.block_pool.BlockPool": (
        "blocks cached_block_hash_to_block cached_block_hashes_by_block hash_block_size num_gpu_blocks"
    ),
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "scheduler_block_size single_type_managers",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "block_pool coordinator",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_hash block_id",
    "vllm.v1.core.sched.output.CachedRequestData": "num_computed_tokens req_ids",
    "vllm.v1.core.sched.output.NewRequestData": "num_computed_tokens req_id",
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens preempted_req_ids scheduled_cached_reqs scheduled_new_reqs total_num_scheduled_tokens"
    ),
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "block_pool",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.outputs.KVConnectorOutput": "finished_recving kv_connector_worker_meta",
    "vllm.v1.request.Request": (
        "_block_hasher block_hashes cache_salt kv_transfer_params lora_request num_tokens prompt_token_ids request_id"
    ),
}
"""Classes, and the attributes of their instances that are used."""

_ADDED_LATER = {"restore_kv_caches", "supports_sleep_mode", "unregister_kv_caches"}
"""Methods of connectors that some tested release does not have."""

_BLOCK = 4


def broken_contract() -> str | None:
    """The first thing that the plug-in relies on and that this vLLM does not have; None if it has everything."""
    try:
        return next(_broken(), None)
    except Exception as error:  # noqa: BLE001  (a release that was never seen may fail in any way)
        return f"{type(error).__name__}: {error}"


def _broken() -> Iterator[str]:
    for name, arguments in _CALLED.items():
        parameters = inspect.signature(resolve_name(name)).parameters
        if missing := set(arguments.split()) - parameters.keys():
            yield f"{name} takes no {', '.join(sorted(missing))}"
    for name, read in _READ.items():
        if missing := set(read.split()) - _attributes(resolve_name(name)):
            yield f"{name} has no {', '.join(sorted(missing))}"
    yield from _broken_connector()
    yield from _broken_hashes()


def _attributes(kind: type) -> set[str]:
    """Names of a class's instances: its own and inherited ones, and those that a method assigns to `self`."""
    names = set(dir(kind))
    for base in kind.__mro__[:-1]:
        names |= inspect.get_annotations(base).keys()
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        stores = (
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        )
        names |= {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return names


def _broken_connector() -> Iterator[str]:
    """Whether vLLM's base class has the methods that ours overrides, and no others that it must have."""
    from chunkweave.vllm.connector import ChunkweaveConnector

    if missing := getattr(ChunkweaveConnector, "__abstractmethods__", ()):
        yield f"vLLM's connectors must have {', '.join(sorted(missing))}"
    above = ChunkweaveConnector.__mro__[1:]
    for name, ours in vars(ChunkweaveConnector).items():
        if name.startswith("_") and name != "__init__":
            continue
        theirs: Any = next((vars(base)[name] for base in above if name in vars(base)), None)
        if theirs is None and name not in _ADDED_LATER:
            yield f"vLLM's connectors have no {name}"
        if inspect.isfunction(theirs) and inspect.isfunction(ours):
            parameters = inspect.signature(theirs).parameters.values()
            positional = [parameter for parameter in parameters if parameter.kind in (0, 1)]
            try:
                inspect.signature(ours).bind(*positional)
            except TypeError as error:
                yield f"vLLM gives {name} of connectors other arguments: {error}"


def _broken_hashes() -> Iterator[str]:
    """Whether hashes of blocks are a chain, which separates woven blocks from exact ones."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher
    from vllm.v1.request import Request

    def hashed(data: Any) -> bytes:
        return sha256(repr(data).encode()).digest()

    hasher = get_request_block_hasher(_BLOCK, hashed)
    request = Request("contract", list(range(4 * _BLOCK)), SamplingParams(max_tokens=1), None, cache_salt="one")
    keys_before = generate_block_hash_extra_keys(request, 0, _BLOCK, 0)
    request.cache_salt = "another"
    if generate_block_hash_extra_keys(request, 0, _BLOCK, 0) == keys_before:
        yield "the hash of a prompt's first block does not depend on its cache_salt"
    request.block_hashes = [hashed("first")]
    plain = hasher(request)
    salted = SaltedHasher(hasher, 2, b"salt")(request)
    if [first == second for first, second in zip(plain, salted, strict=True)] != [True, False, False]:
        yield "the hash of a block does not depend on that of the block before it"
