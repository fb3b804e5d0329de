"""Workloads of server_load.py: arrival times, questions over popular documents, and the contenders."""

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from load_generator import poisson_arrivals
from recurring_requests import world_questions
from world_corpus import make_corpus

from chunkweave.calibration.questions import Example, bundled_corpus, digest_of
from chunkweave.config import ReuseConfig
from chunkweave.errors import DocumentError, UsageError
from chunkweave.planning.method import reuses_nothing
from chunkweave.types import Chunk
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.workloads import recurring

CORPUS = "load"
"""The name of the server's corpus for a data set's passages."""

NONE = "none"
"""Contender without a method: requests have no fields about reuse."""
_WAY = re.compile(r"\s*([\w+.%][\w+.% -]*?)\s*:(.*)", re.DOTALL)
"""A name that can be part of a path in claims.toml, and flags."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, and whether chunks may be reordered; `none` has no order."""

    method: str
    order: str | None
    top_k: int | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of its row."""
        return {"method": self.method, "order": self.order, **_top_k(self.top_k)}

    @property
    def field(self) -> dict[str, Any] | None:
        """The field of its requests about reuse."""
        return None if self.order is None else self.keys

    def command(self, serve: str) -> str:
        """The command of its server."""
        return serve.replace("{method}", self.method).replace("{order}", self.order or "fixed")


@dataclass(frozen=True, slots=True)
class Way:
    """Named settings of the server; its requests have no fields about reuse."""

    name: str
    flags: str
    top_k: int | None = None

    @staticmethod
    def of(text: str) -> "Way":
        """Parse `NAME: FLAGS`.

        Raises:
            UsageError: the form is wrong, or the name has characters other than letters, digits, spaces and `_ + . %
                -`.
        """
        if (found := _WAY.fullmatch(text)) is None:
            raise UsageError(f"{text!r} is no NAME: FLAGS; a name has letters, digits, spaces and _ + . % - only")
        return Way(found[1], found[2].strip())

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of its row."""
        return {"way": self.name, "flags": self.flags, **_top_k(self.top_k)}

    @property
    def field(self) -> dict[str, Any] | None:
        """The field of its requests about reuse."""
        return _top_k(self.top_k) or None

    def command(self, serve: str) -> str:
        """The command of its server."""
        return serve.replace("{way}", self.flags)


def _top_k(top_k: int | None) -> dict[str, int]:
    return {} if top_k is None else {"top_k": top_k}


def choices(methods: Sequence[str], orders: Sequence[str]) -> list[Choice]:
    """Every method in every order; methods that reuse nothing in one order only."""
    found: list[Choice] = []
    for method in methods:
        if method == NONE:
            found.append(Choice(method, None))
        elif reuses_nothing(method, ReuseConfig()):
            found.append(Choice(method, "fixed"))
        else:
            found += [Choice(method, order) for order in orders]
    return found


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
        """All documents, most popular first."""
        corpus = make_corpus(self.worlds, self.seed) if self.worlds else bundled_corpus()
        rows = [corpus.passages[i : i + self.passages] for i in range(0, len(corpus.passages), self.passages)]
        documents = [Chunk("\n".join(chunk.text for chunk in row), row[0].source) for row in rows]
        Random(f"popularity {self.seed}").shuffle(documents)
        return documents

    def settings(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def bodies(self, reuse: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """An endless sequence of bodies of streamed chat requests; only the field `chunkweave` (`reuse`) differs."""
        documents = self.documents()
        weights = _zipf_weights(len(documents), self.zipf)
        rng = Random(f"requests {self.seed}")
        while True:
            chosen: dict[int, None] = {}
            while len(chosen) < min(self.chunks, len(documents)):
                chosen[rng.choices(range(len(documents)), cum_weights=weights)[0]] = None
            picked = [documents[number] for number in rng.sample(list(chosen), len(chosen))]
            body = {
                **_body(f"What do they say about {rng.choice(picked).source}?", self.new_tokens),
                "documents": [{"title": chunk.source, "text": chunk.text} for chunk in picked],
            }
            yield body if reuse is None else {**body, "chunkweave": dict(reuse)}


@dataclass(frozen=True, slots=True)
class CorpusWorkload:
    """Questions of a data set, drawn by Zipf's law, to a corpus of the server with the data set's passages.

    The server retrieves; requests do not name a question's passages.
    """

    dataset: Path
    zipf: float = 1.0
    new_tokens: int = 16
    seed: int = 0

    def passages(self) -> list[str]:
        """The text of every passage, once, in the data set's order.

        Raises:
            DocumentError: as `load_dataset`.
        """
        return list(dict.fromkeys(chunk.text for example in load_dataset(self.dataset) for chunk in example.chunks))

    def settings(self) -> dict[str, Any]:
        """JSON-able: the data set by name and content, not by path."""
        examples = load_dataset(self.dataset)
        found = {"questions": len(examples), "passages": len(self.passages()), "digest": digest_of(examples)}
        return {**asdict(self), "dataset": self.dataset.name, **found}

    def bodies(self, reuse: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """An endless sequence of bodies of streamed chat requests; only `reuse` in the field `chunkweave` differs."""
        questions = [example.question for example in load_dataset(self.dataset)]
        Random(f"popularity {self.seed}").shuffle(questions)
        weights = _zipf_weights(len(questions), self.zipf)
        rng = Random(f"requests {self.seed}")
        while True:
            [question] = rng.choices(questions, cum_weights=weights)
            yield {**_body(question, self.new_tokens), "chunkweave": {"corpus": CORPUS, **(reuse or {})}}


@dataclass(frozen=True, slots=True)
class RecurringWorkload:
    """Questions that recur by Zipf's law, each with the `chunks` passages that a noisy retrieval ranks first.

    They are those of `craft_ordering.py`: `questions` about `worlds` generated worlds, or those of `dataset` over its
    own passages. Requests contain the passages; a question mostly has the same ones, sometimes in another order.
    """

    dataset: Path | None
    chunks: int = 5
    zipf: float = 1.0
    worlds: int = 20
    questions: int = 200
    new_tokens: int = 16
    seed: int = 0

    def examples(self) -> list[Example]:
        """Every question once, with all its passages.

        Raises:
            DocumentError: as `load_dataset`.
        """
        if self.dataset is not None:
            return load_dataset(self.dataset, seed=self.seed)
        return world_questions(self.chunks, questions=self.questions, worlds=self.worlds, seed=self.seed)

    def settings(self) -> dict[str, Any]:
        """JSON-able: a data set by name and content; without the number of passages, which is each contender's."""
        found = {key: value for key, value in asdict(self).items() if key != "chunks"}
        if self.dataset is None:
            return {**found, "recurring": True}
        named = {key: value for key, value in found.items() if key not in ("worlds", "questions")}
        return {**named, "dataset": self.dataset.name, "digest": digest_of(self.examples()), "recurring": True}

    def bodies(self, reuse: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """An endless sequence of bodies of streamed chat requests; only `reuse` in the field `chunkweave` differs.

        A `top_k` in it is omitted: it is for servers that retrieve.
        """
        field = {key: value for key, value in (reuse or {}).items() if key != "top_k"}
        for one in recurring(self.examples(), sys.maxsize, top_k=self.chunks, exponent=self.zipf, seed=self.seed):
            documents = [{"title": chunk.source, "text": chunk.text} for chunk in one.chunks]
            body = {**_body(one.question, self.new_tokens), "documents": documents}
            yield {**body, "chunkweave": field} if field else body


def _zipf_weights(count: int, exponent: float) -> list[float]:
    """Cumulative weights, most popular first."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


def _body(question: str, new_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def arrival_times(count: int, rate_per_s: float, trace: Sequence[float] | None, seed: int) -> list[float]:
    """Arrival times of `count` requests at this mean rate: Poisson, or the first ones of a trace, stretched."""
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
