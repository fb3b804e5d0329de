"""Generated workloads: the documents of requests, if there is no trace."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random

from chunkweave.calibration.questions import Example
from chunkweave.errors import UsageError
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.trace import Arrival, Part, at_times, poisson_times, read_trace

SYSTEM_TOKENS = 96
QUESTION_TOKENS = 64
_DRIFT_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Corpus:
    """A generated knowledge base and how requests draw from it.

    Document r of `documents` is drawn first with weight 1 / r^`exponent`; the others of a request's `top_k` are drawn
    from its `neighbours` nearest documents, nearer ones more often, as retrieval finds related ones. After every 1000
    requests a share `drift` of the documents swap places in the order of popularity. Lengths are log-normal with mean
    `mean_tokens` (RAGCache §3.1's) and sigma `spread`, cut at `max_tokens`.
    """

    documents: int = 10_000
    exponent: float = 1.0
    top_k: int = 2
    neighbours: int = 8
    mean_tokens: int = 3718
    spread: float = 0.8
    max_tokens: int = 16_384
    drift: float = 0.0

    def __post_init__(self) -> None:
        if self.documents < 1 or not 1 <= self.top_k <= min(self.documents, self.neighbours + 1):
            raise UsageError(
                f"top-k {self.top_k} needs as many documents ({self.documents}) and neighbours ({self.neighbours})"
            )
        if not self.exponent >= 0:
            raise UsageError(f"a Zipf exponent must not be negative: {self.exponent}")
        if not 0 <= self.drift <= 1:
            raise UsageError(f"drift must be from 0 to 1, not {self.drift}")


def exponent_for(documents: int, top_share: float, request_share: float) -> float:
    """The Zipf exponent for which `top_share` of the documents get `request_share` of the requests.

    RAGCache §3.2 measured for MMLU that 3 % of the documents get 60 % (its Figure 5).

    Raises:
        UsageError: no exponent does.
    """
    top = max(1, round(documents * top_share))
    if not top / documents <= request_share < 1:
        raise UsageError(f"{top_share:.0%} of {documents} documents cannot get {request_share:.0%} of the requests")
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = [rank**-middle for rank in range(1, documents + 1)]
        low, high = (middle, high) if sum(weights[:top]) < request_share * sum(weights) else (low, middle)
    return (low + high) / 2


def mmlu_like(documents: int = 10_000, top_k: int = 2, drift: float = 0.0) -> Corpus:
    """The skew that RAGCache measured for MMLU: 3 % of the documents get 60 % of the requests; top-2, as in its §7."""
    return Corpus(documents, exponent_for(documents, 0.03, 0.6), top_k, drift=drift)


def draw_requests(corpus: Corpus, times: Sequence[float], seed: int) -> list[Arrival]:
    """One request per arrival time."""
    rng = Random(f"workload {seed}")
    mu = log(corpus.mean_tokens) - corpus.spread**2 / 2
    lengths = [
        max(1, min(corpus.max_tokens, round(rng.lognormvariate(mu, corpus.spread)))) for _ in range(corpus.documents)
    ]
    places = rng.sample(range(corpus.documents), corpus.documents)  # popularity is independent of the neighbourhood
    draw = _zipf(corpus.documents, corpus.exponent, rng)
    nearer = _zipf(corpus.neighbours, 1.0, rng) if corpus.neighbours else None
    arrivals = []
    for number, time_s in enumerate(times):
        if corpus.drift and number and number % _DRIFT_EVERY == 0:
            _change_places(places, round(corpus.drift * corpus.documents), rng)
        first = places[draw()]
        chosen = {first: None}
        while len(chosen) < corpus.top_k and nearer is not None:
            chosen[(first + 1 + nearer()) % corpus.documents] = None
        parts = [Part("system", SYSTEM_TOKENS), *(Part(f"d{number}", lengths[number]) for number in chosen)]
        arrivals.append(Arrival(time_s, tuple(parts), QUESTION_TOKENS, has_system=True))
    return arrivals


def recurring(examples: Sequence[Example], count: int, *, top_k: int, exponent: float, seed: int) -> Iterator[Example]:
    """`count` draws of `examples` by Zipf's law, each with the `top_k` passages of a noisy retrieval.

    A passage at rank r of its question scores -log r plus Gumbel noise of scale 1/4: a rephrased question mostly finds
    the same passages, sometimes in another order.

    Raises:
        UsageError: a question has fewer passages.
    """
    if not 1 <= top_k <= min(len(example.chunks) for example in examples):
        raise UsageError(f"top-k {top_k} must be at least 1 and at most the number of passages of every question")
    rng = Random(f"workload {seed}")
    order = rng.sample(range(len(examples)), len(examples))
    draw = _zipf(len(examples), exponent, rng)
    for _ in range(count):
        example = examples[order[draw()]]
        scores = [-log(rank) - 0.25 * log(rng.expovariate(1.0)) for rank in range(1, len(example.chunks) + 1)]
        found = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:top_k]
        yield replace(example, chunks=tuple(example.chunks[place] for place in found))


def ask_again(
    examples: Sequence[Example],
    count_tokens: Callable[[str], int],
    times: Sequence[float],
    *,
    top_k: int,
    exponent: float,
    seed: int,
) -> list[Arrival]:
    """Arrivals of a data set's recurring questions, each over the `top_k` passages of a noisy retrieval (`recurring`).

    Raises:
        UsageError: a question has fewer passages.
    """
    lengths: dict[str, int] = {}
    arrivals = []
    repeated = recurring(examples, len(times), top_k=top_k, exponent=exponent, seed=seed)
    for time_s, example in zip(times, repeated, strict=True):
        texts = [chunk.text for chunk in example.chunks]
        parts = [Part(text, lengths.setdefault(text, 0) or _count(text, lengths, count_tokens)) for text in texts]
        question = count_tokens(example.question)
        arrivals.append(Arrival(time_s, (Part("system", SYSTEM_TOKENS), *parts), question, has_system=True))
    return arrivals


def _count(text: str, lengths: dict[str, int], count_tokens: Callable[[str], int]) -> int:
    lengths[text] = max(1, count_tokens(text))
    return lengths[text]


def _change_places(places: list[int], count: int, rng: Random) -> None:
    """Shuffle `count` of `places` among themselves."""
    moved = rng.sample(range(len(places)), count)
    documents = [places[rank] for rank in moved]
    rng.shuffle(documents)
    for rank, document in zip(moved, documents, strict=True):
        places[rank] = document


def _zipf(count: int, exponent: float, rng: Random) -> Callable[[], int]:
    """Draws 0..count-1, number i with weight 1 / (i + 1)^exponent."""
    population = range(count)
    weights = list(accumulate((rank + 1) ** -exponent for rank in population))
    return lambda: rng.choices(population, cum_weights=weights)[0]


GENERATED = ("mmlu-like", "zipf")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """How requests are drawn if the source is not a trace, and when they arrive.

    `rate_per_s` gives Poisson arrivals; None keeps a trace's own times, or means one request per second. With
    `requests=None` a trace is replayed wholly. `top_k`, `exponent`, `documents` and `drift` are for drawn requests;
    None means the source's default.
    """

    requests: int | None = None
    rate_per_s: float | None = None
    top_k: int | None = None
    exponent: float | None = None
    documents: int = 10_000
    drift: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise UsageError(f"requests must be at least 1, not {self.requests}")
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise UsageError(f"requests must arrive at a positive rate, not {self.rate_per_s}")


def open_source(name: str, config: SourceConfig) -> list[Arrival]:
    """Arrivals of `name`: `mmlu-like`, `zipf`, a trace file (JSONL), or a data set (JSON) whose questions recur.

    Raises:
        UsageError: an option does not fit the source, or the file does not exist.
        DocumentError: the file is neither a trace nor a data set; the message has file, line and reason.
    """
    times = poisson_times(config.requests or 10_000, config.rate_per_s or 1.0, config.seed)
    if name == "mmlu-like":
        if config.exponent is not None:
            raise UsageError("mmlu-like has a fixed skew; --zipf is for the workload `zipf`")
        return draw_requests(mmlu_like(config.documents, config.top_k or 2, config.drift), times, config.seed)
    if name == "zipf":
        exponent = 1.0 if config.exponent is None else config.exponent
        corpus = Corpus(config.documents, exponent, config.top_k or 2, drift=config.drift)
        return draw_requests(corpus, times, config.seed)
    path = Path(name)
    if not path.exists():
        raise UsageError(f"unknown trace {name!r}: it is neither a file nor one of {', '.join(GENERATED)}")
    if path.suffix.lower() == ".json":
        exponent = 1.0 if config.exponent is None else config.exponent
        examples = load_dataset(path, seed=config.seed)
        return ask_again(
            examples, bundled_token_count(), times, top_k=config.top_k or 5, exponent=exponent, seed=config.seed
        )
    return _replayed(read_trace(path), config)


def bundled_token_count() -> Callable[[str], int]:
    """Counts tokens with the bundled tokenizer."""
    from tokenizers import Tokenizer

    with as_file(files("chunkweave") / "assets" / "tokenizer" / "tokenizer.json") as file:
        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _replayed(arrivals: list[Arrival], config: SourceConfig) -> list[Arrival]:
    if config.top_k is not None or config.exponent is not None:
        raise UsageError("--top-k and --zipf are for drawn requests; a trace file defines its requests")
    kept = arrivals[: config.requests]
    if config.rate_per_s is None:
        return kept
    in_order = sorted(kept, key=lambda arrival: arrival.arrival_s)
    return at_times(in_order, poisson_times(len(in_order), config.rate_per_s, config.seed))
