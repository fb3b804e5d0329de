"""Where the error of reuse comes from: how much of it disappears when full prefill's KV replaces reused KV.

    python benchmarks/oracles.py --model smollm2 --dataset xquad-first-half.json --questions 40 \
        --samples samples.jsonl --out oracles.json

Prompts, the continuation and the measure are those of `chunkweave bench fidelity`. Over chunks that were computed in
each way of `--warm`, some reused KV (of some tokens, on some layers, keys or values) is replaced by full prefill's. The
question and the continuation are computed over that in one pass, as over full prefill's KV, and compared. No method can
do that; it shows where wrong KV matters. Two kinds of rows replace nothing: those that recompute tokens chosen by an
oracle over the reused KV, as a method would, and the method `query`.

Beside the ways of `bench fidelity --warm` there are `opening:N`, behind the first N tokens of all prompts (1: what a
BOS token would be), and `neighbour`, behind the instruction and the passage before it in the same document.
`corrections.py` and `drafts.py` ask the same questions.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table

from chunkweave.calibration.contenders import make_contenders
from chunkweave.calibration.fidelity import Task, decode_greedily, divergence, log_probabilities, make_tasks
from chunkweave.calibration.prompts import Warmth, prefill_and_store
from chunkweave.calibration.questions import Example
from chunkweave.calibration.results import BenchmarkResult, QuestionLog
from chunkweave.calibration.summaries import mean_interval, ratio_interval
from chunkweave.cli.calibrate import PromptOptions
from chunkweave.cli.console import check_writable, progress, write_json
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.errors import UsageError
from chunkweave.fusion.rows import flags_of
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import ReuseMethod, make_method, one_pass, prefer_mean, reuse_every_hit
from chunkweave.planning.plan import Plan
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, neutral_id
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import segment_id
from chunkweave.types import Chunk, Geometry
from chunkweave_lab.cli.fidelity import measured_with
from chunkweave_lab.deviation import kv_deviation, question_attention, reused_positions
from chunkweave_lab.fidelity import FidelityConfig

WAYS = ("alone", "instruction", "neutral")
BUDGETS = (0.05, 0.15)
"""Shares of the reused tokens that are chosen."""
BANDS = 6
"""Number of bands of layers, of about equal width."""
FIRST = 4
"""Number of tokens at the beginning of a chunk that count as its first ones."""
HEADS = (0.1, 0.33)
"""Shares of all heads of all layers that are replaced together."""
READ = "attention x deviation"
CALIBRATED = "query:whole:late:stored"
"""What calibration chooses for SmolLM2 over chunks computed behind neutral passages."""
GROUPS = ("selection", "layers", "sides", "heads", "kinds", "places", "ways")


@dataclass(frozen=True, slots=True)
class Variant:
    """The rows of keys and values that are replaced by full prefill's: masks `[layers, tokens]`.

    Masks `[layers, tokens, heads]` select heads separately.
    """

    group: str
    name: str
    keys: torch.Tensor
    values: torch.Tensor


class Chosen:
    """A method that recomputes given positions, in one pass at every layer."""

    name = "chosen"
    budget = None

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """The plan of full reuse with these positions."""
        return one_pass(self.name, reuse_every_hit(lookup, prefer_mean), self._positions)


def replaced(full: Prefilled, reused: Prefilled, keys: torch.Tensor, values: torch.Tensor) -> Prefilled:
    """Full reuse with the masked rows of its cache replaced by full prefill's; masks as in `Variant`.

    Neither cache is changed.
    """
    geometry, tokens, device = reused.cache.geometry, len(reused.prompt), reused.logits.device
    cache = RequestCache(geometry, tokens, dtype=reused.cache.view(0, tokens)[0].dtype, device=device)
    everywhere = torch.arange(tokens, device=device)
    for layer in range(geometry.num_layers):
        masks = [rows[layer].reshape(tokens, -1, 1).to(device) for rows in (keys, values)]
        pairs = zip(masks, full.cache.view(layer, tokens), reused.cache.view(layer, tokens), strict=True)
        cache.write(layer, everywhere, *(torch.where(mask, exact, old) for mask, exact, old in pairs))
    return replace(reused, cache=cache)


def expected_behind(model: LayerwiseModel, prefilled: Prefilled, continuation: Sequence[int]) -> torch.Tensor:
    """Distributions `[tokens, vocab]` along a continuation, with the question recomputed over the tokens before it."""
    *before, question = prefilled.prompt.parts
    behind = (*question.token_ids, *continuation)
    return log_probabilities(model, replace(prefilled, prompt=Prompt(tuple(before))), behind)[0][-len(continuation) :]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Full prefill's information about the reused tokens of a prompt.

    `deviation` `[layers, tokens]` is the deviation of every token's KV, `read` the question's attention to it, summed
    over heads and tokens of the question; both are 0 for tokens that are not reused.
    """

    deviation: torch.Tensor
    read: torch.Tensor
    reused: torch.Tensor

    @classmethod
    def of(cls, model: LayerwiseModel, full: Prefilled, reused: Prefilled, attention: Sequence[torch.Tensor]) -> Self:
        """From two prefills of one prompt; `attention` `[heads, question, tokens]` by layer is full prefill's."""
        there = torch.zeros(len(full.prompt), dtype=torch.bool)
        there[reused_positions(reused)] = True
        read = torch.stack([layer.sum((0, 1)).cpu() for layer in attention])
        return cls(kv_deviation(full, reused, model) * there, read * there, there)

    def scores(self) -> dict[str, torch.Tensor]:
        """Evidence `[layers, tokens]`, by its name."""
        return {"deviation": self.deviation, READ: self.deviation * self.read}

    def count(self, share: float) -> int:
        """The number of reused tokens for a share."""
        return ceil(share * int(self.reused.sum()))


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of the `count` tokens with the highest `scores` `[tokens]`, or on each layer of `[layers, tokens]`."""
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, value=True)


def at_budget(name: str, share: float) -> str:
    return f"{name}@{100 * share:g}%"


def selections(oracle: Oracle) -> Iterator[Variant]:
    """Tokens that deviate and are read: the same on all layers, or chosen on each layer."""
    scores = oracle.scores()[READ]
    for share in BUDGETS:
        tokens = best(scores.sum(0), oracle.count(share))
        yield both("selection", at_budget(READ, share), tokens.expand(len(scores), -1))
        yield both("selection", at_budget(f"{READ}, by layer", share), best(scores, oracle.count(share)))


def recomputing(oracle: Oracle) -> Iterator[tuple[str, ReuseMethod]]:
    """`query`, and recomputation of the tokens with most of some evidence over all layers."""
    for share in BUDGETS:
        yield at_budget("`query`", share), make_method("query", ReuseConfig(recompute_ratio=share))
        for name, scores in oracle.scores().items():
            tokens = best(scores.sum(0), oracle.count(share))
            yield at_budget(f"{name}, recomputed", share), Chosen(tokens.nonzero()[:, 0].tolist())


def calibrated(share: float) -> ReuseMethod:
    """`CALIBRATED` at one recompute ratio."""
    return next(iter(make_contenders((f"{CALIBRATED}@{share!r}",)).values()))


def both(group: str, name: str, rows: torch.Tensor) -> Variant:
    """Keys and values of the same rows."""
    return Variant(group, name, rows, rows)


def by_layer(oracle: Oracle) -> Iterator[Variant]:
    """One band of the layers, all below, all above."""
    layers = len(oracle.deviation)
    bands = torch.arange(layers).chunk(BANDS)

    def rows(some: Sequence[torch.Tensor]) -> torch.Tensor:
        mask = torch.zeros(layers, 1, dtype=torch.bool)
        mask[torch.cat(tuple(some))] = True
        return mask & oracle.reused

    for band in bands:
        yield both("layers", f"layers {band[0]} to {band[-1]}", rows([band]))
    for place in range(1, len(bands) - 1):
        yield both("layers", f"up to layer {bands[place][-1]}", rows(bands[: place + 1]))
    for place in range(1, len(bands) - 1):
        yield both("layers", f"from layer {bands[place][0]} on", rows(bands[place:]))


def by_side(oracle: Oracle) -> Iterator[Variant]:
    """Keys alone and values alone."""
    everything = oracle.reused.expand(len(oracle.deviation), -1)
    nothing = torch.zeros_like(everything)
    yield Variant("sides", "keys", everything, nothing)
    yield Variant("sides", "values", nothing, everything)


def by_head(oracle: Oracle, full: Prefilled, reused: Prefilled) -> Iterator[Variant]:
    """One key and value head on all layers; the heads, of all layers, that deviate most, and all but these."""
    off = head_deviation(full, reused, oracle.reused)
    layers, heads = off.shape
    for head in range(heads):
        yield both("heads", f"head {head}", heads_of(torch.arange(heads).expand(layers, -1) == head, oracle.reused))
    for share in HEADS:
        most = best(off.flatten(), ceil(share * off.numel())).view(layers, heads)
        yield both("heads", f"{share:.0%} of all heads, most deviating", heads_of(most, oracle.reused))
        yield both("heads", f"all but these {share:.0%}", heads_of(~most, oracle.reused))


def head_deviation(full: Prefilled, reused: Prefilled, there: torch.Tensor) -> torch.Tensor:
    """Deviation of keys and values of the tokens `there`, relative to full prefill's, `[layers, heads]`."""
    rows = []
    for layer in range(reused.cache.geometry.num_layers):
        pairs = zip(full.cache.view(layer, len(there)), reused.cache.view(layer, len(there)), strict=True)
        off = [
            ((exact - old)[there].float().norm(dim=(0, 2)) / exact[there].float().norm(dim=(0, 2))).cpu()
            for exact, old in pairs
        ]
        rows.append(torch.stack(off).sum(0))
    return torch.stack(rows)


def heads_of(heads: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mask of some heads `[layers, heads]` of some tokens."""
    return heads[:, None, :] & tokens[None, :, None]


def by_kind(oracle: Oracle, prompt: Prompt, tokenizer: TextTokenizer) -> Iterator[Variant]:
    """Kinds of tokens: a chunk's first ones, and of the others those without a letter or digit, names and numbers.

    A token counts as a name if it begins with a capital.
    """
    tokens = len(prompt)
    kinds = {name: torch.zeros(tokens, dtype=torch.bool) for name in ("first", "firsts", "marks", "names", "rest")}
    for part, span in zip(prompt.parts, prompt.spans(), strict=True):
        if part.kind is PartKind.CHUNK:
            kinds["first"][span.start] = True
            for place, (position, token) in enumerate(zip(span.positions(), part.token_ids, strict=True)):
                text = tokenizer.decode([token]).strip()
                kind = "names" if text[:1].isupper() or text[:1].isdigit() else "rest"
                kind = kind if any(map(str.isalnum, text)) else "marks"
                kinds["firsts" if place < FIRST else kind][position] = True
    labels = {"first": "first token of a chunk", "firsts": f"first {FIRST} tokens of a chunk"}
    labels |= {"marks": "separators and punctuation", "names": "names and numbers", "rest": "all other tokens"}
    for kind, mask in kinds.items():
        yield both("kinds", labels[kind], (mask & oracle.reused).expand(len(oracle.deviation), -1))


def by_place(oracle: Oracle, prompt: Prompt, holds_answer: Callable[[tuple[int, ...]], bool]) -> Iterator[Variant]:
    """The first chunk and the last one; the chunks that hold the answer, and all others."""
    layers, tokens = oracle.deviation.shape
    chunks = [(p, s) for p, s in zip(prompt.parts, prompt.spans(), strict=True) if p.kind is PartKind.CHUNK]
    masks = {"first chunk": chunks[:1], "last chunk": chunks[-1:]}
    masks["chunks with the answer"] = [(part, span) for part, span in chunks if holds_answer(part.token_ids)]
    masks["chunks without"] = [one for one in chunks if one not in masks["chunks with the answer"]]
    for name, some in masks.items():
        mask = flags_of([span for _, span in some], tokens) & oracle.reused
        yield both("places", name, mask.expand(layers, -1))


class Judged:
    """One task with full prefill's cache, answer, and distributions along that answer."""

    def __init__(self, engine: Engine, task: Task, new_tokens: int) -> None:
        self.task = task
        self.full = engine.runner.prefill(task.prompt, make_method("full"), new_tokens=new_tokens, capture=False)
        self.continuation = decode_greedily(engine, [self.full], new_tokens)[0].token_ids
        self._expected = expected_behind(engine.loaded.model, self.full, self.continuation)

    def compared(self, found: torch.Tensor) -> dict[str, float]:
        """Mean divergence of distributions `[tokens, vocab]` along the answer, and top-1 agreement."""
        kl, agrees = divergence(self._expected, found)
        return {"kl": fmean(kl), "agreement": fmean(agrees)}

    def over(self, engine: Engine, one: Prefilled) -> dict[str, float]:
        """The same for a finished cache, with the question recomputed over it."""
        return self.compared(expected_behind(engine.loaded.model, one, self.continuation))


class Question:
    """Every variant of one task over one way to compute its chunks."""

    def __init__(self, engine: Engine, task: Task, new_tokens: int, groups: Sequence[str] = GROUPS) -> None:
        self._task = task
        self._groups = groups
        self._judged = Judged(engine, task, new_tokens)
        self._full = self._judged.full
        self._attention = question_attention(self._full, engine.loaded.model)

    def measured(self, _way: str, engine: Engine) -> list[dict[str, Any]]:
        """For every variant the mean divergence along the continuation, top-1 agreement, and the replaced share of KV.

        For a method the share is its recompute fraction.
        """
        runner, prompt = engine.runner, self._task.prompt
        reused = runner.prefill(prompt, make_method("full-reuse"), capture=False)
        oracle = Oracle.of(runner.model, self._full, reused, self._attention)
        cells = len(oracle.deviation) * int(oracle.reused.sum())
        found = []
        for one in self._variants(oracle, engine, reused):
            share = sum(float(rows.sum()) / (rows[0, 0].numel() * 2 * cells) for rows in (one.keys, one.values))
            changed = replaced(self._full, reused, one.keys, one.values)
            named = {"group": one.group, "variant": one.name, "share": share}
            found.append({**named, **self._judged.over(engine, changed)})
        for group, name, method in self._methods(oracle):
            woven = runner.prefill(prompt, method, capture=False)
            share = woven.recompute_work / cells
            found.append({"group": group, "variant": name, "share": share, **self._judged.over(engine, woven)})
        return found

    def _methods(self, oracle: Oracle) -> Iterator[tuple[str, str, ReuseMethod]]:
        """The methods with group and name; `ways` has the calibrated `query` over each way's chunks."""
        if "selection" in self._groups:
            yield from (("selection", *one) for one in recomputing(oracle))
        if "ways" in self._groups:
            yield from (("ways", at_budget(f"`{CALIBRATED}`", share), calibrated(share)) for share in BUDGETS)

    def _variants(self, oracle: Oracle, engine: Engine, reused: Prefilled) -> Iterator[Variant]:
        """Nothing replaced, everything replaced, and the variants of the requested groups."""
        everything = oracle.reused.expand(len(oracle.deviation), -1)
        yield both("selection", "nothing", torch.zeros_like(everything))
        yield both("selection", "everything", everything)
        yield from (one for one in self._in_groups(oracle, engine, reused) if one.group in self._groups)

    def _in_groups(self, oracle: Oracle, engine: Engine, reused: Prefilled) -> Iterator[Variant]:
        yield from selections(oracle)
        yield from by_layer(oracle)
        yield from by_side(oracle)
        yield from by_head(oracle, self._full, reused)
        tokenizer, answers = engine.loaded.tokenizer, self._task.answers
        yield from by_kind(oracle, self._task.prompt, tokenizer)
        yield from by_place(
            oracle, self._task.prompt, lambda ids: any(answer in tokenizer.decode(ids) for answer in answers)
        )


def summarize(
    ways: Sequence[str], questions: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]
) -> list[dict[str, Any]]:
    """One row per variant and way: means over questions with bootstrap intervals.

    `left` is the share of full reuse's divergence over chunks computed in the first way, `of_own` over chunks computed
    in this way, `of_plain` the share of the divergence of the variant named `plain`; all paired by question. Other
    measurements are means.
    """
    rows = []
    for way in ways:
        names = [one["variant"] for one in questions[0][way]]
        for place, first in enumerate(questions[0][way]):
            own = [question[way][place] for question in questions]
            kl = [one["kl"] for one in own]
            row = {"chunks": way, "group": first["group"], "variant": first["variant"], "questions": len(own)}
            others = [key for key in first if key not in (*row, "kl", "agreement", "plain")]
            row |= {key: fmean(one[key] for one in own) for key in others}
            intervals = {"kl": mean_interval(kl), "agreement": mean_interval([one["agreement"] for one in own])}
            references = {"left": (ways[0], 0), "of_own": (way, 0)}
            if "plain" in first:
                references["of_plain"] = (way, names.index(first["plain"]))
            for name, (of, at) in references.items():
                intervals[name] = ratio_interval(kl, [question[of][at]["kl"] for question in questions])
            for name, interval in intervals.items():
                row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row)
    return rows


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """One table a group of variants, all ways side by side."""
    groups = dict.fromkeys(row["group"] for row in result["rows"])
    made = {group: _table(result["rows"], group) for group in groups if group != "ways"}
    made |= {"ways": _ways_table(result["rows"])} if "ways" in groups else {}
    return {f"oracle-{group}": markdown_table(*table) for group, table in made.items()}


def _table(rows: Sequence[Mapping[str, Any]], group: str) -> tuple[list[str], list[list[str]]]:
    """Selections as a share of full reuse's divergence over chunks of the first way, others of the same way."""
    share, head = ("left", "left") if group == "selection" else ("of_own", "of own")
    ways = list(dict.fromkeys(row["chunks"] for row in rows))
    found = {(row["variant"], row["chunks"]): row for row in rows if row["group"] == group}
    heads = ["full prefill's KV", "share", *(f"{way}: {head} | 95 % | top-1" for way in ways)]
    cells = []
    for variant in dict.fromkeys(variant for variant, _ in found):
        own = [found[variant, way] for way in ways]
        cells.append([variant, f"{own[0]['share']:.1%}"])
        for row in own:
            cells[-1] += left_cells(row, share)
    return " | ".join(heads).split(" | "), cells


def _ways_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line per way to compute chunks: the remaining error of full reuse, and of the calibrated `query`."""
    shown = ("nothing", *(at_budget(f"`{CALIBRATED}`", share) for share in BUDGETS))
    found = {(row["variant"], row["chunks"]): row for row in rows}
    heads = ["chunks computed", "KL of full reuse"]
    heads += [head for name in ("full reuse", *shown[1:]) for head in (f"{name}: left", "95 %", "top-1")]
    cells = []
    for way in dict.fromkeys(row["chunks"] for row in rows):
        own = [found[name, way] for name in shown]
        cells.append([way, f"{own[0]['kl']:.4f}", *(cell for row in own for cell in left_cells(row, "left"))])
    return heads, cells


def left_cells(row: Mapping[str, Any], what: str) -> list[str]:
    """A share of some divergence with its interval, and top-1 agreement."""
    interval = f"{row[f'{what}_low']:.0%}..{row[f'{what}_high']:.0%}"
    return [f"{row[what]:.0%}", interval, f"{row['agreement']:.1%}"]


def show(rows: Sequence[Mapping[str, Any]], made: Callable[..., tuple[list[str], list[list[str]]]] = _table) -> None:
    """The same tables on the terminal."""
    for group in dict.fromkeys(row["group"] for row in rows):
        heads, cells = made(rows, group)
        table = Table(title=group)
        for place, title in enumerate(heads):
            table.add_column(title, justify="right" if place else "left")
        for line in cells:
            table.add_row(*line)
        Console(width=160).print(table)


Measure = Callable[[str, Engine], list[dict[str, Any]]]
"""Measures one question over chunks computed in a way, in that way's engine; returns one record per variant."""


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """Shared by these benchmarks: a model, an engine for each way to compute chunks, and the questions.

    `others` are questions for fitting. `passages` are the data set's, by document and number.
    """

    arguments: argparse.Namespace
    engines: Mapping[str, Engine]
    tasks: Sequence[Task]
    others: Sequence[Task]
    passages: Mapping[str, Chunk]
    log: QuestionLog

    @property
    def first(self) -> Engine:
        return next(iter(self.engines.values()))

    def prepare(self, way: str, task: Task) -> Engine:
        """The engine of a way, with the task's chunks computed in that way in its store."""
        engine, before = self.engines[way], self._before(way, task.prompt)
        if before is None:
            Warmth.parse(way).prepare(engine, task.prompt)
            return engine
        stored = [part for part in task.prompt.parts if part.id is not None]
        with engine.store.lease(engine.store.lookup(task.prompt)):
            for part in stored:
                request = Prompt((*before(part), part))
                if segment_id(part.id, request.contexts()[-1]) not in engine.store:
                    prefill_and_store(engine, request)
        return engine

    def _before(self, way: str, prompt: Prompt) -> Callable[[PromptPart], tuple[PromptPart, ...]] | None:
        """The context of each part in the ways that only these benchmarks have; None for other ways."""
        name, _, count = way.partition(":")
        opening = tuple(part for part in prompt.parts if part.kind in (PartKind.START, PartKind.SYSTEM))
        first = self._dropped([token for part in opening for token in part.token_ids][: int(count or 0)])
        makers = {
            "opening": lambda _: (first,),
            "neighbour": lambda part: (*opening, self._neighbour(part)),
        }
        start = tuple(part for part in opening if part.kind is PartKind.START)
        if name not in makers:
            return None
        return lambda part: makers[name](part) if part.kind is PartKind.CHUNK else start

    def _neighbour(self, part: PromptPart) -> PromptPart:
        """The passage before a chunk in its document, or after it if it is the first."""
        document, _, number = part.source.rpartition("#")
        other = f"{document}#{int(number) - 1 if int(number) else 1}" if number.isdecimal() else ""
        if other not in self.passages:
            raise UsageError(f"{part.source!r} has no neighbour in the data set")
        return self._dropped(self.first.builder.chunk_part(self.passages[other]).token_ids)

    def _dropped(self, ids: Sequence[int]) -> PromptPart:
        """Context tokens that are in no prompt, so that methods reuse the chunk behind them."""
        own = neutral_id(chunk_id(self.first.loaded.fingerprint, "", tuple(ids)))
        return PromptPart(PartKind.CHUNK, tuple(ids), own)

    def measure(self, ask: Callable[[Engine, Task], Measure]) -> None:
        """Measure every question that is not in the log. `ask` gets the first engine before its store is prepared."""
        with progress("measuring") as report:
            for index, task in enumerate(self.tasks):
                if index not in self.log:
                    measured = ask(self.first, task)
                    self.log.add(index, {"ways": {way: measured(way, self.prepare(way, task)) for way in self.engines}})
                report(index + 1, len(self.tasks))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all measurements."""
        return summarize(list(self.engines), self.log.of("ways"))

    def write(self, script: str, argv: Sequence[str] | None) -> None:
        """Write the result file, if requested."""
        asked = self.arguments
        if asked.out is None:
            return
        about = asked.dataset.name if asked.dataset is not None else "bundled documents"
        settings = settings_of(asked) | {"dataset": about}
        settings["computed_in"] = str(self.first.loaded.model.dtype).removeprefix("torch.")
        more = {"commits": sorted({one for one in self.log.of("commit") if one})}
        command = shlex.join(["python", f"benchmarks/{script}.py", *(sys.argv[1:] if argv is None else argv)])
        write_json(asked.out, BenchmarkResult(script, command, asked.seed, settings, self.rows(), more).as_dict())


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: str(value) for name, value in vars(arguments).items() if name not in ("samples", "out")}


def arguments_of(
    argv: Sequence[str] | None, document: str, groups: Sequence[str], ways: Sequence[str] = WAYS, *, fit: int = 0
) -> argparse.Namespace:
    """The command line of these benchmarks, with `--fit` for those that fit on other questions."""
    parser = argparse.ArgumentParser(description=document.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--warm", default=",".join(ways), help="ways to compute chunks; the first is the reference")
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups, help="of variants; all if left out")
    if fit:
        parser.add_argument("--fit", type=int, default=fit, help="other questions, on which something is fitted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="keep finished questions there, and go on from them")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


@contextmanager
def opened(arguments: argparse.Namespace, others: int = 0) -> Iterator[Bench]:
    """The model and the questions, `others` more of them to fit on."""
    for path in (arguments.samples, arguments.out):
        if path is not None:
            check_writable(path)
    torch.set_num_threads(arguments.threads)
    ways = arguments.warm.split(",")
    asked = PromptOptions(dataset=arguments.dataset, questions=arguments.questions, chunks=arguments.chunks)
    config = FidelityConfig(methods=(), chunks=arguments.chunks, new_tokens=arguments.new_tokens)
    with ExitStack() as stack:
        first = stack.enter_context(Engine.load(arguments.model, dtype=arguments.dtype))
        beside = [stack.enter_context(Engine(first.loaded)) for _ in ways[1:]]
        every, drawn = asked.examples(first, arguments.seed, others)
        tasks = make_tasks(first, every, drawn, config)
        log = QuestionLog(arguments.samples, {**settings_of(arguments), **measured_with(first, drawn)})
        if log.found is None:
            log.begin({})
        engines = dict(zip(ways, [first, *beside], strict=True))
        count = arguments.questions
        yield Bench(arguments, engines, tasks[:count], tasks[count:], passages_of(every), log)


def passages_of(examples: Sequence[Example]) -> dict[str, Chunk]:
    return {chunk.source: chunk for example in examples for chunk in example.chunks}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write JSON."""
    arguments = arguments_of(argv, __doc__ or "", GROUPS)
    with opened(arguments) as bench:
        bench.measure(lambda engine, task: Question(engine, task, arguments.new_tokens, arguments.groups).measured)
        show(bench.rows())
        bench.write("oracles", argv)


if __name__ == "__main__":
    main()
