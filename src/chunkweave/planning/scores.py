"""Cache-Craft's scores: how much a stored chunk depends on its old context, and how much of that is there again.

All are pure. What does not depend on the prompt (a and b of eq. 9, CCI of eq. 11) the profile works out itself, once.
The system part and BOS enter none of them (DESIGN §5.2). A prefix is a set of chunks: one that stands in it twice
counts once, with its mass from both places, and is ordered by its first place.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations, starmap
from operator import gt

from chunkweave.store.records import AttentionProfile
from chunkweave.types import ChunkId


def prefix_overlap(profile: AttentionProfile, prefix: Collection[ChunkId]) -> float:
    """The share beta of the mass on the old prefix that went to chunks which are in the new `prefix` too (eq. 6).

    If the old prefix is empty: 1 if the new one is empty too, else 0 (DESIGN §5.2). If nothing of it was looked at,
    each of its chunks counts the same.

    >>> profile = AttentionProfile((ChunkId("a"), ChunkId("b")), (4, 8), (1.0, 0.5), 0.8, 0.7, (0.9, 0.6), (0.8, 0.0))
    >>> round(prefix_overlap(profile, {ChunkId("a"), ChunkId("c")}), 4)  # 1 / 1.5
    0.6667
    """
    old = profile.mass_on
    if not old:
        return 0.0 if prefix else 1.0
    if len(prefix) < len(old):  # look through the shorter one
        common = [old[chunk] for chunk in prefix if chunk in old]
    else:
        common = [mass for chunk, mass in old.items() if chunk in prefix]
    return sum(common) / profile.inter_total if profile.inter_total else len(common) / len(old)


def order_penalty(old: Iterable[ChunkId], prefix: Mapping[ChunkId, int]) -> float:
    """The order penalty gamma: normalized Kendall tau distance of the m chunks of both prefixes, 0 if m < 2 (eq. 7).

    `old` are the different chunks of the old prefix in their order; `prefix` gives each chunk of the new one its first
    place there.

    >>> a, b, c, d = map(ChunkId, "abcd")
    >>> order_penalty([a, b, c], {a: 0, c: 1, d: 2, b: 3})  # of three pairs (b, c) is discordant
    0.3333333333333333
    """
    places = [prefix[chunk] for chunk in old if chunk in prefix]
    pairs = len(places) * (len(places) - 1) // 2
    return sum(starmap(gt, combinations(places, 2))) / pairs if pairs else 0.0


def adjusted_overlap(profile: AttentionProfile, prefix: Mapping[ChunkId, int]) -> float:
    """The overlap beta' = beta (1 - gamma) (eq. 8); `prefix` gives each chunk of the new prefix its first place there.

    1 does not mean exact: the new prefix may have chunks that the old one had not (`coverage` tells).

    >>> profile = AttentionProfile((ChunkId("a"), ChunkId("b")), (4, 8), (1.0, 0.5), 0.8, 0.7, (0.9, 0.6), (0.8, 0.0))
    >>> adjusted_overlap(profile, {ChunkId("a"): 0, ChunkId("c"): 1, ChunkId("b"): 2})
    1.0
    >>> adjusted_overlap(profile, {ChunkId("b"): 0, ChunkId("a"): 1})  # all are there, all pairs discordant
    0.0
    """
    return prefix_overlap(profile, prefix) * (1.0 - order_penalty(profile.mass_on, prefix))


def fix_overhead(alpha: float, impact: float) -> float:
    """Cache fix overhead CFO: the share of a chunk to recompute, `impact` being CCI (1 - beta') (eq. 12, clamped).

    >>> fix_overhead(2.0, 0.75 * (1 - 0.75))
    0.375
    >>> fix_overhead(3.0, 0.7)
    1.0
    """
    return min(1.0, alpha * impact)


def coverage(old: Iterable[ChunkId], prefix: Mapping[ChunkId, int]) -> float:
    """Share of the new prefix's tokens that the `old` one had too; 1 if the new one is empty.

    `prefix` gives each chunk of the new prefix its tokens. Not in the paper: beta does not see chunks that came
    before a chunk only now (DESIGN §5.2).

    >>> coverage({ChunkId("a")}, {ChunkId("a"): 30, ChunkId("b"): 10})
    0.75
    """
    tokens = sum(prefix.values())
    return sum(map(prefix.__getitem__, prefix.keys() & old)) / tokens if tokens else 1.0
