"""What weaving relies on in vLLM's attention backends, compared with their source, which needs no GPU.

If a test here fails after an update of vLLM, read the backend again, then `StockLayers` and `PagedKV`.
"""

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layer_kv_cache_shape_bytes

from chunkweave.vllm.paged_kv import BlockTable
from chunkweave.vllm.stock_layers import BACKENDS, _Runs

VLLM = Path(find_spec("vllm").submodule_search_locations[0])
FILES = {
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton_attn",
    "FLEX_ATTENTION": "flex_attention",
    "CPU_ATTN": "cpu_attn",
}
KEPT = {
    "FLASH_ATTN": {
        "scheduler_metadata",  # only for full CUDA graphs, which our builders do not have
        "aot_schedule",  # these two are set at the first build and then constant
        "aot_sliding_window",
        "_dcp_context_kv_lens",  # only with context parallelism, which is refused
        "mm_prefix_query_ranges_cpu",  # only for multimodal models, which are refused
        "mm_prefix_query_ranges_gpu",
        "persistent_rswa_prefix_lens",  # only for reference windows, which no woven model has
        "persistent_rswa_window_tensor",
    },
    "FLASHINFER": {
        "_prefill_wrapper",  # one for all builds: `build` plans it again
        "_decode_wrapper",
        "_noncausal_prefill_wrapper",
        "_decode_wrappers_cudagraph",
        "_decode_mask_cache",
        "_workspace_buffer",
        "paged_kv_indices",
        "paged_kv_indptr",
        "paged_kv_last_page_len",
    },
    "TRITON_ATTN": {
        "softmax_segm_expsum",  # scratch of one kernel
        "softmax_segm_max",
        "softmax_segm_output",
        "persistent_rswa_prefix_lens",
    },
    "FLEX_ATTENTION": {
        "persistent_doc_ids",
        "persistent_kv_indices",
        "persistent_kv_num_blocks",
        "persistent_offset_tensor",
        "persistent_physical_to_logical",
        "persistent_query_start_loc",
        "persistent_rswa_kv_indices",
        "persistent_rswa_kv_num_blocks",
        "persistent_rswa_prefix_lens",
        "persistent_seq_lens",
    },
    "CPU_ATTN": set(),
}
"""What a builder keeps from one build to the next, so that metadata may refer to it."""
UNUSED = {"mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"}
"""What builders read only for multimodal models, reference windows and context parallelism."""


@dataclass
class Source:
    """The classes of one backend's module."""

    classes: dict[str, ast.ClassDef]

    def of(self, end: str) -> dict[str, ast.FunctionDef]:
        """The methods of the class whose name ends so."""
        (found,) = [one for name, one in self.classes.items() if name.endswith(end)]
        return {one.name: one for one in found.body if isinstance(one, ast.FunctionDef)}


@pytest.fixture(params=FILES)
def backend(request) -> str:
    return request.param


@pytest.fixture
def source(backend) -> Source:
    module = ast.parse((VLLM / "v1/attention/backends" / f"{FILES[backend]}.py").read_text())
    return Source({one.name: one for one in module.body if isinstance(one, ast.ClassDef)})


def arguments(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in function.args.args]


def own(node: ast.AST) -> str | None:
    """The name of an attribute of `self`, also if an element of it is meant."""
    while isinstance(node, ast.Subscript):
        node = node.value
    named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if named else None


def assigned(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """The attributes that a method assigns, or whose elements it assigns, with a value."""
    found = {}
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            found |= {name: node.value for target in targets if (name := own(target)) is not None}
    return found


def test_every_known_backend_is_compared():
    assert set(FILES) == set(KEPT) == set(BACKENDS)


def test_it_has_the_name_that_weaving_knows(backend, source):
    (named,) = source.of("Backend")["get_name"].body
    assert ast.literal_eval(named.value) == backend


def test_builders_take_what_they_are_given(source):
    builder = source.of("MetadataBuilder")
    assert arguments(builder["__init__"]) == ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]
    assert arguments(builder["build"]) == ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]


def test_builders_read_only_what_a_batch_of_runs_has(source):
    table = BlockTable([1, 2], SimpleNamespace(block_size=16, kernel_block=16, device="cpu"))
    where = torch.tensor([3, 4, 9])
    batch = _Runs.of(where).batch(where, table, where)
    nodes = [node for method in source.of("MetadataBuilder").values() for node in ast.walk(method)]
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "common_attn_metadata"
    }
    assert read > {"num_reqs", "seq_lens", "block_table_tensor", "slot_mapping"}
    assert not {name for name in read - UNUSED if getattr(batch, name, None) is None}


def test_builders_keep_only_what_the_next_build_may_overwrite(backend, source):
    methods = source.of("MetadataBuilder")
    kept: set[str] = set()
    for name, method in methods.items():
        for attribute, value in assigned(method).items():
            made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            buffer = made.startswith("torch.") or made == "CpuGpuBuffer"
            if name != "__init__" or buffer:
                kept.add(attribute)
    assert kept == KEPT[backend]


def test_kv_is_written_apart_from_attention(source):
    (declared,) = [
        node.value
        for node in next(one for name, one in source.classes.items() if name.endswith("Backend")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "forward_includes_kv_cache_update"
    ]
    assert ast.literal_eval(declared) is False
    update = source.of("Impl")["do_kv_cache_update"]
    assert arguments(update) == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]


def test_blocks_have_keys_and_values_of_each_head_side_by_side(backend, source):
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert compute_layer_kv_cache_shape_bytes(spec, 10, 16) == (20, 2, 16, 2 * 64 * 2)
    update = ast.unparse(source.of("Impl")["do_kv_cache_update"])
    if backend != "CPU_ATTN":
        assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in update


def test_a_plan_of_flashinfer_does_not_outlive_the_next_build():
    """The reason for building metadata right before its use. FlexAttention's buffers are the other one."""
    text = (VLLM / "v1/attention/backends/flashinfer.py").read_text()
    assert "attn_metadata.prefill = FIPrefill(wrapper=prefill_wrapper)" in text
    assert "prefill_wrapper = self._get_prefill_wrapper(" in text


def test_what_vllm_chooses_on_a_gpu_is_known():
    """In the order of priority, without MLA; the others are for multimodal models and quantized caches."""
    module = ast.parse((VLLM / "platforms/cuda.py").read_text())
    (chooses,) = [one for one in module.body if getattr(one, "name", "") == "_get_backend_priorities"]
    mla = next(one for one in chooses.body if isinstance(one, ast.If) and ast.unparse(one.test) == "use_mla")
    named = {
        node.attr
        for branch in mla.orelse
        for node in ast.walk(branch)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "AttentionBackendEnum"
    }
    assert named - set(BACKENDS) == {"TURBOQUANT", "TRITON_FLASHINFER", "TRITON_FLASH_ATTN"}
