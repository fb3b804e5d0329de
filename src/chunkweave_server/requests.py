"""Request bodies and their checks, the same for both backends."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json

from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.calibration import Quality
from chunkweave.planning.method_choice import (
    MethodRequest,
    checked_method,
    refuse_unknown_keys,
)
from chunkweave.plugins import METHODS
from chunkweave.retrieval.documents import MOST_LEVELS, nested_too_deeply, renamed_langchain
from chunkweave.types import Chunk
from chunkweave_server.errors import HttpError
from chunkweave_server.fields import WITHOUT_EFFECT, refused_by_engine, unknown_fields, unread_fields
from chunkweave_server.settings import LimitSettings

_PASSED_ON = (
    "temperature",
    "top_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "best_of",
    "user",
    "response_format",
)
"""Fields that are validated here and passed to vLLM unchanged."""

_VLLM_ONLY = (
    "frequency_penalty",
    "presence_penalty",
    "best_of",
    "echo",
    "return_token_ids",
)
"""Fields that the engine backend accepts only with their default values."""

_MOST_STOPS = 4
_MOST_ALTERNATIVES = 20


_MOST_FIELDS = 256
"""Most fields of an object, including further fields for vLLM."""


def _given(data: Any) -> Any:
    """The fields of an object without null ones, which count as left out, as in OpenAI's API."""
    if not isinstance(data, dict):
        return data
    if len(data) > _MOST_FIELDS:
        raise ValueError(f"an object may have at most {_MOST_FIELDS} fields, not {len(data)}")
    return {key: value for key, value in data.items() if value is not None}


def are_token_ids(value: Any) -> bool:
    """Whether texts are given as token ids: a list of them, or of lists of them."""
    return isinstance(value, list) and any(isinstance(element, int | list) for element in value)


Text = str
Name = Annotated[Text, Field(min_length=1, max_length=512)]
Label = Annotated[Text, Field(max_length=512)]
"""A short text: a name, or a text that is kept longer than its request."""
Title = Annotated[Text, Field(max_length=1024)]


class Body(BaseModel):
    """Base of all bodies: no coercion, no unknown fields.

    Every list has a maximum length and is refused at its first invalid element.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    most_values: ClassVar[int] = 100_000
    """Most values in all its lists and objects; bodies with more are refused before they are parsed."""

    _only_given = model_validator(mode="before")(_given)


class Document(Body):
    """A chunk of the prompt. A title becomes a line before the text; the id is used in reports.

    LangChain's documents are accepted too: `page_content`, and `metadata` with optional `title` and `source`.
    """

    text: Text
    title: Title = ""
    id: Label = ""

    @model_validator(mode="before")
    @classmethod
    def _from_langchain(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "page_content" not in data or "text" in data:
            return data
        fields = renamed_langchain(data)
        metadata = fields.pop("metadata", {})
        if not isinstance(metadata, dict):
            raise ValueError("metadata must be an object")
        if isinstance(metadata.get("source"), str):
            fields.setdefault("id", metadata["source"])
        return fields


Documents = Annotated[list[Text | Document], Field(max_length=10_000, fail_fast=True)]


class _SentBack(Body):
    """Part of a message, which may be an earlier answer. Further fields are ignored; `ChatBody` takes them out."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(_SentBack):
    """A text part of a message's content."""

    type: Literal["text"]
    text: Text


class CalledFunction(_SentBack):
    """The function of a tool call; `arguments` is a JSON object as text, as the model wrote it."""

    name: Name
    arguments: Text = ""

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as an object, for chat templates: of an object that is cut off, the fields up to there.

        A text that does not begin with an object, or is nested too deeply, is the only field, `arguments`.
        """
        try:
            parsed = from_json(self.arguments or "{}", allow_partial="trailing-strings")
        except ValueError:
            parsed = None
        usable = isinstance(parsed, dict) and not nested_too_deeply(parsed)
        return parsed if usable else {"arguments": self.arguments}


class ToolCall(_SentBack):
    """One tool call of the assistant."""

    id: Label = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_SentBack):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=4096, fail_fast=True)] = ""
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1024, fail_fast=True)] = []
    tool_call_id: Label | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if "content" not in self.model_fields_set and self.role not in ("assistant", "tool"):
            raise ValueError("content: Field required")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant calls tools")
        return self

    @property
    def text(self) -> str:
        """The content as one text; each part becomes a line."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    @property
    def rendered(self) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            calls = [
                {"name": tool_call.function.name, "arguments": tool_call.function.parsed}
                for tool_call in self.tool_calls
            ]
            message["tool_calls"] = [
                {"id": tool_call.id, "type": tool_call.type, "function": call}
                for tool_call, call in zip(self.tool_calls, calls, strict=True)
            ]
        also = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {**message, **{name: value for name, value in also.items() if value is not None}}


class StreamOptions(Body):
    """Options of a stream. Events are never padded, so obfuscation can only be declined."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _quality(value: Any) -> str:
    return str(Quality.parse(value))


def _with_methods(schema: dict[str, Any]) -> None:
    """Add the pattern of methods to the schema: a name, optionally with settings after colons."""
    schema["pattern"] = f"^({'|'.join(METHODS.names)})(:[a-z0-9=.+-]+)*$"
    schema["examples"] = list(METHODS.names)


class ReuseField(Body):
    """`chunkweave` in a request: reuse and corpus."""

    method: Annotated[str, BeforeValidator(checked_method), Field(json_schema_extra=_with_methods)] | None = None
    quality: Annotated[str, BeforeValidator(_quality), Field(json_schema_extra={"enum": list(Quality)})] | None = None
    order: Literal["free", "fixed"] | None = None
    corpus: Name | None = None
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None
    find_chunks: bool | None = None
    cache: Literal["use", "read", "off"] = "use"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_unknown_keys(data, cls.model_fields)
        return data

    @model_validator(mode="after")
    def _one_source_of_chunks(self) -> "ReuseField":
        if self.find_chunks and (self.corpus is not None or self.order == "free"):
            raise ValueError("find_chunks cannot be given with corpus or order free")
        return self

    @model_validator(mode="after")
    def _one_use_of_the_cache(self) -> "ReuseField":
        if self.cache == "off" and self.method not in (None, "full"):
            raise ValueError("cache off reuses nothing: leave out the method, or give full")
        return self

    @property
    def method_request(self) -> MethodRequest:
        """The fields about the method."""
        return MethodRequest.of(self.method, self.quality)


assert set(ChunkOrder) == {"free", "fixed"}, "the schema must list all orders"


@dataclass(frozen=True, slots=True)
class Question:
    """The question: the user's last message, and the instruction if one is given.

    `history` are the questions sent before it with their answers. If tools were called, `exchanges` has all messages
    after each of these questions and after this one. The answer continues the text `continued`.
    """

    text: str
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()
    exchanges: tuple[tuple[Message, ...], ...] = ()
    continued: str = ""


Stop = Annotated[Text, Field(min_length=1, max_length=1024)]


class _CompletionBody(Body):
    """Fields of both chat and plain completions. The backend checks fields that are not named here."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Label | None = None
    documents: Documents = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64, fail_fast=True)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[Text, Field(max_length=512)] = ""
    chunkweave: ReuseField = ReuseField()
    n: Annotated[int, Field(ge=1, le=64)] = 1
    user: Label | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    echo: bool = False
    return_token_ids: bool = False
    response_format: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "_CompletionBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options can only be given with stream")
        if self.chunkweave.corpus is not None and self.documents:
            raise ValueError("give either documents or chunkweave.corpus, not both")
        if self.chunkweave.find_chunks and self.documents:
            raise ValueError("give either documents or chunkweave.find_chunks, not both")
        if self.chunkweave.corpus is None and self.chunkweave.top_k is not None:
            raise ValueError("chunkweave.top_k can only be given with chunkweave.corpus")
        if nested_too_deeply(self.response_format):
            raise ValueError(f"response_format may be nested at most {MOST_LEVELS} levels deep")
        return self

    @property
    def has_form(self) -> bool:
        """Whether it says anything about the form of the answer."""
        return not self.model_fields_set.isdisjoint(("response_format", "tools", "tool_choice"))

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; None if the request sets no limit."""
        return self.max_tokens

    def finds_chunks(self, usual: bool) -> bool:
        """Whether chunks are found in its prompt: it names none, and it or the `usual` setting says so."""
        reuse = self.chunkweave
        named = self.documents or reuse.corpus is not None
        return not named and (usual if reuse.find_chunks is None else reuse.find_chunks)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def passed_on(self) -> dict[str, Any]:
        """Fields that are passed to vLLM unchanged."""
        fields = {name: getattr(self, name) for name in _PASSED_ON if name in self.model_fields_set}
        return {**fields, **{name: value for name, value in self._extra.items() if name not in WITHOUT_EFFECT}}

    @property
    def only_for_vllm(self) -> list[str]:
        """Given fields that our own engine does not support, except those with their default value."""
        typed = [name for name in _VLLM_ONLY if name in type(self).model_fields]
        return [
            *refused_by_engine(self._extra),
            *(name for name in typed if getattr(self, name) != type(self).model_fields[name].default),
        ]

    @property
    def unknown(self) -> list[str]:
        """Given fields that this server does not know. The engine ignores them; over vLLM they are passed on."""
        return unknown_fields(self._extra)

    @property
    def _extra(self) -> dict[str, Any]:
        return self.model_extra or {}


class ChatBody(_CompletionBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] = []
    tool_choice: Label | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    _unknown_inside: list[str] = []

    @model_validator(mode="after")
    def _only_text(self) -> "ChatBody":
        """Take further fields out of the messages, before messages are joined.

        Raises:
            HttpError: 400, a field has contents that cannot be read.
        """
        for place, part in self._parts_of_messages:
            if not part.model_extra:
                continue
            contents, unknown = unread_fields(part.model_extra)
            if contents:
                path = f"{place}.{contents[0]}"
                raise HttpError(400, f"only texts can be read, not {path}", param=path, code="unsupported_field")
            self._unknown_inside += [f"{place}.{name}" for name in unknown]
            part.model_extra.clear()
        return self

    @property
    def _parts_of_messages(self) -> Iterator[tuple[str, _SentBack]]:
        """The messages, their parts and their calls, each with its path."""
        for number, message in enumerate(self.messages):
            place = f"messages[{number}]"
            yield place, message
            for at, part in enumerate(() if isinstance(message.content, str) else message.content):
                yield f"{place}.content[{at}]", part
            for at, call in enumerate(message.tool_calls):
                yield f"{place}.tool_calls[{at}]", call
                yield f"{place}.tool_calls[{at}].function", call.function

    @model_validator(mode="after")
    def _one_of_each(self) -> "ChatBody":
        self.messages = joined_messages(self.messages)
        return self

    @model_validator(mode="after")
    def _shallow_for_templates(self) -> "ChatBody":
        for name in ("tools", "tool_choice", "chat_template_kwargs"):
            if name in self.model_fields_set and nested_too_deeply({name: getattr(self, name)}):
                raise ValueError(f"{name} may be nested at most {MOST_LEVELS} levels deep")
        if "tools" in self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs cannot contain tools: use the field tools")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens mean the same: give one of them")
        return self

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def unknown(self) -> list[str]:
        return [*super().unknown, *self._unknown_inside]

    @property
    def chat(self) -> list[dict[str, Any]]:
        """All messages in the form that chat templates read; templates know no developer."""
        named = {"developer": "system"}
        return [{**message.rendered, "role": named.get(message.role, message.role)} for message in self.messages]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Inputs of the chat template besides the messages."""
        return {**self.chat_template_kwargs, **({"tools": self.tools} if self.tools else {})}

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives of each token; 0: only the token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def texts_with_documents(self) -> list[str]:
        """The texts that may contain marked documents."""
        return [self.messages[place].text for place in self._places]

    def with_texts(self, texts: Sequence[str]) -> Self:
        """The same request with `texts` instead of `texts_with_documents`."""
        messages = list(self.messages)
        for place, text in zip(self._places, texts, strict=True):
            messages[place] = messages[place].model_copy(update={"content": text})
        return self.model_copy(update={"messages": messages})

    @property
    def _places(self) -> list[int]:
        """Positions of the instruction and of the question in `messages`."""
        last = self._asked_at
        return sorted({last, *([0] if self.messages[0].role in _SYSTEM else [])})

    @property
    def _asked_at(self) -> int:
        """Position of the user's last message; of the last message if none is the user's."""
        places = [place for place, message in enumerate(self.messages) if message.role == "user"]
        return places[-1] if places else len(self.messages) - 1

    @property
    def question(self) -> Question:
        """The question in the messages: the user's last message. A system message at the start is the instruction.

        Earlier turns may come between them: they become turns of the prompt, questions with their answers. After each
        question there may be tool calls of the assistant, with their results or cut off without. A last message of the
        assistant is the beginning of the answer.

        Raises:
            HttpError: 400, the question is missing or empty, or the messages have an unsupported sequence.
        """
        messages = list(self.messages)
        system = messages.pop(0).text if messages[0].role in _SYSTEM else None
        continued = ""
        if any(message.role == "user" for message in messages) and _is_text(messages[-1]):
            continued = messages.pop().text
        with_tools = any(message.role == "tool" or message.tool_calls for message in messages)
        if not messages or messages[-1].role not in ("user", "tool"):
            raise HttpError(400, _NO_QUESTION, param="messages")
        question_text = self.messages[self._asked_at].text
        if not question_text.strip():
            raise HttpError(400, "the question is empty", param=f"messages[{self._asked_at}].content")
        turns = _turns(messages)
        if turns is None:
            message = "earlier turns must begin with the user's message, and tools' results must follow their calls"
            raise HttpError(400, message, param="messages", code="unsupported_conversation")
        history = tuple((question.text, behind[-1].text) for question, behind in turns[:-1])
        exchanges = tuple(behind for _, behind in turns) if with_tools else ()
        return Question(question_text, system, history=history, exchanges=exchanges, continued=continued)


_SYSTEM = ("system", "developer")
_NO_QUESTION = "the last message must be the user's, which is the question, a tool's result, or the answer's beginning"


def _is_text(message: Message) -> bool:
    """Whether a message is the assistant's, without tool calls."""
    return message.role == "assistant" and not message.tool_calls


def joined_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with one instruction at most and one message of the user before each answer.

    System messages at the start become one. A later system message counts as the user's, and messages of the user, or
    of the assistant, that follow each other become one. An empty line separates joined texts.
    """
    groups: list[list[Message]] = []
    for message in messages:
        previous = groups[-1][-1] if groups else None
        if message.role in _SYSTEM and previous is not None and previous.role not in _SYSTEM:
            message = message.model_copy(update={"role": "user"})
        if previous is not None and _joins(previous, message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joins(previous: Message, message: Message) -> bool:
    """Whether a message becomes one with the message before it."""
    if previous.role in _SYSTEM:
        return message.role in _SYSTEM
    return previous.role == message.role != "tool"


def _joined(group: Sequence[Message]) -> Message:
    text = "\n\n".join(text for text in (message.text for message in group) if text.strip())
    calls = [call for message in group for call in message.tool_calls]
    return group[0].model_copy(update={"content": text, "tool_calls": calls})


_Turns = Sequence[tuple[Message, tuple[Message, ...]]]


def _turns(messages: Sequence[Message]) -> _Turns | None:
    """Each question with the messages after it; None if the first message is no question, or a result has no call.

    A question is followed by its answer, or by tool calls, each with its results, and then by the answer. Results and
    answer may be missing: a call that was cut off has none.
    """
    turns: list[tuple[Message, tuple[Message, ...]]] = []
    for place, message in enumerate(messages):
        previous = messages[max(0, place - 1)]
        after_calls = previous.role == "tool" or bool(previous.tool_calls)
        if message.role == "user":
            turns.append((message, ()))
        elif not turns or (message.role == "tool" and not after_calls):
            return None
        else:
            question, behind = turns[-1]
            turns[-1] = question, (*behind, message)
    return turns


def _refuse_other_prompts(prompt: Any) -> Any:
    if are_token_ids(prompt):
        raise ValueError("prompt has token ids: it takes one text")
    if isinstance(prompt, list) and len(prompt) > 1:
        raise ValueError(f"prompt has {len(prompt)} texts: it takes one; send a request for each")
    return prompt


class PromptBody(_CompletionBody):
    """`POST /v1/completions`: the prompt is the question of a chat without a system message."""

    prompt: Annotated[
        Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1, max_length=1)],
        BeforeValidator(_refuse_other_prompts),
    ]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] = 1

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives of each token; 0: only the token; None: no log-probabilities."""
        return self.logprobs

    @property
    def texts_with_documents(self) -> list[str]:
        """The text that may contain marked documents."""
        return [self._text]

    def with_texts(self, texts: Sequence[str]) -> Self:
        """The same request with another prompt."""
        return self.model_copy(update={"prompt": texts[0]})

    @property
    def question(self) -> Question:
        """The prompt as a question.

        Raises:
            HttpError: 400, the prompt is empty.
        """
        if not self._text.strip():
            raise HttpError(400, "the prompt is empty", param="prompt")
        return Question(self._text)

    @property
    def _text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


CompletionBody = ChatBody | PromptBody
"""The requests that both backends answer."""


class CorpusBody(Body):
    """`POST /v1/corpora`."""

    name: Label
    chunk_tokens: Annotated[int, Field(ge=8, le=4096)] = 512
    overlap_tokens: Annotated[int, Field(ge=0, le=2048)] = 0
    index: Literal["flat", "ivf"] | None = None


_MOST_METADATA_BYTES = 16 << 10


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    if nested_too_deeply(metadata):
        raise ValueError(f"metadata may be nested at most {MOST_LEVELS} levels deep")
    if (size := len(json.dumps(metadata))) > _MOST_METADATA_BYTES:
        raise ValueError(f"metadata may have at most {_MOST_METADATA_BYTES} bytes as JSON, not {size}")
    return metadata


class IngestedDocument(Body):
    """A document of a corpus, or LangChain's with a `page_content`."""

    text: Text
    id: Name | None = None
    title: Title = ""
    metadata: Annotated[dict[str, Any], AfterValidator(_small)] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_langchain(cls, data: Any) -> Any:
        return renamed_langchain(data) if isinstance(data, dict) else data


class IngestBody(Body):
    """`POST /v1/corpora/{name}/documents`."""

    most_values: ClassVar[int] = 300_000

    documents: Annotated[list[Text | IngestedDocument], Field(min_length=1, max_length=50_000, fail_fast=True)]
    update: bool = False


class SearchBody(Body):
    """`POST /v1/corpora/{name}/search`."""

    query: Annotated[Text, Field(min_length=1)]
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None


def _refuse_ids(texts: Any) -> Any:
    if are_token_ids(texts):
        message = "input has token ids, which are of another model's tokenizer: send texts"
        raise ValueError(f"{message} (LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False)")
    return texts


class EmbeddingsBody(Body):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Label | None = None
    input: Annotated[
        Text | Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)], BeforeValidator(_refuse_ids)
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Label | None = None

    @property
    def texts(self) -> list[str]:
        """The texts to embed."""
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def unknown(self) -> list[str]:
        """Given fields that are not known."""
        return list(self.model_extra or {})


class ChunksBody(Body):
    """The chunks of a cache command."""

    documents: Documents = []
    corpus: Name | None = None
    cache_salt: Annotated[Text, Field(max_length=512)] = ""

    @model_validator(mode="after")
    def _one_source(self) -> "ChunksBody":
        if self.corpus is not None and (self.documents or self.cache_salt):
            raise ValueError("give either documents (and cache_salt) or corpus")
        return self


class ClearBody(ChunksBody):
    """`POST /v1/cache/clear`."""

    everything: bool = False


def refuse_for_engine(body: CompletionBody) -> None:
    """Refuse what our own engine does not support.

    Raises:
        HttpError: 400; the message names all unsupported fields.
    """
    if unsupported := body.only_for_vllm:
        message = f"not supported by the engine backend: {', '.join(unsupported)}; vLLM's fields need --backend vllm"
        raise HttpError(400, message, param=unsupported[0], code="unsupported_field")
    if (body.alternatives or 0) > _MOST_ALTERNATIVES:
        message = f"at most {_MOST_ALTERNATIVES} alternatives of each token can be given"
        raise HttpError(400, message, param="top_logprobs" if isinstance(body, ChatBody) else "logprobs")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if len(body.stops) > _MOST_STOPS:
        raise HttpError(400, f"stop takes at most {_MOST_STOPS} texts, not {len(body.stops)}", param="stop")
    if body.temperature > 2:
        raise HttpError(400, "temperature must be at most 2", param="temperature")


def check_limits(body: CompletionBody, limits: LimitSettings, *, calibrated: bool) -> int:
    """Check a request against the limits; returns the most tokens of its answer, capped unless that is refused.

    Raises:
        HttpError: 400, too many documents, chunks or tokens, `cache_salt` together with a corpus, or a quality although
            the model was not `calibrated`.
    """
    check_documents(len(body.documents), limits)
    reuse = body.chunkweave
    if reuse.corpus is not None and body.cache_salt:
        message = "cache_salt cannot be given with chunkweave.corpus: removing a document must find all its KV"
        raise HttpError(400, message, param="cache_salt")
    if reuse.top_k is not None and reuse.top_k > limits.max_documents:
        message = f"chunkweave.top_k must be at most {limits.max_documents}"
        raise HttpError(400, message, param="chunkweave.top_k")
    # Checked here, because the engine's message has the model's folder.
    if reuse.quality not in (None, "exact") and reuse.method is None and not calibrated:
        message = "this model was not calibrated: give quality 'exact' or a method"
        raise HttpError(400, message, param="chunkweave.quality", code="not_calibrated")
    most = limits.max_answer_tokens
    wanted_tokens = body.answer_tokens
    return min(limits.default_answer_tokens if wanted_tokens is None else wanted_tokens, most)


def check_documents(count: int, limits: LimitSettings) -> None:
    """Refuse more documents than a request may have.

    Raises:
        HttpError: 400, too many documents.
    """
    if count > limits.max_documents:
        message = f"a request may have at most {limits.max_documents} documents, not {count}"
        raise HttpError(400, message, param="documents", code="too_many_documents")


def chunks_of(documents: Sequence[str | Document]) -> tuple[Chunk, ...]:
    """Documents of a request as chunks of the prompt.

    Raises:
        HttpError: 400, a document is empty.
    """
    chunks = []
    for place, entry in enumerate(documents):
        document = Document(text=entry) if isinstance(entry, str) else entry
        if not document.text.strip():
            raise HttpError(400, f"documents[{place}] is empty", param=f"documents[{place}]")
        text = f"{document.title}\n{document.text}" if document.title else document.text
        chunks.append(Chunk(text, document.id or document.title or f"document {place}"))
    return tuple(chunks)
