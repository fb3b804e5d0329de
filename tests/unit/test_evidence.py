"""Decisions from compared answers: how soon they are right, how seldom wrong, and that they survive bad files."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.planning.calibration import Quality
from chunkweave.planning.evidence import BettingTest, Compared, DriftDetector, Evidence, Progress

BALANCED = Quality.BALANCED
TOKENS, CORRELATION = 16, 0.2


def answers(agreement: float, count: int, seed: int) -> list[Compared]:
    """Beta-binomial answers, their tokens correlated; the divergence grows with disagreement, to .03 in the mean."""
    rng = np.random.default_rng(seed)
    size = (1 - CORRELATION) / CORRELATION
    drawn = rng.binomial(TOKENS, rng.beta(agreement * size, (1 - agreement) * size, count)) / TOKENS
    return [Compared(float(one), 0.03 * (1 - float(one)) / (1 - agreement)) for one in drawn]


def first_decision(evidence: Evidence, streams: dict[str, list[Compared]]) -> int | None:
    for number, drawn in enumerate(zip(*streams.values(), strict=True)):
        evidence.take(dict(zip(streams, drawn, strict=True)))
        if evidence.decision(BALANCED) is not None:
            return number + 1
    return None


def test_a_good_method_is_taken_within_300_answers_in_most_runs():
    found = [first_decision(Evidence(["a"]), {"a": answers(0.97, 2000, seed)}) for seed in range(40)]
    assert None not in found
    assert np.median(found) < 220
    assert min(found) >= 60


def test_of_several_methods_the_cheapest_good_one_serves():
    methods = ["costly", "middle", "cheap"]
    evidence = Evidence(methods)
    streams = {"costly": answers(0.99, 800, 1), "middle": answers(0.985, 800, 2), "cheap": answers(0.93, 800, 3)}
    first_decision(evidence, streams)
    for drawn in zip(*(one[400:] for one in streams.values()), strict=True):
        evidence.take(dict(zip(methods, drawn, strict=True)))
    assert evidence.decision(BALANCED).method == "middle"
    assert evidence.decision(Quality.FAST).method == "cheap"


def test_methods_outside_the_bounds_are_hardly_ever_taken():
    """Four methods at .945, each stream of 2,000 answers: at most one run in twenty may take any of them."""
    wrong = sum(
        first_decision(
            Evidence(list("abcd")), {name: answers(0.945, 1000, 10 * seed + at) for at, name in enumerate("abcd")}
        )
        is not None
        for seed in range(40)
    )
    assert wrong <= 2


@given(st.lists(st.floats(0, 1), max_size=60), st.floats(0.5, 0.99))
def test_the_capital_is_a_supermartingale_at_the_bound(values, bound):
    """After any values the expected capital of a next one with mean `bound` is not above the capital."""
    test = BettingTest(bound, (1 + bound) / 2)
    for value in values:
        test.take(value)
    after = []
    for value, chance in ((1.0, bound), (0.0, 1 - bound)):
        copy = BettingTest(bound, test.typical, test.log_capital, test.count, test.total, test.squares)
        copy.take(value)
        after.append(chance * np.exp(copy.log_capital - test.log_capital))
    assert sum(after) <= 1 + 1e-9


def test_a_divergence_that_is_too_great_is_not_taken():
    evidence = Evidence(["a"])
    for _ in range(500):
        evidence.take({"a": Compared(1.0, 0.06)})
    assert evidence.decision(BALANCED) is None
    assert evidence.decision(Quality.FAST).method == "a"


def test_drift_is_found_within_200_answers_and_what_is_good_stays():
    found = []
    for seed in range(30):
        evidence = Evidence(["a"], {BALANCED: "a"})
        for number, one in enumerate(answers(0.92, 600, seed)):
            evidence.take({"a": one})
            if evidence.drifted(BALANCED):
                found.append(number + 1)
                break
    assert len(found) == 30
    assert np.median(found) < 150
    evidence = Evidence(["a"], {BALANCED: "a"})
    for one in answers(0.97, 5000, 7):
        evidence.take({"a": one})
    assert evidence.taken_back == 0


def test_what_was_taken_back_has_to_be_proven_again():
    evidence = Evidence(["a"], {BALANCED: "a"})
    assert evidence.decision(BALANCED).prior
    for one in answers(0.8, 200, 1):
        evidence.take({"a": one})
    assert evidence.decision(BALANCED) is None
    taken = first_decision(evidence, {"a": answers(0.99, 1000, 2)})
    assert taken > 60
    assert not evidence.decision(BALANCED).prior


def test_one_tenant_cannot_decide_for_the_others():
    evidence = Evidence(["a"])
    for one in answers(0.99, 40, 1):
        evidence.take({"a": one}, "other")
    before = evidence.means()["a"][0]
    for one in answers(0.99, 2000, 2):
        evidence.take({"a": one}, "loud")
    assert evidence.means()["a"][0] <= 2 * before + 1


def test_hopeless_methods_are_compared_seldom():
    evidence = Evidence(["good", "hopeless"])
    wanted = 0
    for good, bad in zip(answers(0.97, 400, 1), answers(0.6, 400, 2), strict=True):
        names = evidence.wanted()
        assert "good" in names
        wanted += "hopeless" in names
        evidence.take({name: one for name, one in (("good", good), ("hopeless", bad)) if name in names})
    assert 60 < wanted < 120


def test_progress_says_how_many_are_expected():
    evidence = Evidence(["a", "b"])
    assert evidence.progress(BALANCED) == Progress(0, 300)
    for one in answers(0.98, 100, 1):
        evidence.take({"a": one})
    progress = evidence.progress(BALANCED)
    assert progress.answers == 100
    assert 100 < progress.expected < 400
    assert evidence.progress_for(BALANCED, "") == progress
    evidence.take({"a": Compared(1.0, 0.0)}, "other")
    for tenant in ("", "other", "third"):
        assert evidence.progress_for(BALANCED, tenant) is None, "it would count requests of other tenants"


def test_the_state_survives_a_restart_and_damage_does_not_matter(tmp_path, caplog):
    evidence, path = Evidence(["a", "b"], {BALANCED: "b"}), tmp_path / "deep" / "evidence.json"
    for one in answers(0.8, 100, 1):
        evidence.take({"b": one}, "t")
    for one in answers(0.99, 200, 2):
        evidence.take({"a": one}, "t")
    evidence.save(path)
    again = Evidence(["a", "b", "c"], {BALANCED: "b"})
    again.load(path)
    assert (again.means()["a"], again.taken_back) == (evidence.means()["a"], evidence.taken_back)
    assert again.decision(BALANCED) == evidence.decision(BALANCED)
    assert again.drifted(BALANCED)
    whole = path.read_text()
    rng = random.Random(3)
    for _ in range(300):
        damaged = list(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice('{}[],:"0x.-n ')
        path.write_text("".join(damaged)[: rng.randint(0, len(damaged))])
        Evidence(["a"]).load(path)
    for text in ("null", "[]", "3", '{"cases": 4}', json.dumps({"cases": [{"quality": "best"}], "tenants": {}})):
        path.write_text(text)
        fresh = Evidence(["a"])
        fresh.load(path)
        assert fresh.means()["a"][0] == 0
    assert "comparisons begin anew" in caplog.text
    Evidence(["a"]).save(tmp_path / "deep")


@pytest.mark.parametrize("values", [[0.0] * 10, [1.0] * 1000])
def test_a_detector_is_bounded(values):
    detector = DriftDetector(0.95)
    for value in values:
        detector.take(value)
    assert detector.alarmed is (values[0] == 0.0)
