"""A conversation as its caller holds it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from chunkweave.config import SamplingParams
from chunkweave.engine.answer import Answer, Request, StreamEvent
from chunkweave.errors import ConversationEndedError
from chunkweave.ordering.conversations import ConversationState
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine


class Conversation:
    """Questions that go on from each other (CRAFT §4.3). `Engine.conversation` makes one.

    What was asked and answered stays in the context, as tokens and as KV; chunks that are there already are not sent
    again. What has been said belongs to the engine, which also takes requests with this `id`; this object only names
    it. It ends when it is closed, or was idle for too long.
    """

    def __init__(self, engine: "Engine", cache_salt: str, conversation_id: str) -> None:
        self.id = conversation_id
        self.cache_salt = cache_salt
        self._engine = engine

    @property
    def turns(self) -> int:
        """Questions answered so far, with those that were cut off since.

        Raises:
            ConversationEndedError: it was idle for too long, or was closed.
        """
        return self._state().turn_count

    @property
    def history_tokens(self) -> int:
        """Tokens of its turns that are still in the context.

        Raises:
            ConversationEndedError: it was idle for too long, or was closed.
        """
        return sum(turn.tokens for turn in self._state().turns)

    def ask(
        self,
        question: str,
        chunks: Sequence[Chunk | str] = (),
        *,
        sampling: SamplingParams | None = None,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
    ) -> Answer:
        """The next turn; `method`, `quality` and `recompute_ratio` are as in `Engine.generate`.

        Raises:
            ConversationEndedError: it was idle for too long, or was closed.
            ConversationBusyError: its last question is still being answered.
            UsageError: as `Engine.generate`, or a chat template that takes no second turn.
            PromptTooLongError: not even the new turn fits the model's context.
        """
        request = self.request(question, chunks, sampling=sampling)
        return self._engine.generate_batch([request], method=method, quality=quality, recompute_ratio=recompute_ratio)[
            0
        ]

    def stream(
        self,
        question: str,
        chunks: Sequence[Chunk | str] = (),
        *,
        sampling: SamplingParams | None = None,
        method: str | None = None,
        quality: str | None = None,
        recompute_ratio: float | None = None,
    ) -> Iterator[StreamEvent]:
        """The next turn in pieces, as `Engine.stream`. A turn that is left before its last event was never said.

        Raises:
            ConversationEndedError: it was idle for too long, or was closed.
        """
        request = self.request(question, chunks, sampling=sampling)
        return self._engine.stream(request, method=method, quality=quality, recompute_ratio=recompute_ratio)

    def request(
        self, question: str, chunks: Sequence[Chunk | str] = (), *, sampling: SamplingParams | None = None
    ) -> Request:
        """The next turn as a request, for `generate_batch` or `AsyncEngine.submit`.

        Raises:
            ConversationEndedError: it was idle for too long, or was closed.
        """
        self._state()
        return Request(
            question,
            tuple(chunks),
            sampling=sampling or SamplingParams(),
            cache_salt=self.cache_salt,
            conversation_id=self.id,
        )

    def close(self) -> None:
        """Forget it, and drop what is kept for it alone; a second time is harmless."""
        self._engine.conversations.close((self.cache_salt, self.id))

    def _state(self) -> ConversationState:
        state = self._engine.conversations.state((self.cache_salt, self.id))
        if state is None:
            raise ConversationEndedError(f"the conversation {self.id!r} was idle for too long, or was closed")
        return state
