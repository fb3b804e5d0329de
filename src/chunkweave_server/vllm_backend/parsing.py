"""Tool calls and reasoning in answers, found by vLLM's own parsers.

A woven answer is a completion of token ids, which vLLM does not parse. Its tokens are sent to vLLM's endpoint for
disaggregated engines (`--enable-scale-out`), which uses the parsers of chats.
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
"""Most sets of tools whose constraints are cached."""

_SHARE_OF_TOKENS = 16
"""vLLM parses a stream from its beginning in each call: the next call comes after 1/16 of the parsed tokens."""


class AnswerForms:
    """Constraints on answers with tools, as in vLLM's own chats: a grammar of the parser's calls, or a schema.

    They depend only on tools and choice, so vLLM is asked once for each set. Used in one event loop only.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def held(self, upstream: Upstream, chat: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a completion that constrain its answer to `chat`'s tools and choice; empty if there are none.

        A constraint in `body` is sent along; vLLM decides which of the two applies.

        Raises:
            UpstreamLostError: the server is gone.
            HttpError: vLLM refused the tools or the choice, with vLLM's message, or has no parser for tool calls.
        """
        constraints = {name: body[name] for name in ("response_format", "structured_outputs") if body.get(name)}
        request = {**chat, **constraints, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).digest()
        if key not in self._known:
            reply = await upstream.post(_RENDER, request)
            rendered = (reply.get("sampling_params") or {}).get("structured_outputs") or {}
            of_body = {
                name: value for name, value in rendered.items() if value is not None and not name.startswith("_")
            }
            self._known[key] = of_body
            if len(self._known) > _FORMS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if form := self._known[key]:
            return {"structured_outputs": form, "response_format": None}
        if is_forced(chat["tool_choice"]):
            raise HttpError(400, f"a forced call needs {TOOL_FLAGS} in vLLM's flags", param="tool_choice")
        return {}


def is_forced(choice: Any) -> bool:
    """Whether a `tool_choice` requires a tool call."""
    return choice not in ("auto", "none")


@dataclass(slots=True, eq=False)
class _Unparsed:
    """State of one choice: tokens that are not parsed yet, and vLLM's parser state to send with them.

    `unsaid_ids` are tokens that were parsed without a result yet, such as the beginning of a call.
    """

    token_ids: list[int] = field(default_factory=list)
    unsaid_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    parsed_tokens: int = 0
    state: dict[str, Any] | None = None


class AnswerParser:
    """Parses one answer, for one attempt on one vLLM server.

    For a stream it returns pieces as they are parsed; otherwise each choice at its end.
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
        """`chat` is the request for the parsers. A final token in `stop_ids` is not part of the answer."""
        self._upstream = upstream
        self._prompt_ids = list(prompt_ids)
        self._chat = chat
        self._stop_ids = stop_ids
        self._stream = stream
        self._number = uuid.uuid4().hex
        self._choices: dict[int, _Unparsed] = {}

    async def parsed(self, pieces: Sequence[Choice]) -> Sequence[Choice]:
        """Parse further `pieces`; returns the parsed pieces, possibly none.

        Raises:
            UpstreamLostError, HttpError: vLLM did not parse them.
        """
        parsed_pieces = [await self._next(choice) for choice in pieces]
        return [piece for piece in parsed_pieces if piece is not None]

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
        message = await (self._piece(waiting, choice) if self._stream else self._whole(waiting, choice))
        waiting.unsaid_ids += waiting.token_ids
        waiting.parsed_tokens += len(waiting.token_ids)
        waiting.token_ids = []
        fields: dict[str, Any] = {name: _given(message.get(name)) or None for name in ("tool_calls", "reasoning")}
        named = isinstance(self._chat.get("tool_choice"), dict)  # OpenAI's finish reason is "stop" for a named tool
        fields["finish_reason"] = "tool_calls" if ends == "stop" and message["calls"] and not named else ends
        text = message.get("content") or ""
        if not text and not any(fields.values()):
            return None
        fields |= {"logprobs": waiting.logprobs, "stop_reason": choice.get("stop_reason")}
        piece = {"index": choice["index"], "text": text, "token_ids": waiting.unsaid_ids}
        waiting.unsaid_ids, waiting.logprobs = [], None
        return {**piece, **{name: value for name, value in fields.items() if value is not None}}

    async def _whole(self, waiting: _Unparsed, choice: Choice) -> dict[str, Any]:
        """A parsed message; `calls` is whether it has tool calls."""
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
        """The new part of a message; `calls` is whether the message has had tool calls so far."""
        body = {
            "stream": True,
            "stream_state": waiting.state,
            "generate_chunk": {"request_id": self._number, "choices": [self._tokens(waiting, choice)]},
        }
        reply = await self._upstream.post(PARSE, {**self._request, **body})
        waiting.state = reply["stream_state"]
        deltas = [parsed_choice["delta"] for parsed_choice in reply["chunk"]["choices"]]
        delta = deltas[0] if deltas else {}
        return {**delta, "calls": bool(waiting.state and waiting.state.get("tools_streamed"))}

    @property
    def _request(self) -> dict[str, Any]:
        return {"model": self._chat.get("model"), "prompt_token_ids": self._prompt_ids, "chat_request": self._chat}

    def _tokens(self, waiting: _Unparsed, choice: Choice) -> dict[str, Any]:
        return {"index": 0, "token_ids": waiting.token_ids, "finish_reason": choice.get("finish_reason")}


def _given(value: Any) -> Any:
    """The value without null fields: of a call in pieces, only the first has a name."""
    if isinstance(value, list):
        return [_given(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return value
