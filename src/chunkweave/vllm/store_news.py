"""What the scheduler is told of a worker's store after each step."""

from collections.abc import Callable

from chunkweave.store.chunk_follower import ChunkNews
from chunkweave.vllm.messages import StepResults

MOST_CHUNKS = 4096
"""Most chunks that the scheduler is told of in one step: what is left follows in the next."""


class StoreNews:
    """Pairs what came and went with the questions that it answers. Called from one thread.

    A request goes on with what the scheduler knows when it hears that its question is answered. So an answer is told
    only with all that it brought, or after it: one that comes in while news are being taken waits for the next ones.
    """

    def __init__(
        self, changed: Callable[[int], ChunkNews], answered: Callable[[], set[str]], most: int = MOST_CHUNKS
    ) -> None:
        """Nothing is told yet.

        Args:
            changed: takes what is new of at most so many chunks.
            answered: takes the requests whose question is answered; what was found for them `changed` sees from then
                on.
            most: chunks a step.
        """
        self._changed = changed
        self._answered = answered
        self._most = most
        self._untold: set[str] = set()

    def tell(self, results: StepResults) -> None:
        """Add what is new."""
        self._untold |= self._answered()
        news = self._changed(self._most)
        results.copies.update(dict.fromkeys(news.came, 1))
        results.copies.update(dict.fromkeys(news.went, -1))
        if not news.more:
            results.answered.update(self._untold)
            self._untold.clear()
