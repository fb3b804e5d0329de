"""What comes back of a request: the answer and its pieces, whichever backend computes it."""

from dataclasses import dataclass

from chunkweave.metrics import ReuseReport
from chunkweave.planning.outcome import PlanExplanation


@dataclass(frozen=True, slots=True)
class Answer:
    """The text, its token ids, why it ended (`stop` or `length`), and what was reused to get it.

    `explanation` is the plan part by part, with the reasons for it.

    >>> from chunkweave import Chunk, Engine
    >>> choir = Chunk("The Selmond Choir is led by Otto Gunmark. There are 112 singers in all.", source="choir")
    >>> with Engine.load("reader") as engine:
    ...     answer = engine.generate("Who leads the Selmond Choir?", [choir])
    >>> answer.text.strip(), answer.finish_reason
    ('Otto Gunmark', 'stop')
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: ReuseReport
    explanation: PlanExplanation


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A piece of an answer as it comes; the last event has the whole `answer` (and the rest of the text).

    >>> from chunkweave import Engine, Request
    >>> with Engine.load("reader") as engine:
    ...     events = list(engine.stream(Request("Who leads the choir?", ["The choir is led by Otto Gunmark."])))
    >>> "".join(event.text for event in events) == events[-1].answer.text
    True
    """

    text: str
    answer: Answer | None = None
