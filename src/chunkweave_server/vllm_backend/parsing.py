"""What an answer means: calls of tools and reasoning, as vLLM's own parsers find them in its tokens.

A woven answer is a completion of token ids, in which nothing is parsed. So its tokens go to the endpoint that vLLM has
for engines apart from their API (`--enable-scale-out`), whose parsers are those of its chats.
"""

import hashlib
import json
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkweave.conversation.answer import Choice, joined_logprobs
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.upstream import Upstream

PARSE = "/v1/chat/completions/derender"
_RENDER = "/v1/chat/completions/render"

TOOL_FLAGS = "--enable-auto-tool-choice and --tool-call-parser"
_FORMS = 64
"""Sets of tools whose forms are kept."""

_SHARE_OF_TOKENS = 16
"""vLLM parses a stream from its beginning each time: it is asked again after so small a part of what there is."""


class AnswerForms:
    """What vLLM holds answers with tools to, as its own chats are held: a grammar of the parser's calls, or a schema.

    It depends on the tools and the choice alone, so vLLM is asked once for a set of them. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def held(self, upstream: Upstream, chat: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        """A completion's fields that hold its answer to `chat`'s tools and choice; none if vLLM leaves it free.

        A form that `body` has already goes along: which of the two counts is vLLM's to say.

        Raises:
            UpstreamLostError: the server is gone.
            HttpError: it refused the tools or the choice, in its own words, or has no parser for calls.
        """
        asked = {name: body[name] for name in ("response_format", "structured_outputs") if body.get(name)}
        request = {**chat, **asked, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
        if key not in self._known:
            reply = await upstream.post(_RENDER, request)
            found = (reply.get("sampling_params") or {}).get("structured_outputs") or {}
            of_body = {name: value for name, value in found.items() if value is not None and not name.startswith("_")}
            self._known[key] = of_body
            if len(self._known) > _FORMS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if form := self._known[key]:
            return {"structured_outputs": form, "response_format": None}
        if is_forced(chat["tool_choice"]):
            raise HttpError(400, f"a forced call needs {TOOL_FLAGS} at vLLM's start", param="tool_choice")
        return {}


def is_forced(choice: Any) -> bool:
    """Whether a `tool_choice` leaves the answer no other way than a call."""
    return choice not in ("auto", "none")


@dataclass(slots=True, eq=False)
class _Unparsed:
    """One choice of a stream: what has come and was not parsed, and what vLLM wants to get back with it.

    Tokens that were parsed and say nothing yet, such as the beginning of a call, are `unsaid_ids`.
    """

    token_ids: list[int] = field(default_factory=list)
    unsaid_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    parsed_tokens: int = 0
    state: dict[str, Any] | None = None


class AnswerParser:
    """Parses one answer. Belongs to one attempt to get it from one vLLM server.

    Of a stream pieces come out as they are parsed, of an answer that is not streamed each choice at its end.
    """

    def __init__(
        self,
        upstream: Upstream,
        prompt_ids: Sequence[int],
        chat: Mapping[str, Any],
        *,
        stop_ids: set[int],
        stream: bool,
    ) -> None:
        """`chat` is what parsers read of the request; a token of `stop_ids` at the end is none of the answer's."""
        self._upstream = upstream
        self._prompt_ids = list(prompt_ids)
        self._chat = chat
        self._stop_ids = stop_ids
        self._stream = stream
        self._number = uuid.uuid4().hex
        self._choices: dict[int, _Unparsed] = {}

    async def parsed(self, pieces: Sequence[Choice]) -> Sequence[Choice]:
        """What is known now that `pieces` have come, which may be nothing.

        Raises:
            UpstreamLostError, HttpError: vLLM did not parse them.
        """
        found = [await self._next(choice) for choice in pieces]
        return [piece for piece in found if piece is not None]

    async def _next(self, choice: Choice) -> Choice | None:
        waiting = self._choices.setdefault(choice["index"], _Unparsed())
        waiting.token_ids += choice.get("token_ids") or []
        if choice.get("logprobs"):
            waiting.logprobs = joined_logprobs(waiting.logprobs, choice["logprobs"])
        ends = choice.get("finish_reason")
        if ends == "stop" and waiting.token_ids and waiting.token_ids[-1] in self._stop_ids:
            waiting.token_ids.pop()
        due = self._stream and len(waiting.token_ids) * _SHARE_OF_TOKENS > waiting.parsed_tokens
        if ends is None and not due:
            return None
        said = await (self._piece(waiting, choice) if self._stream else self._whole(waiting, choice))
        waiting.unsaid_ids += waiting.token_ids
        waiting.parsed_tokens += len(waiting.token_ids)
        waiting.token_ids = []
        known: dict[str, Any] = {name: _given(said.get(name)) or None for name in ("tool_calls", "reasoning")}
        named = isinstance(self._chat.get("tool_choice"), dict)  # such an answer just stops, as with OpenAI
        known["finish_reason"] = "tool_calls" if ends == "stop" and said["calls"] and not named else ends
        text = said.get("content") or ""
        if not text and not any(known.values()):
            return None
        known |= {"logprobs": waiting.logprobs, "stop_reason": choice.get("stop_reason")}
        found = {"index": choice["index"], "text": text, "token_ids": waiting.unsaid_ids}
        waiting.unsaid_ids, waiting.logprobs = [], None
        return {**found, **{name: value for name, value in known.items() if value is not None}}

    async def _whole(self, waiting: _Unparsed, choice: Choice) -> dict[str, Any]:
        """A message, with `calls` for whether there are calls of tools."""
        if not waiting.token_ids:
            return {"calls": False}
        body = {
            "generate_response": {
                "request_id": self._number,
                "prompt_token_ids": self._prompt_ids,
                "choices": [self._tokens(waiting, choice)],
            }
        }
        reply = await self._upstream.post(PARSE, {**self._request, **body})
        message: dict[str, Any] = reply["choices"][0]["message"]
        calls = [{**call, "index": number} for number, call in enumerate(message.get("tool_calls") or [])]
        return {**message, "tool_calls": calls, "calls": bool(calls)}

    async def _piece(self, waiting: _Unparsed, choice: Choice) -> dict[str, Any]:
        """What is new of a message, with `calls` for whether there have been calls of tools."""
        body = {
            "stream": True,
            "stream_state": waiting.state,
            "generate_chunk": {"request_id": self._number, "choices": [self._tokens(waiting, choice)]},
        }
        reply = await self._upstream.post(PARSE, {**self._request, **body})
        waiting.state = reply["stream_state"]
        deltas = [one["delta"] for one in reply["chunk"]["choices"]]
        delta = deltas[0] if deltas else {}
        return {**delta, "calls": bool(waiting.state and waiting.state.get("tools_streamed"))}

    @property
    def _request(self) -> dict[str, Any]:
        return {"model": self._chat.get("model"), "prompt_token_ids": self._prompt_ids, "chat_request": self._chat}

    def _tokens(self, waiting: _Unparsed, choice: Choice) -> dict[str, Any]:
        return {"index": 0, "token_ids": waiting.token_ids, "finish_reason": choice.get("finish_reason")}


def _given(value: Any) -> Any:
    """The same without fields that are null: of a call in pieces all but the first have no name."""
    if isinstance(value, list):
        return [_given(one) for one in value]
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    return value
