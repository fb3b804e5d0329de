"""What is asked: one question over chunks, as every backend takes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chunkweave.config import SamplingParams
from chunkweave.types import Chunk


@dataclass(frozen=True, slots=True)
class Request:
    """One question over chunks, as `Engine.generate_batch` takes them.

    `system=None` means the template's own instruction. `cache_salt` separates tenants: chunks cached under one salt
    are never found under another. `order` is `free` if the chunks (given best first) may be
    reordered, `fixed` if not; None leaves it to the engine. With a `conversation_id`, one among those of the same salt,
    the question is the next turn of that conversation, or the first of a new one; `system=None` is then the
    conversation's own instruction. Who says the number of the `turn`, from 1, is refused where another one comes next.
    Conversations are shared out by `tenant`. Without an id `history` are earlier questions with their answers, which
    stand behind the instruction: nothing is kept of them but KV, which is found again by what they say.
    `history_chunks` has for each of these the chunks that stand before its question.

    >>> from chunkweave import Engine, Request, SamplingParams
    >>> asked = Request("Who leads the choir?", ["The choir is led by Otto Gunmark."], sampling=SamplingParams(16))
    >>> with Engine.load("reader") as engine:
    ...     [answer.text.strip() for answer in engine.generate_batch([asked])]
    ['Otto Gunmark']
    """

    question: str
    chunks: Sequence[Chunk | str] = ()
    system: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    order: str | None = None
    conversation_id: str | None = None
    turn: int | None = None
    tenant: str = ""
    history: Sequence[tuple[str, str]] = ()
    history_chunks: Sequence[Sequence[Chunk | str]] = ()
