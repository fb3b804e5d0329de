"""The load generator against servers whose times are known, and its arithmetic against sums by hand."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import httpx
import pytest

from chunkweave.errors import ChunkweaveError, DocumentError, UsageError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from docs_figures import evaluate  # noqa: E402
from load_generator import LoadedRequest, LoadResult, Usage, run_load  # noqa: E402
from server_load import (  # noqa: E402
    Target,
    contenders_of,
    finished_rows,
    label_of,
    measure,
    run_table,
    summary_heads,
    summary_table,
    tables,
    with_ratios,
    workload_of,
    write_result,
)
from server_load_client import FAILURES, Asker, RefusedError, server_counts, upload  # noqa: E402
from server_load_workload import (  # noqa: E402
    Choice,
    CorpusWorkload,
    RecurringWorkload,
    Way,
    Workload,
    arrival_times,
    choices,
    read_arrivals,
)
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


def options(**given):
    """What the command line gives, as far as these tests need it."""
    usual = {
        "way": [],
        "methods": ["full"],
        "orders": ["fixed"],
        "top_k": [],
        "rates": [],
        "rate_shares": [0.5, 1.0, 2.0],
    }
    load = {"arrivals": None, "requests": 24, "trial_requests": None, "trials": 4, "warm": 1, "unloaded": 2}
    asked = {"dataset": None, "chunks": 6, "zipf": 1.0, "worlds": 0, "passages": 1, "new_tokens": 16, "seed": 0}
    more = {"recurring": None, "questions": None, "search": None, "out": None}
    return argparse.Namespace(**{**usual, **load, **asked, **more, **given})


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


@pytest.mark.timed
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
@pytest.mark.timed
def test_a_contender_finds_where_a_server_no_longer_keeps_up(capsys):
    """One prefill at a time: twenty requests a second at most, and a little more until the mean wait is five times."""
    arguments = options(chunks=1, new_tokens=1, warm=1, unloaded=2, requests=24, trials=4)

    async def main():
        async with fake_server(one_at_a_time()) as client:
            target = Target(str(client.base_url), PATH, "", 30.0, None, 0)
            return await measure(arguments, target, Choice("prefix", "fixed"), None)

    row = asyncio.run(main())
    limit = 1 / PREFILL_S
    assert 0.3 * limit < row["sustainable_rate_per_s"] < 1.1 * limit
    assert row["unsustained_rate_per_s"] > row["sustainable_rate_per_s"]
    rates = [run["rate_per_s"] for run in row["runs"]]
    assert rates == [share * rates[1] for share in (0.5, 1.0, 2.0)]
    assert rates[1] in [trial["rate_per_s"] for trial in row["trials"]]
    means = [run["ttft_mean_s"] for run in row["runs"]]
    assert means[0] < means[2]
    assert all(run["error_rate"] == 0 for run in row["runs"])


def test_only_the_first_contender_looks_for_its_rate_where_that_is_enough():
    async def main():
        async with fake_server(one_at_a_time()) as client:
            target = Target(str(client.base_url), PATH, "", 10.0, None, 0)
            wanted = options(search="first", requests=4, trials=1)
            first, other = Way("full", ""), Way("prefix", "")
            row = await measure(wanted, target, first, None)
            return row, await measure(wanted, target, other, row)

    rows = with_ratios([{**row, "computed_tokens_mean": 10.0} for row in asyncio.run(main())])
    assert [bool(row["trials"]) for row in rows] == [True, False]
    assert rows[1]["over_full"] is None
    cells = tables({"rows": rows})["server-load-ways"].splitlines()[-1].split(" | ")
    assert cells[2:5] == ["", "", "1.00x"]
    assert [run["rate_per_s"] for run in rows[1]["runs"]] == [run["rate_per_s"] for run in rows[0]["runs"]]


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
    assert [label_of(choice.keys) for choice in found] == labels
    assert [choice.field for choice in found[:2]] == [None, {"method": "full", "order": "fixed"}]
    assert found[3].command("serve --method {method} --order {order}") == "serve --method prefix --order free"


def test_ratios_are_over_full_and_prefix():
    run = {"rate_per_s": 2.0, **LoadResult((LoadedRequest(0.0, 0.1, 0.4, 4),), 0.4).as_dict()}
    rows = [
        {
            "method": method,
            "order": order,
            "sustainable_rate_per_s": rate,
            "unsustained_rate_per_s": 1.25 * rate,
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
    assert ratios == [
        ([1.0, 1.0], [0.4, 0.625], [0.32, 0.5]),
        ([1.6, 2.5], [1.0, 1.0], [0.64, 1.0]),
        ([2.0, 3.125], [1.0, 1.5625], [1.0, 1.0]),
        ([4.0, 6.25], [2.0, 3.125], [1.6, 2.5]),
    ]
    assert with_ratios(rows[1:])[0]["over_full"] is None
    unbounded = [rows[0], {**rows[3], "unsustained_rate_per_s": None}]
    assert with_ratios(unbounded)[1]["over_full"] == [4.0, None]
    assert summary_table(with_ratios(unbounded))[1][2:4] == ["at least 10", "at least 4.00x"]
    assert with_ratios(unbounded[::-1])[1]["over_prefix"] is None
    assert len(run_table(rows)) == 8
    heads = ["method", "unloaded TTFT", "sustainable rate/s", "over full", "over prefix", "over prefix, free"]
    assert summary_heads(finished) == heads
    assert summary_table(finished)[3] == [
        *("query, free", "100 ms", "10 to 12.5"),
        *("4.00x to 6.25x", "2.00x to 3.12x", "1.60x to 2.50x"),
    ]
    before = {key: finished[0][key] for key in finished[0].keys() - {"order", "over_prefix_free"}}  # as in older files
    assert summary_heads([before]) == heads[:-1]
    assert summary_table([before]) == [["full", "100 ms", "2 to 2.5", "1.00x", "0.40x to 0.62x"]]
    assert run_table([before])[0][0] == "full"


QUESTIONS = [
    {"question": f"Question {n}?", "answers": ["a"], "chunks": [f"Passage {n}.", f"Passage {n + 1}."]}
    for n in range(30)
]


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in QUESTIONS))
    return path


def test_questions_of_a_data_set_go_to_a_corpus_and_popular_ones_come_back(dataset):
    workload = CorpusWorkload(dataset, zipf=1.2)
    assert sorted(workload.passages()) == sorted(f"Passage {n}." for n in range(31))
    full, named = (list(islice(workload.bodies(one), 200)) for one in ({"top_k": 3}, None))
    assert all(body["chunkweave"] == {"corpus": "load", "top_k": 3} for body in full)
    assert all(body["chunkweave"] == {"corpus": "load"} and "documents" not in body for body in named)
    assert [body["messages"] for body in full] == [body["messages"] for body in named]
    counts = sorted(Counter(body["messages"][0]["content"] for body in full).values())
    assert counts[-1] > 40 > 5 * counts[0]
    settings = workload.settings()
    assert (settings["dataset"], settings["questions"], settings["passages"]) == ("questions.jsonl", 30, 31)


def test_recurring_questions_bring_mostly_the_same_passages_now_and_then_in_another_order(dataset):
    few = [[body["documents"] for body in islice(RecurringWorkload(None, 3, worlds=4).bodies(None), 3)]]
    assert all(len(found) == 3 for found in few[0])
    workload = workload_of(options(recurring=True, dataset=dataset, zipf=1.2), top_k=2)
    asked = list(islice(workload.bodies({"top_k": 2, "method": "prefix"}), 200))
    assert all(body["chunkweave"] == {"method": "prefix"} for body in asked)
    assert "chunkweave" not in next(workload.bodies({"top_k": 2})), "nobody retrieves"
    found = {}
    for body in asked:
        texts = [one["text"] for one in body["documents"]]
        found.setdefault(body["messages"][0]["content"], Counter())[tuple(texts)] += 1
    most = max(found.values(), key=Counter.total)
    assert most.total() > 40
    assert len(most) == 2, "both orders of the two passages"
    settings = workload.settings()
    assert (settings["dataset"], settings["recurring"]) == ("questions.jsonl", True)
    assert "chunks" not in settings, "it is each contender's own"


def test_what_the_server_counts_is_kept_with_a_run():
    async def answer(body, send):
        await send(OK)
        await send({"choices": [{"delta": {"content": "x"}}]})
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": body["cached"]},
        }
        await send({"choices": [], "usage": usage})

    async def main():
        async with fake_server(answer) as client:
            bodies = [{"cached": 20}, {"cached": 60}]
            turns = await Asker(client, PATH, bodies).in_turn()
            return turns, await Asker(client, PATH, bodies).at_times([0.0, 0.1], 10.0)

    for result in asyncio.run(main()):
        assert result.usages == (Usage(100, 20), Usage(100, 60))
        shown = result.as_dict()
        assert (shown["prompt_tokens_mean"], shown["computed_tokens_mean"]) == (100.0, 60.0)
        assert shown["reused_share"] == pytest.approx(0.4)
    assert "reused_share" not in LoadResult((LoadedRequest(0.0, 0.1, 0.4, 4),), 0.4).as_dict()


def test_passages_are_uploaded_and_what_the_server_counted_is_read():
    sent = []
    metrics = """# HELP chunkweave:store_evictions_total segments
chunkweave:store_evictions_total{model_name="reader",tier="host"} 12.0
chunkweave:store_evictions_total{model_name="reader",tier="disk"} 1.0
chunkweave:speculations_total{event="started",model_name="reader"} 5.0
chunkweave:store_inserts_total{model_name="reader",tier="host"} 90.0
"""

    def handle(request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        sent.append((request.url.path, json.loads(request.content)))
        return httpx.Response(403 if "refused" in request.url.path else 201)

    async def main():
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as client:
            await upload(client, "load", [f"text {n}" for n in range(70)])
            with pytest.raises(RefusedError, match="403"):
                await upload(client, "refused", ["text"])
            return await server_counts(client)

    assert asyncio.run(main()) == {"evictions": 13, "speculations_started": 5}
    assert sent[0] == ("/v1/corpora", {"name": "load"})
    documents = [one for path, body in sent[1:3] for one in body["documents"]]
    assert documents == [{"id": str(n), "text": f"text {n}"} for n in range(70)]


def test_a_way_is_flags_under_a_name():
    ways = ["full: --method full", "prefix LRU: --method prefix --policy lru", "usual:"]
    found = contenders_of(options(way=ways, top_k=[1, 3]))
    assert [one.keys for one in found[:2]] == [
        {"way": "full", "flags": "--method full", "top_k": 1},
        {"way": "prefix LRU", "flags": "--method prefix --policy lru", "top_k": 1},
    ]
    assert [one.top_k for one in found] == [1, 1, 1, 3, 3, 3]
    assert (found[3].field, Way.of(ways[0]).field) == ({"top_k": 3}, None)
    assert found[1].command("serve {way} --port 1") == "serve --method prefix --policy lru --port 1"
    assert contenders_of(options(methods=["full"], top_k=[2]))[0].field == {
        "method": "full",
        "order": "fixed",
        "top_k": 2,
    }
    for wrong in ("no flags", "a/b: --method full", "a, b: --method full", ": --method full"):
        with pytest.raises(UsageError, match="NAME: FLAGS"):
            Way.of(wrong)


def way_row(name, top_k, rate, computed):
    run = LoadResult((LoadedRequest(0.0, 0.1, 0.4, 4),), 0.4, (Usage(100, 100 - computed),)).as_dict()
    return {
        **Way(name, f"--flags-of {name}", top_k).keys,
        "reused_share": 1 - computed / 100,
        "computed_tokens_mean": computed,
        "sustainable_rate_per_s": rate,
        "unsustained_rate_per_s": 1.5 * rate,
        "unloaded": run,
        "runs": [{"rate_per_s": 1.0, **run}, {"rate_per_s": 2.0, **run}],
    }


def test_ways_are_compared_within_a_top_k_and_their_figures_have_names():
    rows = [way_row("full", 3, 2.0, 100), way_row("tree", 3, 3.0, 50), way_row("tree", 1, 9.0, 25)]
    rows = with_ratios(rows)
    found = [(row["over_full"], row["limit_over_full"]) for row in rows]
    assert found == [([1.0, 1.0], 1.0), ([1.0, 2.25], 2.0), (None, None)]
    made = tables({"rows": rows})
    assert list(made) == ["server-load-ways-1", "server-load-ways-3"]
    assert made["server-load-ways-3"].splitlines()[0].count("p99") == 2
    lines = made["server-load-ways-3"].splitlines()
    assert (
        lines[-1] == "| tree | 100 ms | 3 to 4.5 | 1.00x to 2.25x | 2.00x | 100 ms | 100 ms | 100 ms | 100 ms | 50% |"
    )
    result = {"served": {"rows": rows}}
    assert evaluate("served: rows/tree,top_k=1/sustainable_rate_per_s", result) == 9.0
    assert evaluate("served: rows/tree,top_k=3/runs/rate_per_s=2.0/ttft_p50_s", result) == 0.1


def test_a_file_goes_on_with_what_is_missing_under_the_same_settings_only(tmp_path, dataset):
    arguments = options(way=["full: --flags-of full"], top_k=[3], dataset=dataset, out=tmp_path / "out.json")
    assert finished_rows(arguments, contenders_of(arguments)) == []
    rows = with_ratios([way_row("full", 3, 2.0, 100)])
    write_result(arguments, rows, contenders_of(arguments))
    written = json.loads(arguments.out.read_text())
    assert written["complete"]
    assert str(tmp_path) not in json.dumps(written["config"])
    more = options(way=[*arguments.way, "tree: --flags"], top_k=[3, 1], dataset=dataset, out=arguments.out)
    assert finished_rows(more, contenders_of(more)) == rows
    write_result(more, rows, contenders_of(more))
    assert not json.loads(arguments.out.read_text())["complete"]
    for other in ({"requests": 5}, {"seed": 1}, {"zipf": 2.0}):
        changed = argparse.Namespace(**{**vars(arguments), **other})
        with pytest.raises(UsageError, match=rf"other settings \(.*{next(iter(other))}"):
            finished_rows(changed, contenders_of(changed))
    renamed = argparse.Namespace(**{**vars(arguments), "way": ["full: --other"]})
    with pytest.raises(UsageError, match="other flags"):
        finished_rows(renamed, contenders_of(renamed))
    methods = argparse.Namespace(**{**vars(arguments), "way": []})
    with pytest.raises(UsageError, match="methods and ways"):
        finished_rows(methods, contenders_of(methods))
    usual = argparse.Namespace(**{**vars(arguments), "top_k": []})
    write_result(usual, rows, contenders_of(usual))
    assert not json.loads(arguments.out.read_text())["complete"], "the server's own top-k is another than 3"


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
