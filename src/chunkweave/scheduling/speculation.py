"""Dynamic speculative pipelining: when to prefill for documents that a search has not confirmed (RAGCache §5.3)."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from chunkweave.errors import UsageError

RequestT = TypeVar("RequestT", bound=Hashable)
DocumentT = TypeVar("DocumentT", bound=Hashable)


class Action(StrEnum):
    """What is to be done with a request after a stage of its search."""

    WAIT = "wait"
    """Nothing runs for it, and nothing is to be started now."""
    START = "start"
    """Start prefilling for the provisional documents; what ran for others, if anything, ends after its step."""
    KEEP = "keep"
    """What runs is for these very documents: let it run. After the last stage its result is the answer."""
    TERMINATE = "terminate"
    """What runs is for other documents and ends after its current step; there is no room for a new start."""
    GENERATE = "generate"
    """The search is over: compute for the final documents; what ran for others, if anything, ends after its step."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[DocumentT]):
    """An action, for `documents`; `terminated` are the documents whose speculation ends with it, if there was one."""

    action: Action
    documents: tuple[DocumentT, ...]
    terminated: tuple[DocumentT, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """What happened to speculations so far.

    `stages` were looked at, the last ones included. `started` speculations; of these `terminated` were for documents
    that changed, `matched` for what the search ended with. `kept` stages confirmed what was running. `deferred` stages
    would have started one but for the load. `regenerated` requests had begun for other documents than the final
    ones, `late` ones had begun for none.
    """

    stages: int = 0
    started: int = 0
    kept: int = 0
    terminated: int = 0
    deferred: int = 0
    matched: int = 0
    regenerated: int = 0
    late: int = 0


@dataclass(slots=True)
class _Search(Generic[DocumentT]):
    """What a request's search has named last, and what was started for it."""

    documents: tuple[DocumentT, ...] | None = None
    speculation: tuple[DocumentT, ...] | None = None
    ever: bool = False


class Speculation(Generic[RequestT, DocumentT]):
    """Algorithm 2 of RAGCache for many requests at once: decides; searching and computing are others' business.

    A speculation is started when a stage names new documents and fewer than `max_prefill_batch` requests are pending,
    so that it takes idle capacity only. It is for an ordered list: the same documents in another order are others.

    One deviation: the printed algorithm starts only where the list changes, so that a list that was named under load
    is never started, however long the search goes on after it. Theorem 5.1 lets it start once the pool has room; so
    does this, unless `retry` is switched off.
    """

    def __init__(self, *, max_prefill_batch: int, retry: bool = True) -> None:
        """No request is being searched for yet.

        Raises:
            UsageError: the batch holds nothing.
        """
        if max_prefill_batch < 1:
            raise UsageError(f"max_prefill_batch must be at least 1, not {max_prefill_batch}")
        self._max_prefill_batch = max_prefill_batch
        self._retry = retry
        self._searches: dict[RequestT, _Search[DocumentT]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> SpeculationCounts:
        """A snapshot of the counters."""
        return SpeculationCounts(**self._counts)

    def on_stage(self, request: RequestT, documents: Sequence[DocumentT], pending: int) -> Decision[DocumentT]:
        """A stage that is not the last has named `documents`, best first.

        Args:
            request: whose search it is; its first stage begins it.
            documents: the provisional top-k.
            pending: requests that wait for, or are in, prefill (the pool's size), without this one's speculation.
        """
        search = self._searches.setdefault(request, _Search())
        named = tuple(documents)
        changed = named != search.documents
        search.documents = named
        self._counts["stages"] += 1
        if search.speculation == named:
            self._counts["kept"] += 1
            return Decision(Action.KEEP, named)
        terminated = self._terminate(search)
        if not changed and not self._retry:
            return Decision(Action.WAIT, named)
        if pending < self._max_prefill_batch:
            search.speculation = named
            search.ever = True
            self._counts["started"] += 1
            return Decision(Action.START, named, terminated)
        self._counts["deferred"] += 1
        return Decision(Action.WAIT if terminated is None else Action.TERMINATE, named, terminated)

    def on_final(self, request: RequestT, documents: Sequence[DocumentT]) -> Decision[DocumentT]:
        """The search is over: KEEP if what runs is for `documents`, else GENERATE. The request is then forgotten."""
        search = self._searches.pop(request, None) or _Search()
        named = tuple(documents)
        self._counts["stages"] += 1
        if search.speculation == named:
            self._counts["matched"] += 1
            return Decision(Action.KEEP, named)
        terminated = self._terminate(search)
        self._counts["regenerated" if search.ever else "late"] += 1
        return Decision(Action.GENERATE, named, terminated)

    def abort(self, request: RequestT) -> tuple[DocumentT, ...] | None:
        """The request is given up; returns the documents whose speculation is to be ended, None if none runs."""
        search = self._searches.pop(request, None)
        return None if search is None else self._terminate(search)

    def failed(self, request: RequestT) -> None:
        """What ran for the request is lost; the next stage may start it anew."""
        search = self._searches.get(request)
        if search is not None:
            search.speculation = None

    @property
    def running(self) -> int:
        """Requests with a speculation that was neither confirmed nor ended."""
        return sum(search.speculation is not None for search in self._searches.values())

    def _terminate(self, search: _Search[DocumentT]) -> tuple[DocumentT, ...] | None:
        terminated, search.speculation = search.speculation, None
        if terminated is not None:
            self._counts["terminated"] += 1
        return terminated
