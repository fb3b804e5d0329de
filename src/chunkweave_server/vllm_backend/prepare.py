"""From a question over chunks to prompt and method, as in our own engine, but with a tokenizer alone."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from chunkweave.config import ConversationConfig, ReuseConfig, SamplingParams, is_hub_name
from chunkweave.conversation.registry import Conversations
from chunkweave.conversation.turns import TurnBuilder, TurnUnderWay
from chunkweave.errors import ModelNotFoundError, PromptTooLongError
from chunkweave.models.adapters import Adapter
from chunkweave.models.gguf import models_folder
from chunkweave.models.hub import hub_folder
from chunkweave.ordering.arrangement import Promotion
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.calibration import CALIBRATION_FILE, CalibrationRecord, stored_calibration
from chunkweave.planning.method_choice import EXACT_METHODS, MethodChoice, MethodChooser, MethodRequest, checked_method
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, is_neutral
from chunkweave.prompt.rendering import Messages, Rendered
from chunkweave.prompt.request import Request
from chunkweave.prompt.template import rendered_exchange, template_for, template_with
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer, TextTokenizer
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.types import Chunk
from chunkweave.vllm.request import promotion_params, to_params

_NO_REUSE = "full"


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A request with its parts, in the order in which they were given, and the method that was chosen for it.

    `room` are the tokens that its answer may have; `raisable` says that its client has asked for no ratio.
    """

    request: Request
    prompt: Prompt
    order: ChunkOrder
    choice: MethodChoice
    room: int
    turn: TurnUnderWay | None = None
    raisable: bool = False

    @property
    def weaves(self) -> bool:
        """Whether KV of chunks may come from other prompts."""
        return self.choice.method not in EXACT_METHODS


@dataclass(frozen=True, slots=True, eq=False)
class ChatDetails:
    """What a request says beside questions and answers: the adapter that it names, and what its template reads.

    `variables` are the template's: `tools`, `chat_template_kwargs`. `exchanges` are messages of the assistant and of
    tools behind each question, if tools were called.
    """

    model: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    exchanges: Sequence[Messages] = ()


_BUILDERS = 64
"""Sets of tools, and adapters, whose templates are kept."""


class PromptPreparer:
    """Makes prompts for one model. May be called from several threads; its state is what conversations have said."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        model: str,
        most_tokens: int,
        chooser: MethodChooser | None = None,
        usual_order: ChunkOrder = ChunkOrder.FIXED,
        shadow: ShadowMonitor | None = None,
        conversations: ConversationConfig | None = None,
    ) -> None:
        """For prompts and answers of `most_tokens` together.

        `model` takes the fingerprint's place in ids of chunks: these are of this server alone.
        """
        self.tokenizer = tokenizer
        self.chooser = chooser or MethodChooser()
        self.builder = PromptBuilder(tokenizer, template_for(tokenizer), f"front:{model}")
        self._model = model
        self._builder_for = lru_cache(_BUILDERS)(self._alike)
        self.conversations = Conversations(conversations)
        self._turn_builder = TurnBuilder(self.builder, self.conversations, most_tokens)
        self._most_tokens = most_tokens
        self._usual_order = usual_order
        self._shadow = shadow

    def prepare(
        self, request: Request, method_request: MethodRequest, chat: ChatDetails | None = None
    ) -> PreparedPrompt:
        """Everything that does not depend on the replica; `end` or `abandon` it.

        Raises:
            UsageError: an empty question or chunk, no such order, a method that vLLM cannot run, a conversation that is
                still being answered, or tools where the chat template has no place for them.
            PromptTooLongError: chunks and question do not fit the model's context.
        """
        choice = self._choice(method_request)
        turn: TurnUnderWay | None = None
        if request.conversation_id is None:
            prompt = self._built(request, chat or ChatDetails())
        else:
            turn, prompt = self._turn_builder.begin(request)
        room = self._most_tokens - len(prompt) - (0 if turn is None else len(turn.closing))
        if room < 1:
            if turn is not None:
                self._turn_builder.abandon(turn)
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens, but the model's context holds {self._most_tokens}, "
                f"the answer counted: send fewer or smaller documents"
            )
        order = self._usual_order if request.order is None else ChunkOrder.parse(request.order)
        room = min(room, request.sampling.max_new_tokens)
        return PreparedPrompt(request, prompt, order, choice, room, turn, not method_request.sets_budget)

    def prepare_beforehand(
        self, chunk: Chunk, passages: Sequence[str], neutral_tokens: int, *, cache_salt: str
    ) -> PreparedPrompt:
        """What computes a chunk before anybody asks, with one token behind it.

        Raises:
            UsageError: an empty chunk.
            PromptTooLongError: the chunk alone does not fit the model's context.
        """
        most, room = self._most_tokens, 1
        prompt = self.builder.beforehand(chunk, passages, neutral_tokens, most_tokens=most, cache_salt=cache_salt)
        if len(prompt) + room > most:
            raise PromptTooLongError(f"the chunk has {len(prompt.parts[-1])} tokens, but the context holds {most}")
        request = Request("", (chunk,), sampling=SamplingParams(room, temperature=0.0), cache_salt=cache_salt)
        return PreparedPrompt(request, prompt, ChunkOrder.FIXED, self._choice(MethodRequest.of("prefix")), room)

    def chunk_parts(self, chunks: Sequence[Chunk], *, cache_salt: str) -> list[PromptPart]:
        """Chunks as they stand in every prompt, without those that no context can hold: nothing is stored of these."""
        parts = []
        for chunk in chunks:
            with suppress(PromptTooLongError):
                limit = PromptLimit(self._most_tokens)
                parts.append(self.builder.chunk_part(chunk, cache_salt=cache_salt, limit=limit))
        return parts

    def end(self, prepared: PreparedPrompt, prompt: Prompt, answer_ids: Sequence[int], text: str | None = None) -> None:
        """Keep a complete answer for its conversation, if it is one's; `prompt` is as it was computed.

        `text` is that of an answer whose last tokens were cut away; what is kept then is tokenized anew.
        """
        if prepared.turn is None:
            return
        said = answer_ids if text is None else self.tokenizer.encode(text)
        while said and said[-1] in self.tokenizer.stop_ids:  # what ends a turn comes from the template
            said = said[:-1]
        part = self._turn_builder.said(prepared.turn, prompt, said)
        self._turn_builder.end(prepared.turn, prompt, part)

    def abandon(self, prepared: PreparedPrompt) -> None:
        """A request ends without an answer; harmless behind `end`."""
        if prepared.turn is not None:
            self._turn_builder.abandon(prepared.turn)

    def _built(self, request: Request, chat: ChatDetails) -> Prompt:
        model = None if chat.model == self._model else chat.model
        variables = json.dumps(chat.variables, sort_keys=True)
        limit = PromptLimit(self._most_tokens)
        limit.check_characters(len(variables) + len(json.dumps(chat.exchanges)), "tools and their messages")
        builder = self._builder_for(model, variables)
        last = len(chat.exchanges) - 1
        exchanges = [
            rendered_exchange(self.tokenizer, messages, chat.variables, first=not number, answered=number < last)
            if messages
            else None
            for number, messages in enumerate(chat.exchanges)
        ]
        history: list[tuple[str, str | Rendered]] = list(request.history)
        for number, found in enumerate(exchanges[:-1]):
            history[number] = history[number][0], found or history[number][1]
        return builder.build(
            request.question,
            request.chunks,
            system=request.system,
            history=history,
            exchange=exchanges[-1] if exchanges else None,
            cache_salt=request.cache_salt,
            limit=limit,
        )

    def _alike(self, adapter: str | None, variables: str) -> PromptBuilder:
        """The builder for an adapter, whose chunks are none of the model's, and for a template with its `variables`."""
        read = json.loads(variables)
        if adapter is None and not read:
            return self.builder
        template = template_with(self.tokenizer, read) if read else template_for(self.tokenizer)
        return self.builder.alike(template, f"front:{self._model}" + (f"+{adapter}" if adapter else ""))

    def _choice(self, method_request: MethodRequest) -> MethodChoice:
        choice = self.chooser.choose(method_request)
        if choice.method == _NO_REUSE:
            return choice
        checked_method(choice.method)
        return choice if self._shadow is None else self._shadow.allowed(choice)


def weave_params(
    prompt: Prompt, choice: MethodChoice, promotion: Promotion | None, *, raisable: bool = False
) -> dict[str, Any] | None:
    """What a prompt's request tells the connector; None if there is nothing for it to do."""
    spans = [
        [span.start, span.stop]
        for part, span in zip(prompt.parts, prompt.spans(), strict=True)
        if part.kind in (PartKind.CHUNK, PartKind.TURN)
    ]
    if not spans or choice.method == _NO_REUSE:
        return None
    start = sum(len(part) for part in prompt.parts if part.kind is PartKind.START)
    neutral = sum(part.id is not None and is_neutral(part.id) for part in prompt.parts)
    more: dict[str, Any] = {"neutral": neutral} if neutral else {}
    if promotion is not None:
        more |= promotion_params(prompt, promotion)
    return {
        "chunks": spans,
        "start_tokens": start,
        "method": choice.method,
        **more,
        **to_params(choice.reuse, raisable=raisable),
    }


def load_tokenizer(source: str, flags: Mapping[str, str | None]) -> HuggingFaceTokenizer:
    """The tokenizer of a folder or hub name, without any weights; one that is in the hub's cache needs no network.

    Args:
        source: folder or hub name.
        flags: `revision` and `chat_template` (a file or the template itself), as given to vLLM; None is its default.

    Raises:
        ModelNotFoundError: there is none.
    """
    from transformers import AutoTokenizer, GenerationConfig

    if is_hub_name(source):
        source = str(hub_folder(source, revision=flags.get("revision"), weights=False))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"the tokenizer of {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    if template := flags.get("chat_template"):
        file = Path(template)
        tokenizer.chat_template = file.read_text(encoding="utf-8") if file.is_file() else template
    try:
        ended = GenerationConfig.from_pretrained(source).eos_token_id
    except (OSError, ValueError):
        ended = None
    stops = ended if isinstance(ended, list) else [] if ended is None else [ended]
    return HuggingFaceTokenizer(tokenizer, stop_ids=stops)


def chooser_for(
    source: str,
    *,
    method: str | None,
    quality: str | None,
    reuse: ReuseConfig,
    dtype: str | None,
    adapter: Adapter | None = None,
) -> MethodChooser:
    """What chooses methods: what the operator says, and the calibration record beside the model, or a shipped one.

    With an adapter it is the record beside that. A record is that of weights and dtype: weights are read only if there
    is a record to compare with.

    Raises:
        UsageError: a quality without a record.
    """
    record = _calibration(Path(source), dtype, adapter)
    how = f"chunkweave calibrate {source}" + ("" if adapter is None else f" --adapter {adapter.folder}")
    chooser = MethodChooser(MethodRequest.of(method, quality), reuse, record, how)
    chooser.choose_usual()
    return chooser


def _calibration(folder: Path, dtype: str | None, adapter: Adapter | None) -> CalibrationRecord | None:
    home = folder if adapter is None else adapter.folder
    if not (home / CALIBRATION_FILE).is_file() and (adapter is not None or folder.parent != models_folder()):
        return None
    from transformers import AutoConfig

    from chunkweave.models.fingerprint import fingerprint_folder

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    meant = dtype if dtype not in (None, "auto") else str(getattr(config, "dtype", None) or "float32")
    key = "" if adapter is None else adapter.key
    return stored_calibration(None, home, fingerprint_folder(folder, config, str(meant).removeprefix("torch."), key))
