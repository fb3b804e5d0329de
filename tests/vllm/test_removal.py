"""What is removed by command is used by no later request: from the stores, and from vLLM's own prefix cache."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chunkweave.vllm.removal import removal_params
from tests.vllm.checkpoints import BOS
from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, alone, tokens
from tests.vllm.serving import TWO_RANKS, Ask, Served, serving

ONE, OTHER = "one tenant's", "another's"
HITS = "vllm:prefix_cache_hits"


@pytest.fixture(scope="module", params=["memory", "disk", "two ranks"])
def served(request, checkpoint, tmp_path_factory):
    extra = {} if request.param == "memory" else {"cache_dir": str(tmp_path_factory.mktemp("kv"))}
    more = TWO_RANKS if request.param == "two ranks" else {}
    with serving(checkpoint("llama"), extra=extra, **SLICED, **more) as running:
        yield running


def forget(served: Served, chunks: Sequence[tuple[int, ...]] | None, salt: str | None = ONE) -> dict:
    """Have chunks removed, or everything; the command's report."""
    (got,) = served.answer(Ask([BOS], removal_params(chunks, [BOS]), salt=salt, top=None))
    assert got.report is not None
    return got.report


def found(served: Served, ask: Ask) -> int:
    """Tokens of a request that were not computed for it, in the stores or in vLLM's own cache."""
    before = served.metric(HITS)
    (got,) = served.answer(ask)
    local = served.metric(HITS) - before
    computed = len(ask.ids) if got.report is None else int(got.report["computed_tokens"])
    return max(int(local), len(ask.ids) - computed)


def stored(served: Served) -> int:
    (state, *_) = served.worker("chunkweave_state")
    served.worker("chunkweave_flush")
    return int(state["segments"])


def test_removed_chunks_are_computed_anew_and_others_are_not(served):
    first, second, third = tokens(64), tokens(70), tokens(64)
    for chunk in (first, second, third):
        served.answer(replace(alone(chunk).ask(), salt=ONE))
    woven = replace(Given([second, first]).ask("full-reuse"), salt=ONE)
    exact = replace(Given([first, second]).ask(), salt=ONE)
    elsewhere = replace(Given([first, second]).ask(), salt=OTHER)
    for ask in (woven, exact, elsewhere):
        served.answer(ask)
        assert found(served, ask) > 60
    stored(served)
    report = forget(served, [first])
    assert report["removed"] >= 2, "it alone, and the second one behind it"
    assert (report["left"], report["unasked"]) == (0, [])
    assert found(served, replace(Given([first]).ask(), salt=ONE)) == 0
    assert forget(served, [first])["removed"] >= 1
    assert found(served, replace(exact, params=None)) == 0, "vLLM's own cache"
    assert forget(served, [first])["removed"] == 0, "a request without chunks stores nothing"
    assert found(served, replace(Given([third]).ask(), salt=ONE)) == 64, "another chunk of the same salt"
    assert found(served, elsewhere) > 120, "the same chunk of another salt"
    assert found(served, replace(elsewhere, params=None)) > 60, "in vLLM's own cache too"
    served.worker("chunkweave_check")


def test_nothing_of_any_salt_is_left_once_everything_is_removed(served):
    asks = [replace(Given([tokens(64)]).ask(), salt=salt) for salt in (ONE, OTHER, None)]
    served.answer(*asks)
    assert stored(served) >= 3
    assert forget(served, None)["removed"] >= 3
    assert stored(served) == 0
    for ask in asks:
        assert found(served, replace(ask, params=None)) == 0
        forget(served, None)
        assert found(served, ask) == 0


@pytest.mark.parametrize("method", ["prefix", "cacheblend"])
def test_what_a_running_request_has_of_a_removed_chunk_does_not_come_back(served, method):
    """It may go on with what it has, but leaves nothing: not its prefill's KV, not vLLM's blocks."""
    forget(served, None)
    chunks = [tokens(64), tokens(64)]
    if method == "cacheblend":
        served.answer(*(replace(alone(chunk).ask(), salt=ONE) for chunk in chunks))
    running = replace(Given([*chunks, tokens(64)]).ask(method, new_tokens=24), salt=ONE, top=None)
    served.send(running)
    for _ in range(2):  # of several: a step has 64 tokens
        served.step()
    served.send(Ask([BOS], removal_params([chunks[0]], [BOS]), salt=ONE, top=None))
    reports = [got.report for got in served.finish().values()]
    assert {"removed": 0, "left": 0, "unasked": [], "lasting": True}.keys() in [report.keys() for report in reports]
    assert forget(served, [chunks[0]])["removed"] == 0, "it has stored nothing after the removal"
    assert found(served, replace(running, params=None, tokens=1)) == 0, "none of its blocks is found"
