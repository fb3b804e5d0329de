"""The counters of a whole hierarchy."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.stats import TieredStats
from chunkweave.store.tier import PayloadT
from chunkweave.store.writer import WriterStats

_SUMMED = ("bytes", "inserts", "evictions", "rejected", "lost", "mismatched", "undeletable")


def total(
    own: TieredStats, levels: Iterable[Level[PayloadT]], records: Sequence[SegmentRecord], writer: WriterStats
) -> TieredStats:
    """`own` counters of a hierarchy, with its levels', its writer's, and what is held now."""
    by_name = {level.name: level.store.stats for level in levels}
    sums = {name: getattr(own, name) + sum(getattr(stats, name) for stats in by_name.values()) for name in _SUMMED}
    variants = Counter(record.chunk_id for record in records)
    return replace(
        own,
        segments=len(records),
        chunks=len(variants),
        variants=dict(sorted(Counter(variants.values()).items())),
        writes_queued=writer.queued,
        writes_done=writer.written,
        writes_skipped=own.writes_skipped + writer.skipped,
        writes_rejected=writer.rejected,
        writes_failed=writer.failed,
        levels=by_name,
        **sums,
    )
