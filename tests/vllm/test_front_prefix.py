"""`chunkweave vllm-serve`: what vLLM's own prefix cache serves, the exact methods, and what reports say of both."""

from itertools import count

import httpx
import openai
import pytest

from chunkweave.models.gguf import checkpoint_folder
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from chunkweave_server.vllm_backend.process import free_port
from tests.vllm.fronts import PASSAGES, QUESTION, FrontProcess, ask, front_process

BLOCK_SIZE = 32
COUNTS = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
PREFIX, FULL, BLEND, QUERY = (
    {"method": method, "order": "fixed"} for method in ("prefix", "full", "cacheblend", "query")
)
_fresh = count(1800)


def fresh() -> list[str]:
    """Passages that no other test has sent."""
    return [f"{passage} So it was told in {next(_fresh)}." for passage in PASSAGES]


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    tokenizer = load_tokenizer(str(checkpoint_folder("reader")), {})
    return PromptBuilder(tokenizer, template_for(tokenizer), "test")


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """Its usual method reads attention profiles, so that chunks are captured while they are computed."""
    folder = tmp_path_factory.mktemp("front")
    options = ("--method", "cachecraft", "--replica-env", "0:VLLM_SERVER_DEV_MODE=1")  # has /reset_prefix_cache
    with front_process(folder, free_port(), *options, "--connector", "host_budget=1GiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(front):
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def report_of(told) -> dict:
    """The report; its counts sum to the prompt."""
    report = told.model_extra["chunkweave"]
    assert sum(report[name] for name in COUNTS) == report["prompt_tokens"] == told.usage.prompt_tokens
    assert 0 <= report["engine_cached_tokens"] <= report["prefix_exact_tokens"]
    return report


def complete(front: FrontProcess, ids: list[int], **more) -> tuple[str, int]:
    """A plain completion of token ids, and how many of them vLLM had cached."""
    body = {"model": "reader", "prompt": ids, "max_tokens": 8, "temperature": 0, **more}
    told = front.post("/v1/completions", body)
    return told["choices"][0]["text"], (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def reset(front: FrontProcess) -> None:
    """Forget vLLM's own prefix cache."""
    httpx.post(f"{front.url}/reset_prefix_cache", timeout=60).raise_for_status()


def test_what_vllm_has_cached_is_exact_and_stored(front, client, builder):
    passages = fresh()
    ids = list(builder.build(QUESTION, passages).token_ids)
    complete(front, ids)
    cached = (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    reports = [report_of(ask(client, passages, reuse=PREFIX)) for _ in range(3)]
    for report in reports:
        assert report["engine_cached_tokens"] == report["prefix_exact_tokens"] == cached
        assert (report["method"], report["why"], report["effective_method"]) == ("prefix", "asked for", "prefix")
    reset(front)
    report = report_of(ask(client, passages, reuse=PREFIX))
    assert report["engine_cached_tokens"] == 0
    chunks = len(ids) - len(builder.build(QUESTION, passages).parts[-1])
    assert report["prefix_exact_tokens"] == chunks // BLOCK_SIZE * BLOCK_SIZE, "the store has the whole exact path"
    assert report["hits"].keys() == {"host"}
    woven = report_of(ask(client, passages[::-1], reuse=BLEND))
    assert woven["reused_tokens"] + woven["recomputed_tokens"] == sum(one["tokens"] for one in woven["chunks"])


@pytest.mark.parametrize("reuse", [BLEND, QUERY])
def test_a_report_names_the_method_that_was_requested_and_what_it_came_to(client, reuse):
    passages = fresh()
    nothing, exact, again = (report_of(ask(client, passages, reuse=reuse)) for _ in range(3))
    woven = report_of(ask(client, passages[::-1], reuse=reuse))
    for report in (nothing, exact, again, woven):
        assert (report["method"], report["why"]) == (reuse["method"], "asked for")
    assert nothing["effective_method"] == ("full" if not nothing["prefix_exact_tokens"] else "prefix")
    for report in (exact, again):
        assert report["effective_method"] == "prefix"
        assert report["reused_tokens"] == report["recomputed_tokens"] == 0
    assert again["engine_cached_tokens"] > 0
    assert woven["effective_method"] == reuse["method"]


def test_a_full_prefill_finds_nothing_and_leaves_nothing_in_vllms_cache(front, client, builder):
    passages = fresh()
    first, again = (report_of(ask(client, passages, reuse=FULL)) for _ in range(2))
    for report in (first, again):
        assert report["computed_tokens"] == report["prompt_tokens"]
        assert (report["method"], report["effective_method"], report["hits"]) == ("full", "full", {})
    ids = list(builder.build(QUESTION, passages).token_ids)
    assert complete(front, ids)[1] <= BLOCK_SIZE, "but for the instruction, what it left is its own"
    for _ in range(2):  # without documents there is nothing to store, and nothing to find either
        report = report_of(ask(client, [], f"{QUESTION} {PASSAGES[0]} {PASSAGES[1]}", reuse=FULL))
        assert report["computed_tokens"] == report["prompt_tokens"]
    stored = report_of(ask(client, passages[::-1], reuse={"method": "full-reuse", "order": "fixed"}))
    assert stored["reused_tokens"] > 0, "what it computed is stored for later requests, as by our engine"


def test_warm_prefix_answers_as_vllms_own_prefix_cache_does(front, client, builder):
    """Ten prompts: as many tokens are left to compute, and the answers are the same."""
    for number in range(10):
        passages = fresh()[number % 2 :]
        first, question = (f"{begin}{QUESTION}{' Tell me.' * number}" for begin in ("Now, ", ""))
        ids, other = (list(builder.build(one, passages).token_ids) for one in (question, first))
        complete(front, other, cache_salt="vllm")
        text, cached = complete(front, ids, cache_salt="vllm")
        ask(client, passages, first, reuse=PREFIX)
        reset(front)
        told = ask(client, passages, question, reuse=PREFIX)
        report = report_of(told)
        assert report["engine_cached_tokens"] == 0
        assert report["computed_tokens"] == len(ids) - cached
        assert told.choices[0].message.content == text
