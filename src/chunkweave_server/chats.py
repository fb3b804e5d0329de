"""Prompts of chats whose template reads more than questions and answers: tools and their messages, variables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import Prompt
from chunkweave.prompt.rendering import Messages, Rendered
from chunkweave.prompt.request import Request
from chunkweave.prompt.template import rendered_exchange, template_for, template_with
from chunkweave_server.requests import ChatBody, CompletionBody


@dataclass(frozen=True, slots=True, eq=False)
class ChatDetails:
    """Details of a chat besides questions and answers: the adapter's name, and input of the chat template.

    `variables` are the template's: `tools`, `chat_template_kwargs`. `exchanges` are the messages of assistant and tools
    after each question, if tools were called.
    """

    model: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    exchanges: Sequence[Messages] = ()

    @property
    def without_tools(self) -> "ChatDetails":
        """The same without tools and their messages."""
        return ChatDetails(self.model, {name: variable for name, variable in self.variables.items() if name != "tools"})


_BUILDERS = 64
"""Most sets of tools and adapters whose builders are cached."""


class ChatPrompts:
    """Builds prompts of chats with tools, adapters or template variables. Thread-safe."""

    def __init__(self, builder: PromptBuilder, model: str, fingerprint: str) -> None:
        """`builder` is that of `model`, whose chunk ids have this fingerprint."""
        self._builder = builder
        self._model = model
        self._fingerprint = fingerprint
        self._builder_for = lru_cache(_BUILDERS)(self._alike)

    def build(self, chat: ChatDetails, request: Request, limit: PromptLimit) -> Prompt:
        """The prompt of a request that belongs to no conversation.

        Raises:
            UsageError: an empty question or chunk, or a chat template without tools.
            PromptTooLongError: the prompt is above the `limit`.
        """
        model = None if chat.model == self._model else chat.model
        variables = json.dumps(chat.variables, sort_keys=True)
        limit.check_characters(len(variables) + len(json.dumps(chat.exchanges)), "tools and their messages")
        builder = self._builder_for(model, variables)
        tokenizer = self._builder.tokenizer
        last = len(chat.exchanges) - 1
        exchanges = [
            rendered_exchange(tokenizer, messages, chat.variables, first=not number, answered=number < last)
            if messages
            else None
            for number, messages in enumerate(chat.exchanges)
        ]
        history: list[tuple[str, str | Rendered]] = list(request.history)
        for number, rendered in enumerate(exchanges[:-1]):
            history[number] = history[number][0], rendered or history[number][1]
        return builder.build(
            request.question,
            request.chunks,
            system=request.system,
            history=history,
            history_chunks=request.history_chunks,
            exchange=exchanges[-1] if exchanges else None,
            continued=request.continued,
            cache_salt=request.cache_salt,
            limit=limit,
        )

    def _alike(self, adapter: str | None, variables: str) -> PromptBuilder:
        """The builder for an adapter, whose chunk ids differ from the model's, and for a template with `variables`."""
        read = json.loads(variables)
        if adapter is None and not read:
            return self._builder
        template = template_with(self._builder.tokenizer, read) if read else template_for(self._builder.tokenizer)
        return self._builder.alike(template, self._fingerprint + (f"+{adapter}" if adapter else ""))


def details_of(body: CompletionBody) -> ChatDetails:
    """Details of a request for chat templates, besides its texts."""
    if not isinstance(body, ChatBody):
        return ChatDetails(body.model)
    variables = {**body.chat_template_kwargs, **({"tools": body.tools} if body.tools else {})}
    exchanges = [[message.rendered for message in behind] for behind in body.question.exchanges]
    return ChatDetails(body.model, variables, exchanges)
