"""Where order, exact prefixes and weaving together save more than the best of them alone. Imports no torch.

Of a prompt's tokens behind the instruction, which all have in common, q are the question's, p lie in the exact prefix
that a free order finds, and of the others, stored in other contexts, weaving computes the share w. Tokens computed:

    weaving, caller's order     q + w (1 - q)
    exact prefix, free order    1 - p'                      p': every path is stored
    all together                q + g + w (1 - q - p - g)   g: computed in full, so that later prefixes are longer

What every woven request costs beside its tokens, in tokens, counts like q; a layer at which all reused tokens are
active like w.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from docs_tables import markdown_table

from chunkweave.ordering.arrangement import Arranger
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.types import ChunkId
from chunkweave_lab.chunk_order import UnlimitedCache
from chunkweave_lab.simulator.trace import Arrival, Part, key_of

WANTED = 1.3
"""CRAFT §6.3 has 1.29 over CacheBlend."""
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
QUESTIONS = (0.02, 0.05, 0.1, 0.2)


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


def region(ratio: float, question: float, wanted: float = WANTED) -> tuple[float, float] | None:
    """The least and the greatest p with which all together compute `wanted` times fewer tokens; None if there is none.

    No prefix grows any more (g = 0), and p' = p. Below, weaving alone is too good; above, the exact prefix alone is.
    """
    woven = question + ratio * (1 - question)
    least = (1 - 1 / wanted) * woven / ratio
    most = (1 - wanted * woven) / (1 - wanted * ratio) if wanted * ratio < 1 else 1.0
    return (least, most) if least <= most else None


def shares_of(arrivals: Sequence[Arrival], config: OrderingConfig, *, warm_up: int, question_tokens: float) -> Shares:
    """Replay requests through the engine's own order and promotion, an unlimited cache given.

    Every chunk is stored alone before, as with `craft_ordering.py serve --alone`. Requests behind the first `warm_up`
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
        continued = frozenset[ChunkId]() if arranged.promotion is None else arranged.promotion.continued
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


def regions() -> list[dict[str, Any]]:
    """JSON-able: every w and q with the p of `region`."""
    found = []
    for ratio in RATIOS:
        for question in QUESTIONS:
            least, most = region(ratio, question) or (None, None)
            found.append({"w": ratio, "q": question, "least_p": least, "most_p": most})
    return found


def region_table() -> str:
    """The p between which `WANTED` is reached, by w and q."""
    heads = ["w", *(f"q = {question:.0%}" for question in QUESTIONS)]
    lines = []
    for ratio in RATIOS:
        found = [region(ratio, question) for question in QUESTIONS]
        lines.append([f"{ratio:.0%}", *("none" if one is None else f"{one[0]:.0%} to {one[1]:.0%}" for one in found)])
    return markdown_table(heads, lines)


def shares_table(rows: Sequence[dict[str, Any]]) -> str:
    """The shares of workloads, and the resulting reduction of computed tokens."""
    ratios = list(rows[0]["gain"])
    heads = ["workload", "Zipf", "warm-up", "q", "p", "g", "p'", *(f"w = {float(ratio):.0%}" for ratio in ratios)]
    lines = [
        [
            one["workload"],
            str(one["zipf"]),
            str(one["warm_up"]),
            *(f"{one[key]:.1%}" for key in ("question", "exact", "grown", "exact_alone")),
            *(f"{one['gain'][ratio]:.2f}x" for ratio in ratios),
        ]
        for one in rows
    ]
    return markdown_table(heads, lines)
