"""Which replica gets a request: the policies, and their registry.

To add one: a class with `name` and `choose`, a line in `ROUTING`, and a test.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from chunkweave.errors import UnknownMethodError, UsageError

USUAL_ROUTING = "affinity"
USUAL_IMBALANCE = 1.25

_ENOUGH = 0.25
"""Share of a prompt that must be cached somewhere, before that decides: one popular document of many is too little."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take a request.

    `cached_tokens` are those of the request's chunks whose KV it holds, `outstanding_tokens` what it has still to
    compute for others, `held_tokens` all whose KV it holds.
    """

    name: str
    outstanding_tokens: int
    cached_tokens: int
    held_tokens: int = 0


class RoutingPolicy(Protocol):
    """Chooses among replicas. One caller at a time."""

    @property
    def name(self) -> str:
        """As it is written on the command line."""

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        """Who gets a request with a prompt of `tokens` tokens; there is at least one candidate."""


class Affinity:
    """Most cached tokens, among replicas that are not overloaded.

    Overloaded is who has more outstanding tokens than `imbalance` times the mean of all, the new request counted. So
    no replica ever has more than that and one request, which cannot be divided: consistent hashing with bounded loads
    (Mirrokni et al., 2018), with cached tokens in the place of the hash. Of equals the least loaded one is taken, and
    of these each in turn.

    Where nobody has `_ENOUGH` of the prompt, the request goes to who holds least. Otherwise whoever got the first
    popular document would be given all that ever came with it, and the others' memory would lie idle.
    """

    name = "affinity"

    def __init__(self, imbalance: float = USUAL_IMBALANCE) -> None:
        if not imbalance >= 1.0:
            raise UsageError(f"the load imbalance must be at least 1, not {imbalance}")
        self._imbalance = imbalance
        self._turn = _Turn()

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> Candidate:
        """Somebody is below the mean, so there always is one."""
        whole = tokens + sum(one.outstanding_tokens for one in candidates)
        bound = self._imbalance * whole / len(candidates)
        free = self._turn.of([one for one in candidates if one.outstanding_tokens <= bound])
        if max(one.cached_tokens for one in free) < _ENOUGH * tokens:
            return min(free, key=lambda one: (one.held_tokens, one.outstanding_tokens))
        return min(free, key=lambda one: (-one.cached_tokens, one.outstanding_tokens))


class Soonest:
    """Fewest tokens before its first one: what is outstanding, and of the request itself what is not cached.

    Unlike `Affinity` it never lets a request wait for longer than computing it elsewhere would take, so that few
    tokens are found where load is high and even. Of equals each in turn.
    """

    name = "soonest"

    def __init__(self, imbalance: float = USUAL_IMBALANCE) -> None:  # noqa: ARG002 - all policies are made alike
        self._turn = _Turn()

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> Candidate:  # noqa: ARG002
        """Whoever would be done first."""
        return min(self._turn.of(candidates), key=lambda one: one.outstanding_tokens - one.cached_tokens)


class LeastLoaded:
    """Fewest outstanding tokens, of equals each in turn."""

    name = "least-loaded"

    def __init__(self, imbalance: float = USUAL_IMBALANCE) -> None:  # noqa: ARG002
        self._turn = _Turn()

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> Candidate:  # noqa: ARG002
        """Whatever is cached."""
        return min(self._turn.of(candidates), key=lambda one: one.outstanding_tokens)


class RoundRobin:
    """Each in turn."""

    name = "round-robin"

    def __init__(self, imbalance: float = USUAL_IMBALANCE) -> None:  # noqa: ARG002
        self._turn = _Turn()

    def choose(self, tokens: int, candidates: Sequence[Candidate]) -> Candidate:  # noqa: ARG002
        """Whatever they hold and do."""
        return self._turn.of(candidates)[0]


ROUTING: Mapping[str, Callable[[float], RoutingPolicy]] = {
    one.name: one for one in (Affinity, Soonest, LeastLoaded, RoundRobin)
}


def make_routing(name: str, imbalance: float = USUAL_IMBALANCE) -> RoutingPolicy:
    """The policy of that name; `imbalance` is for those that bound it.

    Raises:
        UnknownMethodError: no such policy; the message lists those there are.
        UsageError: the imbalance is below 1.
    """
    if name not in ROUTING:
        raise UnknownMethodError(f"unknown routing {name!r}; there are: {', '.join(ROUTING)}")
    return ROUTING[name](imbalance)


class _Turn:
    """Candidates as they are, from another one on each time."""

    def __init__(self) -> None:
        self._numbers = count()

    def of(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        first = next(self._numbers) % len(candidates)
        return [*candidates[first:], *candidates[:first]]
