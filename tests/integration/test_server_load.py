"""The load generator against servers whose times are known, and its arithmetic against sums by hand."""

import argparse
import asyncio
import json
import sys
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import pytest

from chunkweave.errors import ChunkweaveError, DocumentError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from load_generator import LoadedRequest, LoadResult, run_load  # noqa: E402
from server_load import (  # noqa: E402
    Choice,
    Target,
    choices,
    measure,
    run_table,
    summary_heads,
    summary_table,
    with_ratios,
)
from server_load_client import FAILURES, Asker  # noqa: E402
from server_load_workload import Workload, arrival_times, read_arrivals  # noqa: E402
from server_process import serving  # noqa: E402

PATH = "/v1/chat/completions"
PREFILL_S, TOKEN_S, TOKENS = 0.05, 0.01, 4


@asynccontextmanager
async def fake_server(answer):
    """A server on a free port; `answer(body, send)` sends what comes after the head."""

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")
        )
        body = json.loads(await reader.readexactly(length))

        async def send(data):
            writer.write(data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n")
            await writer.drain()

        try:
            await answer(body, send)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        yield client


OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def one_at_a_time():
    """A server that prefills one request after the other, and decodes beside."""
    prefilling = asyncio.Lock()

    async def answer(body, send):
        async with prefilling:
            await asyncio.sleep(PREFILL_S)
        await send(OK)
        await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for token in range(TOKENS):
            if token:
                await asyncio.sleep(TOKEN_S)
            await send({"choices": [{"delta": {"content": "x"}}]})
        await send({"choices": [], "usage": {"completion_tokens": TOKENS + 1}})
        await send(b"data: [DONE]\n\n")

    return answer


def test_times_are_those_of_the_server_and_nobody_waits_for_those_before():
    async def main():
        async with fake_server(one_at_a_time()) as client:
            alone = await Asker(client, PATH, [{}] * 2).in_turn()
            together = await run_load(Asker(client, PATH, [{}] * 4), [0.0] * 4, errors=FAILURES)
        return alone, together

    alone, together = asyncio.run(main())
    assert len(alone.answered) == 2
    for one in alone.answered:
        assert PREFILL_S < one.ttft_s < 10 * PREFILL_S
        assert one.tpot_s >= TOKEN_S * 0.5  # a first token that is read late shortens the rest
        assert one.tokens == TOKENS + 1, "the server counted one more than there were events"
    waits = sorted(one.ttft_s for one in together.answered)
    assert len(waits) == 4
    assert waits[-1] > 4 * PREFILL_S, "four arrived at once and were prefilled one after the other"
    assert together.duration_s < 4 * (PREFILL_S + TOKENS * TOKEN_S) + 1, "they decoded beside one another"


def test_every_body_is_sent_once_and_in_order():
    bodies = [{"number": number} for number in range(4)]
    came = []

    async def note(body, send):
        came.append(body)
        await one_at_a_time()(body, send)

    async def main():
        async with fake_server(note) as client:
            await Asker(client, PATH, bodies).in_turn()
            await run_load(Asker(client, PATH, bodies), [0.0, 0.02, 0.04, 0.06], errors=FAILURES)

    asyncio.run(main())
    assert came == bodies * 2


def test_failures_of_every_kind_are_errors_and_end_no_run():
    async def refuse(body, send):
        await send(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")

    async def break_off(body, send):
        await send(OK)
        await send({"choices": [{"delta": {"content": "x"}}]})
        await send({"error": {"type": "timeout_error", "message": "m"}})

    async def nonsense(body, send):
        await send(OK)
        await send(b"data: {nonsense\n\n")

    async def hang_up(body, send):
        return

    async def main(answer):
        async with fake_server(answer) as client:
            return await run_load(Asker(client, PATH, [{}] * 2), [0.0, 0.01], errors=FAILURES)

    found = [asyncio.run(main(answer)) for answer in (refuse, break_off, nonsense, hang_up)]
    assert all(result.error_rate == 1.0 for result in found)
    told = [result.requests[0].error for result in found]
    kinds = ["status 429", "timeout_error", "JSONDecodeError", "RemoteProtocolError"]
    assert all(kind in error for kind, error in zip(kinds, told, strict=True)), told


def test_an_answer_without_text_is_an_answer():
    async def nothing(body, send):
        await send(OK)
        await send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await send({"choices": [], "usage": {"completion_tokens": 0}})

    async def main():
        async with fake_server(nothing) as client:
            return await Asker(client, PATH, [{}]).in_turn()

    [request] = asyncio.run(main()).answered
    assert (request.tokens, request.error) == (1, None)


@pytest.mark.slow
def test_a_contender_finds_where_a_server_no_longer_keeps_up(capsys):
    """One prefill at a time: twenty requests a second at most, and a little more until the mean wait is five times."""
    arguments = argparse.Namespace(
        chunks=1, zipf=1.0, worlds=0, passages=1, new_tokens=1, seed=0, warm=1, unloaded=2, requests=24, trials=4
    )

    async def main():
        async with fake_server(one_at_a_time()) as client:
            target = Target(str(client.base_url), PATH, "", 30.0, None, 0)
            return await measure(arguments, target, Choice("prefix", "fixed"), rates)

    rates: list[float] = []
    row = asyncio.run(main())
    limit = 1 / PREFILL_S
    assert row["sustainable_rate_bounded"]
    assert 0.3 * limit < row["sustainable_rate_per_s"] < 2 * limit
    assert rates == [share * row["sustainable_rate_per_s"] for share in (0.5, 1.0, 2.0)]
    means = [run["ttft_mean_s"] for run in row["runs"]]
    assert means[0] < means[2]
    assert all(run["error_rate"] == 0 for run in row["runs"])


def test_methods_are_asked_the_same_and_popular_documents_come_back():
    workload = Workload(chunks=4, zipf=1.2, new_tokens=3, seed=5)
    reuse = (Choice("full", "fixed").field, Choice("cacheblend", "free").field)
    full, woven = (list(islice(workload.bodies(one), 60)) for one in reuse)
    assert [{**body, "chunkweave": None} for body in full] == [{**body, "chunkweave": None} for body in woven]
    assert all(body["chunkweave"] == {"method": "cacheblend", "order": "free"} for body in woven)
    assert "chunkweave" not in next(workload.bodies(None))
    counts: dict[str, int] = {}
    for body in full:
        texts = [document["text"] for document in body["documents"]]
        assert len(set(texts)) == 4
        for text in texts:
            counts[text] = counts.get(text, 0) + 1
    ranked = [chunk.text for chunk in workload.documents()]
    assert counts[ranked[0]] > 20 > 5 * counts.get(ranked[100], 0)
    assert len(Workload(passages=3).documents()) == -(-len(Workload().documents()) // 3)


def test_arrivals_have_the_rate_that_was_asked_for(tmp_path):
    times = arrival_times(2000, 5.0, None, 1)
    assert times == sorted(times)
    assert 1999 / (times[-1] - times[0]) == pytest.approx(5.0, rel=0.1)
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens\n2023-11-16 18:15:50.5000000,9\n2023-11-16 18:15:46.5000000,3\n"
        "2023-11-16 18:15:48.5000000,3\n2023-11-16 18:16:00.0000000,3\n"
    )
    trace = read_arrivals(file)
    assert trace == [0.0, 2.0, 4.0, 13.5]
    assert arrival_times(3, 4.0, trace, 1) == [0.0, 0.25, 0.5]
    with pytest.raises(DocumentError):
        arrival_times(5, 4.0, trace, 1)
    file.write_text("WHEN\nnow\n")
    with pytest.raises(DocumentError):
        read_arrivals(file)
    with pytest.raises(DocumentError):
        read_arrivals(tmp_path / "not-there.csv")


def test_each_method_is_measured_in_each_order_where_the_order_matters():
    found = choices(["none", "full", "prefix", "cacheblend"], ["fixed", "free"])
    labels = ["none", "full, fixed", "prefix, fixed", "prefix, free", "cacheblend, fixed", "cacheblend, free"]
    assert [choice.label for choice in found] == labels
    assert [choice.field for choice in found[:2]] == [None, {"method": "full", "order": "fixed"}]
    assert found[3].command("serve --method {method} --order {order}") == "serve --method prefix --order free"


def test_ratios_are_over_full_and_prefix():
    run = {"rate_per_s": 2.0, **LoadResult((LoadedRequest(0.0, 0.1, 0.4, 4),), 0.4).as_dict()}
    rows = [
        {
            "method": method,
            "order": order,
            "sustainable_rate_per_s": rate,
            "sustainable_rate_bounded": True,
            "unloaded": run,
            "runs": [run, run],
        }
        for method, order, rate in (
            ("full", "fixed", 2.0),
            ("prefix", "fixed", 4.0),
            ("prefix", "free", 5.0),
            ("query", "free", 10.0),
        )
    ]
    finished = with_ratios(rows)
    ratios = [(row["over_full"], row["over_prefix"], row["over_prefix_free"]) for row in finished]
    assert ratios == [(1.0, 0.5, 0.4), (2.0, 1.0, 0.8), (2.5, 1.25, 1.0), (5.0, 2.5, 2.0)]
    assert with_ratios(rows[1:])[0]["over_full"] is None
    assert len(run_table(rows)) == 8
    heads = ["method", "unloaded TTFT", "sustainable rate/s", "over full", "over prefix", "over prefix, free"]
    assert summary_heads(finished) == heads
    assert summary_table(finished)[3] == ["query, free", "100 ms", "10", "5.00x", "2.50x", "2.00x"]
    before = {key: finished[0][key] for key in finished[0].keys() - {"order", "over_prefix_free"}}  # as in older files
    assert summary_heads([before]) == heads[:-1]
    assert summary_table([before]) == [["full", "100 ms", "2", "1.00x", "0.50x"]]
    assert run_table([before])[0][0] == "full"


SLOW_START = """
import http.server, sys, time
time.sleep(0.3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_waited_for_and_stopped(tmp_path, free_port):
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(SLOW_START)
    url = f"http://127.0.0.1:{free_port}"
    with serving(f"{sys.executable} {script} {free_port}", url, ready_path="/ready", log=log):
        assert httpx.get(url + "/ready").status_code == 200
        with (
            pytest.raises(ChunkweaveError, match="already"),
            serving("true", url, ready_path="/ready", log=log),
        ):
            pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/ready")
    with (
        pytest.raises(ChunkweaveError, match="ended with 3"),
        serving(f"{sys.executable} -c 'exit(3)'", url, ready_path="/ready", log=log),
    ):
        pass


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
