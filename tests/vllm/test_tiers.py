"""Segments that outlive a vLLM process, and that several share: real processes, a real disk, a real server."""

from pathlib import Path

import pytest
import torch

from chunkweave import Chunk, Engine, StoreConfig
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.tiers.disk import DiskTier
from tests.integration.redis_server import Server
from tests.server.conftest import wait_until
from tests.vllm.answering import Process
from tests.vllm.checkpoints import add_tokenizer, make_checkpoint
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, Scenario, computed_alone, tokens
from tests.vllm.reference import Reference
from tests.vllm.serving import TWO_RANKS, Ask

TOLERANCE = 5e-4
TOKENS = 6
BLOCK_SIZE = 32


@pytest.fixture
def start(tmp_path, checkpoint):
    """Starts engines over the test's own folder; they are ended with the test."""
    started: list[Process] = []

    def begin(name: str, extra: dict | None = None, folder: Path | None = None, *, wait=True, **options) -> Process:
        extra = {"cache_dir": str(tmp_path / "kv")} if extra is None else extra
        options = {**SLICED, **options}
        process = Process(folder or checkpoint("llama"), tmp_path / f"{name}.log", extra=extra, **options)
        started.append(process)
        if wait:
            process.wait()
        return process

    yield begin
    for process in started:
        process.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def wait_for(number: int, folder: Path) -> None:
    wait_until(lambda: len(files(folder)) >= number, 20)


def precompute(process: Process, scenario: Scenario) -> None:
    for first in scenario.first_prompts:
        process.answer(first.ask("prefix"))


def right(got: dict, reference: Reference, scenario: Scenario, method: str = "cacheblend", ratio: float = 0.15) -> None:
    woven = reference.weave(scenario.pieces(reference), method, ratio)
    assert (torch.tensor(got["log_probs"]) - woven.log_probs).abs().max().item() <= TOLERANCE
    assert got["report"]["recomputed"] == woven.recomputed


def test_what_a_killed_process_stored_serves_the_next_one(start, tmp_path, reference):
    scenario = computed_alone()
    first = start("first")
    precompute(first, scenario)
    ask = scenario.prompt.ask("cacheblend", 0.15, TOKENS)
    before = first.answer(ask)[0]
    wait_for(4, tmp_path / "kv")
    first.kill()
    second = start("second")
    after = second.answer(ask)[0]
    right(after, reference, scenario)
    assert after["tokens"] == before["tokens"]
    assert before["report"]["local_tokens"] == BLOCK_SIZE, "the exact path was in the first one's own cache"
    assert after["report"]["hits"] == {"disk": sum(before["report"]["hits"].values())}
    places = ("local_tokens", "engine_cached_tokens", "hits", "kv_sources")
    computed = dict.fromkeys(places) | {"computed_tokens": 1 + len(scenario.prompt.question)}  # and BOS
    exact = {"prefix_exact_tokens": before["report"]["prefix_exact_tokens"] - 1}
    assert after["report"] | dict.fromkeys(places) == before["report"] | exact | computed
    assert second.call("chunkweave_check") == [True]


@pytest.fixture
def redis(tmp_path):
    pytest.importorskip("redis")
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def keys(server: Server) -> int:
    import redis as client

    with client.Redis.from_url(server.url) as connection:
        return sum(1 for _ in connection.scan_iter("chunkweave:*"))


def test_two_servers_share_over_redis_until_it_is_killed_and_then_serve_on(start, redis, reference):
    extra = {"remote_url": redis.url}
    one, other = start("one", extra, wait=False), start("other", extra, wait=False)
    one.wait()
    other.wait()
    scenario = computed_alone()
    precompute(one, scenario)
    wait_until(lambda: keys(redis) >= 4, 20)
    ask = scenario.prompt.ask("cacheblend", 0.15)
    strange = other.answer(ask, salt="another tenant")[0]
    assert strange["report"]["computed_tokens"] == len(scenario.prompt.ids)
    right(other.answer(ask)[0], reference, scenario)
    # One that has seen nothing yet, while requests come in: what is lost is computed.
    more = [computed_alone() for _ in range(4)]
    for each in more:
        precompute(one, each)
    one.call("chunkweave_flush")
    other.send(*[each.prompt.ask("cacheblend", 0.15) for each in more])
    redis.kill()
    for got, each in zip(other.receive(), more, strict=True):
        assert got["report"]["prompt_tokens"] == len(each.prompt.ids)
        if got["report"].get("reused_tokens"):  # it came in, whole or in part
            assert got["report"]["computed_tokens"] < len(each.prompt.ids)
        else:
            plain = reference.log_probs(each.prompt.ids)
            assert (torch.tensor(got["log_probs"]) - plain).abs().max().item() <= TOLERANCE
    for process in (one, other):
        new = Given([tokens(40), tokens(50)])
        for _ in range(4):
            got = process.answer(new.ask("prefix"))[0]
            assert (torch.tensor(got["log_probs"]) - reference.log_probs(new.ids)).abs().max().item() <= TOLERANCE
        assert process.call("chunkweave_check") == [True]


TEXTS = [
    Chunk(f"The {place} of Skerrow was founded in {year}. " * 3, place)
    for place, year in (("harbour", 1871), ("school", 1902), ("mill", 1855), ("chapel", 1790))
]
QUESTION = "When was the mill founded?"


def asked(prompt: Prompt, method: str) -> Ask:
    """What vLLM is to be asked for a prompt of our own engine's."""
    chunks = [
        [span.start, span.stop]
        for part, span in zip(prompt.parts, prompt.spans(), strict=True)
        if part.kind is PartKind.CHUNK
    ]
    return Ask(list(prompt.token_ids), {"chunks": chunks, "method": method}, TOKENS, top=None)


@pytest.mark.parametrize(("family", "adds_bos"), [("llama", True), ("qwen2", False)])
def test_our_engine_and_vllm_read_each_others_segments(start, tmp_path, family, adds_bos):
    """Both configs name a BOS; the second one's tokenizer does not add it, as Qwen2.5's does not."""
    folder = make_checkpoint(tmp_path / "model", family, vocab_size=4096)
    add_tokenizer(folder, adds_bos=adds_bos)
    store = StoreConfig(cache_dir=tmp_path / "kv")
    options = {"method": "prefix", "max_new_tokens": TOKENS}
    with Engine.load(folder, dtype="float32", store=store) as engine:
        assert engine.loaded.tokenizer.start_ids == ((0,) if adds_bos else ())
        answers = [engine.generate(QUESTION, chunks, **options) for chunks in (TEXTS[:2], TEXTS[1::-1])]
        prompts = [engine.builder.build(QUESTION, chunks) for chunks in (TEXTS[:2], TEXTS[1::-1], TEXTS[2:])]
    process = start("vllm", folder=folder, max_num_batched_tokens=1024)
    for answer, prompt in zip(answers, prompts, strict=False):
        got = process.answer(asked(prompt, "prefix"))[0]
        whole = (len(prompt) - len(prompt.parts[-1])) // BLOCK_SIZE * BLOCK_SIZE
        begins = adds_bos and not got["report"]["local_tokens"]  # BOS is stored in no segment
        assert got["report"]["prefix_exact_tokens"] == whole - int(begins)
        assert tuple(got["tokens"]) == tuple(answer.token_ids)
    new = process.answer(asked(prompts[2], "prefix"))[0]
    process.close()  # at once: what is not written yet is written then
    with Engine.load(folder, dtype="float32", store=store) as engine:
        answer = engine.generate(QUESTION, TEXTS[2:], **options)
        assert answer.report.prefix_exact_tokens == len(prompts[2]) - int(adds_bos) - len(prompts[2].parts[-1])
        assert tuple(answer.token_ids) == tuple(new["tokens"])
        fingerprint = engine.loaded.fingerprint
    tier = DiskTier(tmp_path / "kv", fingerprint)
    tier.verify()
    assert not tier.problems()


def test_what_is_computed_is_written(start, tmp_path):
    process = start("written", {"cache_dir": str(tmp_path / "kv"), "ttl": "1h", "codec": "int8"})
    prompt = Given([tokens(40), tokens(50)])
    process.answer(prompt.ask("prefix"))
    process.call("chunkweave_flush")
    assert len(files(tmp_path / "kv")) == 2
    assert process.call("chunkweave_check") == [True]


def test_a_segment_that_one_rank_lost_costs_time_only(start, tmp_path, reference):
    scenario = computed_alone()
    first = start("first", **TWO_RANKS)
    precompute(first, scenario)
    first.call("chunkweave_flush")
    first.close()
    folders = sorted((tmp_path / "kv").glob("*-tp?of2"))
    assert [len(files(folder)) for folder in folders] == [4, 4]
    second = start("second", **TWO_RANKS)
    ask = scenario.prompt.ask("cacheblend", 0.15)
    right(second.answer(ask)[0], reference, scenario)  # now in both ranks' memory
    other = computed_alone()
    precompute(second, other)
    second.call("chunkweave_flush")
    second.call("chunkweave_forget_memory")
    chunk = next(iter(other.seen))
    lost = [path for path in files(folders[0]) if second.call("chunkweave_is_of", path.stem, list(chunk))[0]]
    assert len(lost) == 1
    lost[0].unlink()
    got = second.answer(other.prompt.ask("full-reuse"))[0]
    # No rank wove what the other one could not; the exact path was in vLLM's own cache.
    assert got["report"]["computed_tokens"] == len(other.prompt.ids) - BLOCK_SIZE
    plain = reference.log_probs(other.prompt.ids)
    assert (torch.tensor(got["log_probs"]) - plain).abs().max().item() <= TOLERANCE
    turned = Given(other.prompt.chunks[::-1])
    got = second.answer(turned.ask("full-reuse"))[0]
    assert got["report"]["computed_tokens"] < len(turned.ids)
    assert got["report"]["reused_tokens"] > 0
    assert second.call("chunkweave_check") == [True, True]
