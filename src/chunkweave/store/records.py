"""What the store knows of a segment, without its tensors, and what it counts."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import exp, isfinite
from typing import Self

from chunkweave.prompt.parts import is_mean, is_neutral, mean_id
from chunkweave.types import MOST_SOURCE_CHARACTERS, ChunkId, Context, SegmentId

LEAST_CCI = 0.5
"""CCI of a segment that looked at no chunk before it, such as one computed alone: the sigmoid of 0."""


@dataclass(frozen=True)  # no slots: what follows from the masses alone is worked out once, when it is first asked for
class AttentionProfile:
    """Attention mass of one segment's tokens, averaged over the captured heads and layers.

    `chunks` are the chunks before the segment in its prompt, in order, with `lengths` in tokens; a chunk that stood
    there twice is listed twice. `inter[j]` is the mass that all tokens of the segment together put on `chunks[j]`
    (eq. 3), `intra` on earlier tokens of their own segment, the diagonal left out (eq. 4), `sink` on what is no chunk:
    BOS and the system part, which enter no score. `outward` and `received` hold one number a token: its mass on all of
    `chunks` (the ranking of eq. 14), and what the segment's later tokens put on it (the ranking of H2O).

    Raises:
        ValueError: `chunks`, `lengths` and `inter`, or `outward` and `received`, differ in length; a chunk has no
            tokens; a mass is negative or not finite.

    >>> profile = AttentionProfile((ChunkId("a"), ChunkId("b")), (4, 8), (1.0, 0.5), 0.8, 0.7, (0.9, 0.6), (0.8, 0.0))
    >>> profile.inter_per_pair, profile.intra_per_pair  # 1/(2*4) + .5/(2*8), .8/2**2
    (0.15625, 0.2)
    >>> round(profile.cci, 4)  # the sigmoid of .15625/.2
    0.6859
    """

    chunks: tuple[ChunkId, ...]
    lengths: tuple[int, ...]
    inter: tuple[float, ...]
    intra: float
    sink: float
    outward: tuple[float, ...]
    received: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.chunks) == len(self.lengths) == len(self.inter):
            raise ValueError("an attention profile needs one length and one inter mass for each chunk")
        if not 0 < len(self.outward) == len(self.received):
            raise ValueError("an attention profile needs an outward and a received mass for each token")
        if min(self.lengths, default=1) < 1:
            raise ValueError("a chunk in an attention profile has no tokens")
        masses = (*self.inter, self.intra, self.sink, *self.outward, *self.received)
        if not isfinite(sum(masses)) or min(masses) < 0.0:
            raise ValueError("an attention profile has a mass that is negative or not finite")

    @property
    def tokens(self) -> int:
        """Tokens of the segment."""
        return len(self.outward)

    @cached_property
    def mass_on(self) -> Mapping[ChunkId, float]:
        """Mass on each different chunk before the segment, in the order in which they first stood there."""
        mass: dict[ChunkId, float] = {}
        for chunk, more in zip(self.chunks, self.inter, strict=True):
            mass[chunk] = mass.get(chunk, 0.0) + more
        return mass

    @cached_property
    def inter_total(self) -> float:
        """Mass on all chunks before the segment: the sum of `mass_on`."""
        return sum(self.mass_on.values())

    @cached_property
    def inter_per_pair(self) -> float:
        """The mean mass of a pair of tokens, summed over the chunks before the segment: a of eq. 9."""
        pairs = zip(self.inter, self.lengths, strict=True)
        return sum((mass / (self.tokens * length) for mass, length in pairs), 0.0)

    @cached_property
    def intra_per_pair(self) -> float:
        """The same of the segment with itself: b of eq. 9."""
        return self.intra / self.tokens**2

    @cached_property
    def cci(self) -> float:
        """Cache context impact, from 0.5 (looked at no chunk before it) to 1: the sigmoid of a/b (eq. 11).

        A segment without intra mass, such as one of a single token, has nothing of its own: 1 if it looked at a chunk
        at all, and 0.5 if it did not (then a = 0 decides, not 0/0).
        """
        if not self.inter_per_pair:
            return LEAST_CCI
        return 1.0 / (1.0 + exp(-self.inter_per_pair / self.intra_per_pair)) if self.intra_per_pair else 1.0

    @cached_property
    def by_outward(self) -> tuple[int, ...]:
        """Token indices by falling `outward`, ties from the start on."""
        return _falling(self.outward)

    @cached_property
    def by_received(self) -> tuple[int, ...]:
        """Token indices by falling `received`, ties from the start on."""
        return _falling(self.received)


def _falling(mass: Sequence[float]) -> tuple[int, ...]:
    return tuple(sorted(range(len(mass)), key=mass.__getitem__, reverse=True))


class Mark(StrEnum):
    """What a follower of a store gets to know of a chunk, beside that something of it is stored."""

    MEAN = "mean"
    """A mean is."""
    CONTEXT = "context"
    """A mean's contexts can be woven from what is (`SegmentRecord.serves_contexts`)."""


def marked(chunk: ChunkId, mark: Mark) -> SegmentId:
    """What takes the place of a segment's id where a store says that this is true of a chunk."""
    return SegmentId(f"{chunk}:{mark}")


LEAST_READ = 32
"""Most ids beside its contexts that a mean has read which another mean is computed behind."""


def segment_id(chunk_id: ChunkId, context: Context) -> SegmentId:
    """Id of the segment of `chunk_id` computed in `context` (BLAKE2b-128, 32 hex digits)."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*context, chunk_id):
        digest.update(part.encode("ascii"))
    digest.update(len(context).to_bytes(4, "little"))
    return SegmentId(digest.hexdigest())


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One stored segment: the KV of `token_ids`, computed after the parts named in `context`.

    `exact` means that every token before it was exact too when it was computed, so that its KV equals
    what full prefill gives (up to rounding). Only exact segments may be in the path index. `attention` is what
    its tokens looked at then, if somebody measured it. `owner` is the tenant that it was computed for. Of a `source`
    as much is kept as of a chunk's. `generation` counts how often a part of its tokens was recomputed in a new context
    since all of them were computed in one: 0 where all KV is of this context, n + 1 for a variant that was made from
    one of generation n.

    A mean is over the KV of the chunk in each of `contexts` (`weaving.means`); its `context` is a name for these. Of
    what was read beside the contexts while it was computed, `read` are the ids: what went into the KV that it was woven
    from or computed behind, or `ANYTHING`. `sources` are all of these ids.

    Raises:
        ValueError: the attention profile is of another number of tokens, or has chunks that are not in the contexts;
            the generation is negative, or an exact segment has one, or is a mean, or has read more than its context.
    """

    id: SegmentId
    chunk_id: ChunkId
    context: Context
    token_ids: tuple[int, ...]
    exact: bool
    nbytes: int
    source: str = ""
    attention: AttentionProfile | None = field(default=None, hash=False)
    owner: str = field(default="", compare=False)
    generation: int = 0
    contexts: tuple[Context, ...] = ()
    read: tuple[ChunkId, ...] = ()

    def __post_init__(self) -> None:
        if len(self.source) > MOST_SOURCE_CHARACTERS:
            object.__setattr__(self, "source", self.source[:MOST_SOURCE_CHARACTERS])
        if self.generation < 0 or (self.exact and self.generation):
            raise ValueError(f"an {'exact' if self.exact else 'inexact'} segment of generation {self.generation}")
        if self.exact and (self.contexts or self.read):
            raise ValueError("an exact segment is no mean, and has read nothing but its context")
        if is_mean(self.context) != bool(self.contexts) or (
            self.contexts and self.context != (mean_id(self.contexts),)
        ):
            raise ValueError("the context of a mean is named after its contexts")
        if self.attention is None:
            return
        if self.attention.tokens != len(self.token_ids):
            raise ValueError(f"an attention profile of {self.attention.tokens} tokens for {len(self.token_ids)}")
        if not set(self.attention.chunks) <= self.sources:
            raise ValueError("an attention profile has chunks that are not in the segment's context")

    @classmethod
    def of(
        cls,
        chunk_id: ChunkId,
        context: Context,
        token_ids: tuple[int, ...],
        *,
        exact: bool,
        nbytes: int,
        source: str = "",
        attention: AttentionProfile | None = None,
        owner: str = "",
        generation: int = 0,
        read: Iterable[ChunkId] = (),
    ) -> Self:
        """A record whose id follows from chunk and context."""
        return cls(
            segment_id(chunk_id, context),
            chunk_id,
            context,
            token_ids,
            exact,
            nbytes,
            source,
            attention,
            owner,
            generation,
            read=tuple(sorted({*read} - {*context})),
        )

    def mean_over(
        self, contexts: Iterable[Context], *, nbytes: int, attention: AttentionProfile | None, read: Iterable[ChunkId]
    ) -> Self:
        """The record of a mean over KV of this record's chunk in `contexts`."""
        contexts = tuple(sorted(contexts))
        context = (mean_id(contexts),)
        return replace(
            self,
            id=segment_id(self.chunk_id, context),
            context=context,
            exact=False,
            nbytes=nbytes,
            attention=attention,
            generation=0,
            contexts=contexts,
            read=tuple(sorted({*read}.difference(*contexts))),
        )

    @property
    def sources(self) -> frozenset[ChunkId]:
        """Ids of all that was read while it was computed, but for the chunk itself."""
        return frozenset(self.read).union(*(self.contexts or (self.context,)))

    @property
    def path(self) -> tuple[ChunkId, ...]:
        """The chunks that an exact prefix ending with this segment runs over."""
        return (*self.context, self.chunk_id)

    @property
    def alone(self) -> bool:
        """Computed with nothing before it (but BOS)."""
        return not self.context

    @property
    def neutral(self) -> bool:
        """Computed behind neutral passages."""
        return bool(self.context) and is_neutral(self.context[-1])

    @property
    def serves_contexts(self) -> bool:
        """Whether contexts of means are woven from it: what has read a mean is removed with all that the mean read."""
        return self.neutral or (bool(self.contexts) and len(self.read) <= LEAST_READ)

    @property
    def marks(self) -> tuple[SegmentId, ...]:
        """What a follower of the store hears of beside chunk and segment; see `marked`."""
        of = {Mark.MEAN: bool(self.contexts), Mark.CONTEXT: self.serves_contexts}
        return tuple(marked(self.chunk_id, mark) for mark, is_so in of.items() if is_so)

    @property
    def document(self) -> str:
        """The document of a chunk called `document#3`, or of one that is its whole document."""
        name, _, number = self.source.rpartition("#")
        return name if name and number.isdecimal() else self.source

    def __len__(self) -> int:
        return len(self.token_ids)


MOST_READ = 256
"""Ids that a record lists beside its contexts. Chains of woven prompts read ever more."""

ANYTHING = ChunkId(b"any!".hex() + "0" * 24)
"""In place of all ids that a record does not list: it is removed with any chunk."""


def all_read(chunks: Iterable[ChunkId]) -> frozenset[ChunkId]:
    """The ids that a record is to list; too many are `ANYTHING`."""
    found = frozenset(chunks)
    return found if len(found) <= MOST_READ and ANYTHING not in found else frozenset({ANYTHING})


def union(*groups: Iterable[SegmentRecord]) -> tuple[SegmentRecord, ...]:
    """Each segment of `groups` once: the exact record before an inexact one, else the one that comes first."""
    best: dict[SegmentId, SegmentRecord] = {}
    for record in (record for group in groups for record in group):
        held = best.get(record.id)
        if held is None or (record.exact and not held.exact):
            best[record.id] = record
    return tuple(best.values())


@dataclass(frozen=True, slots=True)
class Removal:
    """What came of removing segments: how many copies are gone, and records of those that the tier would not delete.

    Unless `complete` the tier could not be asked what it holds, and may have more of them.
    """

    removed: int
    left: tuple[SegmentRecord, ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now, and what has happened in it since it was made.

    `hits` and `misses` count looked-up prompt parts (system and chunks) for which something, or nothing, was
    stored. `rejected` counts inserts that did not fit or contradicted what is stored, `lost` payloads that
    the tier no longer had, `mismatched` segments whose token ids differed under an equal id, `undeletable` payloads
    that were dropped here but that the tier could not delete.
    """

    segments: int = 0
    chunks: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    evictions: int = 0
    rejected: int = 0
    lost: int = 0
    mismatched: int = 0
    undeletable: int = 0


@dataclass(frozen=True, slots=True)
class TieredStats(StoreStats):
    """A hierarchy's totals, and `levels` by name.

    `segments` and `chunks` count what is anywhere, once; `bytes`, `inserts`, `evictions`, `rejected`, `lost`,
    `mismatched` and `undeletable` sum over the levels. `promotions` are copies to a faster level, `demotions`
    evictions from memory that went on to a slower one. Of the writes in the background `writes_queued` were accepted,
    `writes_skipped` found no room in the queue or a paused level, `writes_failed` raised. `expired` outlived
    their time. `variants` says how many chunks have 1, 2, ... variants (Cache-Craft Figure 25), `variants_dropped` how
    many were dropped because there were too many.
    """

    promotions: int = 0
    demotions: int = 0
    expired: int = 0
    writes_queued: int = 0
    writes_done: int = 0
    writes_skipped: int = 0
    writes_rejected: int = 0
    writes_failed: int = 0
    variants: Mapping[int, int] = field(default_factory=dict)
    variants_dropped: int = 0
    levels: Mapping[str, StoreStats] = field(default_factory=dict)


class Ages:
    """When each segment was computed, in seconds since the epoch; a segment moved between levels does not get younger.

    For what was stored before this process `stored_at_s` is called once; if that returns None, it counts from now, and
    so does what was computed while the clock was ahead. Not thread-safe; interrupted at any point, a segment may at
    worst get older.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        stored_at_s: Callable[[SegmentId], float | None],
        ageless: frozenset[SegmentId] = frozenset(),
    ) -> None:
        """No ages yet; `ageless` segments never expire."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored_at_s = stored_at_s
        self._ageless = ageless
        self._born_s: dict[SegmentId, float] = {}

    def born(self, segment: SegmentId) -> None:
        """It was computed now."""
        self._born_s[segment] = self._clock()

    def expired(self, segments: Iterable[SegmentId], now_s: float | None = None) -> list[SegmentId]:
        """Those of `segments` that have outlived their time."""
        oldest_s = (self._clock() if now_s is None else now_s) - self._ttl_s
        return [s for s in segments if s not in self._ageless and self._since_s(s) <= oldest_s]

    def keep_only(self, segments: Iterable[SegmentId]) -> None:
        """Forget all others."""
        kept = set(segments)
        self._born_s = {segment: born_s for segment, born_s in tuple(self._born_s.items()) if segment in kept}

    def _since_s(self, segment: SegmentId) -> float:
        now_s = self._clock()
        born_s = self._born_s[segment] if segment in self._born_s else self._stored_at_s(segment)
        born_s = self._born_s[segment] = now_s if born_s is None else min(born_s, now_s)
        return born_s


class Sightings:
    """Counters by segment, the least recently seen forgotten first. Not thread-safe."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[SegmentId, int] = OrderedDict()

    def see(self, segment: SegmentId) -> int:
        """Count one more sighting; returns how many there are."""
        count = self._counts.get(segment, 0) + 1
        self._counts[segment] = count
        self._counts.move_to_end(segment)
        if len(self._counts) > self._capacity:
            self._counts.popitem(last=False)
        return count

    def count(self, segment: SegmentId) -> int:
        """Sightings so far, 0 if it is unknown or forgotten."""
        return self._counts.get(segment, 0)

    def forget(self, segment: SegmentId) -> int:
        """Begin anew; returns the sightings so far."""
        return self._counts.pop(segment, 0)
