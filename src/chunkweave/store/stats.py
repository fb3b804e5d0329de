"""Counters of a segment store."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now, and what has happened in it since it was made.

    `hits` and `misses` count looked-up prompt parts (system and chunks) for which something, or nothing, was
    stored. `rejected` counts inserts that did not fit or contradicted what is stored, `lost` payloads that
    the tier no longer had, `mismatched` segments whose token ids differed under an equal id, `undeletable` payloads
    that were dropped here but that the tier could not delete.
    """

    segments: int = 0
    chunks: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    evictions: int = 0
    rejected: int = 0
    lost: int = 0
    mismatched: int = 0
    undeletable: int = 0


@dataclass(frozen=True, slots=True)
class TieredStats(StoreStats):
    """A hierarchy's totals, and `levels` by name.

    `segments` and `chunks` count what is anywhere, once; `bytes`, `inserts`, `evictions`, `rejected`, `lost`,
    `mismatched` and `undeletable` sum over the levels. `promotions` are copies to a faster level, `demotions`
    evictions from memory that went on to a slower one. Of the writes in the background `writes_queued` were accepted,
    `writes_skipped` found no room in the queue or a paused level, `writes_failed` raised. `expired` outlived
    their time. `variants` says how many chunks have 1, 2, ... variants (Cache-Craft Figure 25), `variants_dropped` how
    many were dropped because there were too many.
    """

    promotions: int = 0
    demotions: int = 0
    expired: int = 0
    writes_queued: int = 0
    writes_done: int = 0
    writes_skipped: int = 0
    writes_rejected: int = 0
    writes_failed: int = 0
    variants: Mapping[int, int] = field(default_factory=dict)
    variants_dropped: int = 0
    levels: Mapping[str, StoreStats] = field(default_factory=dict)
