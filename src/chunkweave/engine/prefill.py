"""One prompt's prefill in steps, from its plan to the segments to store."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Self

import torch

from chunkweave.config import CaptureConfig
from chunkweave.fusion.capture import AttentionCapture, PartCapture
from chunkweave.fusion.loop import LoopTimes, PassRun
from chunkweave.fusion.rows import ActiveRows, CountedWork, counted
from chunkweave.kv.request_cache import RequestCache, before_rope
from chunkweave.kv.segment import SegmentHeldUp, SegmentKV, SegmentLate, SegmentLost
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.outcome import LayerWork, Stop
from chunkweave.planning.plan import KVSource, Pass, Plan, can_be_cut, cut
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import Prompt
from chunkweave.scheduling.in_progress import PartInProgress
from chunkweave.store.index import RequestUse, TieredLease, look_up
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId, Span, joined, spans_of
from chunkweave.weaving.segments import Prefetch, WeavingStore, new_captures, parts_to_keep, segments_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt whose KV cache is complete up to its last token.

    `logits` `[vocab]` predict the first new token. `work` is what every layer of every pass did. `recomputed` are
    positions of reused chunks that were active at the last layer of a pass. `recompute_work` sums the recomputed tokens
    of reused chunks over these layers; it includes tokens that were dropped midway, for the layers at which they were
    active. `stop` says where unfocused chunks were dropped, if any were.

    `captures` are the parts whose KV can be stored, `attention` what their tokens attended to, if requested. `loaded`
    are segments read from a slower tier. `lost_segments` were planned but could not be read. `owner` is the tenant.
    `lease` keeps the segments that were found from being evicted (RAGCache §5.1); None once new segments are stored.
    `mean` names the mean that the last part contributes to. It was `alone` if no step had other requests' tokens.
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
    lost_segments: int = 0
    owner: str = ""
    lease: TieredLease | None = None
    mean: MeanShare | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOptions:
    """What a prefill starts from and what it keeps.

    The cache has room for `new_tokens` more. With `capture`, new segments can be stored afterwards; with `profiles`,
    also what their tokens attend to. `prefetched` is what was prefetched.

    A prefill that was preempted during decoding is repeated with the tokens `generated` so far; they are computed after
    the prompt as in decoding, and nothing is captured. `plan` is the plan of the first run. It is used again unless one
    of its segments is gone, because another plan of an approximate method gives other tokens.

    `owner` is the tenant that stored segments are charged to. With `unseen` the cache also gets KV outside all layers'
    windows, for comparing caches. With `mean` only the last part is kept, as one context's share of its mean. Without
    `looks_up` the store is not asked, and the prompt does not count as a request.
    """

    new_tokens: int = 0
    capture: bool = True
    profiles: bool = False
    prefetched: Prefetch | None = None
    generated: tuple[int, ...] = ()
    plan: Plan | None = None
    owner: str = ""
    unseen: bool = False
    mean: MeanShare | None = None
    looks_up: bool = True


@dataclass(frozen=True, slots=True)
class _Step:
    """A pass or a slice of one. Parts are captured for the store in the prompt's last pass."""

    pass_: Pass
    captures: bool
    in_slices: bool = False


@dataclass(slots=True, eq=False)
class _Progress:
    """Totals over the steps so far; reset with every plan."""

    weave_s: float
    load_s: float = 0.0
    work: list[CountedWork] = field(default_factory=list)
    recompute_work: int = 0
    recomputed: tuple[Span, ...] = ()
    stop: Stop | None = None
    evidence: torch.Tensor | None = None
    alone: bool = True


@dataclass(slots=True, eq=False)
class LayeredPass:
    """A pass left between two layers, to be resumed in a later step: its rows, its run and its times."""

    rows: ActiveRows
    run: PassRun
    times: LoopTimes
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PrefillContext:
    """What all prefills of one runner share: model, store, and capture settings."""

    model: HuggingFaceModel
    store: WeavingStore
    capture: CaptureConfig


class PrefillJob:
    """Fills a prompt's KV cache by a method's plan, one pass or slice of a pass at a time.

    Usage: take `next_rows`, run them, alone or together with others', and pass the result to `take`, until `prefilled`
    is set. Segments are pinned and read until then or until `close`. If a segment is lost, `plan_without` plans again
    and discards what was computed. Owned by one request.

    While segments are being read, a pass may run by layers as they are loaded; `open_pass` is then set.
    """

    def __init__(self, context: PrefillContext, prompt: Prompt, method: ReuseMethod, options: PrefillOptions) -> None:
        """Make the plan and start loading; computes nothing."""
        self.prefilled: Prefilled | None = None
        self._context = context
        self._prompt = prompt
        self._method = method
        self._options = options
        self.use: RequestUse | None = None
        """The use of the store to count, from the first plan on; None if a plan was given."""
        self.open_pass: LayeredPass | None = None
        """The next pass, if some of its layers were run."""
        self._captures: Sequence[PartCapture] = ()
        self._attention: AttentionCapture | None = None
        self._given_up: set[SegmentId] = set()
        self._began = time.perf_counter()
        self._open(options.plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def next_tokens(self) -> int:
        """Tokens in the first layer of the next pass, or of what is left of it."""
        pass_ = self._steps[0].pass_
        return pass_.required_tokens + pass_.starting_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens of all remaining passes, counted in their first layers; 0 when done.

        Of a started pass: its active tokens, times the share of layers left.
        """
        steps = [step.pass_.required_tokens + step.pass_.starting_tokens for step in self._steps]
        if self.open_pass is not None:
            steps[0] = self.tokens_through(self._num_layers - self.open_pass.run.layer)
        return sum(steps)

    @property
    def layers_ready(self) -> int | None:
        """Layers that the next pass can run now without waiting.

        None if it should run whole or in slices by position: nothing is being read and no layer of it was run. 0 if a
        segment is lost and the prefill must be planned again.
        """
        if self.lost is not None:
            return 0
        if self.open_pass is None:
            return self._sources.layers_in if self.loading else None
        return max(0, self._sources.layers_in - self.open_pass.run.layer)

    def tokens_through(self, layers: int) -> int:
        """The work of `layers` layers, as tokens through all layers."""
        active = self.next_tokens if self.open_pass is None else len(self.open_pass.rows)
        return ceil(active * layers / self._num_layers)

    @property
    def can_be_cut(self) -> bool:
        """Whether the next pass can run in slices by position."""
        return can_be_cut(self._steps[0].pass_)

    @property
    def loading(self) -> bool:
        """Whether segments are still being read. Running the pass anyway waits at each layer."""
        return self._sources.reading

    @property
    def lost(self) -> SegmentLost | None:
        """The loss of a segment, if known before its layers were requested."""
        return self._sources.failure

    def next_rows(self, max_tokens: int | None = None) -> ActiveRows:
        """The rows of the next step: at most `max_tokens` of the next pass if it can be cut, else all of it."""
        started = time.perf_counter()
        step = self._steps[0]
        if max_tokens is not None and max_tokens < self.next_tokens and can_be_cut(step.pass_):
            head, tail = cut(step.pass_, max_tokens)
            if tail is not None:
                step = replace(step, pass_=head, in_slices=True)
                self._steps[0] = replace(step, pass_=tail)
                self._steps.appendleft(step)
        rows = ActiveRows.of_pass(
            self._cache,
            self._ids,
            step.pass_,
            dtype=self._context.model.dtype,
            evidence=self._progress.evidence,
            recomputed=self._progress.recomputed,
            answers=len(self._steps) == 1,
        )
        if step.captures and self._captures:
            rows.keep(self._captures, self._attention, in_slices=step.in_slices)
        self._progress.weave_s += time.perf_counter() - started
        return rows

    def take(
        self, rows: ActiveRows, logits: torch.Tensor | None, *, weave_s: float, load_s: float, alone: bool = True
    ) -> None:
        """Record a finished step: its rows, its times in seconds, and for the last step its `logits` `[vocab]`.

        `alone`: no other request was in it.
        """
        pass_ = self._steps.popleft().pass_
        so_far = self._progress
        so_far.weave_s += weave_s
        so_far.load_s += load_s
        so_far.alone &= alone
        so_far.work += rows.work
        so_far.stop, so_far.evidence = rows.stop or so_far.stop, rows.evidence
        fixed = self.plan.computed_tokens_of(pass_)
        so_far.recompute_work += sum(layer.kept_tokens - fixed for layer, _ in rows.work)
        if pass_.depth is None:
            recomputed = spans_of(self.plan.reused_among(rows.where))
            so_far.recomputed = joined([*so_far.recomputed, *recomputed])
        if not self._steps:
            assert logits is not None, "the last pass gives answers"
            self._finish(logits)

    def mark(self) -> None:
        """Save the capture state: the next rows may have to run twice."""
        if self._attention is not None:
            self._attention.mark()

    def undo(self) -> None:
        """Restore the state at `mark`: the rows taken since did not finish, and the next ones are the same."""
        if self._attention is not None:
            self._attention.undo()

    def plan_without(self, lost: SegmentLost) -> None:
        """Plan again without a segment. A late one is skipped for this request, a broken one removed from the store."""
        logger.warning("%s; its tokens are computed instead", lost)
        self._given_up.add(SegmentId(lost.segment))
        if not isinstance(lost, SegmentLate):
            self._context.store.store.drop_damaged(SegmentId(lost.segment))
        elif not isinstance(lost, SegmentHeldUp):
            self._context.store.store.was_late(SegmentId(lost.segment))
        self.close()
        self._open()

    @property
    def _num_layers(self) -> int:
        return self._context.model.geometry.num_layers

    def computed(self) -> Iterator[tuple[SegmentRecord, SegmentKV]]:
        """Segments of parts completed since the last call, for requests that wait for them.

        Reused parts that were recomputed in part are left to the end: a later pass may change them.
        """
        if self._options.mean is not None:
            return iter(())
        complete = [capture for capture in self._captures if capture.woven_from is None and capture.complete]
        self._captures = [capture for capture in self._captures if capture not in complete]
        store = self._context.store.store
        owner = self._options.owner
        return segments_of(self._prompt, self.plan, complete, self._attention, store=store, owner=owner)

    def in_progress(self) -> list[PartInProgress]:
        """The parts that are being computed and will be stored, less those that `computed` returned."""
        if self._options.mean is not None:
            return []
        waiting = {capture.part.span for capture in self._captures if capture.woven_from is None}
        reused = self.plan.spans(KVSource.REUSED)
        approximate_from = reused[0].start if reused else len(self._prompt)
        return [
            PartInProgress(
                part.part.id, context, part.span.stop <= approximate_from, self._tokens_until(part.span.stop)
            )
            for part, context in zip(self.plan.parts, self._prompt.contexts(), strict=True)
            if part.span in waiting and part.part.id is not None
        ]

    def _tokens_until(self, stop: int) -> int:
        """Tokens to compute until the KV of all positions below `stop` is final; of a pass that cannot be cut, all."""
        tokens = 0
        for step in self._steps:
            pass_ = step.pass_
            if step.captures and can_be_cut(pass_):
                inside = (span.within(0, stop) for span in pass_.required)
                tokens += sum(len(span) for span in inside if span)
            else:
                tokens += pass_.required_tokens + pass_.starting_tokens
        return tokens

    def close(self) -> None:
        """Stop reading and unpin; an unfinished job cannot continue. Idempotent."""
        self.open_pass = None
        self._sources.close()

    def _open(self, plan: Plan | None = None) -> None:
        options = self._options
        model = self._context.model
        store = self._context.store
        if plan is None:
            looks_up = options.looks_up
            lookup = store.store.lookup(self._prompt) if looks_up else look_up(self._prompt, (), lambda _: ())
            plan = store.plan(
                lookup,
                self._method,
                given_up=self._given_up,
                loading=store.loading(options.prefetched),
            )
            if looks_up:
                self.use = self.use or RequestUse.of(lookup, plan.segments(), plan.saved())
        self.plan = plan
        # Before segments are sent: the device copies in order.
        self._ids = torch.tensor((*self._prompt.token_ids, *options.generated), device=model.device)
        windows = () if options.unseen else model.geometry.windows
        self._sources = store.pin(plan, prefetched=options.prefetched, windows=windows)
        started = time.perf_counter()
        self._lookup_s = started - self._began
        capacity = len(self._prompt) + options.new_tokens
        self._placements = before_rope(self._sources.placements, model.unrotate_keys, model.device)
        self._cache = RequestCache(
            model.geometry,
            capacity,
            self._placements,
            dtype=model.dtype,
            device=model.device,
        )
        self._captures, self._attention = self._new_captures()
        self._steps = deque(_steps_of(self.plan, behind=len(options.generated)))
        self._progress = _Progress(weave_s=time.perf_counter() - started)

    def _new_captures(self) -> tuple[Sequence[PartCapture], AttentionCapture | None]:
        if not self._options.capture or self._options.generated:
            return (), None
        model = self._context.model
        config = self._context.capture
        store = self._context.store.store
        parts = parts_to_keep(
            self._prompt, self.plan, self._placements, store, variant_fraction=config.variant_fraction
        )
        captures = new_captures(parts, model.geometry, model.dtype, model.device)
        if not captures or not self._options.profiles:
            return captures, None
        return captures, AttentionCapture(self.plan.parts, model.geometry, config, device=model.device)

    def _finish(self, logits: torch.Tensor) -> None:
        started = time.perf_counter()
        self._cache.release_segments()
        self.prefilled = Prefilled(
            prompt=self._prompt,
            plan=self.plan,
            cache=self._cache,
            logits=logits,
            captures=tuple(capture for capture in self._captures if capture.complete),
            attention=self._attention,
            work=tuple(counted(self._progress.work)),
            recomputed=self._progress.recomputed,
            recompute_work=self._progress.recompute_work,
            stop=self._progress.stop,
            lookup_s=self._lookup_s,
            load_s=self._progress.load_s,
            weave_s=self._progress.weave_s + time.perf_counter() - started,
            loaded=tuple(self._sources.loaded()),
            lost_segments=len(self._given_up),
            owner=self._options.owner,
            lease=self._sources.keep_lease(),
            mean=self._options.mean,
            alone=self._progress.alone,
        )


def _steps_of(plan: Plan, *, behind: int) -> list[_Step]:
    """The plan's passes, and one over the `behind` tokens after the prompt."""
    last = len(plan.passes) - 1
    steps = [_Step(pass_, captures=number == last) for number, pass_ in enumerate(plan.passes)]
    if behind:
        rest = Span(plan.prompt_tokens, plan.prompt_tokens + behind)
        steps.append(_Step(Pass(required=(rest,)), captures=False))
    return steps
