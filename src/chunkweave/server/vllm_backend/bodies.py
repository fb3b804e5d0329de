"""Bodies of requests with documents: what the front reads of them, and what goes on to vLLM as it is."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chunkweave.planning.method_choice import FIELD
from chunkweave.server.errors import HttpError, invalid_request
from chunkweave.server.requests import (
    ChatBody,
    Document,
    Message,
    Question,
    ReuseField,
    StreamOptions,
    Text,
    question_of,
)

OURS = ("documents", FIELD)
"""A request with one of these is the front's; all others are handed through."""

_UNSUPPORTED_IN_CHAT = (
    "tools",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "reasoning_effort",
    "thinking_token_budget",
    "echo",
)
"""What vLLM's chat endpoint does and its completions do not: a prompt of token ids goes through the latter."""

_UNSUPPORTED = ("kv_transfer_params", "prompt_embeds", "suffix", "use_beam_search", "prompt_logprobs", "echo")


class FrontBody(BaseModel):
    """What chat and plain completions have in common. Other fields are vLLM's to check."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Text | None = None
    documents: list[Text | Document] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[Text, Field(max_length=512)] = ""
    chunkweave: ReuseField = ReuseField()
    n: Annotated[int, Field(ge=1, le=64)] = 1
    temperature: float | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _consistent(self) -> "FrontBody":
        if self.chunkweave.corpus is not None and self.documents:
            raise ValueError("give either documents or chunkweave.corpus, not both")
        if self.chunkweave.corpus is None and self.chunkweave.top_k is not None:
            raise ValueError("chunkweave.top_k can only be given with chunkweave.corpus")
        if self.chunkweave.conversation_id is not None and self.n > 1:
            raise ValueError("a conversation goes on from one answer: n must be 1")
        return self

    @property
    def handed_on(self) -> dict[str, Any]:
        """Fields that go to vLLM as they are."""
        return dict(self.model_extra or {})

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer, if the request says."""
        return self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event that counts tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def logprobs_of_tokens(self) -> int | None:
        """How many alternatives of each token are asked for; 0 is the token alone, None nothing."""
        raise NotImplementedError

    @property
    def question(self) -> Question:
        """What is asked."""
        raise NotImplementedError


class FrontChatBody(FrontBody):
    """`POST /v1/chat/completions` with documents or a `chunkweave` field."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0

    @property
    def answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_of_tokens(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def question(self) -> Question:
        """The user's last message.

        Raises:
            HttpError: there is none, or messages that mean nothing here.
        """
        body = ChatBody.model_construct(messages=self.messages, chunkweave=self.chunkweave)
        return question_of(body)


class FrontCompletionBody(FrontBody):
    """`POST /v1/completions` with documents or a `chunkweave` field."""

    prompt: Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def logprobs_of_tokens(self) -> int | None:
        return self.logprobs

    @property
    def question(self) -> Question:
        """The one prompt.

        Raises:
            HttpError: it is empty.
        """
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        if not text.strip():
            raise HttpError(400, "the prompt is empty", param="prompt")
        return Question(text)


def read_body(data: Mapping[str, Any], *, chat: bool) -> FrontBody:
    """A body, checked.

    Raises:
        HttpError: 400; the message names the field.
    """
    refused = (*_UNSUPPORTED, *(_UNSUPPORTED_IN_CHAT if chat else ()))
    if given := [name for name in refused if data.get(name) not in (None, [], {}, False)]:
        told = f"not supported with documents or chunkweave: {', '.join(given)}"
        raise HttpError(400, told, param=given[0], code="unsupported_field")
    try:
        return (FrontChatBody if chat else FrontCompletionBody).model_validate(dict(data))
    except ValidationError as error:
        raise invalid_request([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None
