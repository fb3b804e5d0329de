"""Runs prompts through the model: lookup, plan, weave, first logits; then decode steps over many requests."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chunkweave.config import CaptureConfig, ComputeConfig
from chunkweave.engine.prefill import LayeredPass, PrefillContext, Prefilled, PrefillJob, PrefillOptions
from chunkweave.fusion.loop import LoopTimes, PassInterrupted, PassRun
from chunkweave.fusion.rows import ActiveRows
from chunkweave.kv.request_cache import RequestCache
from chunkweave.kv.segment import SegmentKV, SegmentLost, SegmentSource
from chunkweave.models.attention import SdpaAttention
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.kernels.choice import make_attention
from chunkweave.planning.cost import CostModel, Loading
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.store.records import SegmentRecord, all_read, segment_id
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import Staging, host_memory_for, streams_of
from chunkweave.tiers.preload import LoadOrder
from chunkweave.types import SegmentId, Span
from chunkweave.weaving.means import Means
from chunkweave.weaving.segments import Prefetch, WeavingStore, reads_of, segments_of

if TYPE_CHECKING:  # it imports Triton, which need not be there
    from chunkweave.fusion.graphed_decode import GraphedDecode

__all__ = ["Decoding", "Prefilled", "Runner"]


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """A decoding request: its cache, the tokens without KV, and the position of the first of these.

    That is its last token. Behind it may be draft tokens; then the last `answering` tokens get logits. KV of rejected
    drafts is overwritten later.
    """

    cache: RequestCache
    token_ids: tuple[int, ...]
    position: int
    answering: int = 1


class Runner:
    """Computes logits from prompts, for one model and one store. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        model: HuggingFaceModel,
        store: TieredStore[SegmentSource],
        *,
        cost: CostModel | None = None,
        load_order: LoadOrder = LoadOrder.LAYERS,
        capture: CaptureConfig | None = None,
        compute: ComputeConfig | None = None,
        staging: Staging | None = None,
    ) -> None:
        """Make a runner for a model and a store.

        With a `cost` model, segments that load slower than they compute are computed, and a layer that exceeds that
        time is given up. `load_order` is for comparisons only. `capture` says what a prefill keeps for later ones
        (None: the defaults), `compute` how the model runs on its device, `staging` how much is sent to it ahead (None:
        no limit).

        Raises:
            UsageError: `compute` names a kernel that does not run here.
        """
        self.model = model
        self.store = store
        self.cost = cost
        self.capture = capture or CaptureConfig()
        self.load_order = load_order
        self.compute = compute or ComputeConfig()
        self.attention = make_attention(self.compute.attention, model.geometry, dtype=model.dtype, device=model.device)
        self.graphed = self._graphed_decode()
        self.means = Means()
        self._send, self._staging = streams_of(model.device).send, staging
        self._memory = host_memory_for(model.device, self.compute.pinned_bytes)

    def room_for_new_tokens(self, prompt: Prompt) -> int:
        """Tokens that the context leaves for the answer.

        Raises:
            PromptTooLongError: none are left; the message gives the length of the prompt and of its longest part.
        """
        return prompt.room_in(self.model.geometry.max_positions)

    @torch.inference_mode()
    def prefill(
        self,
        prompt: Prompt,
        method: ReuseMethod,
        *,
        new_tokens: int = 0,
        capture: bool = True,
        profiles: bool | None = None,
        prefetched: Prefetch | None = None,
        counts_as_request: bool = True,
        unseen: bool = False,
        mean: MeanShare | None = None,
    ) -> Prefilled:
        """Compute the prompt's KV cache by the method's plan, with room for `new_tokens` more.

        Segments are pinned while they are read. This stores nothing; `store_new` does. With `capture=False` nothing can
        be stored afterwards. With `profiles`, segments are stored with what their tokens attend to; None: as the
        runner's `capture` says, or else if the method reads profiles. If `counts_as_request`, it counts as a request in
        the store's statistics. For `unseen` and `mean` see `PrefillOptions`.
        """
        self.room_for_new_tokens(prompt)
        if profiles is None:
            profiles = self.capture.profile
        if profiles is None:
            profiles = getattr(method, "needs_profiles", False)
        options = PrefillOptions(new_tokens, capture, profiles, prefetched, unseen=unseen, mean=mean)
        with self.start(prompt, method, options) as job:
            if counts_as_request and job.use is not None:
                self.store.note_request(job.use)
            return self.run([job])[0]

    def run(self, jobs: Sequence[PrefillJob]) -> list[Prefilled]:
        """Run prefills to their end: together, except those whose segments are still being read."""
        while unfinished := [job for job in jobs if job.prefilled is None]:
            reading = [job for job in unfinished if job.loading or job.lost is not None]
            try:
                self.step([], [(job, None) for job in (reading[:1] or unfinished)])
            except SegmentLost as lost:
                (reading or unfinished)[0].plan_without(lost)
        return [job.prefilled for job in jobs if job.prefilled is not None]

    def start(self, prompt: Prompt, method: ReuseMethod, options: PrefillOptions) -> PrefillJob:
        """Plan a prefill, which `step` executes piece by piece. The caller closes it."""
        return PrefillJob(PrefillContext(self.model, self._weaving_store, self.capture), prompt, method, options)

    @torch.inference_mode()
    def step(
        self,
        decoding: Sequence[Decoding],
        prefilling: Sequence[tuple[PrefillJob, int | None]],
        *,
        interrupt: Callable[[], bool] | None = None,
        late: Callable[[float], bool] | None = None,
    ) -> torch.Tensor:
        """One run through all layers: one more token of some requests and a piece of others' prefills.

        Each job contributes at most its number of tokens if its pass can be cut, and takes the result. Returns the
        logits of `decoding`, `[answering tokens, vocab]`. Before every layer, `interrupt` may stop the step. Between
        two layers, `late`, called with the share of layers done, may take the jobs out; the decoding requests then
        finish alone, and each job has an `open_pass`.

        Raises:
            PassInterrupted: `interrupt` stopped the step. Nothing has changed; the same step may run again.
            SegmentLost: a segment of a job that was still loading is lost; a step with such a job has no other job.
        """
        plain = all(len(decode.token_ids) == 1 for decode in decoding)  # a graph has one row per request
        if self.graphed is not None and not prefilling and plain:
            decodes_one = ((decode.cache, decode.token_ids[0], decode.position) for decode in decoding)
            logits = self.graphed.decode(*zip(*decodes_one, strict=True))
            if logits is not None:
                return logits
        if interrupt is not None:
            for job, _ in prefilling:
                job.mark()
        decodes = [self._row(decode) for decode in decoding]
        pieces = [(job, job.next_rows(tokens)) for job, tokens in prefilling]
        made = time.perf_counter()
        times = LoopTimes()
        run = PassRun(self.model, [*decodes, *(rows for _, rows in pieces)], times, self.attention)
        while not run.done:
            if interrupt is not None and interrupt():
                for job, _ in pieces:
                    job.undo()
                raise PassInterrupted(run.part_done)
            if late is not None and pieces and run.layer and late(run.part_done):
                pieces = [(job, rows) for job, rows in pieces if not self._left(job, rows, run, times, made)]
                late = None
            else:
                run.next_layer()
        hidden = run.hidden
        logits = self.model.logits(hidden) if len(hidden) else hidden
        ended = time.perf_counter()
        answering = sum(decode.answering for decode in decoding)
        answers = iter(logits[answering:])
        for job, rows in pieces:
            answer_logits = next(answers) if rows.answers else None
            weave_s = ended - made - times.load_s
            alone = not decoding and len(pieces) == 1
            job.take(rows, answer_logits, weave_s=weave_s, load_s=times.load_s, alone=alone)
        return logits[:answering]

    def _left(self, job: PrefillJob, rows: ActiveRows, run: PassRun, times: LoopTimes, since_s: float) -> bool:
        """Take a job out of a run, to be resumed by layers in a later step; False if its pass has ended."""
        request_times = LoopTimes(times.load_s)
        rest = run.take_out(rows, request_times)
        if rest is None:
            return False
        job.open_pass = LayeredPass(rows, rest, request_times, time.perf_counter() - since_s)
        return True

    @torch.inference_mode()
    def step_layers(
        self,
        job: PrefillJob,
        tokens: int,
        *,
        interrupt: Callable[[], bool] | None = None,
        late: Callable[[], bool] | None = None,
    ) -> int:
        """Run a job's next pass alone, through the layers that are in memory; returns the work done.

        Work is counted as tokens through all layers. It is at most `tokens`, except that the first layer always runs
        and is waited for. `interrupt` is called before every layer and may stop there, `late` before every layer but
        the first.

        Raises:
            SegmentLost: the layer that was waited for is lost.
        """
        if job.open_pass is None:
            rows = job.next_rows()
            times = LoopTimes()
            job.open_pass = LayeredPass(rows, PassRun(self.model, [rows], times, self.attention), times)
        started = time.perf_counter()
        going = job.open_pass
        layers = self.model.geometry.num_layers
        first = going.run.layer
        done = 0
        while not going.run.done and not (interrupt is not None and interrupt()):
            begun = going.run.layer > first
            if begun and (not job.layers_ready or done + len(going.rows) > tokens * layers):
                break
            if begun and late is not None and late():
                break
            done += len(going.rows)
            going.run.next_layer()
        ends = going.run.done
        logits = self.model.logits(going.run.hidden)[0] if ends and going.rows.answers else None
        going.spent_s += time.perf_counter() - started
        if ends:
            job.open_pass = None
            job.take(going.rows, logits, weave_s=going.spent_s - going.times.load_s, load_s=going.times.load_s)
        return -(-done // layers)

    def prefetch(self, prompt: Prompt, method: ReuseMethod, *, max_bytes: int | None = None) -> Prefetch:
        """Start reading what `prefill` will need, while the request is pending; pass it to `prefill`, then close it.

        If the segments exceed `max_bytes`, the first ones of the prompt that fit are read.
        """
        plan = self._weaving_store.plan(self.store.lookup(prompt), method)
        return self._weaving_store.prefetch(plan, max_bytes=max_bytes, windows=self.model.geometry.windows)

    def loading(self, prefetched: Prefetch | None = None) -> Loading | None:
        """The current cost of loading segments; None without a cost model."""
        return self._weaving_store.loading(prefetched)

    def wait(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    @torch.inference_mode()
    def decode(
        self, caches: Sequence[RequestCache], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """One more token per request: its last token at its position -> logits `[requests, vocab]`."""
        rows = zip(caches, token_ids, positions, strict=True)
        return self.step([Decoding(cache, (token,), position) for cache, token, position in rows], [])

    def store_new(self, prefilled: Prefilled) -> frozenset[SegmentId]:
        """Store what the prefill computed and promote what it loaded; returns the new segments that the store accepted.

        These include reused chunks that were largely recomputed, as variants for this prompt's context: the same prompt
        reuses them next time without recomputation, with the same KV. Segments found by the prefill are not evicted for
        this; they are unpinned afterwards.
        """
        prompt = prefilled.prompt
        plan = prefilled.plan
        owner = prefilled.owner
        with prefilled.lease or nullcontext():
            for segment, kv in prefilled.loaded:
                self.store.promote(segment, kv)
            new = segments_of(prompt, plan, prefilled.captures, prefilled.attention, store=self.store, owner=owner)
            if prefilled.mean is not None:
                last = [entry for entry in new if entry[0].path == (*prompt.contexts()[-1], prompt.parts[-1].id)]
                return self.means.store_shares(self.store, prefilled.mean, last)
            return frozenset(record.id for record, kv in new if self.store.insert(record, kv))

    def store_turn(self, prefilled: Prefilled, turn: PromptPart) -> bool:
        """Store the KV of a prompt's question and its answer as the part `turn` of later prompts.

        All its tokens are in the cache. It is exact if the whole prompt is, and then stored only behind a path that is
        stored. Returns whether the store accepted it.
        """
        prompt = prefilled.prompt
        plan = prefilled.plan
        context = prompt.contexts()[-1]
        exact = not plan.tokens(KVSource.REUSED)
        *_, read = reads_of(plan, self.store)
        if turn.id is None or read is None or segment_id(turn.id, context) in self.store:
            return False
        if exact and self.store.tree.at(context) is None:
            return False
        start = prompt.spans()[-1].start
        if prefilled.cache.capacity < start + len(turn):
            return False  # of several answers, one that ended without a copy of the prompt's KV
        kv = prefilled.cache.rows(Span(start, start + len(turn)))
        record = SegmentRecord.of(
            turn.id,
            context,
            turn.token_ids,
            exact=exact,
            nbytes=kv.nbytes,
            source=turn.source or str(turn.kind),
            owner=prefilled.owner,
            read=all_read(read.difference(context)),
            novel=True,
        )
        return self.store.insert(record, SegmentKV(kv, keys_at=start))

    def store_computed(self, job: PrefillJob) -> int:
        """Store the parts that a job completed since the last call; returns how many the store accepted."""
        return sum(self.store.insert(record, kv) for record, kv in job.computed())

    @property
    def _weaving_store(self) -> WeavingStore:
        model = self.model
        return WeavingStore(
            self.store,
            model.geometry,
            model.device,
            self.cost,
            self.load_order,
            self._send,
            self._memory,
            staging=self._staging,
        )

    def _graphed_decode(self) -> "GraphedDecode | None":
        """Recorded decode steps, if configured and on a GPU that runs the Triton kernel."""
        device = self.model.device
        if not self.compute.decode_graphs or device.type != "cuda" or isinstance(self.attention, SdpaAttention):
            return None
        from chunkweave.fusion.graphed_decode import GraphedDecode

        return GraphedDecode(self.model, dtype=self.model.dtype, device=device)

    def _row(self, decode: Decoding) -> ActiveRows:
        device = self.model.device
        stop = decode.position + len(decode.token_ids)
        where = list(range(decode.position, stop))
        tokens = torch.tensor(decode.token_ids, device=device)
        positions = torch.tensor(where, device=device)
        return ActiveRows(
            decode.cache,
            tokens,
            positions,
            dtype=self.model.dtype,
            stop=stop,
            where=where,
            answering=decode.answering,
        )
