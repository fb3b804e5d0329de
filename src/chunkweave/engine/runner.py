"""Runs prompts through the model: look up, plan, weave, first logits; then decode steps over many requests."""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from chunkweave.chunking.prompt import Prompt
from chunkweave.config import CaptureConfig
from chunkweave.engine.new_segments import parts_to_keep, segments_of
from chunkweave.engine.prefetch import Prefetch
from chunkweave.engine.turns import Turn, turn_captures, turn_of
from chunkweave.errors import PromptTooLongError
from chunkweave.fusion.attention_capture import AttentionCapture
from chunkweave.fusion.capture import PartCapture
from chunkweave.fusion.loop import LoopTimes, run_pass
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.request_cache import Placement, RequestCache
from chunkweave.kv.segment import SegmentKV, SegmentLate, SegmentLost, SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.cost_model import CostModel
from chunkweave.planning.explanation import Stop
from chunkweave.planning.flops import LayerWork
from chunkweave.planning.loading_controller import preload_depth
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.plan import Fate, PartPlan, Plan
from chunkweave.planning.pruning import too_slow, without
from chunkweave.planning.turns import with_kept
from chunkweave.store.tiered import TieredStore
from chunkweave.tiers.preload import Gone, LayerLoader, LoadingSegment, LoadOrder
from chunkweave.types import SegmentId, Span, joined, spans_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt whose KV cache is complete up to its last token.

    `logits` `[vocab]` are those of the first new token. `recomputed` are the positions of reused chunks that were
    active at the last layer of a pass; `work` is what every layer of every pass did, `recompute_work` the sum
    over those layers of the reused-chunk tokens among them: a token that was dropped midway counts there for the layers
    it was active at, and is not among `recomputed`. `stop` says where unfocused chunks were dropped, if they were.
    `captures` are the parts whose KV can be stored, `attention` what their tokens attended to, if that was asked for.
    `loaded` are the segments that came from a slower tier, `turn` what the conversation's next turn can go on from.
    """

    prompt: Prompt
    plan: Plan
    cache: RequestCache
    logits: torch.Tensor
    captures: tuple[PartCapture, ...]
    attention: AttentionCapture | None
    work: tuple[LayerWork, ...]
    recomputed: tuple[Span, ...]
    recompute_work: int
    stop: Stop | None
    lookup_s: float
    load_s: float
    weave_s: float
    loaded: tuple[tuple[SegmentId, SegmentKV], ...] = ()
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class _Keeping:
    """What of a prefill is kept: parts to store, and the whole turn, which went on from an `earlier` one."""

    capture: bool
    turn: bool
    earlier: Turn | None


class Runner:
    """Owns the way from a prompt to logits for one model and one store. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        model: HuggingFaceModel,
        store: TieredStore[SegmentSource],
        *,
        cost: CostModel | None = None,
        load_order: LoadOrder = LoadOrder.LAYERS,
        capture: CaptureConfig | None = None,
    ) -> None:
        """Put a runner between a model and a store.

        With a `cost` model, segments that load slower than they compute are computed, and a layer that comes later
        than that is given up. `load_order` is for comparison only. `capture` says what is kept of a prefill for later
        ones (None: the defaults).
        """
        self.model = model
        self.store = store
        self.cost = cost
        self.capture = capture or CaptureConfig()
        self.load_order = load_order

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
    def prefill(
        self,
        prompt: Prompt,
        method: ReuseMethod,
        *,
        new_tokens: int = 0,
        capture: bool = True,
        prefetched: Prefetch | None = None,
        earlier: Turn | None = None,
        keep_turn: bool = False,
    ) -> Prefilled:
        """Make the prompt's KV cache by the method's plan, with room for `new_tokens` more.

        Segments stay pinned while they are read. Nothing is stored here: `store_new` does that. With `capture=False`
        nothing can be stored afterwards. With `keep_turn` the result has a `turn`; given as `earlier` to a prompt that
        goes on from this one, its parts are taken as they were woven, and what was recomputed in them stays.
        """
        started = time.perf_counter()
        self.room_for_new_tokens(prompt)
        given_up: set[SegmentId] = set()
        while True:
            plan = self._plan(prompt, method, given_up, earlier)
            held = earlier.segments if earlier is not None else {}
            with self.store.lease(plan.segments()), self._loading(plan, prefetched, held) as placements:
                lookup_s = time.perf_counter() - started
                keeping = _Keeping(capture, keep_turn, earlier)
                try:
                    prefilled = self._weave(prompt, plan, placements, new_tokens, keeping, lookup_s)
                    self._note_reuse(plan.parts)
                    return prefilled
                except SegmentLost as lost:
                    self._give_up(lost, given_up)

    def prefetch(self, prompt: Prompt, method: ReuseMethod) -> Prefetch:
        """Start reading what `prefill` would read, while the request still waits; pass it to `prefill`, then close it.

        Reads the first layers only, as many as keep the later ones from being waited for (Cache-Craft eq. 16), so
        that a queue of waiting requests fills memory no further than it helps.
        """
        plan = self._plan(prompt, method, ())
        lease = self.store.lease(plan.segments())
        wanted = [(segment, self.store.get(segment)) for segment in plan.segments()]
        slow = [(segment, source) for segment, source in wanted if source and not isinstance(source, SegmentKV)]
        depth = self._preload_depth(plan, slow)
        return Prefetch(lease, LayerLoader(slow, self.model.geometry.num_layers, order=self.load_order, depth=depth))

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
        """Store what the prefill computed and promote what it loaded; returns how many new segments the store took.

        Among them are reused chunks that were largely recomputed: as variants of this prompt's context they save the
        same prompt that recomputation next time, with the same KV.
        """
        for segment, kv in prefilled.loaded:
            self.store.promote(segment, kv)
        new = segments_of(prefilled.prompt, prefilled.plan, prefilled.captures, prefilled.attention)
        return sum(self.store.insert(record, kv) for record, kv in new)

    def _plan(
        self, prompt: Prompt, method: ReuseMethod, given_up: Collection[SegmentId], earlier: Turn | None = None
    ) -> Plan:
        """Plan with what is stored, but for what was given up or takes longer to load than to compute."""
        lookup = without(self.store.lookup(prompt), given_up)
        if self.cost is not None:
            lookup = without(lookup, too_slow(lookup, self.cost, self.store.tier_of))
        if earlier is not None:
            lookup = with_kept(lookup, prompt, earlier.kept)
        plan = method.plan(lookup, self.model.geometry)
        plan.validate(self.model.geometry.num_layers)
        return plan

    @contextmanager
    def _loading(
        self, plan: Plan, prefetched: Prefetch | None, held: Mapping[SegmentId, SegmentKV]
    ) -> Iterator[list[Placement]]:
        """Where every segment of the plan goes; those not in memory are read by a loader until this is left.

        What an earlier turn `held` comes from there.
        """
        chosen = [(part.span, part.segment) for part in plan.parts if part.segment is not None]
        exact = {part.segment for part in plan.parts if part.fate is Fate.EXACT}
        sources: dict[SegmentId, SegmentSource] = {}
        slow: list[tuple[SegmentId, SegmentSource]] = []
        for segment in plan.segments():
            ahead = held.get(segment) or (prefetched.find(segment) if prefetched is not None else None)
            source = ahead or self.store.get(segment, exact=segment in exact) or Gone(segment)
            sources[segment] = source
            if not isinstance(source, SegmentKV | LoadingSegment | Gone):
                slow.append((segment, source))
        if prefetched is not None:
            prefetched.start_using()
        if not slow:
            yield [Placement(span, sources[segment]) for span, segment in chosen]
            return
        wait_s = self.cost.prefill(max(source.tokens for _, source in slow)) if self.cost else None
        loader = LayerLoader(slow, self.model.geometry.num_layers, order=self.load_order, wait_s=wait_s)
        try:
            sources |= {SegmentId(segment.name): segment for segment in loader.segments}
            loader.release()
            yield [Placement(span, sources[segment]) for span, segment in chosen]
        finally:
            loader.close()

    def _note_reuse(self, parts: Sequence[PartPlan]) -> None:
        """Tell the store how much each segment saved. Where the method does not score them, a use is just a use."""
        for part in parts:
            if part.segment is not None:
                unscored = 0.0 if part.fate is Fate.EXACT else 1.0
                self.store.note_reuse(part.segment, part.fix.impact if part.fix is not None else unscored)

    def _give_up(self, lost: SegmentLost, given_up: set[SegmentId]) -> None:
        """Go on without a segment: a late one for this request, a broken one for good."""
        logger.warning("%s; it is computed instead", lost)
        given_up.add(SegmentId(lost.segment))
        if not isinstance(lost, SegmentLate):
            self.store.remove(SegmentId(lost.segment))

    def _preload_depth(self, plan: Plan, slow: Sequence[tuple[SegmentId, SegmentSource]]) -> int:
        if self.cost is None:
            return self.model.geometry.num_layers
        load_s = sum(self.cost.load(source.tokens, self.store.tier_of(segment) or "") for segment, source in slow)
        layers = self.model.geometry.num_layers
        return preload_depth(layers, self.cost.prefill(plan.tokens_behind_loading(layers)), load_s)

    def _weave(
        self,
        prompt: Prompt,
        plan: Plan,
        placements: list[Placement],
        new_tokens: int,
        keeping: "_Keeping",
        lookup_s: float,
    ) -> Prefilled:
        started = time.perf_counter()
        model, dtype = self.model, self.model.dtype
        ids = torch.tensor(prompt.token_ids, device=model.device)
        cache = RequestCache(model.geometry, len(prompt) + new_tokens, placements, dtype=dtype, device=model.device)
        captures, attention = self._captures(prompt, plan, placements) if keeping.capture else ((), None)
        kept = self._turn_captures(plan, placements, keeping.earlier) if keeping.turn else ()
        times = LoopTimes()
        work: list[LayerWork] = []
        recompute_work = 0
        stop: Stop | None = None
        evidence: torch.Tensor | None = None
        recomputed: tuple[Span, ...] = ()
        for number, a_pass in enumerate(plan.passes, start=1):
            answers = number == len(plan.passes)
            rows = ActiveRows.of_pass(
                cache, ids, a_pass, dtype=dtype, evidence=evidence, recomputed=recomputed, answers=answers
            )
            if answers:
                rows.keep((*captures, *kept), attention)
            elif a_pass.depth is None:
                rows.keep(kept, None)
            hidden = run_pass(model, [rows], times)
            work += rows.work
            stop, evidence = rows.stop or stop, rows.evidence
            fixed = plan.computed_tokens_of(a_pass)
            recompute_work += sum(layer.kept_tokens - fixed for layer in rows.work)
            if a_pass.depth is None:
                recomputed = joined([*recomputed, *spans_of(plan.reused_among(rows.positions.tolist()))])
        logits = model.logits(hidden)[0]
        cache.release_segments()
        elapsed = time.perf_counter() - started
        return Prefilled(
            prompt=prompt,
            plan=plan,
            cache=cache,
            logits=logits,
            captures=tuple(capture for capture in captures if capture.complete),
            attention=attention,
            work=tuple(work),
            recomputed=recomputed,
            recompute_work=recompute_work,
            stop=stop,
            lookup_s=lookup_s,
            load_s=times.load_s,
            weave_s=elapsed - times.load_s,
            loaded=tuple(_loaded(placements)),
            turn=turn_of(prompt, plan, kept) if keeping.turn else None,
        )

    def _captures(
        self, prompt: Prompt, plan: Plan, placements: Sequence[Placement]
    ) -> tuple[tuple[PartCapture, ...], AttentionCapture | None]:
        geometry, config = self.model.geometry, self.capture
        parts = parts_to_keep(prompt, plan, placements, self.store, woven_fraction=config.woven_fraction)
        captures = tuple(PartCapture(part, geometry, self.model.dtype, woven_from=origin) for part, origin in parts)
        if not captures or not config.profile:
            return captures, None
        return captures, AttentionCapture(plan.parts, geometry, config, device=self.model.device)

    def _turn_captures(
        self, plan: Plan, placements: Sequence[Placement], earlier: Turn | None
    ) -> tuple[PartCapture, ...]:
        kept = earlier.kept if earlier is not None else {}
        records = {
            segment: kept[segment].record if segment in kept else self.store.record(segment)
            for segment in plan.segments()
        }
        return tuple(turn_captures(plan, placements, records, self.model))


def _loaded(placements: Sequence[Placement]) -> Iterator[tuple[SegmentId, SegmentKV]]:
    for segment in dict.fromkeys(p.segment for p in placements if isinstance(p.segment, LoadingSegment)):
        whole = segment.whole()
        if whole is not None:
            yield SegmentId(segment.name), whole
