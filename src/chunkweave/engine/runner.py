"""Runs prompts through the model: look up, plan, weave, first logits; then decode steps over many requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.errors import PromptTooLongError
from chunkweave.fusion.capture import PartCapture
from chunkweave.fusion.loop import LoopTimes, run_pass
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.request_cache import Placement, RequestCache
from chunkweave.kv.segment import SegmentKV
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.flops import LayerWork
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.plan import Fate, Plan
from chunkweave.store.records import SegmentRecord
from chunkweave.store.segment_store import SegmentStore
from chunkweave.types import Span, spans_of


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt whose KV cache is complete up to its last token.

    `logits` `[vocab]` are those of the first new token. `recomputed` are the positions of reused chunks that were
    active at the last layer of the last pass; `work` is what every layer of every pass did, `recompute_work` the sum
    over those layers of the reused-chunk tokens among them.
    """

    prompt: Prompt
    plan: Plan
    cache: RequestCache
    logits: torch.Tensor
    captures: tuple[PartCapture, ...]
    work: tuple[LayerWork, ...]
    recomputed: tuple[Span, ...]
    recompute_work: int
    lookup_s: float
    load_s: float
    weave_s: float


class Runner:
    """Owns the way from a prompt to logits for one model and one store. Not thread-safe: one caller at a time."""

    def __init__(self, model: HuggingFaceModel, store: SegmentStore[SegmentKV]) -> None:
        self.model = model
        self.store = store

    def room_for_new_tokens(self, prompt: Prompt) -> int:
        """How many tokens the context leaves for the answer.

        Raises:
            PromptTooLongError: it leaves none; the message says how long the prompt and its longest part are.
        """
        limit = self.model.geometry.max_positions
        if len(prompt) >= limit:
            longest = max(prompt.parts, key=len)
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens (its longest part, {longest.source or longest.kind}, "
                f"has {len(longest)}), but the model's context is {limit}; send fewer or smaller chunks"
            )
        return limit - len(prompt)

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, method: ReuseMethod, *, new_tokens: int = 0, capture: bool = True) -> Prefilled:
        """Make the prompt's KV cache by the method's plan, with room for `new_tokens` more.

        Segments stay pinned while they are read. Nothing is stored here: `store_new` does that. With `capture=False`
        nothing can be stored afterwards.
        """
        started = time.perf_counter()
        self.room_for_new_tokens(prompt)
        while True:
            plan = method.plan(self.store.lookup(prompt), self.model.geometry)
            plan.validate(self.model.geometry.num_layers)
            with self.store.lease([part.segment for part in plan.parts if part.segment is not None]):
                placements = self._fetch(plan)
                if placements is not None:
                    lookup_s = time.perf_counter() - started
                    return self._weave(prompt, plan, placements, new_tokens, capture, lookup_s)

    @torch.inference_mode()
    def decode(
        self, caches: Sequence[RequestCache], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """One more token for each request: its last token at its position -> logits `[requests, vocab]`."""
        device, dtype = self.model.device, self.model.dtype
        batch = [
            ActiveRows(
                cache, torch.tensor([token], device=device), torch.tensor([position], device=device), dtype=dtype
            )
            for cache, token, position in zip(caches, token_ids, positions, strict=True)
        ]
        return self.model.logits(run_pass(self.model, batch))

    def store_new(self, prefilled: Prefilled) -> int:
        """Store what the prefill computed; returns how many segments the store took.

        A part is exact only if every part before it was; what follows a reused chunk never is.
        """
        contexts = prefilled.prompt.contexts()
        captured = {capture.part.span.start: capture for capture in prefilled.captures}
        stored, exact = 0, True
        for part, context in zip(prefilled.plan.parts, contexts, strict=True):
            exact = exact and part.fate is not Fate.REUSED
            capture = captured.get(part.span.start)
            if capture is not None and part.part.id is not None:
                kv = capture.segment()
                record = SegmentRecord.of(
                    part.part.id,
                    context,
                    part.part.token_ids,
                    exact=exact,
                    nbytes=kv.nbytes,
                    source=part.part.source,
                )
                stored += self.store.insert(record, kv)
        return stored

    def _fetch(self, plan: Plan) -> list[Placement] | None:
        """The plan's segments; None if one is gone, which the store then no longer lists: plan again."""
        placements = []
        for part in plan.parts:
            if part.segment is None:
                continue
            kv = self.store.get(part.segment)
            if kv is None:
                return None
            placements.append(Placement(part.span, kv))
        return placements

    def _weave(
        self,
        prompt: Prompt,
        plan: Plan,
        placements: list[Placement],
        new_tokens: int,
        capture: bool,
        lookup_s: float,
    ) -> Prefilled:
        started = time.perf_counter()
        model, dtype = self.model, self.model.dtype
        ids = torch.tensor(prompt.token_ids, device=model.device)
        cache = RequestCache(model.geometry, len(prompt) + new_tokens, placements, dtype=dtype, device=model.device)
        to_store = [p for p in plan.parts if p.fate is Fate.COMPUTED and p.part.id is not None]
        captures = tuple(PartCapture(part, model.geometry, dtype) for part in to_store) if capture else ()
        times = LoopTimes()
        work: list[LayerWork] = []
        recompute_work = 0
        for a_pass in plan.passes:
            rows = ActiveRows.of_pass(
                cache, ids, a_pass, dtype=dtype, captures=captures if a_pass is plan.passes[-1] else ()
            )
            hidden = run_pass(model, [rows], times)
            work += rows.work
            fixed = plan.computed_tokens_of(a_pass)
            recompute_work += sum(layer.kept_tokens - fixed for layer in rows.work)
        logits = model.logits(hidden)[0]
        recomputed = plan.reused_among(rows.positions.tolist())
        cache.release_segments()
        elapsed = time.perf_counter() - started
        return Prefilled(
            prompt=prompt,
            plan=plan,
            cache=cache,
            logits=logits,
            captures=captures,
            work=tuple(work),
            recomputed=spans_of(recomputed),
            recompute_work=recompute_work,
            lookup_s=lookup_s,
            load_s=times.load_s,
            weave_s=elapsed - times.load_s,
        )
