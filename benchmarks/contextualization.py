"""Deviation of a chunk's KV in another context, and how well Cache-Craft's scores predict it (its Figures 7 to 17).

    python benchmarks/contextualization.py --model smollm2 --dataset xquad-second-half.json --questions 20 \
        --samples samples.jsonl --out contextualization.json

Each chunk of a question is stored in two contexts, as by `chunkweave bench fidelity --warm contexts:2`, and each of
these segments is put into the question's prompt as it is. Its deviation is the L2 norm of (K, V) minus full prefill's,
divided by that of full prefill's, mean over tokens and layers; segments that are an exact prefix of the prompt are
skipped.

- `scores`: Spearman's correlation of the deviation with CCI, with the mismatch of the prefix (1 - beta, gamma, 1 -
  beta') and with their product, which CFO is alpha times of; and the mean deviation in each third of the score.
- `pairs`: of two segments of one chunk, how often the one with the lower score deviates less.
- `tokens`: the correlation, within a segment, of a token's attention mass on the old context, by which tokens are
  chosen, with its deviation; and what share of that mass the tokens with the most of it have.
- `masses`: attention within a chunk by that on chunks before it.
- `growing`: the last chunk of each prompt, computed alone, behind 0, 1, 2, ... other chunks.
- `focus`: the layer, from 0, from which on Algorithm 1 takes some chunks for those that the question looks at.
- `parts`: tokens of the prompt's parts.

All intervals resample questions.
"""

import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
import torch
from docs_tables import markdown_table
from oracles import arguments_of, opened, settings_of
from scipy.stats import spearmanr

from chunkweave.calibration.fidelity import Task, prepare
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.results import BenchmarkResult
from chunkweave.calibration.summaries import mean_interval
from chunkweave.cli.console import progress, write_json
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import make_method, one_pass, reuse_every_hit
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.planning.scores import FocusTracker, order_penalty, prefix_overlap
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import AttentionProfile, SegmentRecord
from chunkweave.types import ChunkId, Geometry
from chunkweave_lab.deviation import kv_deviation, question_attention

GROUPS = ("scores", "growing")
SCORES = ("CCI", "1 - beta", "gamma", "1 - beta'", "CCI (1 - beta')")
TOPS = (0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of a chunk's tokens, those with the most mass on the old context first."""
RESAMPLES = 500
HIGH_CCI = 0.75
"""From this CCI, the middle of its range, a chunk counts as highly contextualized."""

Segment = Mapping[str, Any]


class Picked:
    """A method that reuses a given stored segment of every chunk, and recomputes nothing."""

    name = "picked"
    budget = None

    def __init__(self, choose: Callable[[Sequence[SegmentRecord]], SegmentRecord | None]) -> None:
        self._choose = choose

    def plan(self, lookup: PromptLookup, _geometry: Geometry) -> Plan:
        """The plan of full reuse over the chosen segments."""
        return one_pass(self.name, reuse_every_hit(lookup, self._choose))


def nth(number: int) -> Picked:
    """The segment with this number, in order of ids, modulo the number of segments."""

    def choose(variants: Sequence[SegmentRecord]) -> SegmentRecord | None:
        ordered = sorted(variants, key=lambda record: record.id)
        return ordered[number % len(ordered)] if ordered else None

    return Picked(choose)


def relative_deviation(full: Prefilled, reused: Prefilled, model: LayerwiseModel) -> torch.Tensor:
    """Distance of every token's (K, V) from full prefill's, divided by the norm of the latter, `[layers, tokens]`."""
    tokens, layers = len(full.prompt), range(model.geometry.num_layers)
    pairs = [full.cache.view(layer, tokens) for layer in layers]
    norms = [torch.stack([kv.float().pow(2).sum((1, 2)) for kv in pair]).sum(0).sqrt() for pair in pairs]
    return kv_deviation(full, reused, model) / torch.stack(norms).cpu()


def scores_of(profile: AttentionProfile, places: Mapping[ChunkId, int]) -> dict[str, float]:
    """Cache-Craft's scores of a segment in a prompt, by name in `SCORES`."""
    beta, gamma = prefix_overlap(profile, places), order_penalty(profile.mass_on, places)
    mismatch = 1.0 - beta * (1.0 - gamma)
    return dict(zip(SCORES, (profile.cci, 1.0 - beta, gamma, mismatch, profile.cci * mismatch), strict=True))


def segments_of(engine: Engine, task: Task) -> Iterator[Segment]:
    """Every stored segment of the prompt's chunks: its scores and deviation."""
    runner, model, prompt = engine.runner, engine.loaded.model, task.prompt
    lookup = engine.store.lookup(prompt)
    full = runner.prefill(prompt, make_method("full"), capture=False)
    stored = {record.id: record for entry in lookup.parts for record in entry.variants}
    seen: set[str] = set()
    for number in range(max(len(entry.variants) for entry in lookup.parts)):
        reused = runner.prefill(prompt, nth(number), capture=False)
        deviation = relative_deviation(full, reused, model)
        places: dict[ChunkId, int] = {}
        for part in reused.plan.parts:
            if part.part.kind is not PartKind.CHUNK or part.part.id is None:
                continue
            if part.kv_source is KVSource.REUSED and part.segment not in seen and part.segment is not None:
                seen.add(part.segment)
                profile = stored[part.segment].attention
                if profile is not None and profile.chunks:
                    own = deviation[:, part.span.start : part.span.stop]
                    yield {"chunk": part.part.id, "place": len(places), **_measured(profile, own, dict(places))}
            places.setdefault(part.part.id, len(places))


def _measured(profile: AttentionProfile, own: torch.Tensor, places: Mapping[ChunkId, int]) -> dict[str, Any]:
    """A segment's scores, and its deviation `own` `[layers, tokens]`."""
    by_token, outward = own.mean(0), sorted(profile.outward, reverse=True)
    whole = sum(outward)
    return {
        "scores": scores_of(profile, places),
        "deviation": float(own.mean()),
        "last_layer": float(own[-1].mean()),
        "outward_rank": _spearman(profile.outward, by_token.tolist()),
        "top": [sum(outward[: ceil(share * len(outward))]) / whole if whole else None for share in TOPS],
        "intra": profile.intra,
        "inter": profile.inter_total,
    }


def growing(engine: Engine, task: Task) -> tuple[list[float], Prefilled]:
    """Deviation of the last chunk, computed alone, behind 0, 1, ... earlier chunks; and full prefill of all."""
    opening = [part for part in task.prompt.parts if part.kind in (PartKind.START, PartKind.SYSTEM)]
    *before, last = [part for part in task.prompt.parts if part.kind is PartKind.CHUNK]
    alone = Picked(lambda variants: next((record for record in variants if record.alone), None))
    found: list[float] = []
    for count in range(len(before) + 1):
        prompt = Prompt((*opening, *before[len(before) - count :], last, task.prompt.parts[-1]))
        engine.store.clear()
        Warmth.parse("alone").prepare(engine, prompt)
        full = engine.runner.prefill(prompt, make_method("full"), capture=False)
        reused = engine.runner.prefill(prompt, alone, capture=False)
        span = prompt.spans()[-2]
        found.append(float(relative_deviation(full, reused, engine.loaded.model)[:, span.start : span.stop].mean()))
    return found, full


def focus_of(full: Prefilled, model: LayerwiseModel) -> dict[str, Any]:
    """The layer from which Algorithm 1 accepts the focused chunks (None: never), and their number."""
    tracker, chunks = (
        FocusTracker(),
        [
            span
            for part, span in zip(full.prompt.parts, full.prompt.spans(), strict=True)
            if part.kind is PartKind.CHUNK
        ],
    )
    for layer, weights in enumerate(question_attention(full, model)):
        received = weights.mean(0).sum(0)
        focused = tracker.update([float(received[span.start : span.stop].sum()) for span in chunks])
        if focused is not None:
            return {"layer": layer, "chunks": len(focused), "layers": model.geometry.num_layers}
    return {"layer": None, "chunks": len(chunks), "layers": model.geometry.num_layers}


def parts_of(task: Task) -> dict[str, int]:
    """Tokens by kind of part."""
    tokens: dict[str, int] = defaultdict(int)
    for part in task.prompt.parts:
        tokens[str(part.kind)] += len(part.token_ids)
    return {**tokens, "answer": len(task.answer_ids)}


def summarize(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All rows, from the measurements of each question."""
    segments = [one["segments"] for one in questions]
    rows = [row for name in SCORES for row in (_score_row(name, segments), _pair_row(name, segments))]
    return [
        *rows,
        *_token_rows(segments),
        _mass_row(segments),
        *_growing_rows(questions),
        _focus_row(questions),
        _parts_row(questions),
    ]


def _score_row(name: str, segments: Sequence[Sequence[Segment]]) -> dict[str, Any]:
    measured = [[(one["scores"][name], one["deviation"], one["last_layer"]) for one in own] for own in segments]
    scores, deviation, last = zip(*(one for own in measured for one in own), strict=True)
    thirds = np.array_split(np.argsort(scores, kind="stable"), 3)
    row = {"group": "scores", "name": name, "segments": len(scores)}
    row |= {"correlation": _spearman(scores, deviation), "last_layer": _spearman(scores, last)}
    rng, drawn = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        sample = [one for place in rng.integers(0, len(measured), len(measured)) for one in measured[place]]
        drawn.append(_spearman([one[0] for one in sample], [one[1] for one in sample]))
    there = [one for one in drawn if one is not None]
    low, high = np.percentile(there, [2.5, 97.5]).tolist() if there else (None, None)
    row |= {"correlation_low": low, "correlation_high": high}
    return row | {"deviation_in_thirds": [fmean(deviation[place] for place in third) for third in thirds]}


def _pair_row(name: str, segments: Sequence[Sequence[Segment]]) -> dict[str, Any]:
    """Pairs of segments of one chunk in one prompt; pairs with equal scores are skipped."""
    right: list[list[float]] = []
    for own in segments:
        by_chunk: dict[str, list[Segment]] = defaultdict(list)
        for one in own:
            by_chunk[one["chunk"]].append(one)
        pairs = [pair for several in by_chunk.values() for pair in combinations(several, 2)]
        differences = [(a["scores"][name] - b["scores"][name], a["deviation"] - b["deviation"]) for a, b in pairs]
        right.append([float((score > 0) == (off > 0)) for score, off in differences if score])
    found = [fmean(own) for own in right if own]
    interval = mean_interval(found) if found else None
    row = {"group": "pairs", "name": name, "pairs": sum(map(len, right))}
    ends = (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
    return row | dict(zip(("lower_deviates_less", "low", "high"), ends, strict=True))


def _token_rows(segments: Sequence[Sequence[Segment]]) -> list[dict[str, Any]]:
    ranks = [fmean(found) for own in segments if (found := [one["outward_rank"] for one in own if one["outward_rank"]])]
    interval = mean_interval(ranks)
    row = {"group": "tokens", "name": "rank correlation", "mean": interval.mean}
    rows: list[dict[str, Any]] = [{**row, "low": interval.low, "high": interval.high}]
    every = [one["top"] for own in segments for one in own if one["top"][0] is not None]
    for place, share in enumerate(TOPS):
        rows.append({"group": "tokens", "name": f"top {share:g}", "mean": fmean(tops[place] for tops in every)})
    return rows


def _mass_row(segments: Sequence[Sequence[Segment]]) -> dict[str, Any]:
    every = [one for own in segments for one in own]
    return {
        "group": "masses",
        "name": "intra by inter",
        "mean": sum(one["intra"] for one in every) / sum(one["inter"] for one in every),
        "cci_mean": fmean(one["scores"]["CCI"] for one in every),
        "highly_contextualized": fmean(one["scores"]["CCI"] >= HIGH_CCI for one in every),
    }


def _growing_rows(questions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for count, deviations in enumerate(zip(*(one["growing"] for one in questions), strict=True)):
        interval = mean_interval(deviations)
        ends = {"deviation": interval.mean, "low": interval.low, "high": interval.high}
        yield {"group": "growing", "name": f"behind {count}", **ends}


def _focus_row(questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    every = [one["focus"] for one in questions]
    known = sorted(one["layer"] for one in every if one["layer"] is not None)
    shares = {f"by_{share:g}": fmean(layer < share * every[0]["layers"] for layer in known) for share in (0.25, 0.5)}
    row = {
        "group": "focus",
        "name": "layer",
        "known": len(known) / len(every),
        "chunks": fmean(f["chunks"] for f in every),
    }
    return row | ({"median": known[len(known) // 2], **shares} if known else {})


def _parts_row(questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kinds = dict.fromkeys(kind for one in questions for kind in one["parts"])
    return {
        "group": "parts",
        "name": "tokens",
        **{k: fmean(one["parts"].get(k, 0) for one in questions) for k in kinds},
    }


def _spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 3 or min(len(set(one)), len(set(other))) < 2:
        return None
    return float(spearmanr(one, other).statistic)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """How well each score predicts the deviation, and how the deviation grows."""
    rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        rows[row["group"]].append(row)
    cells = [
        [
            score["name"],
            *_correlation_cells(score),
            ", ".join(f"{one:.3f}" for one in score["deviation_in_thirds"]),
            "-" if pair["low"] is None else f"{pair['lower_deviates_less']:.0%}",
            "-" if pair["low"] is None else f"{pair['low']:.0%}..{pair['high']:.0%}",
        ]
        for score, pair in zip(rows["scores"], rows["pairs"], strict=True)
    ]
    heads = ["score", "rank correlation", "95 %", "on the last layer", "deviation in its thirds"]
    behind = [
        [one["name"], f"{one['deviation']:.3f}", f"{one['low']:.3f}..{one['high']:.3f}"] for one in rows["growing"]
    ]
    return {
        "contextualization": markdown_table([*heads, "lower deviates less", "95 %"], cells),
        "growing": markdown_table(["other chunks", "deviation", "95 %"], behind),
    }


def _correlation_cells(score: Mapping[str, Any]) -> list[str]:
    if score["correlation"] is None or score["correlation_low"] is None:
        return ["-", "-", "-"]
    interval = f"{score['correlation_low']:.2f}..{score['correlation_high']:.2f}"
    return [f"{score['correlation']:.2f}", interval, f"{score['last_layer']:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write JSON."""
    arguments = arguments_of(argv, __doc__ or "", GROUPS, ("contexts:2",))
    with opened(arguments) as bench, progress("measuring") as report:
        engine, warm = bench.first, Warmth.parse(arguments.warm)
        for index, task in enumerate(bench.tasks):
            if index not in bench.log:
                engine.store.clear()
                prepare(engine, bench.tasks, index, warm)
                segments = list(segments_of(engine, task))
                behind, full = growing(engine, task)
                found = {"segments": segments, "growing": behind, "focus": focus_of(full, engine.loaded.model)}
                bench.log.add(index, {**found, "parts": parts_of(task)})
            report(index + 1, len(bench.tasks))
        names = ("segments", "growing", "focus", "parts")
        questions = [dict(zip(names, one, strict=True)) for one in zip(*map(bench.log.of, names), strict=True)]
        command = shlex.join(["python", "benchmarks/contextualization.py", *(sys.argv[1:] if argv is None else argv)])
        rows = summarize(questions)
        for row in rows:
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
        if arguments.out is not None:
            settings = settings_of(arguments) | {"dataset": arguments.dataset.name if arguments.dataset else "bundled"}
            more = {"commits": sorted({one for one in bench.log.of("commit") if one})}
            result = BenchmarkResult("contextualization", command, arguments.seed, settings, rows, more)
            write_json(arguments.out, result.as_dict())


if __name__ == "__main__":
    main()
