"""The bodies of requests: what is read, what is refused, and in which words."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from chunkweave.planning.calibration import Quality
from chunkweave.planning.method import METHODS
from chunkweave.planning.method_choice import ORDERS, checked_method, checked_ratio, refuse_unknown_keys

_MOST_STOPS = 4


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair: no valid Unicode") from error
    return text


def _without_nulls(data: Any) -> Any:
    """Fields that are null count as left out, as with OpenAI."""
    return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, Field(min_length=1, max_length=512)]


class Body(BaseModel):
    """What every body has in common: no coercion, no field that is not named here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    _nulls = model_validator(mode="before")(_without_nulls)


class Document(Body):
    """A chunk of the prompt. The title, if there is one, stands on a line before the text; the id is for reports."""

    text: Text
    title: Text = ""
    id: Text = ""


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    @property
    def text(self) -> str:
        """The content as one text; parts stand on lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class StreamOptions(Body):
    """What a stream ends with."""

    include_usage: bool = False


def _method(value: Any) -> str:
    return checked_method(value, METHODS)


def _quality(value: Any) -> str:
    return str(Quality.parse(value))


class ReuseField(Body):
    """How chunks are reused, and where they come from."""

    method: Annotated[str, BeforeValidator(_method), Field(json_schema_extra={"enum": list(METHODS)})] | None = None
    recompute_ratio: Annotated[float, BeforeValidator(checked_ratio), Field(ge=0, le=1)] | None = None
    quality: Annotated[str, BeforeValidator(_quality), Field(json_schema_extra={"enum": list(Quality)})] | None = None
    order: Literal["free", "fixed"] | None = None
    conversation_id: Name | None = None
    corpus: Name | None = None
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            refuse_unknown_keys(data, cls.model_fields)
        return data


assert set(ORDERS) == {"free", "fixed"}, "the schema names the orders there are"


class Asking(Body):
    """What chat and plain completions have in common."""

    model: Text | None = None
    documents: list[Text | Document] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Text, Field(min_length=1)] | list[Annotated[Text, Field(min_length=1)]] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[Text, Field(max_length=512)] = ""
    chunkweave: ReuseField = ReuseField()
    n: Literal[1] = 1
    user: Text | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> "Asking":
        if isinstance(self.stop, list) and len(self.stop) > _MOST_STOPS:
            raise ValueError(f"stop takes at most {_MOST_STOPS} texts, not {len(self.stop)}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options can only be given with stream")
        if self.chunkweave.corpus is not None and self.documents:
            raise ValueError("give either documents or chunkweave.corpus, not both")
        if self.chunkweave.corpus is not None and self.cache_salt:
            raise ValueError("cache_salt cannot be given with chunkweave.corpus: its removal has to find all KV")
        if self.chunkweave.corpus is None and self.chunkweave.top_k is not None:
            raise ValueError("chunkweave.top_k can only be given with chunkweave.corpus")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer, if the request says."""
        return self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(Asking):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Literal[False] = False

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatBody":
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens mean the same: give one of them")
        return self

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Asking):
    """`POST /v1/completions`."""

    prompt: Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1, max_length=1)]
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    @property
    def question(self) -> str:
        """The one prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class CorpusBody(Body):
    """`POST /v1/corpora`."""

    name: Text
    chunk_tokens: Annotated[int, Field(ge=8, le=4096)] = 512
    overlap_tokens: Annotated[int, Field(ge=0, le=2048)] = 0


class IngestedDocument(Body):
    """A document of a corpus."""

    text: Text
    id: Name | None = None
    title: Text = ""
    metadata: dict[str, Any] = {}


class IngestBody(Body):
    """`POST /v1/corpora/{name}/documents`."""

    documents: Annotated[list[Text | IngestedDocument], Field(min_length=1, max_length=100_000)]
    update: bool = False


class SearchBody(Body):
    """`POST /v1/corpora/{name}/search`."""

    query: Annotated[Text, Field(min_length=1)]
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None


class ChunksBody(Body):
    """Which chunks a cache command is about."""

    documents: list[Text | Document] = []
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
