"""Who waits, who runs, who gives its memory up for whom, and what a step runs. It decides; the core computes."""

from collections.abc import Callable, Iterator, Sequence

from chunkweave.engine.block_pool import BlockPool
from chunkweave.engine.step_group import StepGroup, groups_of
from chunkweave.engine.ticket import Ticket
from chunkweave.engine.waiting_room import WaitingRoom
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

    def __init__(self, tree: StoredPrefixes, config: BatchingConfig, *, preempting: Callable[[Ticket], None]) -> None:
        """Nothing waits yet. `preempting` is told of a request that is about to lose its memory."""
        self.pool = BlockPool(config.kv_tokens // config.block_tokens, config.block_tokens)
        self.waiting = WaitingRoom(tree, window=config.window)
        self._running: list[Ticket] = []
        self._preempting = preempting
        self._budget = TokenBudget(tokens=config.step_tokens, max_running=config.max_running)
        self._spare = TokenBudget(tokens=config.tokens_of_speculations, max_running=config.max_running)

    @property
    def running(self) -> tuple[Ticket, ...]:
        """Those that were admitted and have not ended, a snapshot; from any thread."""
        return tuple(self._running)

    def add(self, ticket: Ticket) -> None:
        """Let a new request wait."""
        self.waiting.add(ticket)

    def confirm(self, ticket: Ticket) -> None:
        """A speculation is a request like others from now on."""
        if ticket in self._running and self.waiting.requests:
            self._preempt(ticket)  # others wait for its memory, or for more: the queue says who is next
        self.waiting.confirm(ticket)

    def admit(self) -> Iterator[Ticket]:
        """Each request that is admitted now, with blocks of its own; it is to be started before the next one is taken.

        Requests are admitted as if there were no speculations, whose places they take where need be; then the
        speculations that still fit.
        """
        while len(self._running) - len(self._speculations()) < self._budget.max_running:
            ticket = self.waiting.pop(self._fits_without_speculations)
            if ticket is None:
                break
            while len(self._running) >= self._budget.max_running or not self.pool.fits(ticket.tokens):
                self._preempt(_youngest(self._speculations()))
            yield self._seated(ticket)
        while len(self._running) < self._budget.max_running:
            ticket = self.waiting.pop_speculation(lambda one: self.pool.fits(one.tokens))
            if ticket is None:
                break
            yield self._seated(ticket)

    def groups(self) -> list[StepGroup]:
        """What this step runs: the requests that were asked for, or else, with what time is to spare, speculations."""
        for speculative, budget in ((False, self._budget), (True, self._spare)):
            self._make_room(speculative=speculative)
            groups = groups_of([ticket for ticket in self._running if ticket.speculative is speculative], budget)
            if groups:
                return groups
        return []

    def put_back(self, ticket: Ticket) -> None:
        """Let a running request wait again, with its tokens kept and nothing else."""
        self._stop(ticket)
        self.waiting.put_back(ticket)

    def end(self, ticket: Ticket) -> bool:
        """A request neither waits nor runs any more; returns whether it ran."""
        if ticket in self._running:
            self._stop(ticket)
            return True
        self.waiting.remove(ticket)
        return False

    def check(self) -> None:
        """Audit blocks and caches.

        Raises:
            StoreError: blocks are held by somebody who does not run, or a cache is larger than its blocks.
        """
        self.pool.check()
        if set(self.pool.held) != set(self._running):
            raise StoreError("blocks are not held by the running requests")
        for ticket in self._running:
            if ticket.running is not None and ticket.running.prefilled.cache.capacity > self.pool.capacity(ticket):
                raise StoreError(f"the cache of request {ticket.id} is larger than its blocks")

    def close(self) -> None:
        """Nothing can wait afterwards."""
        self.waiting.close()

    def _speculations(self) -> list[Ticket]:
        return [ticket for ticket in self._running if ticket.speculative]

    def _fits_without_speculations(self, ticket: Ticket) -> bool:
        return self.pool.fits(ticket.tokens, without=self._speculations())

    def _seated(self, ticket: Ticket) -> Ticket:
        reserved = self.pool.reserve(ticket, ticket.tokens)
        assert reserved, "only what fits is admitted"
        self._running.append(ticket)
        return ticket

    def _make_room(self, *, speculative: bool) -> None:
        """Let decoding requests of one kind have room for their last token's KV, the oldest first."""
        kind = [ticket for ticket in self._running if ticket.speculative is speculative]
        for ticket in sorted(kind, key=lambda ticket: ticket.number):
            while ticket.job is None and ticket in self._running:
                assert ticket.running is not None, "who decodes has a token"
                if self.pool.grow(ticket, ticket.running.position + len(ticket.running.pending)):
                    ticket.running.prefilled.cache.grow(self.pool.capacity(ticket))
                    break
                self._preempt(_youngest(self._speculations() or self._running))

    def _preempt(self, ticket: Ticket) -> None:
        """Take a running request's memory for others; it waits again."""
        self._preempting(ticket)
        self.put_back(ticket)

    def _stop(self, ticket: Ticket) -> None:
        """Take a running request's memory, pins and blocks."""
        ticket.stop_reading()
        if ticket.running is not None:
            ticket.running.let_go()
        self._running.remove(ticket)
        self.pool.release(ticket)


def _youngest(tickets: Sequence[Ticket]) -> Ticket:
    return max(tickets, key=lambda ticket: ticket.number)
