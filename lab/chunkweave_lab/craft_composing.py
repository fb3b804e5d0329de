"""Where order, exact prefixes and weaving together save more than the best of them alone. Imports no torch.

    python lab/chunkweave_lab/craft_composing.py --dataset FILE --requests 600 --out docs/results/craft-composing.json

Of a prompt's tokens behind the instruction, which all have in common, q are the question's, p lie in the exact prefix
that a free order finds, and of the others, stored in other contexts, weaving computes the share w. Tokens computed:

    weaving, caller's order     q + w (1 - q)
    exact prefix, free order    1 - p'                      p': every path is stored
    all together                q + g + w (1 - q - p - g)   g: computed in full, so that later prefixes are longer

What every woven request costs beside its tokens, in tokens, counts like q; a layer at which all reused tokens are
active like w.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import check_writable, write_json
from chunkweave.ordering.arrangement import Arranger
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave_lab.chunk_order import UnlimitedCache
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.trace import Arrival, Part, key_of, poisson_times
from chunkweave_lab.simulator.workloads import QUESTION_TOKENS, Corpus, bundled_token_count, draw_requests, recurring

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
SKEWS = (0.8, 1.0, 1.2, 1.4)
"""Zipf exponents of the popularity."""

_FRAME_TOKENS = 10
"""Of the template, around a question."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the tokens of questions and chunks: q, p, g, and p' (above), over the requests that were counted."""

    question: float
    exact: float
    grown: float
    exact_alone: float

    def weaving(self, ratio: float) -> float:
        """Share computed by weaving in the caller's order."""
        return self.question + ratio * (1 - self.question)

    def prefix(self) -> float:
        """Share computed with exact prefixes in a free order."""
        return 1 - self.exact_alone

    def composed(self, ratio: float) -> float:
        """Share computed by all three together."""
        return self.question + self.grown + ratio * (1 - self.question - self.exact - self.grown)

    def gain(self, ratio: float) -> float:
        """How many times fewer tokens all together compute than the best alone."""
        return min(self.weaving(ratio), self.prefix()) / self.composed(ratio)

    def as_dict(self, ratios: Sequence[float] = RATIOS) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "gain": {str(ratio): self.gain(ratio) for ratio in ratios}}


def shares_of(arrivals: Sequence[Arrival], config: OrderingConfig, *, warm_up: int, question_tokens: float) -> Shares:
    """Replay requests through the engine's own order and promotion, an unlimited cache given.

    Every chunk is stored alone before. Requests behind the first `warm_up`
    are counted; `question_tokens` is a mean.
    """
    woven, exact = (_Replay(config, weaves=weaves) for weaves in (True, False))
    for number, arrival in enumerate(arrivals):
        for one in (woven, exact):
            one.serve(arrival.documents, counted=number >= warm_up)
    questions = (len(arrivals) - warm_up) * question_tokens
    total = woven.tokens + questions
    return Shares(questions / total, woven.exact / total, woven.grown / total, exact.exact / total)


class _Replay:
    """Exact prefixes of one engine: one that weaves grows them by promoted paths, another keeps every path."""

    def __init__(self, config: OrderingConfig, *, weaves: bool) -> None:
        self.tokens = self.exact = self.grown = 0
        self._weaves = weaves
        self._cache = UnlimitedCache()
        self._arranger = Arranger(config, self._cache.tree, order=ChunkOrder.FREE)

    def serve(self, documents: Sequence[Part], *, counted: bool) -> None:
        """One request."""
        parts = {key_of(part): part for part in documents}
        arranged = self._arranger.arrange(_prompt(documents))
        path = [part.id for part in arranged.prompt.parts if part.id is not None]
        stored = self._cache.tree.match(path).nodes
        continued = arranged.promotion.continued
        grows = int(self._weaves and stored < len(path) and path[stored] in continued)
        held = stored + grows if self._weaves else len(path)
        self._cache.hold([parts[chunk] for chunk in path[:held]])
        if counted:
            tokens = [parts[chunk].tokens for chunk in path]
            self.tokens += sum(tokens)
            self.exact += sum(tokens[:stored])
            self.grown += sum(tokens[stored : stored + grows])


def _prompt(documents: Sequence[Part]) -> Prompt:
    chunks = [PromptPart(PartKind.CHUNK, (0,) * part.tokens, key_of(part)) for part in documents]
    return Prompt((*chunks, PromptPart(PartKind.QUESTION, (0,))))


def workloads_of(arguments: argparse.Namespace, skew: float, count: int) -> dict[str, tuple[list[Arrival], float]]:
    """Requests with this skew, and the mean tokens of a question, by workload."""
    corpus = Corpus(1000, skew, arguments.k, mean_tokens=128, spread=0.3, max_tokens=256)
    drawn = draw_requests(corpus, poisson_times(count, 1.0, arguments.seed), arguments.seed)
    count_tokens = bundled_token_count()
    examples = list(
        recurring(load_dataset(arguments.dataset), count, top_k=arguments.k, exponent=skew, seed=arguments.seed)
    )
    questions = fmean(count_tokens(example.question) for example in examples) + _FRAME_TOKENS
    lengths = {chunk.text: max(1, count_tokens(chunk.text)) for example in examples for chunk in example.chunks}
    arrivals = [
        Arrival(float(number), tuple(Part(chunk.text, lengths[chunk.text]) for chunk in example.chunks))
        for number, example in enumerate(examples)
    ]
    return {"drawn": (drawn, float(QUESTION_TOKENS)), "data set": (arrivals, questions)}


def main() -> None:
    """Replay every workload and skew, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True, help="whose questions recur")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--warm-up", type=int, default=100, help="requests before those that are counted; also tenfold")
    parser.add_argument("--k", type=int, default=5, help="chunks of a request")
    parser.add_argument("--window", type=int, default=1000, help="requests over which chunks are counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    check_writable(arguments.out)
    config = OrderingConfig("frequency", arguments.window)
    rows = []
    for skew in SKEWS:
        workloads = workloads_of(arguments, skew, 10 * arguments.warm_up + arguments.requests)
        for name, (arrivals, questions) in workloads.items():
            for warm_up in (arguments.warm_up, 10 * arguments.warm_up):
                some = arrivals[: warm_up + arguments.requests]
                shares = shares_of(some, config, warm_up=warm_up, question_tokens=questions)
                rows.append({"workload": name, "zipf": skew, "warm_up": warm_up, **shares.as_dict()})
    asked = {name: value for name, value in vars(arguments).items() if name not in ("out", "dataset")}
    asked["dataset"] = arguments.dataset.name
    command = shlex.join(["python", *sys.argv])
    write_json(arguments.out, BenchmarkResult("craft-composing", command, arguments.seed, asked, rows, {}).as_dict())


if __name__ == "__main__":
    main()
