"""Where the error of reuse comes from: what goes of it when full prefill's own KV takes the place of reused KV.

    python benchmarks/oracles.py --model smollm2 --dataset xquad-first-half.json --questions 40 \
        --samples samples.jsonl --out oracles.json

Prompts, the continuation and the measure are those of `chunkweave bench fidelity`. Over chunks that were computed in
each way of `--warm`, some reused KV (of some tokens, on some layers, keys or values) is replaced by full prefill's. The
question and the continuation are computed over that in one pass, as they are over full prefill's KV, and compared. No
method can do that: it says where wrong KV does harm. Two kinds of rows replace nothing: those that recompute tokens
which an oracle has chosen, over the reused KV as a method would, and the method `query`.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table

from chunkweave.chunking.prompt import PartKind, Prompt
from chunkweave.chunking.tokenizer import TextTokenizer
from chunkweave.cli.console import progress
from chunkweave.cli.fidelity import PromptOptions, measured_with
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.eval.decoding import decode_greedily
from chunkweave.eval.deviation import kv_deviation, question_attention, reused_positions
from chunkweave.eval.fidelity import FidelityConfig, Task, divergence, log_probabilities, make_tasks
from chunkweave.eval.results import BenchmarkResult, QuestionLog, check_writable, write_json
from chunkweave.eval.scores import mean_interval, ratio_interval
from chunkweave.eval.warming import Warmth
from chunkweave.fusion.rows import flags_of
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import ReuseMethod, make_method, one_pass, prefer_neutral, reuse_every_hit
from chunkweave.planning.plan import Plan
from chunkweave.store.index import PromptLookup
from chunkweave.types import Geometry

WAYS = ("alone", "instruction", "neutral")
BUDGETS = (0.05, 0.15)
"""Shares of the reused tokens that are chosen."""
BANDS = 6
"""Into how many bands the layers are cut, of equal width as far as that goes."""
FIRST = 4
"""How many tokens at the beginning of a chunk count as its first ones."""
HEADS = (0.1, 0.33)
"""Shares of all heads of all layers that are replaced together."""
READ = "attention x deviation"
GROUPS = ("selection", "layers", "sides", "heads", "kinds", "places")


@dataclass(frozen=True, slots=True)
class Variant:
    """What is replaced by full prefill's: rows of the keys and of the values, masks `[layers, tokens]`.

    Masks `[layers, tokens, heads]` are of key and value heads apart.
    """

    group: str
    name: str
    keys: torch.Tensor
    values: torch.Tensor


class Chosen:
    """A method that recomputes the positions that it is given, in one pass at every layer."""

    name = "chosen"
    budget = None

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """The plan of full reuse with these positions."""
        return one_pass(self.name, reuse_every_hit(lookup, prefer_neutral), self._positions)


def replaced(full: Prefilled, reused: Prefilled, keys: torch.Tensor, values: torch.Tensor) -> Prefilled:
    """Full reuse with those rows of its cache replaced by full prefill's that the masks name, as a `Variant` has them.

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
    """Distributions `[tokens, vocab]` along a continuation, the question computed anew over what is before it."""
    *before, question = prefilled.prompt.parts
    behind = (*question.token_ids, *continuation)
    return log_probabilities(model, replace(prefilled, prompt=Prompt(tuple(before))), behind)[0][-len(continuation) :]


@dataclass(frozen=True, slots=True)
class Oracle:
    """What full prefill says of the reused tokens of a prompt.

    `deviation` `[layers, tokens]` is how far the KV of every token is off, `read` how much of the question's attention
    it has, summed over heads and tokens of the question; where nothing is reused both are 0.
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
        """How many of the reused tokens are that share."""
        return ceil(share * int(self.reused.sum()))


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """A mask of the `count` tokens with the highest `scores` `[tokens]`, or on each layer of `[layers, tokens]`."""
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, value=True)


def at_budget(name: str, share: float) -> str:
    return f"{name}@{100 * share:g}%"


def selections(oracle: Oracle) -> Iterator[Variant]:
    """What deviates and is read: the same tokens on all layers, or on each layer its own."""
    scores = oracle.scores()[READ]
    for share in BUDGETS:
        tokens = best(scores.sum(0), oracle.count(share))
        yield both("selection", at_budget(READ, share), tokens.expand(len(scores), -1))
        yield both("selection", at_budget(f"{READ}, by layer", share), best(scores, oracle.count(share)))


def recomputing(oracle: Oracle) -> Iterator[tuple[str, ReuseMethod]]:
    """`query`, and the recomputation of the tokens that have the most of some evidence over all layers."""
    for share in BUDGETS:
        yield at_budget("`query`", share), make_method("query", ReuseConfig(recompute_ratio=share))
        for name, scores in oracle.scores().items():
            tokens = best(scores.sum(0), oracle.count(share))
            yield at_budget(f"{name}, recomputed", share), Chosen(tokens.nonzero()[:, 0].tolist())


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
    """How far keys and values of the tokens `there` are off, relative to full prefill's, `[layers, heads]`."""
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


class Question:
    """One task: what full prefill says of it, and every variant over one way to compute its chunks."""

    def __init__(self, engine: Engine, task: Task, new_tokens: int, groups: Sequence[str] = GROUPS) -> None:
        self._task = task
        self._groups = groups
        self._full = engine.runner.prefill(task.prompt, make_method("full"), new_tokens=new_tokens, capture=False)
        self._continuation = decode_greedily(engine, [self._full], new_tokens)[0].token_ids
        self._expected = expected_behind(engine.loaded.model, self._full, self._continuation)
        self._attention = question_attention(self._full, engine.loaded.model)

    def measured(self, engine: Engine) -> list[dict[str, Any]]:
        """Of every variant the mean divergence along the continuation, top-1 agreement, and the share of KV replaced.

        Of a method the share is its recompute fraction.
        """
        runner, prompt = engine.runner, self._task.prompt
        reused = runner.prefill(prompt, make_method("full-reuse"), capture=False)
        oracle = Oracle.of(runner.model, self._full, reused, self._attention)
        cells = len(oracle.deviation) * int(oracle.reused.sum())
        found = []
        for one in self._variants(oracle, engine, reused):
            share = sum(float(rows.sum()) / (rows[0, 0].numel() * 2 * cells) for rows in (one.keys, one.values))
            changed = replaced(self._full, reused, one.keys, one.values)
            found.append({"group": one.group, "variant": one.name, "share": share, **self._compared(engine, changed)})
        for name, method in recomputing(oracle) if "selection" in self._groups else ():
            woven = runner.prefill(prompt, method, capture=False)
            share = woven.recompute_work / cells
            found.append({"group": "selection", "variant": name, "share": share, **self._compared(engine, woven)})
        return found

    def _variants(self, oracle: Oracle, engine: Engine, reused: Prefilled) -> Iterator[Variant]:
        """Nothing replaced, everything, and what belongs to the groups that are asked for."""
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

    def _compared(self, engine: Engine, one: Prefilled) -> dict[str, float]:
        found = expected_behind(engine.loaded.model, one, self._continuation)
        kl, agrees = divergence(self._expected, found)
        return {"kl": fmean(kl), "agreement": fmean(agrees)}


def summarize(
    ways: Sequence[str], questions: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]
) -> list[dict[str, Any]]:
    """One row a variant and way, means over questions with bootstrap intervals.

    `left` is of full reuse's divergence over chunks computed in the first way, `of_own` over chunks computed in this
    one; both paired by question.
    """
    rows = []
    for way in ways:
        for place, first in enumerate(questions[0][way]):
            own = [question[way][place] for question in questions]
            kl = [one["kl"] for one in own]
            row = {"chunks": way, "group": first["group"], "variant": first["variant"], "questions": len(own)}
            row["share"] = fmean(one["share"] for one in own)
            intervals = {"kl": mean_interval(kl), "agreement": mean_interval([one["agreement"] for one in own])}
            for name, reference in (("left", ways[0]), ("of_own", way)):
                intervals[name] = ratio_interval(kl, [question[reference][0]["kl"] for question in questions])
            for name, interval in intervals.items():
                row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
            rows.append(row)
    return rows


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """One table a group of variants, all ways side by side."""
    groups = dict.fromkeys(row["group"] for row in result["rows"])
    return {f"oracle-{group}": markdown_table(*_table(result["rows"], group)) for group in groups}


def _table(rows: Sequence[Mapping[str, Any]], group: str) -> tuple[list[str], list[list[str]]]:
    """Selections as a share of what full reuse loses over chunks of the first way, all else of the same way."""
    share, head = ("left", "left") if group == "selection" else ("of_own", "of own")
    ways = list(dict.fromkeys(row["chunks"] for row in rows))
    found = {(row["variant"], row["chunks"]): row for row in rows if row["group"] == group}
    heads = ["full prefill's KV", "share", *(f"{way}: {head} | 95 % | top-1" for way in ways)]
    cells = []
    for variant in dict.fromkeys(variant for variant, _ in found):
        own = [found[variant, way] for way in ways]
        cells.append([variant, f"{own[0]['share']:.1%}"])
        for row in own:
            cells[-1].append(f"{row[share]:.0%}")
            cells[-1].append(f"{row[f'{share}_low']:.0%}..{row[f'{share}_high']:.0%}")
            cells[-1].append(f"{row['agreement']:.1%}")
    return " | ".join(heads).split(" | "), cells


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The same tables on the terminal."""
    for group in dict.fromkeys(row["group"] for row in rows):
        heads, cells = _table(rows, group)
        table = Table(title=group)
        for place, title in enumerate(heads):
            table.add_column(title, justify="right" if place else "left")
        for line in cells:
            table.add_row(*line)
        Console(width=160).print(table)


def measure(
    engines: Mapping[str, Engine],
    tasks: Sequence[Task],
    log: QuestionLog,
    new_tokens: int,
    groups: Sequence[str] = GROUPS,
) -> None:
    """Measure every question that is not in the log."""
    with progress("measuring") as report:
        for index, task in enumerate(tasks):
            if index not in log:
                question = Question(next(iter(engines.values())), task, new_tokens, groups)
                found = {}
                for way, engine in engines.items():
                    Warmth.parse(way).prepare(engine, task.prompt)
                    found[way] = question.measured(engine)
                log.add(index, {"ways": found})
            report(index + 1, len(tasks))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--warm", default=",".join(WAYS), help="ways to compute chunks; the first is the reference")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="of variants; all if left out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="keep finished questions there, and go on from them")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
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
        every, drawn = asked.examples(first, arguments.seed, 0)
        tasks = make_tasks(first, every, drawn, config)
        settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("samples", "out")}
        log = QuestionLog(arguments.samples, {**settings, **measured_with(first, drawn)})
        if log.found is None:
            log.begin({})
        measure(dict(zip(ways, [first, *beside], strict=True)), tasks, log, arguments.new_tokens, arguments.groups)
        dtype = str(first.loaded.model.dtype).removeprefix("torch.")
    rows = summarize(ways, log.of("ways"))
    show(rows)
    if arguments.out is not None:
        settings |= {"dataset": asked.about, "computed_in": dtype}
        more = {"commits": sorted({one for one in log.of("commit") if one})}
        command = shlex.join(["python", "benchmarks/oracles.py", *(sys.argv[1:] if argv is None else argv)])
        write_json(arguments.out, BenchmarkResult("oracles", command, arguments.seed, settings, rows, more).as_dict())


if __name__ == "__main__":
    main()
