"""Runs prompts through the model: look up, plan, weave, first logits; then decode steps over many requests."""

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
from chunkweave.kv.segment import SegmentLost, SegmentSource
from chunkweave.models.attention import SdpaAttention
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.kernels.choice import make_attention
from chunkweave.planning.cost import CostModel, Loading
from chunkweave.planning.method import ReuseMethod
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.contexts import MeanShare
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.store.records import SegmentRecord, all_read
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import host_memory_for, streams_of
from chunkweave.tiers.preload import LoadOrder
from chunkweave.types import SegmentId
from chunkweave.weaving.means import Means
from chunkweave.weaving.segments import Prefetch, WeavingStore, reads_of, segments_of

if TYPE_CHECKING:  # it imports Triton, which need not be there
    from chunkweave.fusion.graphed_decode import GraphedDecode

__all__ = ["Decoding", "Prefilled", "Runner"]


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """A request that decodes: its cache, the tokens that it holds no KV of, and the first one's position.

    That is its last token; after an answer of a conversation also the tokens that end the turn.
    """

    cache: RequestCache
    token_ids: tuple[int, ...]
    position: int


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
        compute: ComputeConfig | None = None,
    ) -> None:
        """Put a runner between a model and a store.

        With a `cost` model, segments that load slower than they compute are computed, and a layer that comes later
        than that is given up. `load_order` is for comparison only. `capture` says what is kept of a prefill for later
        ones (None: the defaults), `compute` how the model runs on its device.

        Raises:
            UsageError: `compute` asks for a kernel that does not run here.
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
        self._send = streams_of(model.device).send
        self._memory = host_memory_for(model.device, self.compute.pinned_bytes)

    def room_for_new_tokens(self, prompt: Prompt) -> int:
        """How many tokens the context leaves for the answer.

        Raises:
            PromptTooLongError: it leaves none; the message says how long the prompt and its longest part are.
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
        asked: bool = True,
        unseen: bool = False,
        mean: MeanShare | None = None,
    ) -> Prefilled:
        """Make the prompt's KV cache by the method's plan, with room for `new_tokens` more.

        Segments stay pinned while they are read. Nothing is stored here: `store_new` does that. With `capture=False`
        nothing can be stored afterwards. With `profiles` it is stored with what its tokens attend to; None leaves that
        to the runner's `capture`, and then to the method: whether it reads them itself. It counts as a request if it
        was `asked` for. For `unseen` and `mean` see `PrefillOptions`.
        """
        self.room_for_new_tokens(prompt)
        if profiles is None:
            profiles = self.capture.profile
        if profiles is None:
            profiles = getattr(method, "needs_profiles", False)
        options = PrefillOptions(new_tokens, capture, profiles, prefetched, unseen=unseen, mean=mean)
        with self.start(prompt, method, options) as job:
            if asked and job.use is not None:
                self.store.note_request(job.use)
            return self.run([job])[0]

    def run(self, jobs: Sequence[PrefillJob]) -> list[Prefilled]:
        """Execute prefills to their end: together, but for those whose segments are still being read."""
        while left := [job for job in jobs if job.prefilled is None]:
            reading = [job for job in left if job.loading or job.lost is not None]
            try:
                self.step([], [(job, None) for job in (reading[:1] or left)])
            except SegmentLost as lost:
                (reading or left)[0].go_on_without(lost)
        return [job.prefilled for job in jobs if job.prefilled is not None]

    def start(self, prompt: Prompt, method: ReuseMethod, options: PrefillOptions) -> PrefillJob:
        """Plan a prefill that `step` executes, piece by piece; close it."""
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
        """One run through all layers for one more token of some requests and a piece of others' prefills.

        A job gives at most so many tokens of a pass that can be cut, and takes in what comes of them. Returns the
        logits of those `decoding`, `[requests, vocab]`. `interrupt` is asked before every layer whether to stop there,
        `late` between two layers, with the part that was run, whether those decoding continue alone: then the jobs have
        a pass `under_way`.

        Raises:
            PassInterrupted: it said so. Nothing has changed; the same step may be made again.
            SegmentLost: a job was still loading, and a segment does not come; no other job may be in that step.
        """
        plain = all(one.cache.kept_from is None for one in decoding)  # a conversation keeps its keys before RoPE
        if self.graphed is not None and not prefilling and plain:
            decodes_one = ((one.cache, one.token_ids[0], one.position) for one in decoding)
            logits = self.graphed.decode(*zip(*decodes_one, strict=True))
            if logits is not None:
                return logits
        if interrupt is not None:
            for job, _ in prefilling:
                job.mark()
        decodes = [self._row(one) for one in decoding]
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
        answers = iter(logits[len(decodes) :])
        for job, rows in pieces:
            own = next(answers) if rows.answers else None
            job.take(rows, own, weave_s=ended - made - times.load_s, load_s=times.load_s)
        return logits[: len(decodes)]

    def _left(self, job: PrefillJob, rows: ActiveRows, run: PassRun, times: LoopTimes, since_s: float) -> bool:
        """Take a job out of a run, to go on by layers in a later step; False if its pass has ended."""
        own = LoopTimes(times.load_s)
        rest = run.take_out(rows, own)
        if rest is None:
            return False
        job.under_way = LayeredPass(rows, rest, own, time.perf_counter() - since_s)
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
        """Go on with a job's next pass, by itself, through the layers that are in memory; returns the work done.

        Work is counted as tokens through all layers: at most `tokens`, but for a first layer, which is run whatever it
        takes, and is waited for. `interrupt` is asked before every layer whether to stop there, `late` before every
        further one.

        Raises:
            SegmentLost: the layer that was waited for does not come.
        """
        if job.under_way is None:
            rows, times = job.next_rows(), LoopTimes()
            job.under_way = LayeredPass(rows, PassRun(self.model, [rows], times, self.attention), times)
        started, going = time.perf_counter(), job.under_way
        layers, first, done = self.model.geometry.num_layers, going.run.layer, 0
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
            job.under_way = None
            job.take(going.rows, logits, weave_s=going.spent_s - going.times.load_s, load_s=going.times.load_s)
        return -(-done // layers)

    def prefetch(self, prompt: Prompt, method: ReuseMethod, *, max_bytes: int | None = None) -> Prefetch:
        """Start reading what `prefill` may read, while the request still waits; pass it to `prefill`, then close it.

        Of segments that together take more than `max_bytes` the first ones of the prompt are read, as many as fit.
        """
        plan = self._weaving_store.plan(self.store.lookup(prompt), method)
        return self._weaving_store.prefetch(plan, max_bytes=max_bytes, windows=self.model.geometry.windows)

    def loading(self, prefetched: Prefetch | None = None) -> Loading | None:
        """What bringing segments in takes now; None without a cost model."""
        return self._weaving_store.loading(prefetched)

    def wait(self) -> None:
        """Return once the device has done what it was given."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    @torch.inference_mode()
    def decode(
        self, caches: Sequence[RequestCache], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """One more token for each request: its last token at its position -> logits `[requests, vocab]`."""
        rows = zip(caches, token_ids, positions, strict=True)
        return self.step([Decoding(cache, (token,), position) for cache, token, position in rows], [])

    def store_new(self, prefilled: Prefilled) -> frozenset[SegmentId]:
        """Store what the prefill computed and promote what it loaded; returns the new segments that the store took.

        Among them are reused chunks that were largely recomputed: as variants of this prompt's context they save the
        same prompt that recomputation next time, with the same KV. What the prefill found is not evicted for it, and
        unpinned afterwards.
        """
        prompt, plan, owner = prefilled.prompt, prefilled.plan, prefilled.owner
        with prefilled.lease or nullcontext():
            for segment, kv in prefilled.loaded:
                self.store.promote(segment, kv)
            new = segments_of(prompt, plan, prefilled.captures, prefilled.attention, store=self.store, owner=owner)
            woven = segments_of(prompt, plan, prefilled.woven, None, store=self.store, owner=owner)
            if prefilled.mean is not None:
                last = [one for one in new if one[0].path == (*prompt.contexts()[-1], prompt.parts[-1].id)]
                return self.means.store_shares(self.store, prefilled.mean, last)
            return frozenset(record.id for record, kv in (*new, *woven) if self.store.insert(record, kv))

    def store_answer(self, prefilled: Prefilled, said: PromptPart) -> None:
        """Store the KV of a conversation's turn, its question and the answer, which the cache has kept.

        Nothing is stored if a segment that was reused is not there any more: it may have been removed.
        """
        assert said.id is not None, "a turn has an id"
        *_, read = reads_of(prefilled.plan, self.store)
        if read is None:
            return
        exact = all(part.kv_source is not KVSource.REUSED for part in prefilled.plan.parts)
        kv, context = prefilled.cache.segment(len(said)), prefilled.prompt.contexts()[-1]
        record = SegmentRecord.of(
            said.id,
            context,
            said.token_ids,
            exact=exact,
            nbytes=kv.nbytes,
            owner=prefilled.owner,
            read=all_read(read.difference(context)),
        )
        self.store.insert(record, kv)

    def store_computed(self, job: PrefillJob) -> int:
        """Store the parts that a job has computed whole since the last call; returns how many the store took."""
        return sum(self.store.insert(record, kv) for record, kv in job.computed())

    @property
    def _weaving_store(self) -> WeavingStore:
        model = self.model
        return WeavingStore(
            self.store, model.geometry, model.device, self.cost, self.load_order, self._send, self._memory
        )

    def _graphed_decode(self) -> "GraphedDecode | None":
        """Recorded decode steps, if they are asked for and this is a GPU that our kernel runs on."""
        device = self.model.device
        if not self.compute.decode_graphs or device.type != "cuda" or isinstance(self.attention, SdpaAttention):
            return None
        from chunkweave.fusion.graphed_decode import GraphedDecode

        return GraphedDecode(self.model, dtype=self.model.dtype, device=device)

    def _row(self, one: Decoding) -> ActiveRows:
        device, stop = self.model.device, one.position + len(one.token_ids)
        where = list(range(one.position, stop))
        tokens, positions = torch.tensor(one.token_ids, device=device), torch.tensor(where, device=device)
        return ActiveRows(one.cache, tokens, positions, dtype=self.model.dtype, stop=stop, where=where)
