"""Requests: one question over chunks, the same for every backend."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chunkweave.config import SamplingParams
from chunkweave.types import CacheUse, Chunk


@dataclass(frozen=True, slots=True)
class Request:
    """One question over chunks, for `Engine.generate_batch`.

    `system=None` means the template's own instruction. `cache_salt` separates tenants: chunks cached under one salt are
    never found under another. `order` is `free` if the chunks (given best first) may be reordered, `fixed` if not; None
    means the engine's setting.

    `history` are earlier questions of a conversation with their answers, placed after the instruction. Only their KV
    is kept, and found again by their text. `history_chunks` has for each of them the chunks before its question. The
    answer continues the text `continued`, which is not part of it. `cache` says whether stored KV is used and kept.

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
    tenant: str = ""
    history: Sequence[tuple[str, str]] = ()
    history_chunks: Sequence[Sequence[Chunk | str]] = ()
    continued: str = ""
    cache: CacheUse = CacheUse.USE

    @property
    def messages(self) -> list[dict[str, str]]:
        """The instruction, earlier turns and the question in the form that chat templates read."""
        messages = [] if self.system is None else [("system", self.system)]
        for question, answer in self.history:
            messages += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": text} for role, text in (*messages, ("user", self.question))]
