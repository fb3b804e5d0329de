"""How much of reuse's error is removed by correcting reused KV, or by changed attention, without recomputation.

    python benchmarks/corrections.py --model smollm2 --dataset xquad-first-half.json --questions 24 \
        --samples samples.jsonl --out corrections.json

Two groups of variants, over chunks that were computed in each way of `--warm`; questions and measure are those of
`oracles.py`. `scores`: tokens computed at run time attend to reused chunks with scores divided by a temperature, and
with the logarithm of a scale added (adaptive parallel encoding), or do not attend to the first tokens of chunks;
without recomputation, and with the tokens chosen by the calibrated `query`. `maps`: reused keys and values are
corrected by maps fitted for each layer on other questions (`--fit`), without recomputation.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from docs_tables import markdown_table
from oracles import CALIBRATED, Bench, Judged, Measure, arguments_of, at_budget, calibrated, left_cells, opened, show
from torch.nn import functional

from chunkweave.calibration.fidelity import Task
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.attention import attend_masked, seen_keys
from chunkweave.models.base import LayerwiseModel
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave_lab.deviation import reused_positions

GROUPS = ("scores", "maps")
WAYS = ("alone", "neutral")
BUDGET = 0.05
TEMPERATURES = (0.8, 0.9, 1.1, 1.2)
SCALES = (0.5, 0.7, 1.4, 2.0)
TOGETHER = ((0.9, 0.7), (1.1, 1.4))
"""Temperature and scale together."""
HIDDEN = (1, 4)
"""Numbers of hidden tokens at the beginning of each chunk."""
RANKS = (1, 4, 8)
RIDGE = 0.01
"""Ridge term: share of the mean variance of a map's inputs, added to each direction."""
NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Weighing:
    """How tokens computed at run time attend to reused tokens that are not recomputed.

    Scores are divided by `temperature`, and log `scale` is added; the first `hidden` tokens of chunks are masked.
    """

    temperature: float = 1.0
    scale: float = 1.0
    hidden: int = 0

    @property
    def name(self) -> str:
        if self.hidden:
            return f"first {self.hidden} of each chunk not seen"
        return f"T {self.temperature:g}, S {self.scale:g}"


PLAIN = Weighing()


def weighings() -> Iterator[Weighing]:
    """Single changes, then temperature and scale together."""
    yield PLAIN
    yield from (Weighing(temperature=one) for one in TEMPERATURES)
    yield from (Weighing(scale=one) for one in SCALES)
    yield from (Weighing(*both) for both in TOGETHER)
    yield from (Weighing(hidden=count) for count in HIDDEN)


@torch.inference_mode()
def answered(
    model: LayerwiseModel, reused: Prefilled, recomputed: Sequence[int], answer: Sequence[int], weighing: Weighing
) -> torch.Tensor:
    """Distributions `[tokens, vocab]` along an answer, over full reuse of a prompt with some positions recomputed.

    These, the question and the answer are computed in one pass, each attending to earlier tokens as in `weighing`. The
    cache is not changed.
    """
    tokens, device = len(reused.prompt), reused.logits.device
    question = reused.prompt.spans()[-1]
    fresh = torch.tensor([*sorted(recomputed), *question.positions(), *range(tokens, tokens + len(answer) - 1)])
    ids = torch.tensor([*reused.prompt.token_ids, *answer])[fresh].to(device)
    stale = torch.zeros(tokens + len(answer) - 1, dtype=torch.bool)
    stale[reused_positions(reused)] = True
    stale[fresh] = False
    unseen = stale & _first_tokens(reused.prompt, weighing.hidden, len(stale))
    stale, unseen, fresh = stale.to(device), unseen.to(device), fresh.to(device)
    hidden, room = model.embed(ids), len(stale) - tokens
    added = torch.zeros(len(stale), device=device).masked_fill(stale, torch.tensor(weighing.scale).log().item())
    added = added.masked_fill(unseen, -torch.inf)
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, hidden)
        keys, values = (functional.pad(rows, (0, 0, 0, 0, 0, room)) for rows in reused.cache.view(layer, tokens))
        keys = torch.where(stale[:, None, None], keys / weighing.temperature, keys)
        keys[fresh], values[fresh] = model.rotate_keys(layer, k, fresh), v
        seen = seen_keys(torch.arange(len(stale), device=device), fresh[:, None], model.geometry.window(layer))
        mask = added.expand(seen.shape).masked_fill(~seen, -torch.inf).to(hidden.dtype)
        queries, rule = model.rotate_queries(layer, q, fresh), model.geometry.scores(layer)
        hidden = model.finish(layer, hidden, attend_masked(queries, keys, values, mask, rule))
    return functional.log_softmax(model.logits(hidden[-len(answer) :]).double(), dim=-1)


def _first_tokens(prompt: Prompt, count: int, length: int) -> torch.Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    for part, span in zip(prompt.parts, prompt.spans(), strict=True):
        if part.kind is PartKind.CHUNK:
            mask[span.start : span.start + count] = True
    return mask


@dataclass(slots=True)
class Moments:
    """Sums over tokens, kept in float64: of `x` `[tokens, inputs]`, of `y` `[tokens, outputs]`, and their products."""

    count: int = 0
    x: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    y: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    xx: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    xy: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add tokens, float32."""
        self.count += len(x)
        self.x, self.y = self.x + x.sum(0).double(), self.y + y.sum(0).double()
        self.xx, self.xy = self.xx + (x.T @ x).double(), self.xy + (x.T @ y).double()


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """y = x weight + bias in float32, `weight` `[inputs, outputs]`."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the map to rows `[tokens, inputs]`."""
        return x @ self.weight + self.bias


def fitted(moments: Moments, rank: int | None, blocks: int = 1) -> Map:
    """The ridge regression of `y` on `x`, of at most `rank` (None: any; 0: a constant).

    A lower rank is that of reduced-rank regression: the outputs on the first principal axes of what the full one
    predicts. With several `blocks` inputs and outputs are cut into as many, and only equal ones are connected; inputs
    are then as many as outputs.
    """
    mean_x, mean_y = moments.x / moments.count, moments.y / moments.count
    xx = moments.xx / moments.count - mean_x[:, None] * mean_x
    xy = moments.xy / moments.count - mean_x[:, None] * mean_y
    weight = torch.zeros_like(xy)
    ins, outs = len(mean_x) // blocks, len(mean_y) // blocks
    for block in range(blocks if rank != 0 else 0):
        rows, columns = slice(block * ins, (block + 1) * ins), slice(block * outs, (block + 1) * outs)
        own = xx[rows, rows]
        ridge = RIDGE * own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype)
        weight[rows, columns] = torch.linalg.solve(own + ridge, xy[rows, columns])
    if rank:
        axes = torch.linalg.eigh(weight.T @ xx @ weight).eigenvectors[:, -rank:]
        weight = weight @ axes @ axes.T
    return Map(weight.float(), (mean_y - mean_x @ weight).float())


@dataclass(frozen=True, slots=True)
class Correction:
    """A kind of map for each layer: its inputs, its rank, and whether keys are corrected or only values."""

    name: str
    rank: int | None
    by_head: bool = False
    keys: bool = True


CORRECTIONS = (
    Correction("constant", 0),
    Correction("linear, by head", None, by_head=True),
    *(Correction(f"rank {rank}", rank) for rank in RANKS),
    Correction("linear", None),
    *(Correction(f"values alone, rank {rank}", rank, keys=False) for rank in RANKS),
    Correction("values alone, linear", None, keys=False),
)


class Rows:
    """Keys (before RoPE) and values of the reused tokens of a cache, by layer."""

    def __init__(self, model: HuggingFaceModel, positions: torch.Tensor) -> None:
        self._model = model
        self._positions = positions

    def of(self, prefilled: Prefilled, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, kv_heads * head_dim]` each, float32."""
        keys, values = prefilled.cache.view(layer, len(prefilled.prompt))
        back = self._model.unrotate_keys(layer, keys[self._positions].float(), self._positions)
        return back.flatten(1), values[self._positions].float().flatten(1)

    def placed(self, layer: int, keys: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Keys as `of` gives them, as a cache has them; of the shape and type of `like`."""
        shaped = keys.float().view(len(keys), *like.shape[1:])
        return self._model.rotate_keys(layer, shaped, self._positions).to(like.dtype)


Fits = Mapping[Correction, Sequence[tuple[Map, Map]]]
"""For each correction the maps of keys and values, by layer."""


def fit(bench: Bench, way: str) -> Fits:
    """Fit all corrections on questions that are not measured."""
    model = bench.first.loaded.model
    layers = range(model.geometry.num_layers)
    wide, narrow = ([(Moments(), Moments()) for _ in layers] for _ in range(2))
    for task in bench.others:
        engine = bench.prepare(way, task)
        full, reused = (
            engine.runner.prefill(task.prompt, make_method(m), capture=False) for m in ("full", "full-reuse")
        )
        rows = Rows(model, reused_positions(reused))
        for layer in layers:
            sides, exact = rows.of(reused, layer), rows.of(full, layer)
            for side in range(2):
                off = exact[side] - sides[side]
                wide[layer][side].add(torch.cat(sides, dim=1), off)
                narrow[layer][side].add(sides[side], off)
    heads = model.geometry.num_kv_heads
    return {
        one: [
            (fitted(keys, one.rank, heads if one.by_head else 1), fitted(values, one.rank, heads if one.by_head else 1))
            for keys, values in (narrow if one.by_head else wide)
        ]
        for one in CORRECTIONS
    }


@torch.inference_mode()
def corrected(
    model: HuggingFaceModel, full: Prefilled, reused: Prefilled, one: Correction, maps: Sequence[tuple[Map, Map]]
) -> tuple[Prefilled, float]:
    """Full reuse with its keys and values corrected, and which share of their squared deviation that explains.

    The share is over all layers, and the mean of keys' and values' where both are corrected. No cache is changed.
    """
    geometry, tokens = reused.cache.geometry, len(reused.prompt)
    positions, sides = reused_positions(reused), (0, 1) if one.keys else (1,)
    rows, left, whole = Rows(model, positions), [0.0, 0.0], [0.0, 0.0]
    cache = RequestCache(geometry, tokens, dtype=reused.cache.view(0, tokens)[0].dtype, device=reused.logits.device)
    for layer in range(geometry.num_layers):
        old, exact = rows.of(reused, layer), rows.of(full, layer)
        found = [side.clone() for side in reused.cache.view(layer, tokens)]
        for side in sides:
            guess = maps[layer][side](old[side] if one.by_head else torch.cat(old, dim=1))
            off = exact[side] - old[side]
            left[side] += (off - guess).pow(2).sum().item()
            whole[side] += off.pow(2).sum().item()
            new = old[side] + guess
            flat = new.to(found[side].dtype).view(len(new), *found[side].shape[1:])
            found[side][positions] = rows.placed(layer, new, found[side]) if side == 0 else flat
        cache.write(layer, torch.arange(tokens, device=reused.logits.device), *found)
    return replace(reused, cache=cache), fmean(1.0 - left[side] / whole[side] for side in sides)


class Question:
    """One task with every weighing and every correction."""

    def __init__(self, engine: Engine, task: Task, arguments: argparse.Namespace, fits: Mapping[str, Fits]) -> None:
        self._judged = Judged(engine, task, arguments.new_tokens)
        self._groups = arguments.groups
        self._fits = fits

    def measured(self, way: str, engine: Engine) -> list[dict[str, Any]]:
        """Of every variant the mean divergence along the continuation, and top-1 agreement."""
        reused = engine.runner.prefill(self._judged.task.prompt, make_method("full-reuse"), capture=False)
        found = [{"group": NOTHING, "variant": NOTHING, "share": 0.0, **self._judged.over(engine, reused)}]
        if "scores" in self._groups:
            found += self._weighed(engine, reused)
        if "maps" in self._groups:
            for one, maps in self._fits[way].items():
                changed, explained = corrected(engine.loaded.model, self._judged.full, reused, one, maps)
                named = {"group": "maps", "variant": one.name, "plain": NOTHING, "share": explained}
                found.append({**named, **self._judged.over(engine, changed)})
        return found

    def _weighed(self, engine: Engine, reused: Prefilled) -> Iterator[dict[str, Any]]:
        woven = engine.runner.prefill(self._judged.task.prompt, calibrated(BUDGET), capture=False)
        chosen = [position for span in woven.recomputed for position in span.positions()]
        for base, recomputed in ((NOTHING, []), (at_budget(f"`{CALIBRATED}`", BUDGET), chosen)):
            for weighing in weighings():
                expected = answered(engine.loaded.model, reused, recomputed, self._judged.continuation, weighing)
                named = {"group": "scores", "variant": f"{base}: {weighing.name}", "plain": f"{base}: {PLAIN.name}"}
                share = len(recomputed) / len(reused_positions(reused))
                yield {**named, "share": share, **self._judged.compared(expected)}


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """One table a group of variants, all ways side by side."""
    groups = dict.fromkeys(row["group"] for row in result["rows"] if "of_plain" in row)
    return {f"corrections-{group}": markdown_table(*_table(result["rows"], group)) for group in groups}


def _table(rows: Sequence[Mapping[str, Any]], group: str) -> tuple[list[str], list[list[str]]]:
    """Shares of full reuse's divergence over the same chunks; scores also against the same with plain ones."""
    ways = list(dict.fromkeys(row["chunks"] for row in rows))
    found = {(row["variant"], row["chunks"]): row for row in rows if row["group"] == group}
    scores = group == "scores"
    heads = ["recomputed: scores" if scores else "correction"]
    for way in ways:
        heads += [f"{way}: KL", *(["left", "of plain"] if scores else ["explained", "left"]), "95 %", "top-1"]
    cells = []
    for variant in dict.fromkeys(variant for variant, _ in found):
        cells.append([variant])
        for way in ways:
            row = found[variant, way]
            own = f"{row['of_own']:.0%}" if scores else f"{row['share']:.0%}"
            cells[-1] += [f"{row['kl']:.4f}", own, *left_cells(row, "of_plain")]
    return heads, cells


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, measure, print tables, write JSON."""
    arguments = arguments_of(argv, __doc__ or "", GROUPS, WAYS, fit=10)
    with opened(arguments, arguments.fit if "maps" in arguments.groups else 0) as bench:
        fits = {way: fit(bench, way) for way in bench.engines} if bench.others else {}

        def ask(engine: Engine, task: Task) -> Measure:
            return Question(engine, task, arguments, fits).measured

        bench.measure(ask)
        show([row for row in bench.rows() if "of_plain" in row], _table)
        bench.write("corrections", argv)


if __name__ == "__main__":
    main()
