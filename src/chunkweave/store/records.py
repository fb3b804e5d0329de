"""Records of segments, without tensors, and the store's counters."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import exp, isfinite
from typing import Self

import numpy as np
import numpy.typing as npt

from chunkweave.prompt.parts import FOUND, NEW, PartKind, PromptPart, chunk_id, is_mean, is_neutral, mean_id
from chunkweave.prompt.runs import GRAM, Ids, gram_hashes
from chunkweave.types import MOST_SOURCE_CHARACTERS, ChunkId, Context, SegmentId

LEAST_CCI = 0.5
"""CCI of a segment that attended to no earlier chunk, such as one computed alone: the sigmoid of 0."""


@dataclass(frozen=True)  # no slots: cached properties compute derived values once, on first use
class AttentionProfile:
    """Attention mass of one segment's tokens, averaged over the captured heads and layers.

    `chunks` are the chunks before the segment in its prompt, in order, with `lengths` in tokens; a chunk that occurred
    twice is listed twice. `inter[j]` is the mass that all tokens of the segment together put on `chunks[j]` (eq. 3 of
    Cache-Craft), `intra` the mass on earlier tokens of their own segment, without the diagonal (eq. 4), `sink` the mass
    on BOS and the system part, which enter no score. `outward` holds each token's mass on all of `chunks` (the ranking
    of eq. 14).

    Raises:
        ValueError: `chunks`, `lengths` and `inter` differ in length; there is no token; a chunk has none; a mass is
            negative or not finite.

    >>> profile = AttentionProfile((ChunkId("a"), ChunkId("b")), (4, 8), (1.0, 0.5), 0.8, 0.7, (0.9, 0.6))
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

    def __post_init__(self) -> None:
        if not len(self.chunks) == len(self.lengths) == len(self.inter):
            raise ValueError("an attention profile needs one length and one inter mass for each chunk")
        if not self.outward:
            raise ValueError("an attention profile needs an outward mass for each token")
        if min(self.lengths, default=1) < 1:
            raise ValueError("a chunk in an attention profile has no tokens")
        masses = (*self.inter, self.intra, self.sink, *self.outward)
        if not isfinite(sum(masses)) or min(masses) < 0.0:
            raise ValueError("an attention profile has a mass that is negative or not finite")

    @property
    def tokens(self) -> int:
        """Tokens of the segment."""
        return len(self.outward)

    def cut(self, start: int, stop: int, run: ChunkId) -> "AttentionProfile":
        """The profile of the tokens from `start` up to `stop`, behind the beginning of their `run`.

        Masses are shared out evenly: `inter` and `sink` by tokens, `intra` by pairs of tokens, of which those with the
        beginning become mass on `run`, the same of each token.
        """
        tokens = stop - start
        share = tokens / self.tokens
        pairs = self.intra / self.tokens**2
        profile = replace(
            self,
            inter=tuple(mass * share for mass in self.inter),
            intra=pairs * tokens**2,
            sink=self.sink * share,
            outward=self.outward[start:stop],
        )
        if not start:
            return profile
        on_run = pairs * 2 * start * tokens  # intra pairs of n tokens are half of n squared, these are all
        return replace(
            profile,
            chunks=(*self.chunks, run),
            lengths=(*self.lengths, start),
            inter=(*profile.inter, on_run),
            outward=tuple(mass + on_run / tokens for mass in profile.outward),
        )

    @cached_property
    def mass_on(self) -> Mapping[ChunkId, float]:
        """Mass on each distinct chunk before the segment, in order of first occurrence."""
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
        """The mean mass per pair of tokens, summed over the chunks before the segment: a of eq. 9."""
        pairs = zip(self.inter, self.lengths, strict=True)
        return sum((mass / (self.tokens * length) for mass, length in pairs), 0.0)

    @cached_property
    def intra_per_pair(self) -> float:
        """The mean mass per pair of tokens within the segment: b of eq. 9."""
        return self.intra / self.tokens**2

    @cached_property
    def cci(self) -> float:
        """Cache context impact, from 0.5 (attended to no earlier chunk) to 1: the sigmoid of a/b (eq. 11).

        For a segment without intra mass (b = 0), such as one of a single token, it is 1 if the segment attended to an
        earlier chunk, else 0.5.
        """
        if not self.inter_per_pair:
            return LEAST_CCI
        return 1.0 / (1.0 + exp(-self.inter_per_pair / self.intra_per_pair)) if self.intra_per_pair else 1.0

    @cached_property
    def by_outward(self) -> tuple[int, ...]:
        """Token indices by descending `outward`, ties by position."""
        return _falling(self.outward)


def _falling(mass: Sequence[float]) -> tuple[int, ...]:
    return tuple(sorted(range(len(mass)), key=mass.__getitem__, reverse=True))


class Mark(StrEnum):
    """Properties of a chunk that a store reports to its follower, beside whether a segment of it is stored."""

    MEAN = "mean"
    """A mean of the chunk is stored."""
    CONTEXT = "context"
    """Contexts of means can be woven from a stored segment (`SegmentRecord.serves_contexts`)."""


def marked(chunk: ChunkId, mark: Mark) -> SegmentId:
    """The id under which a store reports `mark` for `chunk`, in place of a segment's id."""
    return SegmentId(f"{chunk}:{mark}")


LEAST_READ = 32
"""Maximum length of `read` for a mean that another mean may be computed behind."""


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

    `exact` means that every token before it was exact too when it was computed, so its KV equals full prefill up to
    rounding. Only exact segments are in the path index. `attention` is its attention profile, if it was measured.
    `owner` is the tenant that it was computed for. `source` is truncated to `MOST_SOURCE_CHARACTERS`. `generation`
    counts partial recomputations: 0 if all KV was computed in this context, n + 1 for a variant made by recomputing
    some tokens of one of generation n.

    A mean is the average of the chunk's KV over `contexts` (`weaving.means`); its `context` is one id that names them.
    A `novel` segment is of text that was found in one prompt and not used since; it is not written to files.
    `read` are further ids that its KV depends on beside the contexts: the inputs of the KV that it was woven from or
    computed behind, or `ANYTHING`. `sources` are all ids that its KV depends on.

    Raises:
        ValueError: the attention profile has another number of tokens, or chunks that are not in the sources; the
            generation is negative; or an exact segment has a generation, is a mean, or has `read` ids.
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
    novel: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.source) > MOST_SOURCE_CHARACTERS:
            object.__setattr__(self, "source", self.source[:MOST_SOURCE_CHARACTERS])
        if self.generation < 0 or (self.exact and self.generation):
            raise ValueError(f"an {'exact' if self.exact else 'inexact'} segment of generation {self.generation}")
        if self.exact and (self.contexts or self.read):
            raise ValueError("an exact segment cannot be a mean or depend on ids beside its context")
        if is_mean(self.context) != bool(self.contexts) or (
            self.contexts and self.context != (mean_id(self.contexts),)
        ):
            raise ValueError("a mean's context must be the id of its contexts")
        if self.attention is None:
            return
        if self.attention.tokens != len(self.token_ids):
            raise ValueError(f"the attention profile has {self.attention.tokens} tokens, not {len(self.token_ids)}")
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
        novel: bool = False,
    ) -> Self:
        """A record whose id is computed from chunk and context."""
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
            novel=novel,
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

    def cut(self, part: PromptPart, offset: int) -> Self:
        """The record of its tokens from `offset` on as the chunk of `part`.

        The beginning of a run is as exact as the run. What follows is behind a beginning that is no part of a prompt:
        an id that no chunk has takes its place, the run is among the `read` ids, and the record is not exact.
        """
        assert part.id is not None, "a part of a run has an id"
        behind = (_beginning_id(self.chunk_id, offset),) if offset else ()
        contexts = tuple(sorted((*context, *behind) for context in self.contexts))
        context = (mean_id(contexts),) if contexts else (*self.context, *behind)
        attention = self.attention
        return replace(
            self,
            id=segment_id(part.id, context),
            chunk_id=part.id,
            context=context,
            token_ids=part.token_ids,
            source=part.source,
            exact=self.exact and not offset,
            nbytes=self.nbytes * len(part) // len(self),
            attention=attention and attention.cut(offset, offset + len(part), self.chunk_id),
            contexts=contexts,
            read=tuple(sorted({*self.read, self.chunk_id})) if offset else self.read,
            novel=False,
        )

    @property
    def sources(self) -> frozenset[ChunkId]:
        """All ids that its KV depends on, without the chunk itself."""
        return frozenset(self.read).union(*(self.contexts or (self.context,)))

    def depends_on(self, chunks: Set[ChunkId]) -> bool:
        """Whether it is the KV of one of `chunks` or depends on one, or on chunks that are not known (`ANYTHING`)."""
        sources = self.sources
        return self.chunk_id in chunks or ANYTHING in sources or not sources.isdisjoint(chunks)

    @property
    def path(self) -> tuple[ChunkId, ...]:
        """The chunks of an exact prefix that ends with this segment."""
        return (*self.context, self.chunk_id)

    @property
    def alone(self) -> bool:
        """Whether it was computed with nothing before it except BOS."""
        return not self.context

    @property
    def neutral(self) -> bool:
        """Whether it was computed behind neutral passages."""
        return bool(self.context) and is_neutral(self.context[-1])

    @property
    def serves_contexts(self) -> bool:
        """Whether contexts of means are woven from it: it is neutral, or a mean with few `read` ids.

        A segment that depends on a mean is removed with every chunk that the mean depends on; hence the limit.
        """
        return self.neutral or (bool(self.contexts) and len(self.read) <= LEAST_READ)

    @property
    def marks(self) -> tuple[SegmentId, ...]:
        """Marks that are reported to the store's follower beside chunk and segment; see `marked`."""
        of = {Mark.MEAN: bool(self.contexts), Mark.CONTEXT: self.serves_contexts}
        return tuple(marked(self.chunk_id, mark) for mark, is_so in of.items() if is_so)

    @property
    def document(self) -> str:
        """The document's name: `source` without a chunk number such as `#3`."""
        name, _, number = self.source.rpartition("#")
        return name if name and number.isdecimal() else self.source

    def __len__(self) -> int:
        return len(self.token_ids)


_EDGE = 2


@dataclass(frozen=True)
class RemovedTexts:
    """Recognizes stored parts of prompts that hold one of some texts, wherever it is in them.

    These are parts that no client named: earlier text found in prompts, system prompts and turns. A part holds a text
    if they have 31 consecutive `token_ids` in common, or of a shorter text all but those at its ends, which may merge
    with its neighbours. Ids are those of chunks of the `fingerprints` under the `salts`: other tenants' parts count for
    nothing.
    """

    texts: tuple[tuple[int, ...], ...]
    fingerprints: tuple[str, ...]
    salts: tuple[str, ...]

    def __call__(self, record: "SegmentRecord") -> bool:
        """Whether a stored segment holds one of the texts."""
        return record.source in _UNNAMED and self.are_in(record.chunk_id, record.token_ids)

    def are_in(self, chunk: ChunkId, token_ids: Sequence[int] | Ids) -> bool:
        """Whether the part `chunk` with these ids holds one of the texts."""
        ids = np.asarray(token_ids, np.int32)
        if not (np.isin(_grams(ids), self._anchors).any() or any(text in ids.tobytes() for text in self._short)):
            return False
        numbers = ids.tolist()
        return any(
            chunk_id(fingerprint, salt, numbers) == chunk for fingerprint in self.fingerprints for salt in self.salts
        )

    @cached_property
    def _anchors(self) -> npt.NDArray[np.uint64]:
        """Of each text every 16th gram: one is in any 31 consecutive ids of it."""
        long = [np.asarray(ids, np.int32) for ids in self.texts if len(ids) >= 2 * GRAM]
        return np.concatenate([np.zeros(0, np.uint64), *(_grams(ids)[::GRAM] for ids in long)])

    @cached_property
    def _short(self) -> list[bytes]:
        """The bytes of shorter texts, without their ends."""
        short = (ids[_EDGE:-_EDGE] if len(ids) > 2 * _EDGE else ids for ids in self.texts if len(ids) < 2 * GRAM)
        return [np.asarray(ids, np.int32).tobytes() for ids in short]


def _grams(ids: Ids) -> npt.NDArray[np.uint64]:
    return gram_hashes(ids.astype(np.uint64)) if len(ids) >= GRAM else np.zeros(0, np.uint64)


_MOST_EARLIER = 1 << 20


class EarlierRuns:
    """What was found in prompts before this process began, by fingerprint and salt. Each record is given out once.

    Every new salt is compared with all records that are left, so they have at most `_MOST_EARLIER` tokens.
    """

    def __init__(self, records: Iterable["SegmentRecord"]) -> None:
        found = (record for record in records if record.source in _UNNAMED)
        self._records = []
        tokens = 0
        for record in found:
            tokens += len(record)
            if tokens > _MOST_EARLIER:
                break
            self._records.append(record)

    def __call__(self, fingerprint: str, salt: str) -> Iterator[Sequence[tuple[ChunkId, tuple[int, ...]]]]:
        """The paths of exact segments, and other segments alone."""
        own = [record for record in self._records if chunk_id(fingerprint, salt, record.token_ids) == record.chunk_id]
        if not own:
            return
        ids = {record.chunk_id: record.token_ids for record in own}
        self._records = [record for record in self._records if record.chunk_id not in ids]
        for record in own:
            path = record.path if record.exact and ids.keys() >= {*record.context} else (record.chunk_id,)
            yield [(chunk, ids[chunk]) for chunk in path]


_UNNAMED = (FOUND, NEW, *map(str, (PartKind.SYSTEM, PartKind.TURN)))
"""Sources of parts that no client named."""


def _beginning_id(run: ChunkId, tokens: int) -> ChunkId:
    """The id that takes the place of a run's first tokens in a context."""
    return ChunkId(hashlib.blake2b(f"{run} {tokens}".encode(), digest_size=16).hexdigest())


MOST_READ = 256
"""Maximum number of `read` ids in a record. Chains of woven prompts depend on ever more chunks."""

ANYTHING = ChunkId(b"any!".hex() + "0" * 24)
"""Replaces ids that a record does not list: such a record is removed with any chunk."""


def all_read(chunks: Iterable[ChunkId]) -> frozenset[ChunkId]:
    """`chunks` as a record lists them: `ANYTHING` if there are more than `MOST_READ`."""
    dependencies = frozenset(chunks)
    known = len(dependencies) <= MOST_READ and ANYTHING not in dependencies
    return dependencies if known else frozenset({ANYTHING})


def union(*groups: Iterable[SegmentRecord]) -> tuple[SegmentRecord, ...]:
    """Each segment of `groups` once: its exact record if there is one, else its first."""
    best: dict[SegmentId, SegmentRecord] = {}
    for record in (record for group in groups for record in group):
        held = best.get(record.id)
        if held is None or (record.exact and not held.exact):
            best[record.id] = record
    return tuple(best.values())


@dataclass(frozen=True, slots=True)
class Removal:
    """Result of a removal: the number of removed copies, and records of copies that the tier failed to delete (`left`).

    If not `complete`, the tier could not be listed and may hold further copies.
    """

    removed: int
    left: tuple[SegmentRecord, ...] = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, and its counters since it was created.

    `hits` and `misses` count looked-up prompt parts (system and chunks) with and without a stored segment. `rejected`
    counts inserts that did not fit or whose tokens differ from the stored segment's, `lost` payloads that the tier no
    longer had, `mismatched` segments whose token ids differed under an equal id, `undeletable` payloads that were
    dropped here but that the tier failed to delete.
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

    `segments` and `chunks` count each segment or chunk once; `bytes`, `inserts`, `evictions`, `rejected`, `lost`,
    `mismatched` and `undeletable` sum over the levels. `promotions` are copies to a faster level, `demotions` evictions
    from memory that were copied to a slower one. Background writes: `writes_queued` were accepted, `writes_skipped` met
    a full queue or a paused level, `writes_rejected` found no room or were cancelled, `writes_failed` raised. `expired`
    segments exceeded their time to live. `variants` maps 1, 2, ... to the number of chunks with that many variants
    (Cache-Craft Figure 25); `variants_dropped` exceeded a limit.
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
    """When each segment was computed, in seconds since the epoch. Moving it between levels does not change that.

    For a segment stored before this process started, `stored_at_s` is called once. If it returns None, or a time in the
    future, the segment's age counts from now. Not thread-safe; an interrupt can only make a segment older.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        stored_at_s: Callable[[SegmentId], float | None],
    ) -> None:
        """No ages yet."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored_at_s = stored_at_s
        self._born_s: dict[SegmentId, float] = {}

    def born(self, segment: SegmentId) -> None:
        """Note that a segment was computed now."""
        self._born_s[segment] = self._clock()

    def copied(self, segment: SegmentId, copy: SegmentId) -> None:
        """Note that `copy` is as old as `segment`."""
        self._born_s[copy] = self._since_s(segment)

    def expired(self, segments: Iterable[SegmentId], now_s: float | None = None) -> list[SegmentId]:
        """Those of `segments` that exceed the time to live."""
        oldest_s = (self._clock() if now_s is None else now_s) - self._ttl_s
        return [s for s in segments if self._since_s(s) <= oldest_s]

    def keep_only(self, segments: Iterable[SegmentId]) -> None:
        """Forget all others."""
        stored = set(segments)
        self._born_s = {segment: born_s for segment, born_s in tuple(self._born_s.items()) if segment in stored}

    def _since_s(self, segment: SegmentId) -> float:
        now_s = self._clock()
        born_s = self._born_s[segment] if segment in self._born_s else self._stored_at_s(segment)
        born_s = self._born_s[segment] = now_s if born_s is None else min(born_s, now_s)
        return born_s


class Sightings:
    """Bounded counters by segment; the least recently seen is forgotten first. Not thread-safe."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[SegmentId, int] = OrderedDict()

    def see(self, segment: SegmentId) -> int:
        """Count one sighting; returns the count."""
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
        """Reset a segment's count; returns it."""
        return self._counts.pop(segment, 0)
