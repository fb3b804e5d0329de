"""benchmarks/peers.py: what is asked, how answers are compared, and that a run goes on where it was stopped."""

import asyncio
import json
import sys
from pathlib import Path
from random import Random

import httpx
import pytest

from chunkweave.calibration.questions import Example
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from chunkweave.types import Chunk
from tests.unit.chunking_tokenizers import bundled

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import peers  # noqa: E402
import peers_workload as workload  # noqa: E402

SIZES = workload.Sizes(chunks=4, requests=6, distinct=3, turns=2)


class Words:
    """A token is a word."""

    def encode(self, text: str) -> list[str]:
        return text.split()

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def text_of(number: int, words: int = 8) -> str:
    return " ".join(f"w{number}.{place}" for place in range(words))


def corpus(examples: int = 100, words: int = 8) -> workload.Corpus:
    """Each question has five passages of its own."""
    asked = [
        Example(f"question {n}", tuple(Chunk(text_of(5 * n + i, words)) for i in range(5)), (f"answer {n}",))
        for n in range(examples)
    ]
    return workload.Corpus(asked, Words(), 8)


def phases(*workloads: str, clients: tuple[int, ...] = (1, 3)) -> list[workload.Phase]:
    return workload.phases_of(workloads, corpus(), SIZES, clients, seed=0)


def texts(phase: workload.Phase) -> list[list[str]]:
    return [[chunk.text for chunk in asked.chunks] for session in phase.sessions for asked in session]


def test_passages_are_cut_or_joined_and_a_question_gets_its_own_first():
    asked = Example("q", tuple(Chunk(text_of(n, 10)) for n in range(3)), ())
    whole = workload.Corpus([asked], Words(), 8).take(3)
    assert [chunk.text for chunk in whole.chunks] == [text_of(n, 8) for n in range(3)]
    joined = workload.Corpus([asked], Words(), 15).take(1)
    assert joined.chunks[0].text == " ".join([*text_of(0, 10).split(), *text_of(1, 10).split()[:5]])
    full = corpus()
    assert [chunk.text for chunk in full.take(2).chunks] == [text_of(0), text_of(1)]
    assert [chunk.text for chunk in full.take(6).chunks] == [*map(text_of, (5, 6, 7, 8, 9, 2))]
    with pytest.raises(UsageError, match="too few passages"):
        corpus(1).take(6)


def test_no_passage_of_cold_requests_comes_again():
    found = phases("cold")
    assert [(phase.workload, phase.clients, phase.requests) for phase in found] == [
        ("", 1, 2),
        ("cold", 1, 6),
        ("cold", 3, 6),
    ]
    asked = [text for phase in found for prompt in texts(phase) for text in prompt]
    assert len(asked) == len(set(asked)) == 14 * 4


def test_warm_requests_were_all_answered_before():
    _, fill, *measured = phases("warm")
    assert fill.workload == ""
    assert fill.requests == 3
    for phase in measured:
        assert texts(phase) == texts(fill) * 2


def test_shuffled_requests_have_known_passages_in_new_company():
    _, fill, *measured = phases("shuffled")
    known = {text: number for number, prompt in enumerate(texts(fill)) for text in prompt}
    for prompt in (prompt for phase in measured for prompt in texts(phase)):
        assert len(set(prompt)) == 4
        assert prompt not in texts(fill)
        assert len({known[text] for text in prompt}) > 1
    assert texts(measured[0]) != texts(measured[1])
    (one,) = workload.shuffled([session[0] for session in fill.sessions], 1, Random(0))
    assert sum(text.text in texts(fill)[int(one.question.split()[1])] for text in one.chunks) >= 2


def test_a_turn_begins_with_the_turn_before_and_what_was_said():
    _, one, three = phases("conversations")
    assert (len(one.sessions), len(three.sessions)) == (3, 3)
    for first, second in one.sessions:
        assert second.chunks[:2] == first.chunks
        said = second.chunks[2].text
        assert said == f"Question: {first.question}\nAnswer: {first.question.replace('question', 'answer')}"
        assert len(second.chunks) == 5
        assert not second.free
    assert len(phases("conversations", clients=(5,))[-1].sessions) == 5, "there is one for each client"


def test_orders_are_taken_over_where_they_are_free():
    given = phases("cold", "conversations", clients=(1,))
    seen = []

    def backwards(lists):
        seen.extend(lists)
        return [one[::-1] for one in lists], [0.25] * len(lists)

    warm_up, cold, conversations = workload.reordered(given, backwards)
    assert len(seen) == warm_up.requests + cold.requests
    assert texts(cold) == [prompt[::-1] for prompt in texts(given[1])]
    assert cold.sessions[0][0].order_s == 0.25
    assert conversations == given[2]
    with pytest.raises(UsageError, match="other chunks"):
        workload.reordered(given, lambda lists: ([[0, 0, 0, 0]] * len(lists), [0.0] * len(lists)))


def test_answers_agree_up_to_the_first_difference():
    full = [[1, 2, 3, 4], [1, 2], [5], [], [7, 8]]
    assert peers.agreement(full, full) == {"first_token_agreement": 1.0, "answer_agreement": 1.0}
    own = [[1, 2, 9, 4], [1, 2, 3, 4], [6], [], []]
    assert peers.agreement(own, full) == {"first_token_agreement": 0.6, "answer_agreement": (0.5 + 0.5 + 0 + 1 + 0) / 5}


def row_of(contender: str, *answers: str) -> dict[str, object]:
    times = {"ttft_mean_s": 1.0, "ttft_p50_s": 1.0, "ttft_p99_s": 2.0, "requests_per_s": 0.5, "reused_share": 0.25}
    runs = [{"workload": "cold", "clients": 1, **times, "answers": list(answers)}, {"workload": "cold", **times}]
    return {"contender": contender, "peak_rss_bytes": 2**30, "runs": runs}


def test_fidelity_is_held_against_full_prefill_by_the_same_engine():
    rows = [
        row_of("full", "a b"),
        row_of("plugin:prefix", "a b"),
        row_of("own:full", "a c"),
        row_of("own:prefix", "a b"),
    ]
    found = {row["contender"]: row["runs"][0]["answer_agreement"] for row in peers.with_fidelity(rows, str.split)}
    assert found == {"full": 1.0, "plugin:prefix": 1.0, "own:full": 1.0, "own:prefix": 0.5}
    why = {"contender": "full", "why": "it failed"}
    alone, said = peers.with_fidelity([row_of("plugin:prefix", "a"), why], str.split)
    assert "answer_agreement" not in alone["runs"][0], "there is nothing to hold it against"
    assert said == why


def test_a_table_has_who_was_measured_and_says_why_others_were_not():
    rows = [row_of("full", "a"), row_of("own:prefix", "a"), {"contender": "lmcache", "why": "No module"}]
    config = {"clients": [1, 16], "workloads": ["cold"]}
    result = {"command": "python benchmarks/peers.py", "config": config, "rows": peers.with_fidelity(rows, str.split)}
    lines = peers.tables(result)["peers"].splitlines()
    assert lines[-1] == "- `lmcache`: not measured; No module"
    full, own = (line for line in lines if line.startswith(("| `full`", "| `own")))
    assert [cell.strip() for cell in full.split("|")[2:-1]] == [
        "1.00 s", "2.00 s", "1.00 s", "2.00 s", "0.50", "0.50", "25.0%", "100.0%", "100.0%", "1.0 GiB"
    ]  # fmt: skip
    assert [cell.strip() for cell in own.split("|")[8:10]] == ["25.0%", ""]
    (heads,) = (line for line in lines if "contender" in line)
    assert heads.count("|") == full.count("|")


def test_a_run_goes_on_with_what_was_measured_under_the_same_settings(tmp_path):
    path = tmp_path / "peers.json"
    assert peers.finished_rows(path, {"seed": 0}) == []
    rows = [row_of("full"), {"contender": "lmcache", "why": "No module"}]
    path.write_text(json.dumps({"config": {"seed": 0, "clients": [1, 4]}, "rows": rows}), encoding="utf-8")
    assert peers.finished_rows(path, {"seed": 0, "clients": (1, 4)}) == rows[:1], "what failed is tried again"
    with pytest.raises(UsageError, match=r"other settings \(chunks, seed\)"):
        peers.finished_rows(path, {"seed": 1, "clients": (1, 4), "chunks": 6})


def test_a_contender_is_an_engine_and_a_method():
    assert peers.Contender("plugin:query@0.05").reuse == {"method": "query", "recompute_ratio": 0.05}
    assert peers.Contender("own:cachecraft@2").reuse == {"method": "cachecraft", "alpha": 2.0}
    assert peers.Contender("plugin:prefix").reuse == {"method": "prefix"}
    for wrong in ("vllm", "own:none", "plugin:query@much", "plugin:prefix@0.1"):
        with pytest.raises(ChunkweaveError):
            peers.Contender(wrong)


def test_a_missing_package_is_said_in_one_line():
    assert peers.import_error(sys.executable, "json") is None
    assert peers.import_error(sys.executable, "no_such_package") == (
        "ModuleNotFoundError: No module named 'no_such_package'"
    )


class Server:
    """Answers a token to each request, and notes what was asked."""

    def __init__(self, more_tokens: int = 0) -> None:
        self.bodies: list[dict[str, object]] = []
        self.builder = PromptBuilder(bundled(), template_for(bundled()), "test")
        self.more_tokens = more_tokens

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        documents = body.get("documents")
        tokens = len(body["prompt"] if documents is None else self.builder.build(body["prompt"], documents))
        usage = {"prompt_tokens": tokens + self.more_tokens, "prompt_tokens_details": {"cached_tokens": tokens // 2}}
        sent = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in sent]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))

    def run(self, contender: str, phase: workload.Phase) -> list[peers.Answered]:
        async def measured() -> list[peers.Answered]:
            async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(self)) as http:
                clients = peers.Clients(peers.Contender(contender), http, None, self.builder, 4)
                return (await clients.run(phase, lambda: None))[0]

        return asyncio.run(measured())


def test_what_lmcache_says_when_it_gives_up_is_why_it_is_not_measured():
    gone = "System will operate in degraded mode (recompute).\nready"
    log = f"INFO: started\n  RuntimeError: no connector for this\n. {gone}"
    assert peers.given_up(log) == "RuntimeError: no connector for this"
    assert peers.given_up("INFO: started\nRuntimeError: of a request\n") is None


def test_vllm_gets_the_ids_that_our_own_server_makes_of_the_texts():
    phase = phases("conversations", clients=(2,))[-1]
    vllm, own = Server(), Server()
    answers = vllm.run("full", phase), own.run("own:prefix", phase)
    assert [one.prompt_tokens for one in answers[0]] == [one.prompt_tokens for one in answers[1]]
    assert {one.text for one in answers[0]} == {"ab"}
    assert answers[0][0].reused_tokens == answers[0][0].prompt_tokens // 2
    for body, other in zip(vllm.bodies, own.bodies, strict=True):
        assert tuple(body["prompt"]) == own.builder.build(other["prompt"], other["documents"]).token_ids
        assert other["chunkweave"] == {"method": "prefix"}
    with pytest.raises(ChunkweaveError, match="became one of"):
        Server(more_tokens=1).run("full", phase)


def test_a_turn_is_asked_after_the_answer_to_the_one_before():
    phase = phases("conversations", clients=(2,))[-1]
    server = Server()
    answers = server.run("full", phase)
    lengths = [len(body["prompt"]) for body in server.bodies]
    assert [one.prompt_tokens for one in answers] != lengths, "two clients ask at the same time"
    asked = [server.builder.build(one.question, one.chunks) for session in phase.sessions for one in session]
    assert [one.prompt_tokens for one in answers] == [len(prompt) for prompt in asked]


def test_the_plug_in_is_told_where_chunks_are():
    (asked,) = phases("cold")[1].sessions[0]
    builder = Server().builder
    prompt = builder.build(asked.question, asked.chunks)
    params = peers.Contender("plugin:epic@0.05").body(asked, prompt, 4)["kv_transfer_params"]["chunkweave"]
    found = [prompt.token_ids[start:stop] for start, stop in params["chunks"]]
    assert found == [builder.chunk_part(chunk).token_ids for chunk in asked.chunks]
    assert (params["method"], params["recompute_ratio"]) == ("epic", 0.05)
    assert params["start_tokens"] == len(bundled().start_ids)
