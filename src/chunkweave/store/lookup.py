"""What the store holds for one prompt: the input of every reuse method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkweave.chunking.prompt import Prompt, PromptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.types import SegmentId, Span


@dataclass(frozen=True, slots=True)
class PartLookup:
    """One part of a prompt and what is stored for it.

    `exact` is set for the parts of the longest exact prefix (and for none after the first gap);
    `variants` are all stored segments of the chunk, whatever their context, most recently used first. `fresh` are the
    offsets of its tokens whose KV was already computed behind these very parts, in an earlier turn of a conversation.
    """

    part: PromptPart
    span: Span
    exact: SegmentRecord | None = None
    variants: tuple[SegmentRecord, ...] = ()
    fresh: frozenset[int] = frozenset()

    @property
    def settled(self) -> bool:
        """Whether it is reused as it is: a conversation's history, of which no token is to be recomputed."""
        return self.exact is None and len(self.fresh) == len(self.part) and bool(self.variants)


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """A prompt with what is stored for each of its parts."""

    parts: tuple[PartLookup, ...]

    @property
    def prompt_tokens(self) -> int:
        return self.parts[-1].span.stop if self.parts else 0

    @property
    def hits(self) -> int:
        """Parts with an id for which something is stored."""
        return sum(bool(part.variants) for part in self.parts)

    @property
    def misses(self) -> int:
        """Parts with an id for which nothing is stored."""
        return sum(part.part.id is not None and not part.variants for part in self.parts)

    def segments(self) -> tuple[SegmentId, ...]:
        """Every segment named, each once: in prompt order, the exact one of a part first."""
        named: dict[SegmentId, None] = {}
        for part in self.parts:
            if part.exact is not None:
                named[part.exact.id] = None
            named.update((record.id, None) for record in part.variants)
        return tuple(named)


def look_up(
    prompt: Prompt,
    path: Sequence[SegmentId],
    variants_of: Callable[[PromptPart], tuple[SegmentRecord, ...]],
) -> PromptLookup:
    """The lookup of `prompt`, given where its exact prefix may run and what is stored of a part.

    `path` has one id for each part that has one, in prompt order; it may end early. The exact prefix goes on while
    the id at that place is among the part's variants and exact.
    """
    left = iter(path)
    unbroken = True
    parts: list[PartLookup] = []
    for part, span in zip(prompt.parts, prompt.spans(), strict=True):
        if part.id is None:
            parts.append(PartLookup(part, span))
            continue
        variants = variants_of(part)
        here = next(left, None) if unbroken else None
        exact = next((record for record in variants if record.id == here and record.exact), None)
        unbroken = exact is not None
        parts.append(PartLookup(part, span, exact, variants))
    return PromptLookup(tuple(parts))
