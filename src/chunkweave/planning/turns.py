"""What earlier turns of a conversation leave for the next one: chunks whose KV stays as they wove it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from chunkweave.chunking.prompt import Prompt
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord, segment_id
from chunkweave.types import SegmentId


@dataclass(frozen=True, slots=True)
class KeptPart:
    """One part as the turns so far have woven it. `fresh` are the offsets of the tokens that were computed in it."""

    record: SegmentRecord
    fresh: frozenset[int]


def with_kept(lookup: PromptLookup, prompt: Prompt, kept: Mapping[SegmentId, KeptPart]) -> PromptLookup:
    """The lookup with `kept` parts in place of what is stored, but for those that are exact anyway.

    A part is taken only behind the same parts as then: its id names chunk and context. Turns that were cut from the
    beginning of a conversation so end the validity of all that follows.
    """
    parts = []
    for entry, context in zip(lookup.parts, prompt.contexts(), strict=True):
        own = kept.get(segment_id(entry.part.id, context)) if entry.part.id is not None else None
        if own is None or entry.exact is not None or own.record.token_ids != entry.part.token_ids:
            parts.append(entry)
        else:
            parts.append(replace(entry, variants=(own.record,), fresh=own.fresh))
    return PromptLookup(tuple(parts))
