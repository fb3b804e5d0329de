"""Which model vLLM has loaded, whether it can be woven, and whether weaving it comes out right.

At start-up each worker tries weaving on random tokens; two things must hold (one of them alone misses faults of the
other). With every token active, each way to run a pass equals vLLM's own forward. And a chunk's KV, read, rotated back,
rotated to another position and written, equals what vLLM computes at that position.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from chunkweave.errors import UnsupportedModelError
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV
from chunkweave.models.anatomy import anatomy_of
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape
from chunkweave.models.huggingface import sliding_windows
from chunkweave.planning.cost import CostModel, measured_quickly
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan, Watch
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave.types import ChunkId, SegmentId, Span
from chunkweave.vllm.architectures import (
    ARCHITECTURES,
    RUN_BY_TRANSFORMERS,
    Architecture,
    Call,
    architecture_of,
    missing_modules,
    narrowed,
    windows_of,
)
from chunkweave.vllm.paged_kv import RequestBlocks
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.weave import WeaveJob

logger = logging.getLogger("vllm.chunkweave")


def check_supported(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what weaving cannot handle before its layers are used.

    Raises:
        UnsupportedModelError: model or configuration have such a feature; the message names it.
    """
    reason = next(_unsupported(model, config, kv_cache_config), None)
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be woven here: {reason}")


def _unsupported(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    architecture = architecture_of(model, config.model_config.hf_config)
    if architecture is None:
        named = f"; of those that vLLM runs by transformers, {', '.join(RUN_BY_TRANSFORMERS)}"
        yield f"the architecture is not one of {', '.join(ARCHITECTURES)}{named}"
        return
    if config.parallel_config.pipeline_parallel_size > 1:
        yield "pipeline parallelism would need hidden-state transfer"
    if config.parallel_config.data_parallel_size > 1:  # 1 for the engines of a dense model, which are independent
        yield "with data parallelism its experts wait in every layer for engines that weave nothing then"
    if config.speculative_config is not None:
        yield "with speculative decoding drafts have a KV cache of their own"
    if config.model_config.is_multimodal_model:
        yield "multimodal prompts have parts that are not tokens"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not all(isinstance(spec, FullAttentionSpec | SlidingWindowSpec) for spec in specs):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        yield f"some layers keep their KV neither for the whole context nor for a window ({kinds})"
    elif len({spec.block_size for spec in specs}) > 1:
        yield f"its layers have blocks of {', '.join(str(spec.block_size) for spec in specs)} tokens"
    yield from _unsupported_layers(model.model.layers, architecture, config)


def _unsupported_layers(layers: Sequence[Any], architecture: Architecture, config: VllmConfig) -> Iterator[str]:
    anatomy = anatomy_of(config.model_config.hf_config)
    missing = {name for layer in layers for name in missing_modules(layer, architecture, anatomy)}
    if missing:
        yield f"its layers have no {', '.join(sorted(missing))}"
    if architecture.reduces_itself and config.parallel_config.tensor_parallel_size > 1:
        yield "its layers sum over tensor-parallel ranks themselves"
    attentions = [getattr(layer, architecture.attention) for layer in layers]
    yield from _unsupported_rotations([getattr(attention, "rotary_emb", None) for attention in attentions])
    rope = config.model_config.hf_config.rope_parameters
    if architecture.call is Call.TRANSFORMERS and rope.get("rope_type") in ("dynamic", "longrope"):
        yield f"its angles by RoPE type {rope['rope_type']} depend on more than a token's position"
    if any(getattr(attention, "do_llama_4_scaling", False) for attention in attentions):
        yield "its queries are scaled by their position"
    if any(getattr(attention.attn.impl, "sinks", None) is not None for attention in attentions) and not anatomy.sinks:
        yield "its family is not known to have attention sinks"
    said = getattr(config.model_config.hf_config, "attn_logit_softcapping", None)
    for cap in {getattr(attention.attn.impl, "logits_soft_cap", None) or None for attention in attentions} - {said}:
        yield f"vLLM caps attention scores at {cap}, the checkpoint at {said}"
    yield from _unsupported_windows([attention.attn for attention in attentions], config.model_config)


def _unsupported_rotations(rotaries: Sequence[Any]) -> Iterator[str]:
    for name in dict.fromkeys(type(rotary).__name__ for rotary in rotaries):
        if any(word in name for word in ("Dynamic", "MRotary", "DualChunk")):
            yield f"{name} depends on more than a token's position"
    for rotary in rotaries:
        if getattr(rotary, "use_long_rope", False):
            most = rotary.original_max_position_embeddings
            yield f"beyond {most} positions LongRoPE has other angles; it is woven with --max-model-len {most} or less"


def _unsupported_windows(attentions: Sequence[Any], config: ModelConfig) -> Iterator[str]:
    """Segments are shared with the project's own engine, so that both must see the same keys."""
    everywhere = (None,) * len(attentions)
    try:
        windows = windows_of(attentions) or everywhere
    except UnsupportedModelError as error:
        yield str(error)
        return
    most = config.max_model_len
    for own, said in zip(windows, sliding_windows(config.hf_config) or everywhere, strict=True):
        if min(own or most, most) != min(said or most, most):
            yield f"vLLM attends within {own} keys, the checkpoint says {said}"


_TOKENS = 40
_SHIFT = 13
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest relative error, by norm, of hidden states and of KV; half precision rounds at every step."""


def checked_layers(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> StockLayers:
    """The layers of a model that can be woven and was tried.

    Sliding windows are narrowed while it is tried, so that the tokens are more than a window.

    Raises:
        UnsupportedModelError: model or configuration have a feature that cannot be woven, or what comes out differs.
    """
    check_supported(model, config, kv_cache_config)
    architecture = architecture_of(model, config.model_config.hf_config)
    attentions = [getattr(layer, architecture.attention).attn for layer in model.model.layers] if architecture else []
    with narrowed(attentions, _TOKENS // 2):
        _check(StockLayers(model, config, kv_cache_config))
    return StockLayers(model, config, kv_cache_config)


def _check(layers: StockLayers) -> None:
    """Try weaving on blocks whose contents are restored afterwards."""
    blocks = -(-(_TOKENS + _SHIFT) // layers.paged.block_size)
    last = layers.paged.num_slots // layers.paged.block_size
    groups = max(layers.paged.groups) + 1
    if last <= 2 * groups * blocks:  # the first block is nobody's
        raise UnsupportedModelError("the KV cache is too small to try weaving in it")
    free = [range(last - (n + 1) * blocks, last - n * blocks) for n in range(2 * groups)]
    tables = [RequestBlocks(free[n::2], layers.paged) for n in range(2)]
    everywhere = torch.arange(0, _TOKENS + _SHIFT, device=layers.device)
    slots = torch.cat([table.slots(everywhere) for both in tables for table in both.tables])
    ids = torch.arange(_TOKENS) * 7919 % 251 + 3
    with layers.paged.preserved(slots), layers.adapters.using(0), torch.inference_mode():
        _check_all_active(layers, tables[0], ids)
        _check_shift(layers, tables, ids)


def _check_all_active(layers: StockLayers, blocks: RequestBlocks, ids: torch.Tensor) -> None:
    """Recompute ratio 1: the KV of the last layer against that of vLLM's forward, with its kernels and with ours."""
    positions = torch.arange(len(ids), device=layers.device)
    last = layers.num_layers - 1
    slots = blocks.of(last).slots(positions)
    layers.forward(ids.to(layers.device), positions, layers.activate(positions, blocks))
    expected = layers.paged.read(last, slots).clone()
    span = Span(0, len(ids))
    part = PromptPart(PartKind.QUESTION, tuple(ids.tolist()))
    ways = {
        "the layers driven one by one": Pass((span,)),
        "the layers' modules with attention that is watched": Pass((span,), watch=Watch(span, (0, last))),
    }
    for way, a_pass in ways.items():
        plan = Plan("full", (PartPlan(part, span, KVSource.COMPUTED),), (a_pass,))
        WeaveJob(layers, blocks, plan, (), part.token_ids, first=0, stop=len(ids)).run()
        _compare(f"with every token computed, {way}", layers, expected, layers.paged.read(last, slots))


def _check_shift(layers: StockLayers, tables: list[RequestBlocks], ids: torch.Tensor) -> None:
    """Recompute ratio 0: a chunk computed at positions 0.., reused at others, against one computed there."""
    positions = torch.arange(len(ids), device=layers.device)
    shifted = positions + _SHIFT
    layers.forward(ids.to(layers.device), positions, layers.activate(positions, tables[0]))
    stored = [layers.paged.read(layer, tables[0].of(layer).slots(positions)) for layer in range(layers.num_layers)]
    # Attention depends on distances alone: the same slots, entered with later positions, give the KV of a chunk there.
    layers.forward(ids.to(layers.device), shifted, layers.activate(positions, tables[0]))
    expected = [layers.paged.read(layer, tables[0].of(layer).slots(positions)) for layer in range(layers.num_layers)]
    before = PromptPart(PartKind.START, tuple(range(3, 3 + _SHIFT)))
    chunk = PromptPart(PartKind.CHUNK, tuple(ids.tolist()), ChunkId("check"))
    spans = (Span(0, _SHIFT), Span(_SHIFT, _SHIFT + len(ids)))
    plan = Plan(
        "full-reuse",
        (PartPlan(before, spans[0], KVSource.COMPUTED), PartPlan(chunk, spans[1], KVSource.REUSED, SegmentId("check"))),
        (Pass((spans[0],)),),
    )
    placed = [Placement(spans[1], SegmentKV(torch.stack(stored).cpu(), keys_at=0))]
    prompt = before.token_ids + chunk.token_ids
    WeaveJob(layers, tables[1], plan, placed, prompt, first=0, stop=spans[1].stop).run()
    for layer, wanted in enumerate(expected):
        found = layers.paged.read(layer, tables[1].of(layer).slots(shifted))
        _compare(f"KV shifted to another position, layer {layer},", layers, wanted, found)


def measured_cost(layers: StockLayers, fingerprint: str, most_tokens: int, agreed: Callable[[bool], bool]) -> CostModel:
    """What prefill costs by vLLM's own forward, measured in about two seconds (`measured_quickly`).

    Of prompts of at most `most_tokens`, in blocks whose contents are restored afterwards. Call it before there are
    requests, on all ranks alike.
    """
    size = layers.paged.block_size
    last, groups = layers.paged.num_slots // size, max(layers.paged.groups) + 1
    count = min((last - 1) // groups, most_tokens // size)
    blocks = RequestBlocks([range(last - (n + 1) * count, last - n * count) for n in range(groups)], layers.paged)

    def time_prefill(cached: int, new: int) -> float:
        positions = torch.arange(cached, cached + new, device=layers.device)
        ids = positions * 7919 % 251 + 3
        active = layers.activate(positions, blocks)
        took_s = 0.0
        for _ in range(2):  # the first one makes code for this number of tokens
            started_s = time.perf_counter()
            layers.forward(ids, positions, active)[-1:].cpu()
            took_s = time.perf_counter() - started_s
        return took_s

    slots = torch.cat([table.slots(torch.arange(count * size, device=layers.device)) for table in blocks.tables])
    with layers.paged.preserved(slots), layers.adapters.using(0), torch.inference_mode():
        return measured_quickly(
            time_prefill,
            most_tokens=count * size,
            agreed=agreed,
            kv_bytes_per_token=layers.own_geometry.kv_elements_per_token() * layers.dtype.itemsize,
            fingerprint=fingerprint,
        )


def _compare(what: str, layers: StockLayers, expected: torch.Tensor, found: torch.Tensor) -> None:
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= _TOLERANCE[layers.paged.dtype]:
        raise UnsupportedModelError(f"{what} differ from vLLM's own by {error:.3g} of their norm")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def model_fingerprint(config: VllmConfig) -> str:
    """The fingerprint that chunkweave's own engine gives the same checkpoint; with dummy weights, of shape and seed."""
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    folder = model_folder(config)
    if folder is None:
        return fingerprint_shape(model.hf_config, dtype, model.seed or 0)
    return fingerprint_folder(folder, model.hf_config, dtype)


def model_folder(config: VllmConfig) -> Path | None:
    """Where the checkpoint's files are; None for dummy weights, which have none."""
    model = config.model_config
    return None if config.load_config.load_format == "dummy" else _folder(model.model, model.revision)


def usual_start(model: ModelConfig) -> tuple[int, ...]:
    """The leading tokens of a prompt that are part of no chunk, as the project's own engine makes them.

    They are what the model's tokenizer puts before a text. A config may name a BOS that the tokenizer does not add
    (Qwen2.5), so it is read only where there is no tokenizer.
    """
    bos = getattr(model.hf_config, "bos_token_id", None)
    named = (bos,) if isinstance(bos, int) else ()
    try:
        folder = _folder(model.tokenizer or model.model, model.tokenizer_revision)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return named
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
        return HuggingFaceTokenizer(tokenizer).start_ids
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        logger.warning("the tokenizer cannot be read (%s): a prompt is taken to begin with %s", error, named)
        return named


def rank_fingerprint(fingerprint: str, rank: int, size: int) -> str:
    """What one of `size` tensor-parallel ranks keeps its segments under: each has a share of the heads only.

    One alone has them all, and shares its segments with the project's own engine.
    """
    return fingerprint if size == 1 else f"{fingerprint}-tp{rank}of{size}"


def _folder(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint; of a name on a hub the files lie in the hub's own cache by now."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
