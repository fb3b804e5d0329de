"""Copies of the hottest upper nodes on a second memory level, for when the first one is lost (RAGCache §6)."""

from functools import partial

from chunkweave.store.records import segment_id
from chunkweave.store.store import TieredStore
from chunkweave.store.tier import PayloadT


def replicate_hottest(store: TieredStore[PayloadT], number: int) -> int:
    """Copy the `number` hottest upper nodes of the fastest memory level to the next one; returns how many were copied.

    For idle moments: it moves payloads. Without a second level in memory there is nothing to do; what is on disk or
    remote survives anyway.
    """
    memory = [level for level in store.levels if not level.background]
    if len(memory) < 2:
        return 0
    source, target = memory[:2]
    copied = 0
    for path in store.tree.missing_replicas(number, source.name, target.name):
        segment = segment_id(path[-1], path[:-1])
        record, payload = source.record(segment), source.get(segment)
        if record is not None and payload is not None:
            copied += target.insert(record, payload, wanted=partial(source.store.__contains__, segment))
    return copied
