"""Identifies the model that vLLM has loaded, whether it can be woven, and whether weaving gives correct results.

At start-up each worker tries weaving on random tokens. Two things must hold, because each alone misses faults that the
other finds. With every token active, each way to run a pass equals vLLM's own forward. And a chunk's KV, read, rotated
back, rotated to another position and written, equals what vLLM computes at that position.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from chunkweave.config import StoreConfig
from chunkweave.errors import ModelError, UnsupportedModelError
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import RawCodec, SegmentKV
from chunkweave.models.anatomy import anatomy_of
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape
from chunkweave.models.huggingface import sliding_windows
from chunkweave.planning.cost import CostModel, measured_quickly
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan, Watch
from chunkweave.prompt.find_chunks import ChunkFinder, TokenTable
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.prompt.runs import RunIndex
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave.settings import GIB
from chunkweave.types import ChunkId, SegmentId, Span
from chunkweave.vllm.architectures import (
    ARCHITECTURES,
    MULTIMODAL,
    RUN_BY_TRANSFORMERS,
    Architecture,
    Call,
    architecture_of,
    language_model_of,
    missing_modules,
    narrowed,
    windows_of,
)
from chunkweave.vllm.paged_kv import KV_DTYPES, RequestBlocks
from chunkweave.vllm.stock_layers import BACKENDS, StockLayers
from chunkweave.vllm.weave import WeaveJob, scratch_bytes

logger = logging.getLogger("vllm.chunkweave")


def check_supported(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse models that weaving cannot handle, before their layers are used.

    Raises:
        UnsupportedModelError: model or configuration have an unsupported feature; the message names it.
    """
    reason = next(_unsupported(model, config, kv_cache_config), None)
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be woven here: {reason}")


def _unsupported_caches(config: ModelConfig) -> Iterator[str]:
    """Kinds of attention whose cache is not the keys and values of heads, whatever the class."""
    if config.is_hybrid or config.is_attention_free:
        yield "layers of linear attention or Mamba keep a state, which depends on every earlier token"
    if getattr(config.hf_text_config, "index_topk", None):
        yield "its sparse attention chooses keys by an index, which is cached beside them"
    if config.use_mla:
        yield "multi-head latent attention (MLA) caches latents, which have no keys of heads before RoPE"


def config_problems(name: str, config: VllmConfig) -> Iterator[str]:
    """Why a model of vLLM's class `name` cannot be woven with this configuration, whatever its layers are."""
    yield from _unsupported_caches(config.model_config)
    if not config.model_config.is_multimodal_model:
        yield from _unsupported_class(name, config)
    elif name not in MULTIMODAL:
        yield f"of the models whose prompts may have images only these are known: {', '.join(MULTIMODAL)}"
    if config.parallel_config.pipeline_parallel_size > 1:
        yield "pipeline parallelism would need hidden-state transfer"
    if config.parallel_config.data_parallel_size > 1:  # 1 for the engines of a dense model, which are independent
        yield "with data parallelism its experts wait in every layer for other engines, which do not weave then"
    parallel = config.parallel_config
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        yield "with context parallelism a rank has only some of a prompt's tokens"
    yield from _unsupported_drafts(config.speculative_config)


def _unsupported_class(name: str, config: VllmConfig) -> Iterator[str]:
    if architecture_of(name, config.model_config.hf_text_config) is None:
        named = f"; of those that vLLM runs by transformers, {', '.join(RUN_BY_TRANSFORMERS)}"
        yield f"the architecture is not one of {', '.join(ARCHITECTURES)}{named}"


def _unsupported(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    yield from config_problems(type(model).__name__, config)
    text = language_model_of(model)
    yield from _unsupported_class(type(text).__name__, config)
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not all(isinstance(spec, FullAttentionSpec | SlidingWindowSpec) for spec in specs):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        yield f"some layers keep their KV neither for the whole context nor for a window ({kinds})"
    elif len({spec.block_size for spec in specs}) > 1:
        yield f"its layers have blocks of {', '.join(str(spec.block_size) for spec in specs)} tokens"
    architecture = architecture_of(type(text).__name__, config.model_config.hf_text_config)
    if architecture is not None:
        yield from _unsupported_layers(text.model.layers, architecture, config)


WOVEN_DRAFTS = ("ngram", "suffix")
"""Methods of speculative decoding whose drafts are looked up in the tokens: no draft has KV before the model checks it.
"""


def _unsupported_drafts(speculative: Any) -> Iterator[str]:
    """Parts end in the prompt, whose KV is final: vLLM computes drafts, accepted or not, only behind it."""
    if speculative is not None and speculative.method not in WOVEN_DRAFTS:
        supported = ", ".join(WOVEN_DRAFTS)
        yield (
            f"with speculative decoding by {speculative.method}, drafts come from KV or hidden states of their own, "
            f"which a weave does not make; these methods are woven: {supported}"
        )


def _unsupported_layers(layers: Sequence[Any], architecture: Architecture, config: VllmConfig) -> Iterator[str]:
    anatomy = anatomy_of(config.model_config.hf_text_config)
    missing = {name for layer in layers for name in missing_modules(layer, architecture, anatomy)}
    if missing:
        yield f"its layers have no {', '.join(sorted(missing))}"
    if architecture.reduces_itself and config.parallel_config.tensor_parallel_size > 1:
        yield "its layers sum over tensor-parallel ranks themselves"
    attentions = [getattr(layer, architecture.attention) for layer in layers]
    yield from _unsupported_rotations([getattr(attention, "rotary_emb", None) for attention in attentions])
    rope = config.model_config.hf_text_config.rope_parameters
    if architecture.call is Call.TRANSFORMERS and rope.get("rope_type") in ("dynamic", "longrope"):
        yield f"its angles by RoPE type {rope['rope_type']} depend on more than a token's position"
    if any(getattr(attention, "do_llama_4_scaling", False) for attention in attentions):
        yield "its queries are scaled by their position"
    if any(getattr(attention.attn.impl, "sinks", None) is not None for attention in attentions) and not anatomy.sinks:
        yield "its family is not known to have attention sinks"
    softcap = getattr(config.model_config.hf_text_config, "attn_logit_softcapping", None)
    for cap in {getattr(attention.attn.impl, "logits_soft_cap", None) or None for attention in attentions} - {softcap}:
        yield f"vLLM caps attention scores at {cap}, the checkpoint at {softcap}"
    yield from _unsupported_backends([attention.attn for attention in attentions])
    yield from _unsupported_windows([attention.attn for attention in attentions], config.model_config)


def _unsupported_backends(attentions: Sequence[Any]) -> Iterator[str]:
    names = sorted({attention.get_attn_backend().get_name() for attention in attentions})
    advice = f"choose one with --attention-backend: {', '.join(BACKENDS)}"
    if unknown := [name for name in names if name not in BACKENDS]:
        yield f"how its attention backend {', '.join(unknown)} keeps metadata and KV is not known; {advice}"
    if len(names) > 1:
        yield f"its layers have several attention backends, {', '.join(names)}; {advice}"


def _unsupported_rotations(rotaries: Sequence[Any]) -> Iterator[str]:
    for name in dict.fromkeys(type(rotary).__name__ for rotary in rotaries):
        if any(word in name for word in ("Dynamic", "DualChunk")):
            yield f"{name} depends on more than a token's position"
    for rotary in rotaries:
        if getattr(rotary, "use_long_rope", False):
            most = rotary.original_max_position_embeddings
            yield f"beyond {most} positions LongRoPE has other angles; it is woven with --max-model-len {most} or less"


def _unsupported_windows(attentions: Sequence[Any], config: ModelConfig) -> Iterator[str]:
    """Check that both engines see the same keys, because they share segments."""
    everywhere = (None,) * len(attentions)
    try:
        windows = windows_of(attentions) or everywhere
    except UnsupportedModelError as error:
        yield str(error)
        return
    most = config.max_model_len
    for own, said in zip(windows, sliding_windows(config.hf_text_config) or everywhere, strict=True):
        if min(own or most, most) != min(said or most, most):
            yield f"vLLM attends within {own} keys, the checkpoint says {said}"


_TOKENS = 40
_SHIFT = 13
_TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
    torch.float8_e4m3fn: 0.15,
    torch.float8_e5m2: 0.3,
}
"""Largest relative error, by norm, of KV as the cache keeps it; half precision rounds at every step, and a key that is
rotated in a quantized cache is rounded twice.
"""


def checked_layers(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[StockLayers, int]:
    """The layers of a supported model that passed the trial, and the bytes of device memory that they keep.

    They keep what attention backends allocate for their metadata.

    Sliding windows are narrowed during the trial, so that the tokens exceed a window.

    Raises:
        UnsupportedModelError: model or configuration have an unsupported feature, or the results differ.
    """
    check_supported(model, config, kv_cache_config)
    text = language_model_of(model)
    architecture = architecture_of(type(text).__name__, config.model_config.hf_text_config)
    attentions = [getattr(layer, architecture.attention).attn for layer in text.model.layers] if architecture else []
    bytes_before = _allocated_bytes(torch.device(config.device_config.device))
    with narrowed(attentions, _TOKENS // 2):
        tried = StockLayers(model, config, kv_cache_config)
        _check(tried)
        kept_bytes = _allocated_bytes(tried.device) - bytes_before
    return StockLayers(model, config, kv_cache_config), kept_bytes


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def check_store(layers: StockLayers, store: StoreConfig) -> None:
    """Refuse settings of the store that a quantized KV cache does not combine with.

    Raises:
        UnsupportedModelError: codec or device tier would need KV in the model's dtype.
    """
    if not layers.paged.quantized:
        return
    if store.codec != RawCodec.name:
        raise UnsupportedModelError(
            f"a quantized KV cache is stored as it is: codec {store.codec} would round it again"
        )
    if store.device_budget_bytes:
        raise UnsupportedModelError(
            "a device tier (device_budget) holds one dtype, and weaves over a quantized KV cache two"
        )


def spare_bytes(config: VllmConfig, device: torch.device) -> int:
    """CUDA memory beside vLLM's own budget; call it once vLLM has allocated the KV cache.

    Of what is free, vLLM's activations and graphs will take a part, so at most the share that its budget leaves counts.
    With a KV cache of a given size (`kv_cache_memory_bytes`) vLLM has no share, and all that is free counts.
    """
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    cache = config.cache_config
    share = 1.0 if cache.kv_cache_memory_bytes else 1.0 - cache.gpu_memory_utilization
    return min(free, int(total * share))


def room_for_weaves(layers: StockLayers, config: VllmConfig, store: StoreConfig, *, kept: int, spare: int) -> int:
    """Device memory for weaves: the `spare` bytes without what is sent ahead, the device tier, and `kept` ones.

    Raises:
        ModelError: a prompt of as many tokens as a step does not fit; the message has the number.
    """
    longest = config.model_config.max_model_len
    usual = min(config.scheduler_config.max_num_batched_tokens, longest)
    taken = store.device_staging_bytes + store.device_budget_bytes + kept
    own = layers.own_geometry
    itemsize = layers.dtype.itemsize
    usual_bytes, longest_bytes = (
        taken + scratch_bytes(own, itemsize, tokens=tokens, active=tokens) for tokens in (usual, longest)
    )
    needed = (
        f"beside --gpu-memory-utilization it needs {_gib(usual_bytes)} of device memory for prompts of {usual} tokens "
        f"and {_gib(longest_bytes)} for {longest}, with {_gib(taken)} for device_staging, device_budget and workspaces"
    )
    if usual_bytes > spare:
        less = "lower --gpu-memory-utilization or device_staging"
        raise ModelError(f"{needed}; {_gib(spare)} are there: {less}")
    logger.info("chunkweave weaves: %s; %s are there, and vLLM computes prompts that need more", needed, _gib(spare))
    return spare - taken


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _check(layers: StockLayers) -> None:
    """Try weaving on blocks, and restore their contents."""
    blocks = -(-(_TOKENS + _SHIFT) // layers.paged.block_size)
    last = layers.paged.num_slots // layers.paged.block_size
    groups = max(layers.paged.groups) + 1
    if last <= 2 * groups * blocks:  # block 0 is the null block
        raise UnsupportedModelError("the KV cache is too small for the start-up check of weaving")
    free = [range(last - (n + 1) * blocks, last - n * blocks) for n in range(2 * groups)]
    tables = [RequestBlocks(free[n::2], layers.paged) for n in range(2)]
    everywhere = torch.arange(0, _TOKENS + _SHIFT, device=layers.device)
    slots = torch.cat([table.slots(everywhere) for both in tables for table in both.tables])
    ids = torch.arange(_TOKENS) * 7919 % 251 + 3
    with layers.paged.preserved(slots), layers.adapters.using(0), torch.inference_mode():
        _check_all_active(layers, tables[0], ids)
        _check_shift(layers, tables, ids)


def _check_all_active(layers: StockLayers, blocks: RequestBlocks, ids: torch.Tensor) -> None:
    """Recompute ratio 1: the last layer's KV equals that of vLLM's forward, with vLLM's kernels and with ours."""
    positions = torch.arange(len(ids), device=layers.device)
    last = layers.num_layers - 1
    slots = blocks.of(last).slots(positions)
    layers.forward(ids.to(layers.device), positions, layers.activate(positions, blocks))
    expected = layers.paged.read(last, slots).clone()
    span = Span(0, len(ids))
    part = PromptPart(PartKind.QUESTION, tuple(ids.tolist()))
    passes = {
        "the layers driven one by one": Pass((span,)),
        "the layers' modules with attention that is watched": Pass((span,), watch=Watch(span, (0, last))),
    }
    for description, plan_pass in passes.items():
        plan = Plan("full", (PartPlan(part, span, KVSource.COMPUTED),), (plan_pass,))
        WeaveJob(layers, blocks, plan, (), part.token_ids, first=0, stop=len(ids)).run()
        _compare(f"with every token computed, {description}", layers, expected, layers.paged.read(last, slots))


def _check_shift(layers: StockLayers, tables: list[RequestBlocks], ids: torch.Tensor) -> None:
    """Recompute ratio 0: a chunk computed at positions 0.. and reused at others equals one computed there."""
    positions = torch.arange(len(ids), device=layers.device)
    shifted = positions + _SHIFT
    layers.forward(ids.to(layers.device), positions, layers.activate(positions, tables[0]))
    stored = [
        layers.paged.read_stored(layer, tables[0].of(layer).slots(positions)) for layer in range(layers.num_layers)
    ]
    # Attention depends only on distances: the same slots with later positions give the KV of a chunk there.
    layers.forward(ids.to(layers.device), shifted, layers.activate(positions, tables[0]))
    expected = [layers.paged.read(layer, tables[0].of(layer).slots(positions)) for layer in range(layers.num_layers)]
    start_part = PromptPart(PartKind.START, tuple(range(3, 3 + _SHIFT)))
    chunk = PromptPart(PartKind.CHUNK, tuple(ids.tolist()), ChunkId("check"))
    spans = (Span(0, _SHIFT), Span(_SHIFT, _SHIFT + len(ids)))
    plan = Plan(
        "full-reuse",
        (
            PartPlan(start_part, spans[0], KVSource.COMPUTED),
            PartPlan(chunk, spans[1], KVSource.REUSED, SegmentId("check")),
        ),
        (Pass((spans[0],)),),
    )
    placed = [Placement(spans[1], SegmentKV(torch.stack(stored).cpu(), keys_at=0))]
    prompt = start_part.token_ids + chunk.token_ids
    WeaveJob(layers, tables[1], plan, placed, prompt, first=0, stop=spans[1].stop).run()
    for layer, wanted in enumerate(expected):
        read_keys = layers.paged.read(layer, tables[1].of(layer).slots(shifted))
        _compare(f"KV shifted to another position, layer {layer},", layers, wanted, read_keys)


def measured_cost(layers: StockLayers, fingerprint: str, most_tokens: int, agreed: Callable[[bool], bool]) -> CostModel:
    """Prefill times of vLLM's own forward, measured in about two seconds (`measured_quickly`).

    For prompts of at most `most_tokens`, in blocks whose contents are restored. Call it before the first request, on
    all ranks alike.
    """
    size = layers.paged.block_size
    last = layers.paged.num_slots // size
    groups = max(layers.paged.groups) + 1
    count = min((last - 1) // groups, most_tokens // size)
    blocks = RequestBlocks([range(last - (n + 1) * count, last - n * count) for n in range(groups)], layers.paged)

    def time_prefill(cached: int, new: int) -> float:
        positions = torch.arange(cached, cached + new, device=layers.device)
        ids = positions * 7919 % 251 + 3
        active = layers.activate(positions, blocks)
        took_s = 0.0
        for _ in range(2):  # the first run compiles code for this number of tokens
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
            kv_bytes_per_token=layers.own_geometry.kv_elements_per_token() * layers.paged.stored_dtype.itemsize,
            fingerprint=fingerprint,
        )


def _compare(what: str, layers: StockLayers, expected: torch.Tensor, actual: torch.Tensor) -> None:
    error = layers.ranks.maximum((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= _TOLERANCE[layers.paged.stored_dtype]:
        raise UnsupportedModelError(f"{what} differ from vLLM's own by {error:.3g} of their norm")


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def model_fingerprint(config: VllmConfig) -> str:
    """The fingerprint that our engine gives the same checkpoint; for dummy weights, of shape and seed.

    If vLLM keeps KV in another dtype than the model's, the fingerprint has that too. The scales of a quantized cache
    are part of the checkpoint.
    """
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype not in ("auto", dtype):
        dtype += f", KV in {KV_DTYPES.get(cache_dtype, cache_dtype)}"
    folder = model_folder(config)
    if folder is None:
        return fingerprint_shape(model.hf_config, dtype, model.seed or 0)
    return fingerprint_folder(folder, model.hf_config, dtype)


def model_folder(config: VllmConfig) -> Path | None:
    """The folder of the checkpoint's files; None for dummy weights."""
    model = config.model_config
    return None if config.load_config.load_format == "dummy" else _folder(model.model, model.revision)


def usual_start(model: ModelConfig) -> tuple[int, ...]:
    """The leading tokens of a prompt that belong to no chunk, as in our own engine.

    They are what the model's tokenizer puts before a text. A config may name a BOS that the tokenizer does not add
    (Qwen2.5), so it is used only without a tokenizer.
    """
    tokenizer = _tokenizer(model)
    bos = getattr(model.hf_text_config, "bos_token_id", None)
    named = (bos,) if isinstance(bos, int) else ()
    return named if tokenizer is None else tokenizer.start_ids


def finder_of(model: ModelConfig, runs: RunIndex) -> ChunkFinder:
    """Finds chunks in the model's prompts, with a table of its tokenizer if it can be read."""
    tokenizer = _tokenizer(model)
    if tokenizer is not None:
        return ChunkFinder(TokenTable.of(tokenizer), runs)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    token_fields = [getattr(model.hf_text_config, name, None) for name in names]
    control = {
        token
        for field_value in token_fields
        for token in (field_value if isinstance(field_value, list) else [field_value])
        if token is not None
    }
    return ChunkFinder(None, runs, control=control)


def _tokenizer(model: ModelConfig) -> HuggingFaceTokenizer | None:
    """The model's tokenizer; None if its folder has none, or it cannot be read."""
    try:
        folder = _folder(model.tokenizer or model.model, model.tokenizer_revision)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
        return HuggingFaceTokenizer(tokenizer)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        logger.warning("the tokenizer cannot be read: %s", error)
        return None


def rank_fingerprint(fingerprint: str, rank: int, size: int) -> str:
    """Fingerprint for the segments of one of `size` tensor-parallel ranks, which has only a share of the heads.

    A single rank has all heads, and shares its segments with our own engine.
    """
    return fingerprint if size == 1 else f"{fingerprint}-tp{rank}of{size}"


def _folder(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint; a hub name is in the local hub cache by now."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
