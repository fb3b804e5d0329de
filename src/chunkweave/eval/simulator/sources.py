"""From what a user names to arrivals: a trace file, a data set, or a generated workload."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from chunkweave.errors import UsageError
from chunkweave.eval.datasets import load_dataset
from chunkweave.eval.simulator.trace import Arrival, at_times, poisson_times, read_trace
from chunkweave.eval.simulator.workloads import Corpus, ask_again, draw_requests, mmlu_like

GENERATED = ("mmlu-like", "zipf")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """How requests are drawn where the source is no trace, and when they arrive.

    `rate_per_s` are Poisson arrivals; None keeps a trace's own times and means one request a second elsewhere.
    `requests` None takes a trace whole. `top_k`, `exponent`, `documents` and `drift` are for what is drawn; None is
    each source's default.
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
            raise UsageError(f"at least one request is needed, not {self.requests}")
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise UsageError(f"requests must arrive at a positive rate, not {self.rate_per_s}")


def open_source(name: str, config: SourceConfig) -> list[Arrival]:
    """Arrivals of `name`: `mmlu-like`, `zipf`, a trace file (JSONL), or a data set (JSON) whose questions recur.

    Raises:
        UsageError: an option does not fit the source, or there is no such file.
        DocumentError: the file is neither a trace nor a data set; the message has file, line and reason.
    """
    times = poisson_times(config.requests or 10_000, config.rate_per_s or 1.0, config.seed)
    if name == "mmlu-like":
        if config.exponent is not None:
            raise UsageError("mmlu-like has a skew of its own; --zipf is for the trace `zipf`")
        return draw_requests(mmlu_like(config.documents, config.top_k or 2, config.drift), times, config.seed)
    if name == "zipf":
        exponent = 1.0 if config.exponent is None else config.exponent
        corpus = Corpus(config.documents, exponent, config.top_k or 2, drift=config.drift)
        return draw_requests(corpus, times, config.seed)
    path = Path(name)
    if not path.exists():
        raise UsageError(f"no trace {name!r}: neither a file nor one of {', '.join(GENERATED)}")
    if path.suffix.lower() == ".json":
        exponent = 1.0 if config.exponent is None else config.exponent
        examples = load_dataset(path, seed=config.seed)
        return ask_again(
            examples, bundled_token_count(), times, top_k=config.top_k or 5, exponent=exponent, seed=config.seed
        )
    return _replayed(read_trace(path), config)


def bundled_token_count() -> Callable[[str], int]:
    """Counts tokens with the tokenizer that comes with the package."""
    from tokenizers import Tokenizer

    with as_file(files("chunkweave") / "assets" / "tokenizer" / "tokenizer.json") as file:
        tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _replayed(arrivals: list[Arrival], config: SourceConfig) -> list[Arrival]:
    if config.top_k is not None or config.exponent is not None:
        raise UsageError("--top-k and --zipf are for requests that are drawn; a trace file says who asks for what")
    kept = arrivals[: config.requests]
    if config.rate_per_s is None:
        return kept
    in_order = sorted(kept, key=lambda arrival: arrival.arrival_s)
    return at_times(in_order, poisson_times(len(in_order), config.rate_per_s, config.seed))
