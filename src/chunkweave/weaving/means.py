"""The mean of a chunk's KV over several contexts: a guess at what it is in a context not known yet."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from chunkweave.kv.segment import SegmentKV, SegmentSource
from chunkweave.prompt.contexts import MeanShare
from chunkweave.store.records import ANYTHING, AttentionProfile, SegmentRecord, all_read
from chunkweave.store.store import TieredStore
from chunkweave.types import ChunkId, Context, SegmentId

logger = logging.getLogger(__name__)

_MOST_PENDING = 32
"""Chunks of which some contexts are computed and others not; each takes twice the memory of its bfloat16 KV."""


_MOST_FORGOTTEN = 65_536
"""Chunks of which it is known when they were forgotten."""

_MOST_DONE = 1024
"""Means of which it is known when they were whole."""


_Key = tuple[str, int, ChunkId]
"""A group, of how many contexts, and of which chunk: requests of two clients may name a group alike."""


@dataclass(slots=True, eq=False)
class _Pending:
    """The sums over the contexts so far, in float32."""

    record: SegmentRecord
    kv: torch.Tensor
    profiles: list[AttentionProfile | None]
    contexts: list[Context]
    read: set[ChunkId] = field(default_factory=set)


class Means:
    """Collects KV of chunks by context until a chunk has all of its mean's. Owned by what computes; thread-safe.

    KV is `[layers, 2, tokens, kv_heads, head_dim]`, keys before RoPE, so that a mean over positions means something.
    What is pending is lost with the process; computing it is begun anew then.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[_Key, _Pending] = OrderedDict()
        self._forgotten_s: OrderedDict[ChunkId, float] = OrderedDict()
        self._all_forgotten_s = -inf
        self._done_s: OrderedDict[_Key, float] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Means of which some contexts are computed and others not."""
        return len(self._pending)

    def store_shares(
        self, store: TieredStore[SegmentSource], share: MeanShare, computed: Iterable[tuple[SegmentRecord, SegmentKV]]
    ) -> frozenset[SegmentId]:
        """Take KV of one context, and store what is a mean then; returns the means that are stored.

        No `forget` comes between the two: what it is to remove is pending before it, and in the store after it.
        """
        stored = set()
        for record, kv in computed:
            with self._lock:
                mean = self.take(share, record, kv)
                if mean is not None and store.insert(*mean):
                    stored.add(mean[0].id)
        return frozenset(stored)

    def take(self, share: MeanShare, record: SegmentRecord, kv: SegmentKV) -> tuple[SegmentRecord, SegmentKV] | None:
        """Add one context's KV; returns the mean once there are all of them. The same context twice counts once.

        What was begun before something that it read was forgotten is dropped, and what comes when the mean is whole.
        """
        assert kv.keys_at is None, "keys of different positions have no mean"
        with self._lock:
            read = self._forgotten_s.keys() & {*record.sources, record.chunk_id}
            forgotten_s = max((self._forgotten_s[chunk] for chunk in read), default=-inf)
            done_s = self._done_s.get(_key_of(share, record), -inf)
            if max(forgotten_s, done_s, self._all_forgotten_s) >= share.begun_s:
                return None
            sums = self._add(share, record, kv)
        if sums is None:
            return None
        mean = SegmentKV((sums.kv / len(sums.contexts)).to(kv.kv.dtype))
        attention = mean_profile(sums.profiles)
        whole = sums.record.mean_over(sums.contexts, nbytes=mean.nbytes, attention=attention, read=all_read(sums.read))
        return whole, mean

    def _add(self, share: MeanShare, record: SegmentRecord, kv: SegmentKV) -> _Pending | None:
        key = _key_of(share, record)
        sums = self._pending.get(key)
        if sums is None:
            sums = _Pending(record, kv.kv.detach().to("cpu", torch.float32, copy=True), [], [])
            self._pending[key] = sums
            if len(self._pending) > _MOST_PENDING:
                (group, *_), _ = self._pending.popitem(last=False)
                logger.warning("too many chunks are being computed at once: %s is begun anew", group)
        elif record.context in sums.contexts:
            return None
        else:
            sums.kv += kv.kv.to("cpu")
        sums.contexts.append(record.context)
        sums.profiles.append(record.attention)
        sums.read |= record.sources
        if len(sums.contexts) < share.of:
            return None
        self._done_s[key] = time.monotonic()
        if len(self._done_s) > _MOST_DONE:
            self._done_s.popitem(last=False)
        for other in [one for one in self._pending if one[-1] == record.chunk_id]:  # over contexts that it had before
            del self._pending[other]
        return sums

    def forget(self, chunks: frozenset[ChunkId] | None) -> None:
        """Drop what is pending of `chunks`, or has read one of them; None: all that is pending."""
        with self._lock:
            if chunks is None:
                self._pending.clear()
                self._all_forgotten_s = time.monotonic()
                return
            chunks |= {ANYTHING}
            for chunk in chunks:
                self._forgotten_s[chunk] = time.monotonic()
                self._forgotten_s.move_to_end(chunk)
            while len(self._forgotten_s) > _MOST_FORGOTTEN:
                _, self._all_forgotten_s = self._forgotten_s.popitem(last=False)  # as if it had been all
            for key, sums in list(self._pending.items()):
                if sums.record.chunk_id in chunks or not chunks.isdisjoint(sums.read):
                    del self._pending[key]


def _key_of(share: MeanShare, record: SegmentRecord) -> _Key:
    return share.group, share.of, record.chunk_id


def mean_profile(profiles: Sequence[AttentionProfile | None]) -> AttentionProfile | None:
    """The attention of a mean: masses are means too, over the chunks of all contexts. None if one is not known.

    A chunk of one of M contexts has 1/M of its mass there: CCI's a and b (Cache-Craft eq. 9) are means over the
    contexts then, and beta is the share of all the mass that went to chunks of the new prefix.
    """
    known = [profile for profile in profiles if profile is not None]
    if len(known) < len(profiles) or not known:
        return None
    share = 1.0 / len(known)
    return AttentionProfile(
        chunks=tuple(chunk for one in known for chunk in one.chunks),
        lengths=tuple(length for one in known for length in one.lengths),
        inter=tuple(mass * share for one in known for mass in one.inter),
        intra=sum(one.intra for one in known) * share,
        sink=sum(one.sink for one in known) * share,
        outward=tuple(sum(masses) * share for masses in zip(*(one.outward for one in known), strict=True)),
        received=tuple(sum(masses) * share for masses in zip(*(one.received for one in known), strict=True)),
    )
