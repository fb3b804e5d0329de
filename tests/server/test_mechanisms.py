"""Eviction, admission, variants and promotion do what a server is told: each test fails if its setting is not wired."""

from random import Random
from threading import Event

import pytest

from chunkweave.errors import UsageError
from chunkweave.planning.calibration import record_path, save_record
from chunkweave.planning.cost import CostModel
from tests.integration.test_engine import calibration
from tests.server.conftest import engine_of, later, report_of, settings_of, wait_until
from tests.server.test_front_prefill_ahead import confirmed, slow_corpus, speculations

FERRY = "The ferry leaves at seven, at noon and at six."
CHOIR = "The choir sings on Sundays behind the old wall."
TOWER = "The tower has two hundred and thirty steps and a copper roof."

pytestmark = pytest.mark.backend("engine")


def ask(client, *documents, messages=None, **reuse):
    """The report of one answer over documents."""
    body = {} if messages is None else {"messages": messages}
    return report_of(client.ask(documents=documents, max_tokens=1, chunkweave={"method": "prefix", **reuse}, **body))


def exact(report) -> int:
    """How many chunks were an exact prefix."""
    return sum(chunk["kv_source"] == "prefix-exact" for chunk in report["chunks"] if chunk["rank"] is not None)


@pytest.mark.parametrize("choice", ["cheapest", "fixed"])
def test_documents_that_come_back_in_one_order_become_an_exact_prefix(serve, tmp_path, choice):
    """Under a calibrated method too, which alone would weave them for ever; how soon depends on what they cost."""
    loaded = serve().engine.loaded
    path = record_path(tmp_path, None, loaded.fingerprint)
    path.parent.mkdir()
    save_record(path, calibration(loaded, "epic", 0.5))
    client = serve(cache_dir=tmp_path, choice=choice)
    documents = [FERRY, CHOIR, TOWER]
    reports = [report_of(client.ask(documents=documents[::-1], max_tokens=1))]
    reports += [report_of(client.ask(documents=documents, max_tokens=1)) for _ in range(30)]
    reused = [report for report in reports if report["reused_tokens"]]
    if choice == "fixed":
        assert {report["why"] for report in reports} == {"calibrated"}
        assert len(reused) == 30
    else:
        assert {report["why"] for report in reports} <= {"calibrated", "no gain", "path recurs"}
        assert exact(reports[-1]) == 3
        assert len(reused) < 30


def test_a_cap_on_all_instances_holds_all_chunks_together(serve):
    """Cache-Craft's N x M as it is printed: one total, whatever chunk they are of."""
    client = serve(max_instances=3, max_variants=None)
    for documents in ((FERRY, CHOIR), (CHOIR, FERRY), (TOWER,), (TOWER, CHOIR)):
        ask(client, *documents)
    assert len(client.engine.store) == 3
    assert client.engine.store.stats.variants_dropped > 0


@pytest.mark.parametrize(
    ("policy", "kept"), [("lru", TOWER), ("lfu", FERRY), ("pgdsf", FERRY), ("reuse-frequency", FERRY)]
)
def test_the_policy_says_what_leaves_memory(serve, policy, kept):
    """One document is asked for often and long ago, another once and just now."""
    probe = serve()
    sizes = []
    for document in (FERRY, TOWER, CHOIR):
        ask(probe, document)
        sizes.append(probe.engine.store.used_bytes)
    client = serve(policy=policy, host_budget=sizes[-1] - 1)
    for document in (*[FERRY] * 6, TOWER, CHOIR):
        ask(client, document)
    assert exact(ask(client, kept)) == 1


def test_admission_keeps_what_was_seen_once_off_the_disk(serve, tmp_path):
    client = serve(cache_dir=tmp_path / "kv", admission=2)
    disk = client.engine.store.levels[-1]
    ask(client, FERRY)
    client.engine.store.flush(5)
    assert disk.name == "disk"
    assert len(disk.store) == 0
    ask(client, FERRY)
    client.engine.store.flush(5)
    assert len(disk.store) > 0


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_threshold_of_n_is_reached_by_the_nth_request_computed_ahead_or_not(serve, threshold):
    """What a search's first stage names is prefilled before the request counts: it is promoted even so."""
    client = serve(order="free", promotion_threshold=threshold)
    corpus, found = slow_corpus(client), []
    reuse = {"corpus": "sea", "top_k": 2, "method": "prefix"}
    for number in range(1, 5):
        begun = lambda number=number: speculations(client)["started"] == number  # noqa: E731
        report = confirmed(client, corpus, begun, chunkweave=reuse)
        assert report["pipelining"]["matched"]
        found.append(exact(report))
    # What the request itself was computed by is no exact prefix of it: the next one finds it.
    assert found == [0 if number <= threshold else 2 for number in range(1, 5)]


def frequencies(client, tier="host"):
    """By how many chunks are before it and which document it is, how often a segment was asked for."""
    shown = client.get("/v1/cache").json()["eviction"]["engine"][tier]
    return {(one["behind"], one["source"]): one["frequency"] for one in shown if one["source"] != "turn"}


def ask_at_once(client, number, *documents):
    """So many requests over the same documents, of which none is begun before all are there."""
    batching, gate = engine_of(client.service).batching, Event()
    batching.between_steps(gate.wait)
    replies = [later(client.ask, f"Number {one}?", documents=list(documents)) for one in range(number)]
    wait_until(lambda: batching.stats.waiting == number)
    gate.set()
    assert {reply.result().status_code for reply in replies} == {200}


@pytest.mark.parametrize(
    ("policy", "tiers"), [("pgdsf", ["host"]), ("pgdsf", ["host", "disk"]), ("lfu", ["host"]), ("gdsf", ["host"])]
)
def test_equal_requests_at_once_count_once_each(serve, tmp_path, policy, tiers):
    """Those that find a chunk missing all compute and store it: coming in again is no use (RAGCache §5.1)."""
    client = serve(policy=policy, cache_dir=tmp_path / "kv" if "disk" in tiers else None)
    ask_at_once(client, 6, FERRY)
    client.engine.store.flush(5)
    for tier in tiers:
        assert set(frequencies(client, tier).values()) == {6}, tier
    ask(client, FERRY)
    assert set(frequencies(client).values()) == {7}


def test_what_is_written_through_or_loaded_into_memory_is_no_use(serve, tmp_path):
    client = serve(policy="pgdsf", cache_dir=tmp_path / "kv")
    for _ in range(2):
        ask(client, FERRY)
    client.engine.store.flush(5)
    for record in client.engine.store.records():
        assert client.engine.store.levels[0].store.drop(record.id)
    ask(client, FERRY)
    assert set(frequencies(client, "host").values()) == set(frequencies(client, "disk").values()) == {3}


# --- Cache-Craft's variants (§3.3), with what a server is given

FIVE = (
    FERRY,
    CHOIR,
    TOWER,
    "The mill by the river was built of oak in one summer.",
    "Nets are mended in the old loft.",
)


def recomputed(client, *documents, **reuse) -> float:
    """The share of the reused chunks' tokens that one request computes again, over all layers."""
    report = ask(client, *documents, **{"method": client.service.settings.requests.method, **reuse})
    return report["recompute_fraction"] or 0.0


def at_random(client, requests: int = 200) -> tuple[float, float]:
    """What requests for four of five chunks in random order recompute: the mean of the first 50, and of the last."""
    draw = Random(1)
    shares = [recomputed(client, *draw.sample(FIVE, 4)) for _ in range(requests)]
    return sum(shares[:50]) / 50, sum(shares[-50:]) / 50


def test_a_prompt_that_comes_again_is_hardly_recomputed(serve):
    client = serve(method="cachecraft:no-focus")
    ask(client, *FIVE[:4], method="cachecraft:no-focus")
    shares = [recomputed(client, *FIVE[:0:-1]) for _ in range(5)]
    assert shares[0] > 0.4
    assert shares[4] <= 0.1
    none = serve(method="cachecraft:no-focus", variant_fraction=None)
    ask(none, *FIVE[:4], method="cachecraft:no-focus")
    shares = [recomputed(none, *FIVE[:0:-1]) for _ in range(5)]
    assert shares[4] == shares[1] > 0.4


@pytest.mark.parametrize("contexts", ["bundled", "corpus"])
def test_what_was_computed_beforehand_becomes_variants_too(serve, contexts):
    client = serve(method="cachecraft:no-focus", contexts=contexts)
    assert client.warm(*FIVE).status_code == 200
    shares = [recomputed(client, *FIVE[:4]) for _ in range(5)]
    assert shares[0] > 0.4
    if contexts == "bundled":
        assert shares[0] == pytest.approx(0.5, abs=0.03), "behind neutral passages CCI is .5, nothing of them is here"
    assert shares[4] <= 0.1


def test_random_requests_recompute_less_and_less_if_variants_may_be_kept(serve):
    first, last = at_random(serve(method="cachecraft"))
    assert last <= first / 2
    _, of_one = at_random(serve(method="cachecraft", max_variants=1))
    assert of_one > 2 * last


def test_generations_are_limited(serve):
    """With a limit of 1, a variant that was made from another one is recomputed whole before more are made from it."""

    def oldest(client) -> int:
        at_random(client, 60)
        return max(record.generation for record in client.engine.store.records())

    assert oldest(serve(method="cachecraft:no-focus", max_variants=2, variant_generations=None)) > 1
    assert oldest(serve(method="cachecraft:no-focus", max_variants=2, variant_generations=1)) == 1


LARGE = [FERRY, CHOIR, TOWER]


@pytest.mark.parametrize("order", ["fixed", "free"])
def test_of_a_large_top_k_only_the_first_chunks_are_stored_as_an_exact_path(serve, order):
    """RAGCache §8: permutations of many documents seldom come back, those of the first few do."""
    usual, capped = serve(order=order), serve(order=order, path_chunks=2)
    assert [exact(ask(usual, *LARGE)) for _ in range(2)] == [0, 3]
    assert [exact(ask(capped, *LARGE)) for _ in range(2)] == [0, 2]
    assert len(capped.engine.store) == len(usual.engine.store) - 2, "nor is the answer behind what is not stored"
    woven = ask(capped, *LARGE, method="full-reuse")
    assert sum(chunk["kv_source"] == "computed" for chunk in woven["chunks"]) == 1


def test_history_stays_on_the_path_whatever_the_cap(serve):
    client = serve(path_chunks=1, deduplicate=True)
    messages = [{"role": "user", "content": "When?"}]
    first = client.ask(messages=messages, documents=[FERRY], chunkweave={"method": "prefix"}).json()
    said = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    reports = [ask(client, CHOIR, TOWER, messages=messages) for _ in range(2)]
    found = [chunk["kv_source"] for chunk in reports[1]["chunks"]]
    assert found == ["prefix-exact"] * 5 + ["computed"], "instruction, ferry, turn, its end, choir"


def flat_costs(folder):
    """A file by which every prefill takes a second: by the token, what comes with few others costs most."""
    path = folder / "costs.json"
    CostModel((0,), (1, 100_000), ((1.0, 1.0),), kv_bytes_per_token=1).save(path)
    return path


LONG = " ".join(f"Step {number} of the tower leads to step {number + 1}." for number in range(12))


@pytest.mark.parametrize(("known", "kept"), [(True, FERRY), (False, LONG)])
def test_of_equal_frequency_what_costs_least_a_token_leaves_first(serve, tmp_path, known, kept):
    """RAGCache eq. 1: clock + average cost * frequency; by frequency alone the older one would leave."""
    settings = {"policy": "pgdsf", "cost_model": flat_costs(tmp_path)} if known else {"policy": "gdsf"}
    probe = serve(**settings)
    for document in (FERRY, LONG, CHOIR):
        ask(probe, document)
    client = serve(**settings, host_budget=probe.engine.store.used_bytes - 1)
    for document in (FERRY, LONG, CHOIR):
        ask(client, document)
    assert exact(ask(client, kept)) == 1
    if known:
        shown = client.get("/v1/cache").json()["eviction"]["engine"]["host"]
        (instruction,) = (one for one in shown if not one["behind"])
        assert instruction["frequency"] == 4
        first = client.engine.builder.build("When does the ferry leave?", [FERRY])
        assert instruction["average_cost_s"] == pytest.approx(1 / len(first), rel=0.2), "1 s for the first prompt"


def test_what_prefill_costs_is_measured_where_a_policy_asks_for_it_and_nothing_is_known(serve, tmp_path):
    first = serve(policy="pgdsf")
    ask(first, FERRY)
    costs = {one["average_cost_s"] for one in first.get("/v1/cache").json()["eviction"]["engine"]["host"]}
    assert 0 < max(costs) < 0.5, "not a second a token"
    for policy, measured in (("lru", False), ("pgdsf", True)):
        folder = tmp_path / policy
        serve(policy=policy, cache_dir=folder)
        assert bool(list(folder.rglob("prefill-engine.json"))) is measured
    (kept,) = (tmp_path / "pgdsf").rglob("prefill-engine.json")
    kept.write_text(kept.read_text().replace('"prefill_s": [', '"prefill_s": [ '))
    before = kept.read_text()
    serve(policy="pgdsf", cache_dir=tmp_path / "pgdsf")
    assert kept.read_text() == before, "measured once"


def test_a_cost_model_that_is_none_is_refused(tmp_path):
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(UsageError, match="cost_model"):
        settings_of(cost_model=tmp_path / "none.json")


def test_a_cost_model_that_does_not_exist_is_measured_at_the_start(serve, tmp_path):
    path = tmp_path / "costs.json"
    first = serve(cost_model=path, cache_dir=tmp_path / "kv", remote_url=f"file://{tmp_path / 'remote'}")
    cost = CostModel.read(path)
    assert first.engine.runner.cost == cost
    assert cost.prefill(100) > 0
    assert set(cost.tier_bytes_per_s) == {"disk", "remote"}
    assert all(rate > 0 for rate in cost.tier_bytes_per_s.values())
    assert not list(tmp_path.rglob("*.safetensors")), "what was written to measure is gone"
    again = serve(cost_model=path, cache_dir=tmp_path / "kv")
    assert again.engine.runner.cost == cost, "measured once"
