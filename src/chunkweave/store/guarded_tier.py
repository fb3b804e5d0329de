"""A store's tier, its failures to list and to delete noted instead of raised."""

import logging
from collections.abc import Sequence
from typing import Generic

from chunkweave.store.records import SegmentRecord
from chunkweave.store.shared import SharedTier
from chunkweave.store.tier import PayloadT, Tier
from chunkweave.types import SegmentId

logger = logging.getLogger(__name__)


class GuardedTier(Generic[PayloadT]):
    """What a tier holds, as far as it can be learnt, and what it would not delete. Called without the store's lock.

    A tier that is `shared` is filled and emptied by other processes too: a payload that is not there (any more, or just
    now) is no broken invariant, and what this process left there in time is not asked for again.
    """

    def __init__(self, tier: Tier[PayloadT], *, shared: bool) -> None:
        self.tier = tier
        self.shared = shared
        self.finder = tier if isinstance(tier, SharedTier) else None
        """Finds segments that were never looked up here; None if the tier cannot be asked."""
        self.undeletable: set[SegmentId] = set()
        """Dropped here, but the tier could not delete them."""

    def held_bytes(self, record: SegmentRecord) -> int:
        """Bytes that the tier holds of a record's payload, 0 if none."""
        return record.nbytes if self.shared else self.tier.nbytes(record.id)

    def listed(self) -> list[SegmentRecord]:
        """Everything held; nothing if the tier cannot say."""
        try:
            return list(self.tier.records())
        except OSError as error:
            logger.warning("the tier cannot say what it holds: %s", error)
            return []

    def found(self, segments: Sequence[SegmentId]) -> list[SegmentRecord]:
        """Records of those of `segments` that are held now; none if the tier cannot be asked."""
        try:
            return [] if self.finder is None else list(self.finder.find(segments))
        except OSError as error:
            logger.warning("the tier cannot be asked for segments to delete: %s", error)
            return []

    def delete(self, segment: SegmentId) -> None:
        """Delete a payload, or remember that the tier would not."""
        try:
            self.tier.delete(segment)
        except OSError as error:
            self.undeletable.add(segment)
            logger.warning("segment %s cannot be deleted from its tier: %s", segment, error)
