"""What the front sends to have chunks computed among their own kind: all of a chunk to one vLLM server."""

from collections import Counter, defaultdict
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from tests.server.conftest import later, wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, MORE, running_front

ROUTINGS = ("affinity", "round-robin")
FIVE = [*DOCUMENTS, MORE, "The lighthouse keeper rows to the mole at dusk.", "Nets are mended behind the chandlery."]
FEW = {"context_count": 2, "context_tokens": 1, "neutral_tokens": 200}
"""Two contexts of one chunk each."""


def params_of(body: dict[str, Any]) -> dict[str, Any]:
    return dict(body["kv_transfer_params"]["chunkweave"])


def last_chunk(body: dict[str, Any]) -> tuple[int, ...]:
    start, stop = params_of(body)["chunks"][-1]
    return tuple(body["prompt"][start:stop])


def shares(*fakes: FakeVllm) -> list[dict[str, Any]]:
    return [body for fake in fakes for body in fake.seen if "mean" in params_of(body)]


def first_passes(fake: FakeVllm) -> list[tuple[int, ...]]:
    return [last_chunk(body) for body in fake.seen if "mean" not in params_of(body)]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_shares_of_a_mean_and_what_they_are_woven_from_go_to_one_server(fakes, routing):
    with running_front(*fakes, routing=routing, **FEW) as front:
        warmed = front.warm(*FIVE)
        assert (warmed.status_code, warmed.json()["computed"]) == (200, len(FIVE))
    where = defaultdict(set)
    for number, fake in enumerate(fakes):
        sent: set[tuple[int, ...]] = set()
        counts: Counter[str] = Counter()
        for body in fake.seen:
            params = params_of(body)
            assert (body["max_tokens"], params["counts_as_request"]) == (1, False)
            assert params["chunks"][-1][1] == len(body["prompt"]), "the chunk comes last, and nothing behind it"
            if "mean" not in params:
                assert params["method"] == "prefix"
                assert params["neutral"] == len(params["chunks"]) - 1 > 0
                sent.add(last_chunk(body))
                continue
            assert (params["method"], params["mean"]["of"], "neutral" in params) == ("full-reuse", 2, False)
            where[params["mean"]["group"]].add(number)
            context = {tuple(body["prompt"][start:stop]) for start, stop in params["chunks"][:-1]}
            assert context
            assert context <= sent, "what it is woven from is there before it"
            counts[params["mean"]["group"]] += 1
            if counts[params["mean"]["group"]] == 2:
                sent.add(last_chunk(body))
        assert all(count == 1 for count in Counter(first_passes(fake)).values()), "each once a call"
    assert [len(servers) for servers in where.values()] == [1] * len(FIVE)
    assert len(shares(*fakes)) == 2 * len(FIVE)
    assert all(shares(fake) for fake in fakes), "chunks are spread over the servers"


def test_what_has_a_mean_is_sent_no_more_and_first_passes_are_removed(fakes):
    with running_front(*fakes, **FEW) as front:
        assert front.warm(*FIVE[:3]).json()["computed"] == 3
        assert not any(fake.first_passes for fake in fakes), "each chunk has a mean"
        means = [set(fake.means) for fake in fakes]
        assert sum(map(len, means)) == 3
        before = [len(fake.seen) for fake in fakes]
        assert front.warm(*FIVE[:3]).json()["computed"] == 0
        assert [len(fake.seen) for fake in fakes] == before
        assert front.warm(*FIVE).json()["computed"] == 2
        last = {last_chunk(body) for body in shares(*fakes)}
        assert len(last) == 5
        sent = [body for fake, count in zip(fakes, before, strict=True) for body in fake.seen[count:]]
        again = {chunk for found in means for _, chunk in found} & {last_chunk(body) for body in sent}
        assert all(last_chunk(body) not in again for body in sent if "mean" in params_of(body))


def test_a_mean_of_another_salt_is_none_of_it(fakes):
    with running_front(fakes[0], **FEW) as front:
        front.warm(*FIVE[:3])
        assert front.warm(*FIVE[:3], cache_salt="other").json()["computed"] == 3


@pytest.mark.parametrize("fault", ["plugged", "silent"])
def test_a_server_that_does_not_say_what_it_stores_is_sent_all(fakes, fault):
    vllm, _ = fakes
    with running_front(vllm, **FEW) as front:
        front.warm(*FIVE[:3])
        setattr(vllm, fault, fault == "silent")
        assert front.warm(*FIVE[:3]).json()["computed"] == 3
        vllm.plugged, vllm.silent = True, False
        assert front.warm(*FIVE[:3]).json()["computed"] == 0


def test_a_chunk_without_others_is_computed_behind_neutral_passages(fakes):
    with running_front(fakes[0], **FEW) as front:
        front.warm(MORE)
        (body,) = fakes[0].seen
        assert "mean" not in params_of(body)
        assert params_of(body)["neutral"] > 0


def test_where_a_server_ends_another_one_computes_all_of_the_chunk(fakes):
    one, other = fakes

    def ends(body: dict[str, Any]) -> Response | None:
        """At the second share that it is sent."""
        if len(shares(one)) == 2 and "mean" in params_of(body):
            one.healthy = False
        return None if one.healthy else JSONResponse({"error": {"message": "the engine has ended"}}, 500)

    one.behave = ends
    with running_front(one, other, **FEW) as front:
        warmed = front.warm(*FIVE)
        assert warmed.status_code == 200, warmed.text
    groups = Counter(params_of(body)["mean"]["group"] for body in shares(other))
    assert list(groups.values()) == [2] * len(FIVE), "the other one has all shares of each"


@pytest.mark.parametrize("removed", [0, 1], ids=["itself", "a context"])
def test_what_is_cleared_while_it_is_warmed_is_sent_no_more(fakes, removed):
    """Whatever of a document is sent behind the removal would be computed, and stored, behind it."""
    (vllm, _), documents = fakes, FIVE[:3]
    with running_front(vllm, **FEW) as front:
        sent = front.service.backend.context.preparer.builder.chunk_part(documents[removed]).token_ids
        vllm.gate.clear()
        warming = later(front.warm, *documents)
        wait_until(lambda: vllm.seen)
        before = len(vllm.seen)
        assert front.clear(documents[removed]).status_code == 200
        vllm.gate.set()
        warming.result()
        rest = vllm.seen[before:]
        assert rest, "the others are warmed"
        for body in rest:
            chunks = [tuple(body["prompt"][start:stop]) for start, stop in params_of(body)["chunks"]]
            assert sent not in chunks
        left = {front.service.backend.context.preparer.builder.chunk_part(one).token_ids for one in documents}
        assert {last_chunk(body) for body in rest if "mean" in params_of(body)} == left - {sent}, "over what is left"


def test_warmed_documents_are_spread_over_servers(fakes):
    with running_front(*fakes, contexts="bundled") as front:
        documents = [f"Document {number}. {MORE}" for number in range(6)]
        assert front.warm(*documents).json()["computed"] == 6
    assert min(len(fake.seen) for fake in fakes) >= 2


@pytest.mark.parametrize("contexts", ["bundled", "corpus"])
def test_warming_continues_where_a_server_ends(fakes, contexts):
    one, other = fakes
    with running_front(one, other, contexts=contexts) as front:
        one.stop()
        warmed = front.warm(*DOCUMENTS, MORE)
        assert warmed.status_code == 200, warmed.text
        assert len({last_chunk(body) for body in other.seen}) == 3
