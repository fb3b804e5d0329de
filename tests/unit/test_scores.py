"""Cache-Craft's scores against the formulas written out by hand and by brute force."""

import doctest
from itertools import combinations
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.planning import scores
from chunkweave.planning.scores import (
    coverage,
    order_penalty,
    prefix_overlap,
    recompute_share,
)
from chunkweave.store import records
from chunkweave.store.records import AttentionProfile
from chunkweave.types import ChunkId


def profile_of(chunks: str, inter: tuple[float, ...] = (), *, tokens: int = 2, intra: float = 0.5) -> AttentionProfile:
    """A segment that stood after `chunks` of 4 tokens each and put `inter` on them."""
    share = sum(inter) / tokens
    return AttentionProfile(tuple(map(ChunkId, chunks)), (4,) * len(chunks), inter, intra, 0.1, (share,) * tokens)


def places(chunks: str) -> dict[ChunkId, int]:
    found: dict[ChunkId, int] = {}
    for place, chunk in enumerate(chunks):
        found.setdefault(ChunkId(chunk), place)
    return found


def adjusted_overlap(profile: AttentionProfile, prefix: dict[ChunkId, int]) -> float:
    """The overlap beta' = beta (1 - gamma) (Cache-Craft eq. 8)."""
    return prefix_overlap(profile, prefix) * (1.0 - order_penalty(profile.mass_on, prefix))


@pytest.mark.parametrize("module", [scores, records])
def test_the_worked_examples(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_a_b_and_cci_from_an_attention_matrix():
    """Chunks of 3, 2 and 4 tokens after a sink of 2; the last one's scores, from the weights one by one."""
    rng = Random(1)
    edges = {"sink": range(2), "A": range(2, 5), "B": range(5, 7), "C": range(7, 11)}
    weights = []
    for query in range(11):
        raw = [rng.random() for _ in range(query + 1)]
        weights.append([value / sum(raw) for value in raw] + [0.0] * (10 - query))
    own = edges["C"]
    mass = {name: sum(weights[q][s] for q in own for s in keys) for name, keys in edges.items() if name != "C"}
    intra = sum(weights[q][s] for q in own for s in own if s < q)
    profile = AttentionProfile(
        (ChunkId("A"), ChunkId("B")),
        (3, 2),
        (mass["A"], mass["B"]),
        intra,
        mass["sink"],
        tuple(sum(weights[q][2:7]) for q in own),
    )
    a = mass["A"] / (4 * 3) + mass["B"] / (4 * 2)
    b = intra / 4**2
    assert profile.inter_per_pair == pytest.approx(a)
    assert profile.intra_per_pair == pytest.approx(b)
    assert profile.cci == pytest.approx(1 / (1 + exp(-a / b)))
    diagonal = sum(weights[q][q] for q in own)
    assert sum(profile.inter) + profile.intra + profile.sink + diagonal == pytest.approx(4)
    assert sum(profile.outward) == pytest.approx(sum(profile.inter))


def test_cci_without_mass_of_its_own():
    assert profile_of("A", (0.7,), tokens=1, intra=0.0).cci == 1.0
    assert profile_of("A", (0.0,), tokens=1, intra=0.0).cci == 0.5
    assert profile_of("", (), tokens=1, intra=0.0).cci == 0.5
    assert profile_of("A", (1e-3,), intra=1e-300).cci == 1.0


def test_beta_when_nothing_was_looked_at_counts_chunks():
    assert prefix_overlap(profile_of("AB", (0.0, 0.0)), {ChunkId("A")}) == 0.5


@settings(deadline=None)
@given(old=st.text("ABCDEFG", max_size=8), new=st.text("ABCDEFGXY", max_size=8), data=st.data())
def test_the_overlap_by_brute_force(old, new, data):
    inter = tuple(data.draw(st.lists(st.floats(0.01, 5), min_size=len(old), max_size=len(old))))
    profile = profile_of(old, inter)
    first_old, first_new = list(dict.fromkeys(old)), list(dict.fromkeys(new))
    common = [chunk for chunk in first_old if chunk in new]
    beta = float(not new)
    if old:
        beta = sum(m for chunk, m in zip(old, inter, strict=True) if chunk in new) / sum(inter)
    pairs = list(combinations(common, 2))
    discordant = sum(
        (first_old.index(x) < first_old.index(y)) != (first_new.index(x) < first_new.index(y)) for x, y in pairs
    )
    gamma = discordant / len(pairs) if pairs else 0.0
    assert prefix_overlap(profile, set(map(ChunkId, new))) == pytest.approx(beta)
    assert adjusted_overlap(profile, places(new)) == pytest.approx(beta * (1 - gamma))
    if set(old) <= set(new):
        assert prefix_overlap(profile, set(map(ChunkId, new))) in (0.0, 1.0), "not nearly 1: no token is recomputed"


def test_cfo_scales_and_is_clamped():
    assert recompute_share(0.5, 0.6) == pytest.approx(0.3)
    assert recompute_share(3.0, 0.6) == 1.0
    assert recompute_share(0.0, 1.0) == recompute_share(2.0, 0.0) == 0.0


def test_coverage_is_by_tokens():
    prefix = {ChunkId("A"): 30, ChunkId("B"): 10}
    assert coverage({ChunkId("B"), ChunkId("X")}, prefix) == 0.25
    assert coverage((), prefix) == 0.0
    assert coverage((), {}) == 1.0


def test_rankings_put_the_greatest_first_and_ties_at_the_start():
    profile = AttentionProfile((ChunkId("A"),), (4,), (2.0,), 0.5, 0.0, (0.2, 0.9, 0.2, 0.7))
    assert profile.by_outward == (1, 3, 0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "one length"),
        ({"lengths": (0,)}, "has no tokens"),
        ({"outward": ()}, "each token"),
        ({"intra": -0.1}, "negative or not finite"),
        ({"sink": float("inf")}, "negative or not finite"),
        ({"outward": (float("nan"), 0.0)}, "negative or not finite"),
    ],
)
def test_profiles_that_contradict_themselves(change, message):
    values = {
        "chunks": (ChunkId("A"),),
        "lengths": (4,),
        "inter": (1.0,),
        "intra": 0.5,
        "sink": 0.1,
        "outward": (0.5, 0.5),
    }
    AttentionProfile(**values)
    with pytest.raises(ValueError, match=message):
        AttentionProfile(**{**values, **change})
