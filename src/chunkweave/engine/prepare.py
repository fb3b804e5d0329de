"""What happens to a request before its prefill and right after it."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from chunkweave.config import ReuseConfig, SamplingParams
from chunkweave.conversation.turns import TurnBuilder, TurnUnderWay
from chunkweave.engine.runner import Runner
from chunkweave.errors import UsageError
from chunkweave.models.loading import LoadedModel
from chunkweave.ordering.arrangement import Arranged, Arranger
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.adaptive_methods import LoadAwareMethod, PrefixGrowingMethod
from chunkweave.planning.calibration import CalibrationRecord, Quality, stored_calibration
from chunkweave.planning.method import ReuseMethod, make_method
from chunkweave.planning.method_choice import Kept, MethodChoice, MethodChooser, MethodRequest, Why
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import Prompt, PromptPart
from chunkweave.prompt.request import Request
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.types import Chunk, SegmentId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request with its prompt, the method chosen for it, what it keeps, and how many tokens it may generate."""

    request: Request
    arranged: Arranged
    choice: MethodChoice
    method: ReuseMethod
    kept: Kept
    room: int
    turn: TurnUnderWay | None = None

    @property
    def closing(self) -> tuple[int, ...]:
        """Tokens that are computed after its answer: those that end a conversation's turn."""
        return () if self.turn is None else self.turn.closing

    @property
    def history(self) -> Mapping[int, SegmentId] | None:
        """Of a conversation, the segments of its earlier turns by the place of their part."""
        return None if self.turn is None else self.turn.places(self.prompt)

    @property
    def prompt(self) -> Prompt:
        """The prompt with its chunks in order."""
        return self.arranged.prompt


@dataclass(eq=False)
class RequestPreparer:
    """Makes prompts, puts their chunks in order, and chooses methods, with one model's parts.

    Its only state is what the arranger has counted. May be called from several threads; they tokenize beside each
    other. `passages` are neutral ones. `shadow`, if there is one, may replace the method that was chosen by the exact
    one.
    """

    loaded: LoadedModel
    builder: PromptBuilder
    runner: Runner
    chooser: MethodChooser
    arranger: Arranger
    turn_builder: TurnBuilder
    passages: tuple[str, ...]
    shadow: ShadowMonitor | None = None
    _arranging: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def prepare(
        self,
        request: Request,
        method_request: MethodRequest,
        *,
        most_tokens: int | None = None,
        speculative: bool = False,
    ) -> PreparedRequest:
        """Everything that can be said about a request before anything is computed. It counts as asked for then.

        `end` or `abandon` it. A `speculative` one counts once it is confirmed. A conversation is cut down to
        `most_tokens`, its answer among them; a prompt with far more is refused before all of it is tokenized.

        Raises:
            UsageError: an empty question or chunk, no such order, a conversation that is still being answered, or a
                method_request that cannot be met.
            PromptTooLongError: chunks and question do not fit the model's context.
        """
        order = None if request.order is None else ChunkOrder.parse(request.order)
        method_request.refuse_layers_beyond(self.loaded.model.geometry.num_layers)
        choice = self.chooser.choose(method_request)
        method = self._make_method(choice, sets_budget=method_request.sets_budget)
        if self.shadow is not None and (allowed := self.shadow.allowed(choice)) != choice:
            choice, method = allowed, make_method(allowed.method, allowed.reuse)
        turn: TurnUnderWay | None = None
        if request.conversation_id is None:
            context = self.loaded.model.geometry.max_positions
            prompt = self.builder.build(
                request.question,
                request.chunks,
                system=request.system,
                history=request.history,
                cache_salt=request.cache_salt,
                limit=PromptLimit(min(context, most_tokens or context)),
            )
        else:
            turn, prompt = self.turn_builder.begin(request, most_tokens=most_tokens)
        room = self.runner.room_for_new_tokens(prompt) - (0 if turn is None else len(turn.closing))
        with self._arranging:
            arranged = self.arranger.arrange(prompt, order, counted=not speculative)
        if arranged.promotion is not None and turn is None:  # a conversation keeps whatever its next turn goes on from
            method = PrefixGrowingMethod(method, arranged.promotion)
        kept = self.chooser.kept(choice)
        if turn is not None:  # its later turns may be answered by another method
            kept = replace(kept, kv=True)
        room = min(request.sampling.max_new_tokens, room)
        return PreparedRequest(request, arranged, choice, method, kept, room, turn)

    def prepare_beforehand(
        self, chunk: Chunk | str, *, cache_salt: str = "", most_tokens: int | None = None
    ) -> PreparedRequest | None:
        """What computes a chunk before anybody asks, with one token behind it; None if that is stored.

        What its tokens attend to is kept if the usual method reads it, or if it is configured (`CaptureConfig`).

        Raises:
            UsageError: an empty chunk.
            PromptTooLongError: the chunk alone does not fit the model's context, or `most_tokens`.
        """
        prompt = self.prompt_beforehand(chunk, cache_salt=cache_salt, most_tokens=most_tokens)
        context = prompt.contexts()[-1]
        if any(record.context == context for record in self.runner.store.lookup(prompt).parts[-1].variants):
            return None
        kept = Kept(profiles=self.chooser.kept(self.chooser.choose(MethodRequest())).profiles)
        choice = self.chooser.choose(MethodRequest.of("prefix"))
        request = Request("", (chunk,), sampling=SamplingParams(1, temperature=0.0), cache_salt=cache_salt)
        room = min(1, self.runner.room_for_new_tokens(prompt))
        return PreparedRequest(request, Arranged(prompt), choice, make_method(choice.method, choice.reuse), kept, room)

    def prompt_beforehand(self, chunk: Chunk | str, *, cache_salt: str = "", most_tokens: int | None = None) -> Prompt:
        """The prompt that a chunk is computed in before anybody asks, the chunk last.

        Raises:
            UsageError: an empty chunk.
            PromptTooLongError: the chunk alone does not fit the model's context, or `most_tokens`.
        """
        context = self.loaded.model.geometry.max_positions
        most = min(context, most_tokens or context)
        tokens = self.runner.capture.neutral_tokens
        return self.builder.beforehand(chunk, self.passages, tokens, most_tokens=most, cache_salt=cache_salt)

    def preamble(self, opening: Sequence[PromptPart]) -> tuple[PromptPart, ...]:
        """What chunks are computed behind before anybody asks with this opening."""
        return self.builder.preamble(self.passages, self.runner.capture.neutral_tokens, opening=opening)

    def confirm(self, prepared: PreparedRequest) -> None:
        """A speculative request is asked for."""
        with self._arranging:
            self.arranger.count(prepared.prompt, free=prepared.arranged.promotion is not None)

    def abandon(self, prepared: PreparedRequest) -> None:
        """A request ends without an answer; harmless behind `end`."""
        if prepared.turn is not None:
            self.turn_builder.abandon(prepared.turn)

    def _make_method(self, choice: MethodChoice, *, sets_budget: bool) -> ReuseMethod:
        """The method chosen; with a cost model and no ratio asked for, the loading controller may raise its ratio."""
        cost = self.runner.cost
        if sets_budget or cost is None:
            return make_method(choice.method, choice.reuse)
        return LoadAwareMethod(choice.method, choice.reuse, cost, self.runner.store.tier_of)


def open_chooser(
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


def refuse_unknown(method: str | None, quality: str | None) -> None:
    """Before a model is loaded for nothing.

    Raises:
        UnknownMethodError: no such method.
        UsageError: no such quality.
    """
    if method is not None:
        make_method(method)
    if quality is not None:
        Quality.parse(quality)
