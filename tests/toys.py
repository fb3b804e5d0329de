"""Tiny models of every supported family, and tiers of a given speed."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from chunkweave.kv.segment import SegmentSource
from chunkweave.models.fingerprint import fingerprint_shape
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import LoadedModel, bundled_tokenizer, random_model
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

TOY_FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
"""The families that most tests run with. `toy_config` knows all of `models.anatomy.FAMILIES`."""

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_TWO_ROPES: dict[str, Any] = {
    "rope_parameters": {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "rope_theta": 1e6}}
}
_PARTIAL: dict[str, Any] = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "pad_token_id": 0}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.5,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_TOY_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": _EXPERTS,
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gpt_oss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {**_WINDOWS, **_TWO_ROPES},
    "olmo3": {**_WINDOWS, **_TWO_ROPES},
    "exaone4": {**_WINDOWS, "sliding_window_pattern": "LG"},
    "cohere2": _WINDOWS,
    "dots1": _ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 48},
    "glm4_moe": {**_ROUTED, "use_qk_norm": True, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "granite": _MULTIPLIERS,
    "granitemoe": {**_MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cwm": _WINDOWS,
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    "phi": _PARTIAL,
    "stablelm": _PARTIAL,
    "nemotron": _PARTIAL,
    "glm": _PARTIAL,
    "glm4": _PARTIAL,
}


def toy_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A 4-layer configuration of `family` with grouped-query attention; `changes` are applied last."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    values |= _TOY_CHANGES.get(family, {})
    made = TOY_FAMILIES.get(family)
    return made(**{**values, **changes}) if made else AutoConfig.for_model(family, **{**values, **changes})


def toy_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> LoadedModel:
    """A toy model with the bundled tokenizer. Its weights are large, so tokens differ and attention is not flat."""
    config = toy_config(family, **changes)
    model = HuggingFaceModel(random_model(config, dtype=dtype, device="cpu", seed=seed))
    name = f"toy-{family}"
    fingerprint = fingerprint_shape(config, str(dtype).removeprefix("torch."), seed)
    return LoadedModel(model, bundled_tokenizer(), fingerprint, name)


_TIMER_SLOP_S = 0.005
"""A reader that wakes up at most this late still gets the link's full throughput."""


class Link:
    """A link of fixed throughput, shared by all readers, one transfer at a time."""

    def __init__(self, bytes_per_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def transfer(self, nbytes: int) -> None:
        """Wait until `nbytes` have passed the link, after everything sent earlier."""
        with self._lock:
            now = time.perf_counter()
            idle = now - self._free_at_s > _TIMER_SLOP_S
            self._free_at_s = (now if idle else self._free_at_s) + nbytes / self.bytes_per_s
            wait_s = self._free_at_s - now
        self._sleep(max(wait_s, 0.0))


class ThrottledSegment:
    """A `SegmentSource` whose layers are read over a link."""

    def __init__(self, source: SegmentSource, link: Link) -> None:
        self._source = source
        self._link = link

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self._source.tokens

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._source.nbytes

    @property
    def keys_at(self) -> int | None:
        """As in the source."""
        return self._source.keys_at

    def layer(self, index: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
        """One layer, after the time that the link needs for it."""
        layer = self._source.layer(index, scratch)
        self._link.transfer(layer.nbytes)
        return layer


class ThrottledTier:
    """A tier in memory behind a link; writing takes no time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._held: dict[SegmentId, tuple[SegmentRecord, SegmentSource]] = {}

    def put(self, record: SegmentRecord, payload: SegmentSource) -> None:
        """Store a segment."""
        self._held[record.id] = (record, payload)

    def get(self, segment: SegmentId) -> SegmentSource | None:
        """The segment, to be read over the link."""
        held = self._held.get(segment)
        return None if held is None else ThrottledSegment(held[1], self._link)

    def delete(self, segment: SegmentId) -> None:
        """Delete a segment."""
        self._held.pop(segment, None)

    def nbytes(self, segment: SegmentId) -> int:
        """Bytes held."""
        held = self._held.get(segment)
        return 0 if held is None else held[1].nbytes

    def size_of(self, _record: SegmentRecord, payload: SegmentSource) -> int:
        """Bytes that it would take."""
        return payload.nbytes

    def records(self) -> Iterator[SegmentRecord]:
        """All stored records."""
        return (record for record, _ in tuple(self._held.values()))


def run_at_once(count: int, work: Callable[[int], None]) -> None:
    """Call `work` with each number below `count` in a thread of its own; raises what one of them raised."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait(30)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))
