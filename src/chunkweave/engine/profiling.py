"""Measures a cost model: prefill time over a grid of (cached, new) tokens, and read throughput of tiers."""

import time
from random import Random
from statistics import median

import torch

from chunkweave.config import ReuseConfig
from chunkweave.engine.runner import Runner
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.cost import CostModel, measured_quickly
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import Geometry


def quick_profile(model: HuggingFaceModel, fingerprint: str) -> CostModel:
    """Prefill times, measured in about two seconds (`measured_quickly`)."""
    nbytes = kv_bytes_per_token(model.geometry, model.dtype)
    most_tokens = min(model.geometry.max_positions - 1, 4096)
    tier: HostTier[SegmentSource] = HostTier()
    runner = Runner(model, TieredStore([Level("host", SegmentStore(tier, budget_bytes=2 * most_tokens * nbytes))]))
    return measured_quickly(
        lambda cached, new: _time_prefill(runner, cached, new, 1),
        most_tokens=most_tokens,
        kv_bytes_per_token=nbytes,
        fingerprint=fingerprint,
    )


def kv_bytes_per_token(geometry: Geometry, dtype: torch.dtype) -> int:
    """Bytes of K and V per token, over all layers."""
    return geometry.kv_elements_per_token() * torch.finfo(dtype).bits // 8


def _time_prefill(runner: Runner, cached: int, new: int, repeats: int) -> float:
    rng = Random(f"{cached} {new}")
    vocabulary = runner.model.geometry.vocab_size
    parts = [PromptPart(PartKind.QUESTION, tuple(rng.randrange(vocabulary) for _ in range(new)))]
    if cached:
        ids = tuple(rng.randrange(vocabulary) for _ in range(cached))
        system = PromptPart(PartKind.SYSTEM, ids, chunk_id("profile", "", ids))
        parts.insert(0, system)
        runner.store_new(runner.prefill(Prompt((system,)), make_method("full")))
    prompt = Prompt(tuple(parts))
    prefix = make_method("prefix", ReuseConfig())
    runner.prefill(prompt, prefix, capture=False)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        prefilled = runner.prefill(prompt, prefix, capture=False)
        times.append(time.perf_counter() - started - prefilled.load_s)
    return median(times)
