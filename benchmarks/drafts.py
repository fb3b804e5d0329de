"""Choosing tokens to recompute by the attention of the question and a draft of the answer.

    python benchmarks/drafts.py --model smollm2 --dataset xquad-first-half.json --questions 24 \
        --samples samples.jsonl --out drafts.json

Full reuse decodes a draft, and what the calibrated `query` chooses is chosen by the attention of the question and the
draft behind it. The chosen tokens are recomputed with the question; the draft is thrown away. Beside that the same
without a draft, at the same and at higher ratios, since drafting takes time that could be spent on more tokens; and
with full prefill's own answer for a draft, as no method can. Questions and measure are those of `oracles.py`.

A draft's time is that of full reuse, of decoding, and of the last pass; the chunks are brought in once.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from docs_tables import markdown_table
from oracles import (
    BUDGETS,
    Chosen,
    Judged,
    arguments_of,
    at_budget,
    calibrated,
    left_cells,
    opened,
    show,
)

from chunkweave.calibration.fidelity import Task, decode_greedily
from chunkweave.engine.engine import Engine
from chunkweave.engine.runner import Prefilled
from chunkweave.planning.method import ReuseMethod, make_method
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.deviation import reused_positions

GROUPS = ("drafts",)
WAYS = ("alone", "neutral")
DRAFTS = (4, 8, 16)
"""Tokens of a draft."""
MORE = (0.1, 0.2, 0.3)
"""Higher ratios without a draft."""


def chosen_with(engine: Engine, prompt: Prompt, draft: Sequence[int], share: float) -> list[int]:
    """Positions that the calibrated `query` would recompute if the draft followed the question."""
    *before, question = prompt.parts
    longer = Prompt((*before, replace(question, token_ids=(*question.token_ids, *draft))))
    woven = engine.runner.prefill(longer, calibrated(share), capture=False)
    return [position for span in woven.recomputed for position in span.positions()]


def timed(engine: Engine, prompt: Prompt, method: ReuseMethod, new_tokens: int = 0) -> tuple[Prefilled, float]:
    """A prefill, and its time to first token in seconds."""
    started = time.perf_counter()
    found = engine.runner.prefill(prompt, method, new_tokens=new_tokens, capture=False)
    found.logits.argmax().item()
    return found, time.perf_counter() - started


class Question:
    """One task with every draft."""

    def __init__(self, engine: Engine, task: Task, arguments: argparse.Namespace) -> None:
        self._judged = Judged(engine, task, arguments.new_tokens)
        self._full_s = timed(engine, task.prompt, make_method("full"))[1]

    def measured(self, _way: str, engine: Engine) -> list[dict[str, Any]]:
        """Of every variant the divergence along the continuation, top-1 agreement, and seconds to the first token."""
        prompt, room = self._judged.task.prompt, max(DRAFTS)
        reused, reuse_s = timed(engine, prompt, make_method("full-reuse"), room)
        found = [self._record(engine, "nothing", reused, reuse_s)]
        for share in sorted((*BUDGETS, *MORE)):
            woven, seconds = timed(engine, prompt, calibrated(share))
            found.append(self._record(engine, at_budget("no draft", share), woven, seconds))
        drafts = {}
        for count in DRAFTS:
            started = time.perf_counter()
            tokens = decode_greedily(engine, [reused], count)[0].token_ids
            drafts[f"draft of {count}"] = (tokens, time.perf_counter() - started)
        drafts[f"full prefill's answer of {room}"] = (self._judged.continuation[:room], 0.0)
        for share in BUDGETS:
            for name, (draft, draft_s) in drafts.items():
                woven, seconds = timed(engine, prompt, Chosen(chosen_with(engine, prompt, draft, share)))
                spent = reuse_s + draft_s + seconds - woven.load_s
                record = self._record(engine, at_budget(name, share), woven, spent)
                found.append({**record, "plain": at_budget("no draft", share)})
        return found

    def _record(self, engine: Engine, name: str, woven: Prefilled, seconds: float) -> dict[str, Any]:
        share = woven.recompute_work / (len(reused_positions(woven)) * engine.loaded.model.geometry.num_layers)
        timing = {"seconds": seconds, "full_seconds": self._full_s}
        named = {"group": "drafts", "variant": name, "share": share, **timing}
        return {**named, **self._judged.over(engine, woven)}


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """One table, all ways side by side."""
    return {"drafts": markdown_table(*_table(result["rows"], "drafts"))}


def _table(rows: Sequence[Mapping[str, Any]], _group: str) -> tuple[list[str], list[list[str]]]:
    """Shares of full reuse's divergence over the same chunks, and times against full prefill's."""
    ways = list(dict.fromkeys(row["chunks"] for row in rows))
    found = {(row["variant"], row["chunks"]): row for row in rows}
    heads = ["chosen by", "recomputed", "speed-up"]
    for way in ways:
        heads += [f"{way}: KL", "left", "95 %", "top-1", "of no draft", "95 %"]
    cells = []
    for variant in dict.fromkeys(variant for variant, _ in found):
        own = [found[variant, way] for way in ways]
        faster = fmean(row["full_seconds"] for row in own) / fmean(row["seconds"] for row in own)
        timed_by = "-" if "answer" in variant else f"{faster:.2f}x"
        cells.append([variant.partition("@")[0], f"{own[0]['share']:.1%}", timed_by])
        for row in own:
            against = ["-", "-"]
            if "of_plain" in row:
                against = [f"{row['of_plain']:.0%}", f"{row['of_plain_low']:.0%}..{row['of_plain_high']:.0%}"]
            cells[-1] += [f"{row['kl']:.4f}", *left_cells(row, "of_own"), *against]
    return heads, cells


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    arguments = arguments_of(argv, __doc__ or "", GROUPS, WAYS)
    with opened(arguments) as bench:
        bench.measure(lambda engine, task: Question(engine, task, arguments).measured)
        show(bench.rows(), _table)
        bench.write("drafts", argv)


if __name__ == "__main__":
    main()
