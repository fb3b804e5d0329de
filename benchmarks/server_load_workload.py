"""Who asks when, and for what: arrival times, and questions over documents that are popular by Zipf's law."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from load_generator import poisson_arrivals
from world_corpus import make_corpus

from chunkweave.errors import DocumentError
from chunkweave.eval.worlds.world import bundled_corpus
from chunkweave.types import Chunk


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of `chunks` documents each, drawn without repetition by Zipf's law and put in random order.

    The documents are passages of `worlds` generated worlds, or of the bundled corpus (0), each of `passages` in a row.
    """

    chunks: int = 6
    zipf: float = 1.0
    worlds: int = 0
    passages: int = 1
    new_tokens: int = 16
    seed: int = 0

    def documents(self) -> list[Chunk]:
        """All there are, the most popular first."""
        corpus = make_corpus(self.worlds, self.seed) if self.worlds else bundled_corpus()
        rows = [corpus.passages[i : i + self.passages] for i in range(0, len(corpus.passages), self.passages)]
        documents = [Chunk("\n".join(chunk.text for chunk in row), row[0].source) for row in rows]
        Random(f"popularity {self.seed}").shuffle(documents)
        return documents

    def bodies(self, reuse: Mapping[str, str] | None) -> Iterator[dict[str, Any]]:
        """Bodies of streamed chat requests without end: the same for all but for the field `chunkweave`, `reuse`."""
        documents = self.documents()
        weights = list(accumulate((rank + 1) ** -self.zipf for rank in range(len(documents))))
        rng = Random(f"requests {self.seed}")
        while True:
            chosen: dict[int, None] = {}
            while len(chosen) < min(self.chunks, len(documents)):
                chosen[rng.choices(range(len(documents)), cum_weights=weights)[0]] = None
            picked = [documents[number] for number in rng.sample(list(chosen), len(chosen))]
            body = {
                "messages": [{"role": "user", "content": f"What do they say about {rng.choice(picked).source}?"}],
                "documents": [{"title": chunk.source, "text": chunk.text} for chunk in picked],
                "max_tokens": self.new_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            yield body if reuse is None else {**body, "chunkweave": dict(reuse)}


def arrival_times(count: int, rate_per_s: float, trace: Sequence[float] | None, seed: int) -> list[float]:
    """When `count` requests come, at that mean rate: Poisson, or as a trace's first ones, stretched."""
    if trace is None:
        return poisson_arrivals(count, rate_per_s, seed)
    if len(trace) < count or count < 2:
        raise DocumentError(f"the trace has {len(trace)} arrivals, {count} are needed, and 2 at least")
    stretch = (count - 1) / rate_per_s / (trace[count - 1] - trace[0])
    return [(time_s - trace[0]) * stretch for time_s in trace[:count]]


def read_arrivals(path: Path) -> list[float]:
    """Seconds since the first arrival, from a CSV file whose column TIMESTAMP has dates and times.

    Raises:
        DocumentError: the file cannot be read, or a row has no such time.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            times = [datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in csv.DictReader(file)]
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise DocumentError(f"{path} is no CSV file with dates and times in a column TIMESTAMP: {error}") from error
    times.sort()
    return [time_s - times[0] for time_s in times]
