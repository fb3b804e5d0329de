"""`chunkweave vllm-serve`: what vLLM's own prefix cache serves, the exact methods, and what reports say of both."""

from itertools import count

import httpx
import pytest

from chunkweave.models.gguf import checkpoint_folder
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from tests.vllm.fronts import PASSAGES, QUESTION, FrontProcess, ask, told

BLOCK_SIZE = 32
COUNTS = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
PREFIX, FULL, BLEND = ({"method": method, "order": "fixed"} for method in ("prefix", "full", "cacheblend"))
_fresh = count(1800)


def fresh() -> list[str]:
    """Passages that no other test has sent."""
    return told(f"in {next(_fresh)}")


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    tokenizer = load_tokenizer(str(checkpoint_folder("reader")), {})
    return PromptBuilder(tokenizer, template_for(tokenizer), "test")


def report_of(answer) -> dict:
    """The report; its counts sum to the prompt, and what was not computed counts as cached."""
    report = answer.model_extra["chunkweave"]
    assert sum(report[name] for name in COUNTS) == report["prompt_tokens"] == answer.usage.prompt_tokens
    cached = report["prefix_exact_tokens"] + report["reused_tokens"]
    assert answer.usage.prompt_tokens_details.cached_tokens == cached
    assert report["recomputed_tokens"] == sum(chunk["recomputed_tokens"] for chunk in report["chunks"])
    assert 0 <= report["engine_cached_tokens"] <= report["prefix_exact_tokens"]
    return report


def complete(front: FrontProcess, ids: list[int]) -> int:
    """Have a plain completion of token ids; how many of them vLLM had cached."""
    answer = front.post("/v1/completions", {"model": "reader", "prompt": ids, "max_tokens": 8, "temperature": 0})
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def test_what_vllm_has_cached_is_exact_and_stored(front, client, builder):
    passages = fresh()
    ids = list(builder.build(QUESTION, passages).token_ids)
    complete(front, ids)
    cached = (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    reports = [report_of(ask(client, passages, reuse=PREFIX)) for _ in range(3)]
    for report in reports:
        assert report["engine_cached_tokens"] == report["prefix_exact_tokens"] == cached
        assert (report["method"], report["why"], report["effective_method"]) == ("prefix", "asked for", "prefix")
    httpx.post(f"{front.url}/reset_prefix_cache", timeout=60).raise_for_status()  # vLLM's own
    report = report_of(ask(client, passages, reuse=PREFIX))
    assert report["engine_cached_tokens"] == 0
    chunks = len(ids) - len(builder.build(QUESTION, passages).parts[-1])
    assert report["prefix_exact_tokens"] == chunks // BLOCK_SIZE * BLOCK_SIZE, "the store has the whole exact path"
    assert report["hits"].keys() == {"host"}
    woven = report_of(ask(client, passages[::-1], reuse=BLEND))
    assert (woven["method"], woven["why"], woven["effective_method"]) == ("cacheblend", "asked for", "cacheblend")
    assert woven["reused_tokens"] + woven["recomputed_tokens"] == sum(one["tokens"] for one in woven["chunks"])
    assert woven["recomputed_tokens"] > 0
    assert {chunk["kv_source"] for chunk in woven["chunks"]} == {"reused"}


def test_a_full_prefill_finds_nothing_and_leaves_nothing_in_vllms_cache(front, client, builder):
    passages = fresh()
    first, again = (report_of(ask(client, passages, reuse=FULL)) for _ in range(2))
    for report in (first, again):
        assert report["computed_tokens"] == report["prompt_tokens"]
        assert (report["method"], report["effective_method"], report["hits"]) == ("full", "full", {})
    ids = list(builder.build(QUESTION, passages).token_ids)
    assert complete(front, ids) <= BLOCK_SIZE, "but for the instruction, what it left is its own"
    for _ in range(2):  # without documents there is nothing to store, and nothing to find either
        report = report_of(ask(client, [], f"{QUESTION} {PASSAGES[0]} {PASSAGES[1]}", reuse=FULL))
        assert report["computed_tokens"] == report["prompt_tokens"]
    stored = report_of(ask(client, passages[::-1], reuse={"method": "full-reuse", "order": "fixed"}))
    assert stored["reused_tokens"] > 0, "what it computed is stored for later requests, as by our engine"


def test_a_resent_conversation_is_found_in_vllms_own_blocks(front, client, builder):
    """Up to the last token of the last answer, rounded down to a block; documents are where they were."""
    passages = fresh()
    messages: list[dict[str, str]] = []
    known_tokens = 0
    for question in ("Who leads the Selmond Choir?", "How many singers are in it?", "Who built the Ostby Mill?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model="reader",
            messages=messages,
            temperature=0,
            max_tokens=8,
            extra_body={"documents": passages, "chunkweave": PREFIX},
        )
        report = report_of(answer)
        if known_tokens:
            assert report["engine_cached_tokens"] == (known_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        text = answer.choices[0].message.content
        known_tokens = report["prompt_tokens"] + len(builder.answer_ids(text.strip()))
        messages.append({"role": "assistant", "content": text})
