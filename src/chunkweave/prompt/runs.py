"""Finds earlier text in a prompt by its token ids: the longest stored beginning, and equal runs at any offset.

Fingerprints are hashes of 16 consecutive ids, of which the least in each window of 16 is kept (winnowing, SIGMOD 2003):
any equal run of at least 31 ids is met. A fingerprint leads to places in stored runs, whose ids are compared. Hashes of
whole beginnings, one in 32 ids, lead to the path of runs that an earlier prompt began with, however it was cut.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkweave.types import ChunkId, Span

GRAM = 16
"""Ids in a fingerprint, and fingerprints in a window."""

LEAST = 32
"""Least ids of a match at any offset, and between two hashes of a beginning."""

_MOST_BEGINNINGS = 4
"""Most paths that are tried for a prompt's beginning, the longest first: runs of a path may be evicted."""

MOST_PLACES = 8
"""Most places of a fingerprint: text that repeats costs no more than other text."""

_MOST_CHANCES = 8
_RUN_TOKENS = 128
"""Ids that take as much memory as what is known of a run, or of a place on a path."""

_MOST_MATCHES = 512
"""Most matches of a prompt: each is a part, and a part's context names all before it."""

_LEAST_CAPACITY = 1 << 12
_GROWTH = 1.25
_MOST_LOAD = 0.6
_BUCKET = 8
"""Keys that are compared at once: a cache line."""

_REACHES = (1, 2, 4, 8)
_PREFIX_FACTOR = np.uint64(0xD1342543DE82EF95)
_DOUBLING = tuple(np.uint64(pow(0x9E3779B97F4A7C15, reach, 1 << 64)) for reach in _REACHES)
"""Factors by which a hash over 1, 2, 4, 8 ids is joined with that of the ids behind it."""

Path = Sequence[tuple[ChunkId, Sequence[int]]]
"""The parts of a prompt's beginning with their ids."""

Ids = npt.NDArray[np.integer[Any]]
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Match:
    """The tokens of `span` equal those of the chunk `run` from `offset` on; `whole`: they are all of it."""

    span: Span
    run: ChunkId
    offset: int
    whole: bool


@dataclass(slots=True, eq=False)
class _Run:
    """A stored run: its chunk, the salt that it may be found under, its ids, and where it is on paths (node numbers).

    A run too short for a fingerprint is on paths only.
    """

    chunk: ChunkId
    salt: str
    ids: Ids
    nodes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Node:
    """The end of a path: its last run, and the node before it (0: none)."""

    parent: int
    run: int


class RunIndex:
    """The runs of token ids that are stored, findable at any offset by prompts with the same salt. Thread-safe.

    Fingerprints have a secret key and the salt, so text cannot be made to collide with another tenant's. Runs that are
    not stored any more are left out when they are met. At most `most_tokens` ids are kept, the least recently used
    leave first; the table has about 4 bytes an id beside them.
    """

    def __init__(self, is_stored: Callable[[ChunkId], bool], *, most_tokens: int = 1 << 24) -> None:
        """An empty index. `is_stored` says whether any segment of a chunk is stored."""
        self._is_stored = is_stored
        self._most_tokens = most_tokens
        self._secret = secrets.token_bytes(16)
        self._lock = Lock()
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._numbers: dict[ChunkId, int] = {}
        self._nodes: dict[int, _Node] = {}
        self._node_numbers: dict[_Node, int] = {}
        self._next = count(1)
        self._tokens = 0
        self._used = 0
        self._powers: Hashes = np.ones(1, np.uint64)
        self._clear_table(_LEAST_CAPACITY)

    def __len__(self) -> int:
        """Number of runs."""
        return len(self._runs)

    @property
    def tokens(self) -> int:
        """Ids of all runs."""
        return self._tokens - _RUN_TOKENS * len(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes of the table, without the ids."""
        return self._keys.nbytes + self._places.nbytes

    def add(self, path: Path, salt: str) -> None:
        """Make the runs of a prompt's beginning findable, given with their ids; known ones are marked as used."""
        with self._lock:
            numbers = [self._add_run(chunk, ids, salt) for chunk, ids in path]
            self._add_path(numbers, salt)

    def beginning(self, token_ids: Sequence[int] | Ids, salt: str) -> list[Match]:
        """The runs of the longest stored beginning that is known, in order; the last one may be matched in part."""
        ids = np.asarray(token_ids, np.int32)
        keys = self._prefix_keys(ids, salt)
        with self._lock:
            known = np.flatnonzero(self._are_known(keys))
            for key in keys[known[: -_MOST_BEGINNINGS - 1 : -1]].tolist():
                matches = self._along(ids, self._node_of(key), salt)
                if matches:
                    return matches
            return []

    def matches(
        self, token_ids: Sequence[int] | Ids, salt: str, fences: Sequence[int] = (), *, within: Span | None = None
    ) -> list[Match]:
        """The longest equal runs `within` a span, in order and without overlaps; none crosses one of the `fences`."""
        ids = np.asarray(token_ids, np.int32)
        within = Span(0, len(ids)) if within is None else within
        edges = np.array([within.start, *(fence for fence in fences if fence > within.start), within.stop])
        positions, keys = self._fingerprints(ids[within.start : within.stop], salt)
        with self._lock:
            known = self._are_known(keys)
            matches: list[Match] = []
            done = within.start
            for position, key in zip((positions[known] + done).tolist(), keys[known].tolist(), strict=True):
                if position < done:
                    continue
                edge = int(np.searchsorted(edges, position, "right"))
                room = Span(max(done, int(edges[edge - 1])), int(edges[edge]))
                if len(room) < LEAST or len(matches) == _MOST_MATCHES:
                    continue
                match = self._longest(ids, position, key, salt, room)
                if match is not None:
                    matches.append(match)
                    done = match.span.stop
            return matches

    def forget(self, is_gone: Callable[[ChunkId, Ids], bool]) -> frozenset[ChunkId]:
        """Drop the runs for whose chunk and ids `is_gone` is true; returns their chunks."""
        with self._lock:
            runs = tuple(self._runs.items())
        gone = [(number, run.chunk) for number, run in runs if is_gone(run.chunk, run.ids)]
        with self._lock:
            for number, _ in gone:
                if number in self._runs:
                    self._drop(number)
        return frozenset(chunk for _, chunk in gone)

    def clear(self) -> None:
        """Drop all runs."""
        self.forget(lambda chunk, ids: True)  # noqa: ARG005

    def _add_run(self, chunk: ChunkId, token_ids: Sequence[int], salt: str) -> int:
        number = self._numbers.get(chunk)
        if number is not None:
            self._runs.move_to_end(number)
            return number
        ids = np.asarray(token_ids, np.int32)
        number = self._numbers[chunk] = next(self._next)
        self._runs[number] = _Run(chunk, salt, ids)
        self._tokens += len(ids) + _RUN_TOKENS
        self._make_room()
        if len(ids) >= LEAST:
            positions, keys = self._fingerprints(ids, salt)
            self._insert(keys, number, positions, most=MOST_PLACES)
        return number

    def _make_room(self) -> None:
        """Drop runs, the least recently used first; of these some get a second chance because they are stored."""
        chances = _MOST_CHANCES
        while self._tokens > self._most_tokens and len(self._runs) > 1:
            oldest = next(iter(self._runs))
            if chances and self._is_stored(self._runs[oldest].chunk):
                self._runs.move_to_end(oldest)
                chances -= 1
            else:
                self._drop(oldest)

    def _add_path(self, numbers: Sequence[int], salt: str) -> None:
        """Enter the beginnings that end in the last run, and those of earlier runs that are new on this path."""
        if not all(number in self._runs for number in numbers):
            return
        runs = [self._runs[number] for number in numbers]
        ids = np.concatenate([run.ids for run in runs]) if runs else np.zeros(0, np.int32)
        keys = self._prefix_keys(ids, salt)
        parent = 0
        start = 0
        for number, run in zip(numbers, runs, strict=True):
            place = _Node(parent, number)
            node = self._node_numbers.get(place)
            stop = start + len(run.ids)
            if node is None:
                node = self._node_numbers[place] = next(self._next)
                run.nodes = [*(earlier for earlier in run.nodes if earlier in self._nodes), node]
                within = np.arange(start // LEAST, stop // LEAST)
                self._insert(keys[within], node, within, most=1)
                while len(self._nodes) >= self._most_tokens // _RUN_TOKENS:
                    self._drop_node(next(iter(self._nodes)))
            self._nodes.pop(node, None)
            self._nodes[node] = place  # the last used ones are last
            parent = node
            start = stop

    def _along(self, ids: Ids, node: int, salt: str) -> list[Match]:
        """The matches along the path that ends at a node, as far as its runs are stored and equal."""
        path: list[_Run] = []
        while node:
            place = self._nodes.get(node)
            run = None if place is None else self._runs.get(place.run)
            if place is None or run is None or run.salt != salt:
                return []
            path.append(run)
            node = place.parent
        matches: list[Match] = []
        start = 0
        for run in reversed(path):
            rest = ids[start : start + len(run.ids)]
            equal = _count_equal(rest, run.ids[: len(rest)])
            if not equal or not self._is_stored(run.chunk):
                break
            whole = equal == len(run.ids)
            matches.append(Match(Span(start, start + equal), run.chunk, 0, whole))
            start += equal
            if not whole:
                break
        return matches

    def _node_of(self, key: int) -> int:
        """The node that was entered last under a key; 0: none."""
        return next((int(self._places[slot, 0]) for slot in self._slots(key) if self._keys[slot] == key), 0)

    def _slots(self, key: int) -> Iterator[int]:
        """The slots that may hold a key: from the first one of its bucket up to the first that is empty."""
        slot = key % (len(self._keys) // _BUCKET) * _BUCKET
        while self._keys[slot]:
            yield slot
            slot = (slot + 1) % len(self._keys)

    def _are_known(self, keys: Hashes) -> npt.NDArray[np.bool_]:
        """Whether each key is in the table; whole buckets are compared at once."""
        buckets = self._keys.reshape(-1, _BUCKET)
        numbers = (keys % np.uint64(len(buckets))).astype(np.int64)
        known = np.zeros(len(keys), bool)
        pending = np.arange(len(keys))
        while len(pending):
            held = buckets[numbers[pending]]
            known[pending] = (held == keys[pending, None]).any(axis=1)
            pending = pending[held.all(axis=1) & ~known[pending]]
            numbers[pending] = (numbers[pending] + 1) % len(buckets)
        return known

    def _longest(self, ids: Ids, position: int, key: int, salt: str, room: Span) -> Match | None:
        """The longest match through a fingerprint; of equally long ones that of a whole run."""
        best: Match | None = None
        for run, offset in self._places_of(key):
            if run.salt != salt:
                continue
            span = _equal(ids, position, run.ids, offset, room)
            match = Match(span, run.chunk, offset - (position - span.start), len(span) == len(run.ids))
            better = best is None or (len(span), match.whole) > (len(best.span), best.whole)
            if len(span) >= LEAST and better:
                best = match
        return best

    def _places_of(self, key: int) -> Iterator[tuple[_Run, int]]:
        for slot in self._slots(key):
            run = self._runs.get(int(self._places[slot, 0])) if self._keys[slot] == key else None
            if run is not None and self._is_stored(run.chunk):
                yield run, int(self._places[slot, 1])

    def _hashes(self, ids: Ids, salt: str) -> Hashes:
        """A hash of each id under the salt and the secret."""
        digest = hashlib.blake2b(salt.encode(), digest_size=16, key=self._secret).digest()
        factor, addend = np.frombuffer(digest, np.uint64)
        return _mixed((ids.astype(np.uint64) + addend) * (factor | np.uint64(1)))

    def _prefix_keys(self, ids: Ids, salt: str) -> Hashes:
        """Keys of the first `LEAST`, twice `LEAST`, ... ids: a polynomial in the ids' hashes."""
        powers = self._powers
        if len(ids) > len(powers):
            powers = self._powers = np.multiply.accumulate(np.full(2 * len(ids), _PREFIX_FACTOR, np.uint64))
        sums = np.add.accumulate(self._hashes(ids, salt) * powers[: len(ids)])
        return _mixed(sums[LEAST - 1 :: LEAST] ^ _PREFIX_FACTOR) | np.uint64(1)

    def _fingerprints(self, ids: Ids, salt: str) -> tuple[npt.NDArray[np.int64], Hashes]:
        """Positions and keys of the winnowed grams, ascending."""
        grams = len(ids) - GRAM + 1
        if grams <= 0:
            return np.zeros(0, np.int64), np.zeros(0, np.uint64)
        keys = gram_hashes(self._hashes(ids, salt))
        # A gram is kept if it is the least of a window that holds it: if it is the largest least one of all of these.
        least = keys
        for reach in _REACHES:
            least = np.minimum(least[:-reach], least[reach:]) if len(least) > reach else least.min(keepdims=True)
        edge = np.zeros(GRAM - 1, np.uint64)
        kept = np.concatenate((edge, least, edge))
        for reach in _REACHES:
            kept = np.maximum(kept[:-reach], kept[reach:])
        positions = np.flatnonzero(keys == kept[:grams])
        if len(positions) * 4 > grams:  # text that repeats itself: of equal ones in a window one is enough
            begins = np.append(True, (np.diff(positions) >= GRAM) | (keys[positions[1:]] != keys[positions[:-1]]))
            distances = positions - positions[np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))]
            windows = distances // GRAM
            positions = positions[begins | np.append(True, windows[1:] != windows[:-1])]
        return positions, keys[positions]

    def _insert(self, keys: Hashes, number: int, positions: npt.NDArray[np.int64], *, most: int) -> None:
        """Enter places of a run or node. A key has at most `most` places; if that is one, the last one stays."""
        if self._used + len(keys) > _MOST_LOAD * len(self._keys):
            self._rebuild(self._used + len(keys))
        size = len(self._keys)
        buckets = size // _BUCKET
        for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
            slot = key % buckets * _BUCKET
            same = 0
            while held := int(self._keys[slot]):
                same += held == key
                if held == key and (same == most or not self._is_live(slot)):
                    break
                slot = (slot + 1) % size
            if not held:
                self._keys[slot] = key
                self._used += 1
            if not held or most == 1 or not self._is_live(slot):
                self._places[slot] = number, position

    def _is_live(self, slot: int) -> bool:
        """Whether the run or node at a slot is known, and the run stored."""
        number = int(self._places[slot, 0])
        run = self._runs.get(number)
        return number in self._nodes if run is None else self._is_stored(run.chunk)

    def _rebuild(self, least: int) -> None:
        """A larger table, without the entries of dropped runs and nodes."""
        numbers = np.fromiter((*self._runs, *self._nodes), np.uint32, len(self._runs) + len(self._nodes))
        live = np.flatnonzero(np.isin(self._places[:, 0], numbers) & (self._keys != 0))
        keys = self._keys[live]
        places = self._places[live]
        buckets = max(_LEAST_CAPACITY, int(_GROWTH * (least - self._used + len(live)) / _MOST_LOAD)) // _BUCKET
        self._used = len(live)
        self._clear_table(buckets * _BUCKET)
        firsts = (keys % np.uint64(buckets)).astype(np.int64) * _BUCKET
        order = np.argsort(firsts, kind="stable")
        # Each entry gets the first slot that is neither before its bucket nor taken by an entry before it.
        count_up = np.arange(len(order))
        slots = np.maximum.accumulate(firsts[order] - count_up) + count_up
        fits = slots < len(self._keys)
        self._keys[slots[fits]] = keys[order[fits]]
        self._places[slots[fits]] = places[order[fits]]
        for entry in order[~fits].tolist():
            slot = next(slot for slot in range(len(self._keys)) if not self._keys[slot])
            self._keys[slot] = keys[entry]
            self._places[slot] = places[entry]

    def _clear_table(self, capacity: int) -> None:
        self._keys: Hashes = np.zeros(capacity, np.uint64)
        self._places: npt.NDArray[np.uint32] = np.zeros((capacity, 2), np.uint32)

    def _drop(self, number: int) -> None:
        """Drop a run and its places on paths; places behind these are not found until their runs are dropped."""
        run = self._runs.pop(number)
        del self._numbers[run.chunk]
        self._tokens -= len(run.ids) + _RUN_TOKENS
        for node in run.nodes:
            self._drop_node(node)

    def _drop_node(self, node: int) -> None:
        place = self._nodes.pop(node, None)
        if place is not None:
            del self._node_numbers[place]


def gram_hashes(hashes: Hashes) -> Hashes:
    """A hash of each `GRAM` consecutive ids, given at least as many and a hash of each."""
    for reach, times in zip(_REACHES, _DOUBLING, strict=True):
        hashes = hashes[:-reach] + hashes[reach:] * times
    return _mixed(hashes) | np.uint64(1)  # 0 marks an empty slot


def _mixed(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ (hashes >> np.uint64(32))


def _equal(ids: Ids, position: int, run: Ids, offset: int, room: Span) -> Span:
    """The longest span around `position`, within `room`, that equals the run around `offset`."""
    before = min(position - room.start, offset)
    behind = min(room.stop - position, len(run) - offset)
    left = _count_equal(ids[position - before : position][::-1], run[offset - before : offset][::-1])
    right = _count_equal(ids[position : position + behind], run[offset : offset + behind])
    return Span(position - left, position + right)


def _count_equal(one: Ids, other: Ids) -> int:
    """Number of equal ids at the beginning; compares pieces that grow, so that a short match costs little."""
    done = 0
    size = 64
    while done < len(one):
        differ = np.flatnonzero(one[done : done + size] != other[done : done + size])
        if len(differ):
            return done + int(differ[0])
        done += size
        size *= 4
    return len(one)
