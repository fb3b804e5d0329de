"""Who waits, who runs, who gives its memory up for whom, and what a step runs. It decides; the core computes."""

from collections.abc import Callable, Iterator, Sequence

from chunkweave.engine.block_pool import BlockPool
from chunkweave.engine.step_group import StepGroup, groups_of
from chunkweave.engine.ticket import RequestState
from chunkweave.engine.waiting_room import RequestQueue
from chunkweave.errors import StoreError
from chunkweave.scheduling.budget import BatchingConfig, TokenBudget
from chunkweave.scheduling.queue import StoredPrefixes


class Scheduler:
    """Requests between admission and end, and the blocks that those hold which run.

    A request is admitted if what is known of it fits, and grows as it decodes. Where no block is left, the youngest
    request gives its KV up and waits again with its tokens kept. The oldest is never preempted for others, and no
    request may be larger than the whole memory: so there is always one that ends. Speculations yield their places and
    blocks to all others, and are in no step in which another request could be. One thread's.
    """

    def __init__(
        self, tree: StoredPrefixes, config: BatchingConfig, *, preempting: Callable[[RequestState], None]
    ) -> None:
        """Nothing waits yet. `preempting` is told of a request that is about to lose its memory."""
        self.pool = BlockPool(config.kv_tokens // config.block_tokens, config.block_tokens)
        self.waiting = RequestQueue(tree, window=config.window)
        self._running: list[RequestState] = []
        self._preempting = preempting
        self._budget = TokenBudget(tokens=config.step_tokens, max_running=config.max_running)
        self._spare = TokenBudget(tokens=config.tokens_of_speculations, max_running=config.max_running)

    @property
    def running(self) -> tuple[RequestState, ...]:
        """Those that were admitted and have not ended, a snapshot; from any thread."""
        return tuple(self._running)

    def add(self, request: RequestState) -> None:
        """Let a new request wait."""
        self.waiting.add(request)

    def confirm(self, request: RequestState) -> None:
        """A speculation is a request like others from now on."""
        if request in self._running and self.waiting.requests:
            self._preempt(request)  # others wait for its memory, or for more: the queue says who is next
        self.waiting.confirm(request)

    def admit(self) -> Iterator[RequestState]:
        """Each request that is admitted now, with blocks of its own; it is to be started before the next one is taken.

        Requests are admitted as if there were no speculations, whose places they take where need be; then the
        speculations that still fit.
        """
        while len(self._running) - len(self._speculations()) < self._budget.max_running:
            request = self.waiting.pop(self._fits_without_speculations)
            if request is None:
                break
            while len(self._running) >= self._budget.max_running or not self.pool.fits(request.tokens):
                self._preempt(_youngest(self._speculations()))
            yield self._seated(request)
        while len(self._running) < self._budget.max_running:
            request = self.waiting.pop_speculation(lambda one: self.pool.fits(one.tokens))
            if request is None:
                break
            yield self._seated(request)

    def groups(self) -> list[StepGroup]:
        """What this step runs: the requests that were asked for, or else, with what time is to spare, speculations."""
        for speculative, budget in ((False, self._budget), (True, self._spare)):
            self._make_room(speculative=speculative)
            groups = groups_of([request for request in self._running if request.speculative is speculative], budget)
            if groups:
                return groups
        return []

    def put_back(self, request: RequestState) -> None:
        """Let a running request wait again, with its tokens kept and nothing else."""
        self._stop(request)
        self.waiting.put_back(request)

    def end(self, request: RequestState) -> bool:
        """A request neither waits nor runs any more; returns whether it ran."""
        if request in self._running:
            self._stop(request)
            return True
        self.waiting.remove(request)
        return False

    def check(self) -> None:
        """Audit blocks and caches.

        Raises:
            StoreError: blocks are held by somebody who does not run, or a cache is larger than its blocks.
        """
        self.pool.check()
        if set(self.pool.held) != set(self._running):
            raise StoreError("blocks are not held by the running requests")
        for request in self._running:
            if request.decode is not None and request.decode.prefilled.cache.capacity > self.pool.capacity(request):
                raise StoreError(f"the cache of request {request.id} is larger than its blocks")

    def close(self) -> None:
        """Nothing can wait afterwards."""
        self.waiting.close()

    def _speculations(self) -> list[RequestState]:
        return [request for request in self._running if request.speculative]

    def _fits_without_speculations(self, request: RequestState) -> bool:
        return self.pool.fits(request.tokens, without=self._speculations())

    def _seated(self, request: RequestState) -> RequestState:
        reserved = self.pool.reserve(request, request.tokens)
        assert reserved, "only what fits is admitted"
        self._running.append(request)
        return request

    def _make_room(self, *, speculative: bool) -> None:
        """Let decoding requests of one kind have room for their last token's KV, the oldest first."""
        kind = [request for request in self._running if request.speculative is speculative]
        for request in sorted(kind, key=lambda request: request.number):
            while request.job is None and request in self._running:
                assert request.decode is not None, "who decodes has a token"
                if self.pool.grow(request, request.decode.position + len(request.decode.pending)):
                    request.decode.prefilled.cache.grow(self.pool.capacity(request))
                    break
                self._preempt(_youngest(self._speculations() or self._running))

    def _preempt(self, request: RequestState) -> None:
        """Take a running request's memory for others; it waits again."""
        self._preempting(request)
        self.put_back(request)

    def _stop(self, request: RequestState) -> None:
        """Take a running request's memory, pins and blocks."""
        request.stop_reading()
        if request.decode is not None:
            request.decode.let_go()
        self._running.remove(request)
        self.pool.release(request)


def _youngest(requests: Sequence[RequestState]) -> RequestState:
    return max(requests, key=lambda request: request.number)
