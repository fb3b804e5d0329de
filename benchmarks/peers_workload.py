"""Workloads of benchmarks/peers.py: sessions of requests over passages of real text.

- `cold`: no passage was asked about before;
- `warm`: a few prompts that were answered before, again and again;
- `shuffled`: the passages of those prompts in a new order, each prompt with half of another one's;
- `conversations`: each turn has new passages behind all that was sent and said before; what was said are the data
  set's own answers, so that every contender gets the same prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from chunkweave.calibration.questions import Example
from chunkweave.errors import UsageError
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import Chunk

COLD, WARM, SHUFFLED, CONVERSATIONS = WORKLOADS = ("cold", "warm", "shuffled", "conversations")
_WARM_UP = 2
_LEAST_FULL = 0.75
"""A passage with this share of its tokens is not filled up with the next text."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: a question over chunks, whose order may be changed if they are `free`; `order_s` is what that took."""

    question: str
    chunks: tuple[Chunk, ...]
    free: bool = True
    order_s: float = 0.0


Session = tuple[Asked, ...]
"""Requests that are sent one after the other, each after the previous answer."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Sessions processed by `clients` clients. Without a workload they only warm up, and nothing is measured."""

    sessions: tuple[Session, ...]
    clients: int = 1
    workload: str = ""

    @property
    def requests(self) -> int:
        """Requests of all sessions."""
        return sum(map(len, self.sessions))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Passages of a prompt, requests of a phase, prompts that `warm` repeats, turns of a conversation."""

    chunks: int
    requests: int
    distinct: int
    turns: int


class Corpus:
    """The passages of a data set, each used once, and its questions, repeated."""

    def __init__(self, examples: Sequence[Example], tokenizer: TextTokenizer, passage_tokens: int) -> None:
        """Texts are joined while they are short, and cut at `passage_tokens`."""
        places: dict[str, int] = {}
        passages: list[Chunk] = []
        joined = ""
        for text in dict.fromkeys(chunk.text for example in examples for chunk in example.chunks):
            places[text] = len(passages)
            joined = f"{joined}\n{text}" if joined else text
            ids = tokenizer.encode(joined)
            if len(ids) >= _LEAST_FULL * passage_tokens:
                passages.append(Chunk(tokenizer.decode(ids[:passage_tokens]), f"passage {len(passages)}"))
                joined = ""
        self._left = dict(enumerate(passages))
        self._questions = cycle(
            (one, list(dict.fromkeys(places[chunk.text] for chunk in one.chunks))) for one in examples
        )

    def take(self, count: int) -> Example:
        """The next question over `count` new passages: its own, then others.

        Raises:
            UsageError: fewer passages are left.
        """
        if len(self._left) < count:
            raise UsageError("the data set has too few passages: take a larger one, or ask for fewer requests")
        example, own = next(self._questions)
        chosen = [number for number in own if number in self._left][:count]
        others = (number for number in self._left if number not in chosen)
        chosen += islice(others, count - len(chosen))
        return replace(example, chunks=tuple(self._left.pop(number) for number in chosen))


def phases_of(workloads: Sequence[str], corpus: Corpus, sizes: Sizes, clients: Sequence[int], seed: int) -> list[Phase]:
    """Every workload at each number of clients, preceded by its warm-up."""
    rng = Random(f"peers {seed}")
    known = list(_cold(corpus, sizes.chunks, sizes.distinct))
    phases = [_phase(_cold(corpus, sizes.chunks, _WARM_UP))]
    for workload in workloads:
        if workload in (WARM, SHUFFLED):
            phases.append(_phase(known))
        for count in clients:
            if workload == COLD:
                phase = _phase(_cold(corpus, sizes.chunks, sizes.requests))
            elif workload == WARM:
                phase = _phase(islice(cycle(known), sizes.requests))
            elif workload == SHUFFLED:
                phase = _phase(shuffled(known, sizes.requests, rng))
            else:
                conversations = max(count, sizes.requests // sizes.turns)
                phase = Phase(tuple(conversation(corpus, sizes.turns, sizes.chunks) for _ in range(conversations)))
            phases.append(replace(phase, clients=count, workload=workload))
    return phases


def _phase(requests: Iterator[Asked] | Sequence[Asked]) -> Phase:
    return Phase(tuple((one,) for one in requests))


def _cold(corpus: Corpus, chunks: int, count: int) -> Iterator[Asked]:
    for _ in range(count):
        example = corpus.take(chunks)
        yield Asked(example.question, example.chunks)


def shuffled(known: Sequence[Asked], count: int, rng: Random) -> Iterator[Asked]:
    """Questions of `known` over half of their own chunks and as many of others', in random order."""
    for _ in range(count):
        asked = rng.choice(known)
        size = len(asked.chunks)
        own = rng.sample(asked.chunks, size // 2)
        others = [chunk for other in known if other is not asked for chunk in other.chunks]
        yield replace(asked, chunks=tuple(rng.sample([*own, *rng.sample(others, size - len(own))], size)))


def conversation(corpus: Corpus, turns: int, chunks: int) -> Session:
    """Turns with `chunks` new passages in all; what was said before is a chunk behind the passages of its turn."""
    asked: list[Asked] = []
    before: tuple[Chunk, ...] = ()
    for turn in range(turns):
        example = corpus.take(chunks // turns)
        asked.append(Asked(example.question, before + example.chunks, free=False))
        answer = example.answers[0] if example.answers else "That is not said."
        said = Chunk(f"Question: {example.question}\nAnswer: {answer}", f"turn {turn}")
        before = (*asked[-1].chunks, said)
    return tuple(asked)


Orders = Callable[[list[list[int]]], tuple[Sequence[Sequence[int]], Sequence[float]]]
"""From lists of numbers of chunks, as they will be asked, to the same in new orders, and the seconds that each took."""


def reordered(phases: Sequence[Phase], orders: Orders) -> list[Phase]:
    """The same phases with chunks in other orders, where they are free.

    Raises:
        UsageError: an order has other chunks.
    """
    numbers: dict[Chunk, int] = {}
    asked = [one for phase in phases for session in phase.sessions for one in session if one.free]
    given = [[numbers.setdefault(chunk, len(numbers)) for chunk in one.chunks] for one in asked]
    chunks = list(numbers)
    made = iter([(list(order), order_s) for order, order_s in zip(*orders(given), strict=True)])

    def again(one: Asked) -> Asked:
        if not one.free:
            return one
        order, order_s = next(made)
        if sorted(order) != sorted(numbers[chunk] for chunk in one.chunks):
            raise UsageError(f"an order has other chunks than the request: {order}")
        return replace(one, chunks=tuple(chunks[number] for number in order), order_s=order_s)

    return [replace(phase, sessions=tuple(tuple(map(again, one)) for one in phase.sessions)) for phase in phases]
