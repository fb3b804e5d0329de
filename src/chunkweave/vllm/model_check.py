"""The start-up gate: weaving is switched on only where this worker's own model shows that it comes out right.

Two things must hold on random tokens (one of them alone misses faults of the other): with every token active, each way
to run a pass equals vLLM's own forward, and a chunk's KV, read, turned back, turned to another position and written,
equals what vLLM computes at that position.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from chunkweave.chunking.prompt import PartKind, PromptPart
from chunkweave.chunking.tokenizer import HuggingFaceTokenizer
from chunkweave.errors import UnsupportedModelError
from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV
from chunkweave.models.fingerprint import fingerprint_folder, fingerprint_shape
from chunkweave.planning.plan import KVSource, PartPlan, Pass, Plan, Watch
from chunkweave.types import ChunkId, SegmentId, Span
from chunkweave.vllm.paged_kv import BlockTable
from chunkweave.vllm.stock_layers import StockLayers
from chunkweave.vllm.weave import WeaveJob

logger = logging.getLogger("vllm.chunkweave")


SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

_TOKENS = 40
_SHIFT = 13
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest relative error, by norm, of hidden states and of KV; half precision rounds at every step."""


def check(layers: StockLayers) -> None:
    """Try both on blocks whose contents are put back afterwards.

    Raises:
        UnsupportedModelError: one does not hold; the message says which, and how far off it is.
    """
    blocks = -(-(_TOKENS + _SHIFT) // layers.paged.block_size)
    last = layers.paged.num_slots // layers.paged.block_size
    if last < 2 * blocks:
        raise UnsupportedModelError("the KV cache is too small to try weaving in it")
    tables = [BlockTable(range(last - (n + 1) * blocks, last - n * blocks), layers.paged) for n in range(2)]
    everywhere = torch.arange(0, _TOKENS + _SHIFT, device=layers.device)
    slots = torch.cat([table.slots(everywhere) for table in tables])
    ids = torch.arange(_TOKENS) * 7919 % 251 + 3
    with layers.paged.preserved(slots), torch.inference_mode():
        _check_all_active(layers, tables[0], ids)
        _check_shift(layers, tables, ids)


def _check_all_active(layers: StockLayers, table: BlockTable, ids: torch.Tensor) -> None:
    """Recompute ratio 1: the KV of the last layer against that of vLLM's forward, with its kernels and with ours."""
    positions = torch.arange(len(ids), device=layers.device)
    slots, last = table.slots(positions), layers.num_layers - 1
    layers.forward(ids.to(layers.device), positions, layers.activate(positions, table))
    expected = layers.paged.read(last, slots).clone()
    span = Span(0, len(ids))
    part = PromptPart(PartKind.QUESTION, tuple(ids.tolist()))
    ways = {
        "the layers driven one by one": Pass((span,)),
        "the layers' modules with attention that is watched": Pass((span,), watch=Watch(span, (0, last))),
    }
    for way, a_pass in ways.items():
        plan = Plan("full", (PartPlan(part, span, KVSource.COMPUTED),), (a_pass,))
        WeaveJob(layers, table, plan, (), part.token_ids, first=0, stop=len(ids)).run()
        _compare(f"with every token computed, {way}", layers, expected, layers.paged.read(last, slots))


def _check_shift(layers: StockLayers, tables: list[BlockTable], ids: torch.Tensor) -> None:
    """Recompute ratio 0: a chunk computed at positions 0.., reused at others, against one computed there."""
    here = torch.arange(len(ids), device=layers.device)
    there = here + _SHIFT
    layers.forward(ids.to(layers.device), here, layers.activate(here, tables[0]))
    read = [layers.paged.read(layer, tables[0].slots(here)) for layer in range(layers.num_layers)]
    stored = [torch.stack((layers.rotation.inverse(keys, here), values)) for keys, values in read]
    # Attention depends on distances alone: the same slots, entered with later positions, give the KV of a chunk there.
    layers.forward(ids.to(layers.device), there, layers.activate(here, tables[0]))
    expected = [layers.paged.read(layer, tables[0].slots(here)) for layer in range(layers.num_layers)]
    before = PromptPart(PartKind.START, tuple(range(3, 3 + _SHIFT)))
    chunk = PromptPart(PartKind.CHUNK, tuple(ids.tolist()), ChunkId("gate"))
    spans = (Span(0, _SHIFT), Span(_SHIFT, _SHIFT + len(ids)))
    plan = Plan(
        "full-reuse",
        (PartPlan(before, spans[0], KVSource.COMPUTED), PartPlan(chunk, spans[1], KVSource.REUSED, SegmentId("gate"))),
        (Pass((spans[0],)),),
    )
    source = SegmentKV(torch.stack(stored).cpu())
    job = WeaveJob(
        layers,
        tables[1],
        plan,
        [Placement(spans[1], source)],
        before.token_ids + chunk.token_ids,
        first=0,
        stop=spans[1].stop,
    )
    job.run()
    for layer, wanted in enumerate(expected):
        _compare(
            f"KV shifted to another position, layer {layer},",
            layers,
            wanted,
            layers.paged.read(layer, tables[1].slots(there)),
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
    """The token ids that belong to nobody at the beginning of a prompt: START, as the project's own engine makes it.

    That is what the model's tokenizer puts before a text. A config may name a BOS that the tokenizer does not add
    (Qwen2.5); so the config is asked only where there is no tokenizer.
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


def check_supported(model: Any, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what weaving cannot handle before its layers are taken.

    Raises:
        UnsupportedModelError: model or configuration have such a feature; the message names it.
    """
    name = type(model).__name__
    reasons = [
        (name not in SUPPORTED, f"the architecture is not one of {', '.join(SUPPORTED)}"),
        (config.parallel_config.pipeline_parallel_size > 1, "pipeline parallelism would need hidden-state transfer"),
        (config.speculative_config is not None, "with speculative decoding drafts have a KV cache of their own"),
        (config.model_config.is_multimodal_model, "multimodal prompts have parts that are not tokens"),
        (len(kv_cache_config.kv_cache_groups) != 1, "hybrid KV cache groups are not uniform over layers"),
    ]
    reasons += [
        (
            not isinstance(group.kv_cache_spec, FullAttentionSpec),
            f"{type(group.kv_cache_spec).__name__} is not full attention",
        )
        for group in kv_cache_config.kv_cache_groups
    ]
    for bad, reason in reasons:
        if bad:
            raise UnsupportedModelError(f"{name} cannot be woven here: {reason}")
    _check_layers(name, model)


def _check_layers(name: str, model: Any) -> None:
    rotary = {id(layer.self_attn.rotary_emb) for layer in model.model.layers}
    if len(rotary) != 1:
        raise UnsupportedModelError(f"{name} cannot be woven here: its layers rotate by different angles")
    kind = type(model.model.layers[0].self_attn.rotary_emb).__name__
    if any(word in kind for word in ("Dynamic", "MRotary", "Longrope", "LongRoPE", "DualChunk")):
        raise UnsupportedModelError(f"{name} cannot be woven here: {kind} depends on more than a token's position")
    if getattr(model.model.layers[0].self_attn, "do_llama_4_scaling", False):
        raise UnsupportedModelError(f"{name} cannot be woven here: its queries are scaled by their position")
    windows = [getattr(layer.self_attn.attn.impl, "sliding_window", None) for layer in model.model.layers]
    if any(window not in (None, -1, (-1, -1)) for window in windows):
        raise UnsupportedModelError(f"{name} cannot be woven here: it attends within a sliding window")
