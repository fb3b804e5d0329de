"""From a file to the sequence of requests in it: our own traces, Mooncake's, or data sets question by question."""

import json
from pathlib import Path

from chunkweave.errors import DocumentError, UsageError
from chunkweave.eval.datasets import Example, load_dataset
from chunkweave.eval.simulator.trace import Arrival, Part, read_trace
from chunkweave.eval.simulator.workloads import bundled_token_count

MOONCAKE = "Mooncake trace"
"""Its blocks are named for all that is before them, so that their order is not free."""


def read_requests(path: Path, *, top_k: int | None = None, seed: int = 0) -> tuple[str, list[Arrival]]:
    """What kind of file it is, and its requests in order, each of its first `top_k` documents (None: all).

    A data set (MuSiQue or SQuAD JSON, or JSONL with `question`) is a request for each question, one a second, its
    tokens counted with the bundled tokenizer. `seed` draws the paragraphs that a SQuAD question gets.

    Raises:
        DocumentError: the file cannot be read; the message has file, line and reason.
        UsageError: `top_k` is not positive.
    """
    if top_k is not None and top_k < 1:
        raise UsageError(f"top-k must be at least 1, not {top_k}")
    first = _first_line(path)
    if "arrival_s" in first or "hash_ids" in first:
        kind = MOONCAKE if "hash_ids" in first else "request trace"
        arrivals = sorted(read_trace(path), key=lambda one: one.arrival_s)
    else:
        kind, arrivals = "data set", _questions(load_dataset(path, seed=seed))
    return kind, arrivals if top_k is None else [_cut(arrival, top_k) for arrival in arrivals]


def _first_line(path: Path) -> dict[str, object]:
    """The object in the first line that has something in it; empty if that is none."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            line = next((line for line in file if line.strip()), "")
        entry = json.loads(line) if line.lstrip().startswith("{") else {}
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8: bad byte at offset {error.start}") from error
    except OSError as error:
        raise DocumentError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except json.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _questions(examples: list[Example]) -> list[Arrival]:
    count = bundled_token_count()
    lengths: dict[str, int] = {}
    arrivals = []
    for number, example in enumerate(examples):
        for chunk in example.chunks:
            if chunk.text not in lengths:
                lengths[chunk.text] = max(1, count(chunk.text))
        parts = tuple(Part(chunk.text, lengths[chunk.text]) for chunk in example.chunks)
        arrivals.append(Arrival(float(number), parts, count(example.question)))
    return arrivals


def _cut(arrival: Arrival, top_k: int) -> Arrival:
    parts = arrival.parts[: int(arrival.has_system) + top_k]
    return Arrival(arrival.arrival_s, parts, arrival.question_tokens, arrival.has_system, arrival.conversation)
