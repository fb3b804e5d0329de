"""Cache-Craft's scores: how much a stored chunk depends on its old context, and how much of that context is present
again.

All functions are pure. Values that do not depend on the prompt (a and b of eq. 9, CCI of eq. 11) are properties of the
profile, computed once. The system part and BOS are not counted. A prefix is a set of chunks: a duplicate counts once,
with the mass of both occurrences, at its first index.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, pairwise, starmap
from operator import gt

from chunkweave.store.records import AttentionProfile
from chunkweave.types import ChunkId


def prefix_overlap(profile: AttentionProfile, prefix: Collection[ChunkId]) -> float:
    """The share beta of the mass on the old prefix that is on chunks of the new `prefix` too (eq. 6).

    If the old prefix is empty: 1 if the new one is empty too, else 0. If there is no mass on it, each of its chunks
    counts the same.

    >>> profile = AttentionProfile((ChunkId("a"), ChunkId("b")), (4, 8), (1.0, 0.5), 0.8, 0.7, (0.9, 0.6))
    >>> round(prefix_overlap(profile, {ChunkId("a"), ChunkId("c")}), 4)  # 1 / 1.5
    0.6667
    """
    old = profile.mass_on
    if not old:
        return 0.0 if prefix else 1.0
    if len(prefix) < len(old):  # iterate over the shorter one
        common = [old[chunk] for chunk in prefix if chunk in old]
    else:
        common = [mass for chunk, mass in old.items() if chunk in prefix]
    return sum(common) / profile.inter_total if profile.inter_total else len(common) / len(old)


def order_penalty(old: Iterable[ChunkId], prefix: Mapping[ChunkId, int]) -> float:
    """The order penalty gamma: normalized Kendall tau distance of the m chunks in both prefixes, 0 if m < 2 (eq. 7).

    `old` are the distinct chunks of the old prefix in order; `prefix` maps each chunk of the new one to its first
    index.

    >>> a, b, c, d = map(ChunkId, "abcd")
    >>> order_penalty([a, b, c], {a: 0, c: 1, d: 2, b: 3})  # of three pairs (b, c) is discordant
    0.3333333333333333
    """
    places = [prefix[chunk] for chunk in old if chunk in prefix]
    pairs = len(places) * (len(places) - 1) // 2
    return sum(starmap(gt, combinations(places, 2))) / pairs if pairs else 0.0


def recompute_share(alpha: float, impact: float) -> float:
    """Cache fix overhead CFO: the share of a chunk to recompute, with `impact` = CCI (1 - beta') (eq. 12, clamped).

    >>> recompute_share(2.0, 0.75 * (1 - 0.75))
    0.375
    >>> recompute_share(3.0, 0.7)
    1.0
    """
    return min(1.0, alpha * impact)


def coverage(old: Iterable[ChunkId], prefix: Mapping[ChunkId, int]) -> float:
    """Share of the new prefix's tokens that the `old` one also had; 1 if the new one is empty.

    `prefix` maps each chunk of the new prefix to its number of tokens. Not in the paper: beta ignores chunks that are
    only in the new prefix.

    >>> coverage({ChunkId("a")}, {ChunkId("a"): 30, ChunkId("b"): 10})
    0.75
    """
    tokens = sum(prefix.values())
    return sum(map(prefix.__getitem__, prefix.keys() & old)) / tokens if tokens else 1.0


FOCUS_WINDOW = 3
"""Consecutive layers with the same focused set after which it is accepted (w of Algorithm 1)."""

LEAST_CHUNKS = 3
"""With fewer chunks there are too few gaps to tell focused chunks from others."""


def focused_by_gap(mass: Sequence[float]) -> frozenset[int]:
    """Indices of the focused chunks: those above the greatest gap of `mass` `[chunks]`, cumulated over layers.

    The plain reading of Algorithm 1; as printed, the first gap is never the cut (docs/papers.md). Of equal gaps the
    first is the cut. Without a gap, or with fewer than three chunks, all are focused.

    >>> sorted(focused_by_gap([0.1, 0.9, 0.5, 0.8]))
    [1, 2, 3]
    """
    order = sorted(range(len(mass)), key=lambda index: (-mass[index], index))
    gaps = [mass[above] - mass[below] for above, below in pairwise(order)]
    if len(mass) < LEAST_CHUNKS or not sum(gaps):
        return frozenset(order)
    return frozenset(order[: 1 + gaps.index(max(gaps))])


FindFocused = Callable[[Sequence[float]], frozenset[int]]
"""Cumulated mass of each chunk -> indices of the focused chunks."""


class FocusTracker:
    """Tracks the question's attention from layer to layer until the set of focused chunks is stable."""

    def __init__(self, window: int = FOCUS_WINDOW, focused: FindFocused = focused_by_gap) -> None:
        """`window` is the number of consecutive layers that must agree on the result of `focused`.

        Raises:
            ValueError: a window below 1.
        """
        if window < 1:
            raise ValueError(f"a focused set must hold for at least one layer, not {window}")
        self._window = window
        self._focused = focused
        self._cumulated: list[float] = []
        self._last: frozenset[int] | None = None
        self._layers_in_a_row = 0

    def update(self, layer_mass: Sequence[float]) -> frozenset[int] | None:
        """Add one layer's attention mass of the question on each chunk, `[chunks]`.

        Returns the focused chunks' indices once the last `window` layers agree on them, None until then. Always None
        with fewer than three chunks.

        Raises:
            ValueError: the number of chunks differs from earlier layers.
        """
        if self._last is not None and len(layer_mass) != len(self._cumulated):
            raise ValueError(f"attention mass on {len(layer_mass)} chunks after that on {len(self._cumulated)}")
        cumulated = self._cumulated or [0.0] * len(layer_mass)
        self._cumulated = [total + more for total, more in zip(cumulated, layer_mass, strict=True)]
        focused = self._focused(self._cumulated)
        self._layers_in_a_row = self._layers_in_a_row + 1 if focused == self._last else 1
        self._last = focused
        stable = len(layer_mass) >= LEAST_CHUNKS and self._layers_in_a_row >= self._window
        return focused if stable else None
