"""Answers in a given form, for the engine backend: `response_format`, `tools` and `tool_choice`.

A tool call is `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>` in the answer's text.
"""

import hashlib
import json
import re
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from chunkweave.conversation.answer import AnswerEnd, Choice, PendingAnswer, joined_logprobs
from chunkweave.engine.grammar import Grammar, GrammarCompiler, KeywordError, grammars_available, json_rule
from chunkweave.errors import install_extra
from chunkweave.prompt.find_chunks import RESULT_BEGINS
from chunkweave.prompt.request import Request
from chunkweave_server.backend import Event
from chunkweave_server.errors import HttpError
from chunkweave_server.requests import ChatBody, CompletionBody, Message
from chunkweave_server.threads import TenantThreads

BEGIN = "<tool_call>"
END = "</tool_call>"
_ARGUMENTS = re.compile(r'\s*\{"name": "([^"\\]+)", "arguments": ')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STRING_OR_END = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|{END}', re.DOTALL)
_MOST_BYTES = 64 << 10
"""Most bytes of a request's schemas as JSON."""
_MOST_CALLS = 8
_MOST_GRAMMARS = 32
"""Most compiled grammars of a tenant."""

_MOST_PLACES = 3
"""Most places that the refusal of a schema names."""

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "default", "enum", "examples")
"""Keywords of JSON schema whose values are schemas by names, and values of the described data."""

_TOOLS_TEXT = """You can call these functions, described by one JSON object a line:
{tools}
To call a function, answer only with {begin}{{"name": NAME, "arguments": {{...}}}}{end}"""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The grammar that an answer must match, and whether it may contain tool calls. `schemas` are those of the request
    by their place in it.

    With a `named` tool the finish reason is that of a text, as in OpenAI's API. `either`: an answer has content or
    calls, so its content may spell the beginning of a call.
    """

    lark: str
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calls: bool = False
    named: bool = False
    either: bool = False


def form_of(body: CompletionBody) -> AnswerForm | None:
    """The form that a request gives its answer; None: any text.

    Raises:
        HttpError: 400, a wrong or too large `response_format`, `tools` or `tool_choice`; 501, the library is missing.
    """
    schema = _schema(body.response_format)
    tools = _tools(body.tools) if isinstance(body, ChatBody) else {}
    schemas = {} if schema is None else {"response_format.json_schema.schema": schema}
    choice = _choice(body, tools) if isinstance(body, ChatBody) else "none"
    if schema is None and (not tools or choice == "none"):
        return None
    param = "tools" if tools and choice != "none" else "response_format"
    if not grammars_available():
        message = f"{param} needs a library that is not installed here: {install_extra('server')}"
        raise HttpError(501, message, param=param, code="not_installed")
    if len(json.dumps([schema, tools])) > _MOST_BYTES:
        raise HttpError(400, f"schemas may have at most {_MOST_BYTES} bytes as JSON", param=param)
    if not tools or choice == "none":
        assert schema is not None, "else there is no form"
        return AnswerForm(f"%llguidance {{}}\nstart: {json_rule(schema)}\n", schemas)
    assert isinstance(body, ChatBody), "only chats have tools"
    parameters = {f"tools[{number}].function.parameters": tool for number, tool in enumerate(tools.values())}
    form = _with_calls(schema, tools, choice, parallel=body.parallel_tool_calls)
    return replace(form, schemas={**schemas, **parameters})


def _with_calls(
    schema: Mapping[str, Any] | None, tools: Mapping[str, Mapping[str, Any]], choice: str, *, parallel: bool
) -> AnswerForm:
    named = choice in tools
    callable_ = {choice: tools[choice]} if named else tools
    more = f" more{{0,{_MOST_CALLS - 1}}}" if parallel and not named else ""
    rules = [
        f"call_{number}: {json.dumps(_beginning(name))} {json_rule(parameters)} {json.dumps('}' + END)}"
        for number, (name, parameters) in enumerate(callable_.items())
    ]
    calls = " | ".join(f"call_{number}" for number in range(len(rules)))
    begin = json.dumps(BEGIN)
    if choice == "auto" and schema is None:
        # Lazy: as soon as the text has the beginning of a call, the call must follow.
        start = [f"start: TEXT | begin call{more}", f"begin[lazy]: TEXT {begin}", r"TEXT: /(.|\n)*/"]
    elif choice == "auto":
        start = [f"start: content | {begin} call{more}", f"content: {json_rule(schema or {})}"]
    else:
        start = [f"start: {begin} call{more}"]
    lines = ["%llguidance {}", *start, f"call: {calls}", *([f'more: "\\n" {begin} call'] if more else []), *rules]
    either = choice == "auto" and schema is not None
    return AnswerForm("\n".join(lines) + "\n", calls=True, named=named, either=either)


def _beginning(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _schema(response_format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The JSON schema of a `response_format`; None for text."""
    kind = response_format.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        message = 'response_format must be of type text, json_object, or json_schema with {"json_schema": {"schema"}}'
        raise HttpError(400, message, param="response_format")
    return schema


def _tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parameters' schemas by the tools' names."""
    parameters_by_name: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        function = tool.get("function")
        place = f"tools[{number}]"
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise HttpError(400, f"{place} must be of type function", param=place)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in parameters_by_name:
            message = f"{place}.function.name must be a new name of 1 to 64 letters, digits, and any of _.-"
            raise HttpError(400, message, param=place)
        parameters = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise HttpError(400, f"{place}.function.parameters must be a schema of an object", param=place)
        parameters_by_name[name] = {**parameters, "type": "object"}
    return parameters_by_name


def _choice(body: ChatBody, tools: Mapping[str, Any]) -> str:
    """`auto`, `none`, `required`, or the name of a tool."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in tools:
            raise HttpError(400, f"tool_choice must name one of the tools, not {name!r}", param="tool_choice")
        return str(name)
    if choice not in ("auto", "none", "required"):
        raise HttpError(400, "tool_choice must be auto, none, required or a function", param="tool_choice")
    if choice == "required" and not tools:
        raise HttpError(400, "tool_choice needs tools", param="tool_choice")
    return choice


class Grammars:
    """Compiled grammars, cached separately for each tenant. Used in one event loop; they are compiled in threads."""

    def __init__(self, compiler: GrammarCompiler, threads: TenantThreads) -> None:
        self._compiler = compiler
        self._threads = threads
        self._known: dict[str, OrderedDict[bytes, Grammar]] = {}

    async def compiled(self, tenant: str, form: AnswerForm) -> Grammar:
        """The compiled grammar of a form.

        Raises:
            HttpError: 400, keywords of its schemas are not supported.
            UsageError: it is not supported.
        """
        compiled = self._known.setdefault(tenant, OrderedDict())
        key = hashlib.sha256(form.lark.encode()).digest()
        if key not in compiled:
            try:
                compiled[key] = await self._threads.run(tenant, partial(self._compiler.compile, form.lark))
            except KeywordError as error:
                places = _places(form.schemas, error.keywords)
                if not places:
                    raise
                message = f"not supported: {', '.join(places[:_MOST_PLACES])}"
                raise HttpError(400, message, param=places[0], code="unsupported_field") from error
            if len(compiled) > _MOST_GRAMMARS:
                compiled.popitem(last=False)
        compiled.move_to_end(key)
        return compiled[key]


def _places(schemas: Mapping[str, Mapping[str, Any]], keywords: Sequence[str]) -> list[str]:
    """Where these keywords of JSON schema are in schemas, as paths in the request."""
    places: list[str] = []
    pending: list[tuple[str, Any]] = list(schemas.items())
    while pending:
        place, schema = pending.pop(0)
        if isinstance(schema, list):
            pending += [(f"{place}[{number}]", inner) for number, inner in enumerate(schema)]
        if not isinstance(schema, Mapping):
            continue
        places += [f"{place}.{keyword}" for keyword in keywords if keyword in schema]
        for keyword, inner in schema.items():
            if keyword in _SCHEMAS_BY_NAME and isinstance(inner, Mapping):
                pending += [(f"{place}.{keyword}.{name}", of_name) for name, of_name in inner.items()]
            elif keyword not in _VALUES:
                pending.append((f"{place}.{keyword}", inner))
    return places


def with_plain_tools(
    request: Request, tools: Sequence[Mapping[str, Any]], exchanges: Sequence[Any], *, usual: str
) -> Request:
    """The request with tools and their messages as plain text, for models whose chat template has no place for them.

    The instruction, or the `usual` one, ends with the tools' descriptions; a call is text of the assistant, a result a
    message of the user.
    """
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    if tools:
        system = usual if request.system is None else request.system
        text = _TOOLS_TEXT.format(tools=described, begin=BEGIN, end=END)
        request = replace(request, system=f"{system}\n\n{text}" if system else text)
    if not exchanges:
        return request
    turns: list[tuple[str, str]] = []
    pending_question = ""
    for question, messages in zip(
        (*(earlier for earlier, _ in request.history), request.question), exchanges, strict=True
    ):
        pending_question = f"{pending_question}\n{question}" if pending_question else question
        for message in messages:
            if message.role == "assistant":
                turns.append((pending_question, _said(message)))
                pending_question = ""
            else:
                result = f"{RESULT_BEGINS}{message.text}</tool_response>"
                pending_question = f"{pending_question}\n{result}" if pending_question else result
    return replace(request, question=pending_question, history=tuple(turns))


def _said(message: Message) -> str:
    """A message of the assistant as text."""
    called = [tool_call.function for tool_call in message.tool_calls]
    calls = [
        f"{BEGIN}{_beginning(function.name)}{json.dumps(function.parsed, ensure_ascii=False)}}}{END}"
        for function in called
    ]
    return "\n".join(([message.text] if message.text else []) + calls)


@dataclass(slots=True, eq=False)
class _Parsed:
    """The state of one choice: text that is not parsed yet, and the number of calls."""

    text: str = ""
    calls: int = 0
    content: bool = False
    """Whether it is content to its end: one of `AnswerForm.either` that did not begin with a call."""
    inside: bool = False
    """Whether the text is that of a call."""
    logprobs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ParsedEvent:
    """Pieces of choices with their tool calls; the last event has the end."""

    choices: Sequence[Choice]
    end: AnswerEnd | None


class ParsedAnswer:
    """An answer whose text is split into content and tool calls; a call comes whole, also in a stream.

    All else is that of the answer inside.
    """

    def __init__(self, answer: PendingAnswer[Event], form: AnswerForm) -> None:
        self._answer = answer
        self._events = aiter(answer)
        self._form = form
        self._choices: dict[int, _Parsed] = {}

    @property
    def begun(self) -> bool:
        """Whether a first event, or an error in its place, is or was available."""
        return self._answer.begun

    @property
    def failed(self) -> bool:
        """Whether it ended without an answer."""
        return self._answer.failed

    def confirm(self) -> None:
        """Make a speculative request an ordinary one."""
        self._answer.confirm()

    def abort(self) -> None:
        """End the request now."""
        self._answer.abort()

    async def aclose(self) -> None:
        """End the request unless it has ended."""
        await self._answer.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ParsedEvent:
        """The next event. Raises the errors of the answer."""
        event = await anext(self._events)
        pieces = [self._piece(choice) for choice in event.choices]
        return ParsedEvent([piece for piece in pieces if piece is not None], event.end)

    def _piece(self, choice: Choice) -> Choice | None:
        state = self._choices.setdefault(choice["index"], _Parsed())
        state.text += choice["text"]
        if choice.get("logprobs"):
            state.logprobs = joined_logprobs(state.logprobs, choice["logprobs"])
        reason = choice.get("finish_reason")
        text, calls = self._read(state, ends=reason is not None)
        if reason == "stop" and state.calls and not (state.inside or self._form.named):
            reason = "tool_calls"
        if not text and not calls and reason is None:
            return None
        fields = {"tool_calls": calls, "finish_reason": reason, "logprobs": state.logprobs}
        state.logprobs = None
        return {
            "index": choice["index"],
            "text": text,
            **{name: field_value for name, field_value in fields.items() if field_value},
        }

    def _read(self, state: _Parsed, *, ends: bool) -> tuple[str, list[dict[str, Any]]]:
        """Read as much as is certain: the content, and whole calls."""
        content = ""
        calls: list[dict[str, Any]] = []
        while True:
            if not state.inside:
                content += self._content(state, ends=ends)
            call = _next_call(state, ends=ends) if state.inside else None
            if call is None:
                return content, calls
            calls.append(call)

    def _content(self, state: _Parsed, *, ends: bool) -> str:
        """The text up to the next call, which is then begun; between calls there is none."""
        if self._form.either and not state.calls:
            state.content = state.content or not BEGIN.startswith(state.text[: len(BEGIN)])
        if state.content:
            content, state.text = state.text, ""
            return content
        content, begin, behind = state.text.partition(BEGIN)
        if begin:
            state.inside, state.text = True, behind
        else:
            held = 0 if ends else _held_back(state.text)
            content, state.text = state.text[: len(state.text) - held], state.text[len(state.text) - held :]
        return "" if state.calls else content


def _held_back(text: str) -> int:
    """Characters at the end that may begin a call."""
    return next((size for size in range(min(len(BEGIN), len(text)), 0, -1) if BEGIN.startswith(text[-size:])), 0)


def _next_call(state: _Parsed, *, ends: bool) -> dict[str, Any] | None:
    """Take the next whole call from the text, or, if the answer `ends` in it, as much as there is."""
    begun = _ARGUMENTS.match(state.text)
    if begun is None or not (ends or END in state.text):
        return None
    rest = state.text[begun.end() :]
    end = next((piece for piece in _STRING_OR_END.finditer(rest) if piece[0] == END), None)
    if end is not None:
        arguments, state.text = rest[: end.start()].removesuffix("}"), rest[end.end() :]
    elif ends and rest:
        arguments, state.text = _unframed(rest), ""
    else:
        return None
    state.inside = end is None
    state.calls += 1
    function = {"name": begun[1], "arguments": arguments}
    return {"index": state.calls - 1, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _unframed(text: str) -> str:
    """The arguments in the text of a call that was cut off: an object, or the beginning of one."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text
