"""`vllm serve` with the connector and `find_chunks`: requests are plain, and passages that move are reused."""

import json
import shutil
import urllib.request

import pytest

from chunkweave.prompt.parts import neutral_passages
from tests.vllm.test_server import READER, running_server

PASSAGES = neutral_passages()
CONNECTOR = {
    "kv_connector": "ChunkweaveConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "find_chunks": True,
        "method": "cacheblend",
        "recompute_ratio": 0.1,
        "host_budget": "1GiB",
    },
}
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The reader with a chat template."""
    folder = tmp_path_factory.mktemp("reader") / "model"
    shutil.copytree(READER, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    with running_server(tmp_path_factory, str(folder), CONNECTOR, "--max-model-len", "2048") as address:
        yield address


def post(url, path, **body):
    whole = {"model": "reader", "max_tokens": 4, "temperature": 0, **body}
    request = urllib.request.Request(f"{url}{path}", json.dumps(whole).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return (json.load(reply).get("kv_transfer_params") or {}).get("chunkweave")


def complete(url, prompt, **more):
    return post(url, "/v1/completions", prompt=prompt, **more)


def chat(url, messages, **more):
    return post(url, "/v1/chat/completions", messages=messages, **more)


def rag(passages, question="Who paid for the bridge?"):
    return "\n\n".join(("Use the context to answer.", *passages, f"Question: {question}"))


def taken(report):
    kept = report["prefix_exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"]
    return kept / (kept + report["computed_tokens"])


def test_passages_of_a_plain_completion_are_reused_in_another_order(url):
    first = complete(url, rag(PASSAGES[:5]))
    assert taken(first) == 0
    again = complete(url, rag(PASSAGES[4::-1]))
    assert again["reused_tokens"] > 0
    assert taken(again) > 0.8


def test_passages_of_a_chat_are_reused_and_system_prompts_are_exact(url):
    for order in (1, -1):
        report = chat(url, [{"role": "user", "content": rag(PASSAGES[5:10][::order])}])
    assert taken(report) > 0.8
    for order in (1, -1):
        system = "\n\n".join(("Answer from this.", *PASSAGES[10:14][::order]))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who paid?"}]
        report = chat(url, messages)
    assert report["reused_tokens"] == 0


def test_an_agents_results_are_found_after_older_ones_are_dropped(url):
    """As templates without a role for tools render them."""
    task = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Who paid for the bridge?"}]
    steps = [
        [
            {"role": "assistant", "content": f"I search for {n}."},
            {"role": "user", "content": "\n\n".join(f"{text} As of {n}." for text in PASSAGES[n : n + 2])},
        ]
        for n in range(0, 16, 2)
    ]
    shares = []
    for last in range(1, len(steps) + 1):
        kept = steps[max(0, last - 5) : last]
        report = chat(url, [*task, *(message for step in kept for message in step)])
        if last > 5:
            shares.append(taken(report))
    assert len(shares) == 3
    assert min(shares) >= 0.7


def test_tenants_with_the_same_text_share_nothing(url):
    reports = [complete(url, rag(PASSAGES[:5]), cache_salt=salt) for salt in ("acme", "bolt")]
    assert [taken(report) for report in reports] == [0, 0]


def test_a_request_may_switch_it_off_or_name_its_own_chunks(url):
    off = complete(url, rag(PASSAGES[:5]), kv_transfer_params={"chunkweave": {"find_chunks": False}})
    assert off is None
    exact = complete(
        url, rag(PASSAGES[2::-1]), kv_transfer_params={"chunkweave": {"find_chunks": True, "method": "prefix"}}
    )
    assert (exact["method"], exact["reused_tokens"]) == ("prefix", 0)
    both = {"chunkweave": {"find_chunks": True, "chunks": [[1, 9]]}}
    assert "give either chunks or find_chunks" in complete(url, rag(PASSAGES[:5]), kv_transfer_params=both)["error"]
