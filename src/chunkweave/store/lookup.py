"""What the store holds for one prompt: the input of every reuse method."""

from dataclasses import dataclass

from chunkweave.chunking.prompt import PromptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Span


@dataclass(frozen=True, slots=True)
class PartLookup:
    """One part of a prompt and what is stored for it.

    `exact` is set for the parts of the longest exact prefix (and for none after the first gap);
    `variants` are all stored segments of the chunk, whatever their context, most recently used first.
    """

    part: PromptPart
    span: Span
    exact: SegmentRecord | None = None
    variants: tuple[SegmentRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """A prompt with what is stored for each of its parts."""

    parts: tuple[PartLookup, ...]

    @property
    def prompt_tokens(self) -> int:
        return self.parts[-1].span.stop if self.parts else 0
