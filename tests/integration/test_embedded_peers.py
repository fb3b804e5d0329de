"""benchmarks/embedded_peers.py: what is asked of whom, what servers' answers mean, what the rows and bars say."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from random import Random

import httpx
import pytest

from chunkweave.errors import ChunkweaveError
from chunkweave.models.gguf import BUNDLED_READER, checkpoint_folder
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import embedded_contenders as contenders  # noqa: E402
import embedded_peers as peers  # noqa: E402
from peers_workload import Asked  # noqa: E402
from sustained_engines import FirstToken  # noqa: E402

from chunkweave.types import Chunk  # noqa: E402


def prompt_of(*documents: tuple[int, ...]) -> Prompt:
    chunks = [PromptPart(PartKind.CHUNK, ids, chunk_id("peers", "", ids)) for ids in documents]
    return Prompt((*chunks, PromptPart(PartKind.QUESTION, (5, 6, 7))))


def answered(ttft_s: float, token: int = 3, tokens: int = 1, decode_s: float = 0.0) -> contenders.Answered:
    return contenders.Answered(FirstToken(ttft_s, 0, {token: -0.1, token + 1: -3.0}), tokens, decode_s)


def measured(name: str, ttft_s: float, decode_s: float, token: int = 3) -> peers.Measured:
    one = peers.Measured(name, peak_rss_bytes=1 << 30)
    for workload in peers.WORKLOADS:
        decoded = workload in (peers.REPEATED, peers.REORDERED)
        one.answers[workload] = [
            answered(ttft_s * scale, token, 5 if decoded else 1, decode_s if decoded else 0.0) for scale in (1, 2)
        ]
    return one


def settings(tmp_path: Path, **changes: object) -> contenders.Settings:
    folder = checkpoint_folder(BUNDLED_READER)
    given = {"folder": folder, "dtype": "float32", "threads": 1, "max_tokens": 512, "kept_bytes": 1 << 24}
    given |= {"llama_server": tmp_path / "llama-server", "gguf": tmp_path / "w.gguf", "python": "python"}
    return contenders.Settings(**{**given, "port": 8199, "log": tmp_path / "log", **changes})


def test_rows_hold_contenders_against_each_other_prompt_by_prompt():
    found = {
        "transformers": measured("transformers", 4.0, 1.0),
        "llama.cpp": measured("llama.cpp", 5.0, 0.25),
        "own:query@0.15": measured("own:query@0.15", 1.0, 0.5, token=4),
        "vllm": peers.Measured("vllm", why="OSError: no such program"),
    }
    rows = {row["contender"]: row for row in peers.rows_of(found, [100, 200])}
    own = rows["own:query@0.15"]
    assert own["prefill_tokens_per_s"] == 100.0
    assert own["decode_tokens_per_s"] == 8.0
    assert own["sooner_than"]["llama.cpp"]["reordered"] == 5.0
    assert "vllm" not in own["sooner_than"]
    assert own["top_1"] == 0.0
    assert own["kl"] > 1
    assert rows["transformers"]["kl"] == 0.0
    assert rows["vllm"] == {"contender": "vllm", "why": "OSError: no such program"}
    bars = {(bar["contender"], bar["figure"], bar["other"]): bar for bar in peers.bars_of(list(rows.values()))}
    assert bars["own:query@0.15", "reordered", "llama.cpp"] | {"value": 5.0, "met": True} in bars.values()
    assert bars["own:full+native", "decode", "llama.cpp"]["met"] is None
    found = {"transformers": found["transformers"], "own:full": measured("own:full", 3.2, 0.25)}
    found["own:full"].answers["cold"][0] = answered(100.0)
    full = {bar["other"]: bar for bar in peers.bars_of(peers.rows_of(found, [100, 200])) if bar["figure"] == "every"}
    assert full["transformers"]["value"] == 1.25, "one slow prompt of eight changes nothing"
    assert full["transformers"]["met"] is False
    assert own["answer_p50_s"] == 2.0
    assert own["sooner_than"]["llama.cpp"]["answer"] == pytest.approx((5.25 / 1.5 + 10.25 / 2.5) / 2)
    shown = peers.tables({"command": "python benchmarks/embedded_peers.py", "rows": list(rows.values()), "bars": []})
    assert "- `vllm`: not measured; OSError: no such program" in shown["embedded-peers"]
    json.dumps(list(rows.values()))


def test_novel_prompts_have_a_third_of_new_passages():
    class Passages:
        left = 0

        def take(self, count):
            self.left += count
            return Namespace(chunks=[Chunk(f"new {self.left - place}") for place in range(count)])

    known = [Asked(f"q{n}", tuple(Chunk(f"old {n} {place}") for place in range(6))) for n in range(2)]
    for asked in peers.novel(known, Passages(), 5, Random(0)):
        assert len({chunk.text for chunk in asked.chunks}) == 6
        assert sum(chunk.text.startswith("new") for chunk in asked.chunks) == 2


class Broken:
    """Answers once, then fails."""

    def __init__(self) -> None:
        self.answers = 0

    def answer(self, prompt, new_tokens):
        self.answers += 1
        if self.answers > 1:
            raise ChunkweaveError("it gave up in /somewhere/of/mine/log")
        return answered(1.0)


def test_who_fails_is_left_out_from_there_on():
    broken, found = Broken(), {"a": peers.Measured("a")}
    steps = []
    peers.measure({"a": broken}, found, [prompt_of((1,))] * 4, "cold", 1, lambda: steps.append(1))
    assert (broken.answers, len(steps)) == (2, 4)
    assert found["a"].why == "ChunkweaveError: it gave up in log"


def test_a_reason_names_no_folder_of_this_machine():
    try:
        Path("/nowhere/at/all/llama-server").read_text()
    except OSError as error:
        said = peers.reason_of(error)
    assert said == "FileNotFoundError: [Errno 2] No such file or directory: 'llama-server'"


def stream_of(*events: dict[str, object]) -> httpx.Client:
    asked: list[dict[str, object]] = []
    lines = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, text=lines)

    client = httpx.Client(base_url="http://peer", transport=httpx.MockTransport(answer))
    client.asked = asked
    return client


def test_what_llama_cpp_answers_is_read():
    probabilities = [{"id": 9, "logprob": -0.5, "top_logprobs": [{"id": 9, "logprob": -0.5}, {"id": 2, "logprob": -2}]}]
    end = {"stop": True, "tokens_evaluated": 5, "timings": {"prompt_n": 3, "prompt_ms": 250.0}}
    client = stream_of({"stop": False, "tokens": [9], "completion_probabilities": probabilities}, end)
    found = contenders.LlamaServer(client, 0).answer(prompt_of((1, 2)), 1)
    assert (found.tokens, found.server_s, found.first.stored_tokens) == (1, 0.25, 2)
    assert found.first.likeliest == {9: -0.5, 2: -2.0}
    assert found.first.ttft_s > 0
    assert client.asked[0]["prompt"] == [1, 2, 5, 6, 7]
    assert client.asked[0]["cache_prompt"] is True
    with pytest.raises(ChunkweaveError, match="a prompt of 4 tokens became one of 5"):
        contenders.LlamaServer(client, 0).answer(prompt_of((1,)), 1)


def test_what_vllm_answers_is_read():
    logprobs = {"top_logprobs": [{"token_id:9": -0.5, "token_id:2": -2.0}]}
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    client = stream_of({"choices": [{"text": " a", "logprobs": logprobs}]}, {"choices": [], "usage": usage})
    found = contenders.VllmServer(client, 0).answer(prompt_of((1, 2)), 1)
    assert (found.tokens, found.first.stored_tokens, found.first.likeliest) == (1, 2, {9: -0.5, 2: -2.0})
    with pytest.raises(ChunkweaveError, match="the engine died"):
        contenders.VllmServer(stream_of({"error": "the engine died"}), 0).answer(prompt_of((1, 2)), 1)


def test_engines_agree_on_a_prompt(tmp_path):
    prompt, given = prompt_of(tuple(range(20, 60)), tuple(range(70, 110))), settings(tmp_path)
    found = {}
    with contenders.opened("own:query@0.15", given, 0) as child:
        engines = {"a": contenders.Transformers(given), "b": contenders.OwnEngine("full", given), "c": child}
        for name, one in engines.items():
            found[name] = [one.answer(prompt, 1), one.answer(prompt, 4)]
        assert child.peak_rss_bytes() > 1 << 26
    theirs = found["a"][0].first
    for first, second in found.values():
        assert first.first.differs(theirs) < 1e-3
        assert first.first.token == theirs.token
        assert (first.tokens, second.tokens) == (1, 4)
        assert second.decode_s > 0
    stored = [one.first.stored_tokens for one in found["c"]]
    assert stored[0] == 0 < stored[1], "what was asked before is in its store"
    assert [one.first.stored_tokens for one in found["b"]] == [0, 0]


def test_our_engine_answers_several_at_once_and_with_drafts(tmp_path):
    """The tokens of an answer are the same with draft tokens, and as many."""
    given = settings(tmp_path)
    prompts = [prompt_of(tuple(range(start, start + 40)) * 2) for start in (20, 70)]
    plain, drafted = (contenders.OwnEngine(spec, given) for spec in ("full", "full+drafts"))
    said: dict[str, list[int]] = {}
    for name, engine in (("plain", plain), ("drafted", drafted)):
        step, said[name] = engine._step, []

        def noting(*args, step=step, tokens=said[name]):
            rows = step(*args)
            tokens += rows.argmax(-1).tolist()
            return rows

        engine._step = noting
        assert engine.answer(prompts[0], 24).tokens == 24
    assert said["plain"] == said["drafted"]
    assert len(said["plain"]) == 23
    assert plain.together(prompts, 4) > 0
    with pytest.raises(ChunkweaveError, match="no variant 'fast'"):
        contenders.OwnEngine("full+fast", given)


def test_who_cannot_be_had_says_why(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="llama-server"),
        contenders.opened("llama.cpp", settings(tmp_path), 0),
    ):
        pass
    with (
        pytest.raises(ChunkweaveError, match="nowhere"),
        contenders.opened("own:full", settings(tmp_path, folder=tmp_path / "nowhere"), 0),
    ):
        pass
