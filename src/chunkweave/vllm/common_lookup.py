"""What several ranks have looked up, each in its own tiers, made into one lookup that all share. Torch-free."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from chunkweave.planning.pruning import without
from chunkweave.store.lookup import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId

Known = tuple[SegmentId, bool]
"""A segment, and whether it is exact."""


def known_by(found: PromptLookup) -> set[Known]:
    """What one rank has."""
    return {(record.id, record.exact) for record in _records(found)}


def held_by_all(found: PromptLookup, ranks: Sequence[Collection[Known]]) -> PromptLookup:
    """The lookup as if only that were stored which every rank has, and has as exact (or not) as the others."""
    everywhere = set.intersection(*map(set, ranks))
    return without(found, {record.id for record in _records(found) if (record.id, record.exact) not in everywhere})


def in_order(found: PromptLookup) -> PromptLookup:
    """The same with variants by id: which was used last is not the same on every rank."""
    parts = (replace(part, variants=tuple(sorted(part.variants, key=lambda r: r.id))) for part in found.parts)
    return PromptLookup(tuple(parts))


def digest_of(what: object) -> int:
    """62 bits of what `repr` says; equal if that is, which sets do not promise."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest()) >> 2


def _records(found: PromptLookup) -> list[SegmentRecord]:
    records = [record for part in found.parts for record in part.variants]
    return records + [part.exact for part in found.parts if part.exact is not None]
