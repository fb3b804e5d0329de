"""What the front sees of vLLM with the plug-in: an HTTP server in a thread that stores chunks and computes nothing."""

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from chunkweave.conversation.answer import PartReport, PrefillReport
from chunkweave.planning.method_choice import MethodChooser, MethodRequest
from chunkweave.planning.plan import KVSource
from chunkweave.types import Span, spans_of
from chunkweave.vllm.report_socket import ReportSender

CONTEXT = 2048
Behave = Callable[[dict[str, Any]], Response | None]
Key = tuple[str, tuple[int, ...]]
"""A chunk: the cache salt and its tokens."""


@dataclass
class FakeVllm:
    """Answers `max_tokens` tokens, the piece ` w<number>` each, and reports what its store would have reused.

    `behave` may answer in its place; `cached` tokens it says that it found in its own cache; `gate` holds answers back
    until it is set; `break_after` tokens it drops the connection. With `parses` it takes what it has answered for a
    call of a tool once that has as many tokens, and what comes before for text; the call is cut off where the answer
    is, and `reasoning` is before all. With `forms` it holds forced calls.
    With `healthy` false its health check fails.

    Of chunks it knows which have `means`, and of which there are `first_passes`, and says so if it is asked.

    Of what it is to remove it says that so many segments are `left`. Unless it is `plugged` it does not know that
    command, while it is `silent` it fails, and it takes `slow_s` for it. It has so many data-parallel `engines`.

    Of a chunk that was computed in all contexts of a mean it has the chunks in each of the contexts (`means`). What has
    read a chunk that is removed, is removed with it.
    """

    report_to: str | None = None
    behave: Behave | None = None
    break_after: int | None = None
    parses: int | None = None
    reasoning: str | None = None
    forms: bool = True
    healthy: bool = True
    parsed: list[dict[str, Any]] = field(default_factory=list)
    rendered: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[str | None] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    paths: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    aborted: int = 0
    cached: int = 0
    stored: set[Key] = field(default_factory=set)
    means: dict[Key, set[tuple[Key, ...]]] = field(default_factory=dict)
    first_passes: set[Key] = field(default_factory=set)
    removals: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    plugged: bool = True
    silent: bool = False
    slow_s: float = 0.0
    engines: int = 1
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self._pending: dict[str, set[tuple[Key, ...]]] = {}
        self._sender = ReportSender(self.report_to or "")
        self._server = uvicorn.Server(uvicorn.Config(self._app(), log_level="critical", lifespan="off"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "FakeVllm":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.gate.set()
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()
        self._sender.close()

    def send_counts(self, source: str, counts: dict[str, Any]) -> None:
        """Say what the store of a worker counts, as the plug-in does now and then."""
        self._sender.send_counts(source, {"store": counts})

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions/derender", self._parse, methods=["POST"]),
                Route("/v1/chat/completions/render", self._render, methods=["POST"]),
                Route("/{path:path}", self._other, methods=["GET", "POST"]),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(
            "# HELP vllm:requests Requests.\n# TYPE vllm:requests counter\n"
            f'vllm:requests{{model_name="m"}} {len(self.seen)}\n'
            "# TYPE vllm:kv_cache_usage_perc gauge\n"
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
            "# TYPE vllm:num_preemptions counter\n"
            'vllm:num_preemptions_total{engine="0",model_name="m"} 0.0\n'
            "# TYPE vllm:num_requests_running gauge\n"
            + "".join(
                f'vllm:num_requests_running{{engine="{number}",model_name="m"}} 0.0\n' for number in range(self.engines)
            )
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "max_model_len": CONTEXT}]})

    async def _other(self, request: Request) -> Response:
        body = await request.body()
        self.paths.append((request.method, str(request.url.path), dict(request.headers), body))
        if request.url.query == "stream":
            return StreamingResponse(_numbers(), media_type="text/event-stream")
        if request.url.path == "/v1/models/missing":
            return JSONResponse({"error": {"message": "no such thing", "code": 404}}, 404)
        text = body.decode(errors="replace")
        return JSONResponse({"path": request.url.path, "query": request.url.query, "body": text})

    async def _parse(self, request: Request) -> Response:
        body = await request.json()
        if self.parses is None or not body:
            return JSONResponse({"error": {"message": "disabled or nothing"}}, 403 if self.parses is None else 400)
        self.parsed.append(body)
        streams = body.get("stream", False)
        before = (body.get("stream_state") or {}).get("output_token_ids", [])
        (choice,) = (body["generate_chunk"] if streams else body["generate_response"])["choices"]
        new = choice["token_ids"]
        text = "".join(f" w{token - 600}" for token in new if len(before) + 1 + new.index(token) < self.parses)
        ends = choice.get("finish_reason") == "length"
        function = {"name": "get_time", "arguments": '{"town": "Hal' if ends else '{"town": "Halvik"}'}
        reasoning = None if before else self.reasoning
        calls = len(before) < self.parses <= len(before) + len(new)
        tools = [{"id": "call-1", "type": "function", "function": function}] if calls else []
        if not streams:
            message = {"role": "assistant", "content": text, "tool_calls": tools, "reasoning": reasoning}
            return JSONResponse({"choices": [{"message": message}]})
        delta = {"content": text or None, "tool_calls": [{**tools[0], "index": 0}] if tools else None, "role": None}
        delta["reasoning"] = reasoning
        state = {"output_token_ids": [*before, *new], "tools_streamed": len(before) + len(new) >= self.parses}
        return JSONResponse({"chunk": {"choices": [{"delta": delta}]}, "stream_state": state})

    async def _render(self, request: Request) -> Response:
        """A form for forced calls alone; one of a tool that is not among them is refused."""
        body = await request.json()
        self.rendered.append(body)
        choice, names = body["tool_choice"], [tool["function"]["name"] for tool in body["tools"]]
        if isinstance(choice, dict) and choice["function"]["name"] not in names:
            return JSONResponse({"error": {"message": "no such tool", "code": 400}}, 400)
        form = (
            None if choice == "auto" or not self.forms else {"json": {"const": None}, "regex": None, "_backend": None}
        )
        return JSONResponse({"token_ids": [1], "sampling_params": {"structured_outputs": form}})

    async def _complete(self, request: Request) -> Response:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or (body.get("stream") and "max_tokens" not in body):
            return JSONResponse({"error": {"message": "no request for a completion", "code": 400}}, 400)
        command = (body.get("kv_transfer_params") or {}).get("chunkweave") or {}
        if (forget := command.get("forget")) is not None:
            await asyncio.sleep(self.slow_s)
            return self._forget(body, forget, request.headers.get("x-data-parallel-rank"))
        if (asked := command.get("stored")) is not None:
            return self._inventory(body, asked)
        self.seen.append(body)
        self.ranks.append(request.headers.get("x-data-parallel-rank"))
        if self.behave is not None and (reply := self.behave(body)) is not None:
            return reply
        if not body.get("stream"):
            return JSONResponse({"object": "text_completion", "choices": [{"index": 0, "text": "plain"}]})
        self._report(body, request.headers.get("x-request-id", ""))
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    def _forget(self, body: dict[str, Any], forget: dict[str, Any], rank: str | None) -> Response:
        whole: dict[str, Any] = {"object": "text_completion", "choices": [{"index": 0, "text": " w0"}]}
        if self.silent:
            return JSONResponse({"error": {"message": "the engine has ended", "code": 500}}, 500)
        self.removals.append({**body, "rank": rank})
        if not self.plugged:
            return JSONResponse(whole)
        salt = body.get("cache_salt", "")
        named = {(salt, tuple(ids)) for ids in forget.get("chunks", ())}
        if forget.get("first_passes"):
            gone = self.first_passes & named
        else:
            gone = set(self.stored) if forget.get("everything") else self.stored & named
            gone |= {one for one, contexts in self.means.items() if any(gone & {*context} for context in contexts)}
            self.stored -= gone
            self.means = {one: contexts for one, contexts in self.means.items() if one not in gone}
        self.first_passes -= gone
        report = {"removed": len(gone), "left": self.left, "unasked": [], "lasting": True}
        return JSONResponse({**whole, "kv_transfer_params": {"chunkweave": report}})

    def _inventory(self, body: dict[str, Any], asked: dict[str, Any]) -> Response:
        whole: dict[str, Any] = {"object": "text_completion", "choices": [{"index": 0, "text": " w0"}]}
        if self.silent:
            return JSONResponse({"error": {"message": "the engine has ended", "code": 500}}, 500)
        if not self.plugged:
            return JSONResponse(whole)
        chunks = [(body.get("cache_salt", ""), tuple(ids)) for ids in asked["chunks"]]
        means = [number for number, chunk in enumerate(chunks) if chunk in self.means]
        contexts = [number for number, chunk in enumerate(chunks) if chunk in self.means.keys() | self.first_passes]
        return JSONResponse({**whole, "kv_transfer_params": {"chunkweave": {"means": means, "contexts": contexts}}})

    def _report(self, body: dict[str, Any], request_id: str) -> None:
        params = (body.get("kv_transfer_params") or {}).get("chunkweave")
        if params is None:
            return
        salt, total = body.get("cache_salt", ""), len(body["prompt"])
        spans = params["chunks"]
        chunks = [(salt, tuple(body["prompt"][start:stop])) for start, stop in spans]
        found = [chunk for chunk in chunks if chunk in self.stored]
        contexts = {chunk: len(self.means[chunk]) for chunk in found if chunk in self.means}
        if (share := params.get("mean")) is not None:
            self._take(share, chunks)
        else:
            self.stored |= set(chunks)
            self.first_passes |= {chunks[-1]} if params.get("neutral") else set()
        choice = MethodChooser().choose(MethodRequest(params["method"]))
        found = [] if choice.method == "full" else found
        local = 0 if found or choice.method == "full" else self.cached
        reused = sum(len(ids) for _, ids in found)
        places = [span for chunk, span in zip(chunks, spans, strict=True) if chunk in found]
        again = math.ceil(choice.parameters.get("recompute_ratio", choice.parameters.get("alpha", 0.0) / 4) * reused)
        positions = [position for start, stop in places for position in range(start, stop)]
        computed = sorted(set(range(local, total)).difference(positions))
        scored = {"cfo": 0.25, "generation": 1} if "alpha" in choice.parameters else {}
        report = PrefillReport(
            {
                KVSource.EXACT: [Span(0, local)],
                KVSource.REUSED: [Span(*span) for span in places],
                KVSource.COMPUTED: spans_of(computed),
            },
            positions[:again],
            again,
            0.2 if found else 0.0,
            choice.parameters,
            choice.parameters.get("check_layers", []) if found else [],
            3 if found and choice.parameters.get("focus") else None,
            {"host": reused} if found else {"vllm": local - params["start_tokens"]} if local else {},
            local,
            {
                span[0]: PartReport(reasons=scored, contexts=contexts.get(chunk, 0))
                for chunk, span in zip(chunks, spans, strict=True)
                if chunk in found
            },
        )
        fields = {
            "method": choice.method,
            "effective_method": choice.method if found else "prefix" if local else "full",
            **report.as_dict(),
        }
        self._sender.send(f"cmpl-{request_id}-0-ab12cd34", {"chunkweave": fields})

    def _take(self, share: dict[str, Any], chunks: list[Key]) -> None:
        *before, last = chunks
        if last in self.means and not share.get("anew"):
            return
        contexts = self._pending.setdefault(share["group"], set())
        contexts.add(tuple(before))
        if len(contexts) == share["of"]:
            self.means[last] = self._pending.pop(share["group"])
            self.stored.add(last)

    async def _events(self, body: dict[str, Any]) -> Any:
        ended = False
        try:
            await asyncio.to_thread(self.gate.wait, 30)
            count = min(body["max_tokens"], 12)
            for number in range(count):
                if self.break_after is not None and number >= self.break_after:
                    raise ConnectionError("broken on purpose")
                last = number == count - 1
                for index in range(body.get("n", 1)):
                    yield _event(body, index, number, last=last)
                await asyncio.sleep(0.002)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count, "total_tokens": 0}
            yield _data({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": self.cached}}})
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.aborted += not ended


def _event(body: dict[str, Any], index: int, number: int, *, last: bool) -> bytes:
    ends = "stop" if body.get("min_p") == 0 else "length"
    choice: dict[str, Any] = {"index": index, "text": f" w{number}", "finish_reason": ends if last else None}
    choice["token_ids"] = [600 + number]
    if body.get("logprobs") is not None:
        top = {f" w{number}": -3.5, " x": -0.1, " y": -2.5}
        choice["logprobs"] = {
            "tokens": [f" w{number}"],
            "token_logprobs": [-3.5],
            "top_logprobs": [top],
            "text_offset": [0],
        }
    return _data({"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]})


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def _numbers() -> Any:
    for number in range(3):
        yield f"data: {number}\n\n".encode()
        await asyncio.sleep(0.01)
