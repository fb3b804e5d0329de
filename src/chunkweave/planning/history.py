"""A conversation's history in the eyes of a reuse method: taken as its answers saw it, and left alone."""

from collections.abc import Mapping
from dataclasses import replace

from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord


def with_history(lookup: PromptLookup, history: Mapping[int, SegmentRecord]) -> PromptLookup:
    """The lookup in which the parts of a conversation's `history`, by place, have their own segment and nothing else.

    What belongs to the longest exact prefix stays that. The KV of the rest is what this conversation's answers were
    decoded over, wherever it was computed: all its tokens count as fresh, so that no method recomputes one of them.
    """
    parts = []
    for place, entry in enumerate(lookup.parts):
        record = history.get(place)
        if record is None or entry.exact is not None or record.token_ids != entry.part.token_ids:
            parts.append(entry)
        else:
            parts.append(replace(entry, variants=(record,), fresh=frozenset(range(len(record)))))
    return PromptLookup(tuple(parts))
