"""The mean of a chunk's KV over several contexts: an estimate of its KV in an unknown context."""

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
"""Most unfinished means; each takes twice the memory of its bfloat16 KV."""


_MOST_FORGOTTEN = 65_536
"""Most chunks whose time of removal is recorded."""

_MOST_DONE = 1024
"""Most means whose time of completion is recorded."""


_Key = tuple[str, int, ChunkId]
"""Group, number of contexts, and chunk; two clients may use the same group name."""


@dataclass(slots=True, eq=False)
class _Pending:
    """Sums over the contexts so far, in float32."""

    record: SegmentRecord
    kv: torch.Tensor
    profiles: list[AttentionProfile | None]
    contexts: list[Context]
    read: set[ChunkId] = field(default_factory=set)


class Means:
    """Collects KV of chunks by context until a mean is complete. Owned by the computing component; thread-safe.

    KV is `[layers, 2, tokens, kv_heads, head_dim]`, with keys before RoPE, because keys rotated to different positions
    have no meaningful mean. Unfinished means are lost with the process and computed again.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[_Key, _Pending] = OrderedDict()
        self._forgotten_s: OrderedDict[ChunkId, float] = OrderedDict()
        self._all_forgotten_s = -inf
        self._done_s: OrderedDict[_Key, float] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Number of unfinished means."""
        return len(self._pending)

    def store_shares(
        self, store: TieredStore[SegmentSource], share: MeanShare, computed: Iterable[tuple[SegmentRecord, SegmentKV]]
    ) -> frozenset[SegmentId]:
        """Add KV of one context and store means that are complete; returns the stored means.

        Both happen under one lock, so `forget` finds a mean either pending or in the store.
        """
        stored = set()
        for record, kv in computed:
            with self._lock:
                mean = self.take(share, record, kv)
                if mean is not None and store.insert(*mean):
                    stored.add(mean[0].id)
        return frozenset(stored)

    def take(self, share: MeanShare, record: SegmentRecord, kv: SegmentKV) -> tuple[SegmentRecord, SegmentKV] | None:
        """Add one context's KV; returns the mean when all contexts are there. A repeated context counts once.

        Contributions are dropped if they began before one of their inputs was forgotten, or before the mean was
        completed.
        """
        assert kv.keys_at is None, "keys rotated to different positions have no mean"
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
                logger.warning("too many chunks are computed at once: %s starts over", group)
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
        for older in [pending for pending in self._pending if pending[-1] == record.chunk_id]:
            del self._pending[older]
        return sums

    def forget(self, chunks: frozenset[ChunkId] | None) -> None:
        """Drop pending means of `chunks` and those that have read one of them; None: all."""
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
                _, self._all_forgotten_s = self._forgotten_s.popitem(last=False)  # as if all were forgotten then
            for key, sums in list(self._pending.items()):
                if sums.record.chunk_id in chunks or not chunks.isdisjoint(sums.read):
                    del self._pending[key]


def _key_of(share: MeanShare, record: SegmentRecord) -> _Key:
    return share.group, share.of, record.chunk_id


def mean_profile(profiles: Sequence[AttentionProfile | None]) -> AttentionProfile | None:
    """The attention profile of a mean: mean masses over the chunks of all contexts. None if a profile is missing.

    A chunk of one of M contexts has 1/M of its mass there. So CCI's a and b (Cache-Craft eq. 9) are means over the
    contexts, and beta is the share of all mass on chunks of the new prefix.
    """
    complete = [profile for profile in profiles if profile is not None]
    if len(complete) < len(profiles) or not complete:
        return None
    share = 1.0 / len(complete)
    return AttentionProfile(
        chunks=tuple(chunk for profile in complete for chunk in profile.chunks),
        lengths=tuple(length for profile in complete for length in profile.lengths),
        inter=tuple(mass * share for profile in complete for mass in profile.inter),
        intra=sum(profile.intra for profile in complete) * share,
        sink=sum(profile.sink for profile in complete) * share,
        outward=tuple(sum(masses) * share for masses in zip(*(profile.outward for profile in complete), strict=True)),
    )
