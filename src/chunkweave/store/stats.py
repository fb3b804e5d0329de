"""Counters of a segment store."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now, and what has happened in it since it was made.

    `hits` and `misses` count looked-up prompt parts (system and chunks) for which something, or nothing, was
    stored. `rejected` counts inserts that did not fit or contradicted what is stored, `lost` payloads that
    the tier no longer had, `mismatched` segments whose token ids differed under an equal id.
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
