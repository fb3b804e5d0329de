"""Prompts of random tokens, and shortcuts from a prompt to log-probabilities, for the oracle tests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.fusion.loop import PassRun
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.base import DecoderLayers
from chunkweave.models.loading import LoadedModel
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave_lab.baselines import bench_method

BOS = 1


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (a - b).abs().max().item() <= tolerance


def chunk_part(ids: Sequence[int], kind: PartKind = PartKind.CHUNK) -> PromptPart:
    return PromptPart(kind, tuple(ids), chunk_id("test", "", tuple(ids)))


def make_prompt(
    sizes: Sequence[int], *, system: int = 0, question: int = 5, seed: int = 0, order: Sequence[int] | None = None
) -> Prompt:
    """START, a system part of `system` tokens, chunks of `sizes` in `order`, a question; ids are random by `seed`."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(10, 4000, (n,), generator=generator).tolist()

    head = ids(system)
    chunks = [ids(n) for n in sizes]
    tail = ids(question)
    parts = [PromptPart(PartKind.START, (BOS,))]
    if head:
        parts.append(chunk_part(head, PartKind.SYSTEM))
    parts += [chunk_part(chunks[i]) for i in (order if order is not None else range(len(chunks)))]
    if tail:
        parts.append(PromptPart(PartKind.QUESTION, tuple(tail)))
    return Prompt(tuple(parts))


def alone(part: PromptPart) -> Prompt:
    return Prompt((PromptPart(PartKind.START, (BOS,)), part))


@dataclass
class Bench:
    """A model, a store, and what the tests ask of them. What chunks attend to is kept, whatever the method."""

    loaded: LoadedModel
    runner: Runner
    tier: HostTier[SegmentSource]

    def prefill(self, prompt: Prompt, method: str, *, ratio: float = 0.15, keep: bool = False, **config) -> Prefilled:
        """With a method by its name, a baseline or ablation such as `cachecraft:no-cci` among them."""
        name, *settings = method.split(":")
        chosen = bench_method(name, settings, ReuseConfig(recompute_ratio=ratio, **config))
        prefilled = self.runner.prefill(prompt, chosen, new_tokens=16)
        if keep:
            self.runner.store_new(prefilled)
        self.runner.store.check()
        return prefilled

    def log_probs(self, prompt: Prompt, method: str, **options) -> torch.Tensor:
        return torch.log_softmax(self.prefill(prompt, method, **options).logits, -1)

    def precompute(self, prompt: Prompt, *, without: Collection[int] = ()) -> Prompt:
        """Store every chunk as computed alone, except those whose numbers are in `without`; returns the prompt."""
        chunks = [part for part in prompt.parts if part.kind is PartKind.CHUNK]
        for number, chunk in enumerate(chunks):
            if number not in without:
                self.prefill(alone(chunk), "full", keep=True)
        return prompt

    def decode(self, prefilled: Prefilled, tokens: int) -> list[int]:
        out = [int(prefilled.logits.argmax())]
        for step in range(tokens - 1):
            logits = self.runner.decode([prefilled.cache], [out[-1]], [len(prefilled.prompt) + step])
            out.append(int(logits[0].argmax()))
        return out

    def own_log_probs(self, prompt: Prompt) -> torch.Tensor:
        """The Hugging Face model's own forward."""
        with torch.inference_mode():
            logits = self.loaded.model.model(torch.tensor([prompt.token_ids])).logits[0, -1]
        return torch.log_softmax(logits.float(), -1)


def make_bench(loaded: LoadedModel, *, budget_bytes: int = 1 << 30) -> Bench:
    tier: HostTier[SegmentSource] = HostTier()
    store = SegmentStore(tier, budget_bytes=budget_bytes)
    runner = Runner(loaded.model, TieredStore([Level("host", store)]), capture=CaptureConfig(profile=True))
    return Bench(loaded, runner, tier)


def run_pass(model: DecoderLayers, batch: Sequence[ActiveRows]) -> torch.Tensor:
    """A pass through all layers; returns its hidden state."""
    run = PassRun(model, batch)
    while not run.done:
        run.next_layer()
    return run.hidden
