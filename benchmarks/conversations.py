r"""Conversations over generated worlds: computed tokens, TTFT and F1 with and without deduplication (CRAFT, Figure 7).

    python benchmarks/conversations.py --model reader --conversations 60 --out docs/results/conversations-reader.json
    python benchmarks/conversations.py --shape smollm2-135m --conversations 4 --turns 6 --chunks 5 \
        --out docs/results/conversations-smollm2-135m.json

A conversation is about `--pool` passages of one held-out world. Each of its turns asks a question over `--chunks` of
them: those that the question needs and others in random order, as retrieval might return them, so that passages recur.
Only kinds of question are used whose answer does not depend on other passages in the prompt, and by default those that
the bundled reader answers well, over no more passages than in its training. Every contender is a method, with or
without deduplication, and has its own store and conversations; each turn goes to all contenders, one after the other.
The passages are computed alone before (`--warm alone`, the same for all), and answers are greedy.

F1 differences and quotients of TTFT are between the same turns with and without deduplication, over turns from which
deduplication removed chunks. Intervals resample whole conversations, since turns of one depend on each other; p is that
of the paired t-test over turns, as in the paper.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track
from rich.table import Table

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.calibration.summaries import mean_interval
from chunkweave.cli.console import check_writable, write_json
from chunkweave.config import ConversationConfig, SamplingParams
from chunkweave.conversation.answer import Answer
from chunkweave.engine.engine import Engine
from chunkweave.models.loading import LoadedModel, load_folder, load_shape
from chunkweave_lab.summaries import best_scores
from chunkweave_lab.worlds.questions import sample_request
from chunkweave_lab.worlds.records import QuestionKind, Request, Split, World
from chunkweave_lab.worlds.world import generate_world

METHODS = ("prefix", "cacheblend", "cachecraft")
KINDS = (QuestionKind.SINGLE, QuestionKind.BRIDGE, QuestionKind.ALIAS, QuestionKind.CORRECTION, QuestionKind.COMPARISON)
"""Kinds whose answer cannot be changed by passages other than those that they name."""

ASKED = "single,bridge"


@dataclass(frozen=True)
class Turn:
    """A contender's result in one turn. `f1` is None if the model's text is meaningless."""

    conversation: int
    turn: int
    ttft_s: float
    computed_tokens: int
    chunks_not_sent: int
    tokens_not_sent: int
    history_tokens: int
    prompt_tokens: int
    f1: float | None


@dataclass
class Contender:
    """A method with or without deduplication, its own store, and its turns so far."""

    method: str
    deduplicate: bool
    engine: Engine
    turns: list[Turn] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.method}, {'deduplicated' if self.deduplicate else 'all chunks sent'}"

    def ask(self, conversation: int, number: int, request: Request, sampling: SamplingParams, scored: bool) -> None:
        """Run one turn of the conversation with this number."""
        talking = self.engine.conversation(str(conversation))
        answer = talking.ask(request.question, request.chunks, sampling=sampling, method=self.method)
        f1 = best_scores(answer.text, request.answers)["f1"] if scored else None
        self.turns.append(_turn(conversation, number, answer, f1))


def _turn(conversation: int, number: int, answer: Answer, f1: float | None) -> Turn:
    report = answer.report
    return Turn(
        conversation,
        number,
        report.ttft_s,
        report.computed_tokens + report.recomputed_tokens,
        report.chunks_not_sent,
        report.tokens_not_sent,
        report.history_tokens,
        report.prompt_tokens,
        f1,
    )


def contenders(loaded: LoadedModel, methods: Sequence[str]) -> list[Contender]:
    """Every method twice."""
    return [
        Contender(method, dedup, Engine(loaded, conversations=ConversationConfig(deduplicate=dedup)))
        for method in methods
        for dedup in (True, False)
    ]


def conversations(
    count: int, turns: int, chunks: int, *, pool: int, kinds: Sequence[QuestionKind], seed: int
) -> Iterator[list[Request]]:
    """Conversations, each about passages of its own world; deterministic in its arguments."""
    rng = Random(f"conversations {seed}")
    for _ in range(count):
        world = generate_world(rng.getrandbits(48), Split.TEST)
        world = replace(world, passages=tuple(rng.sample(world.passages, min(pool, len(world.passages)))))
        yield [_question(world, rng, chunks, kinds) for _ in range(turns)]


def _question(world: World, rng: Random, chunks: int, kinds: Sequence[QuestionKind]) -> Request:
    """A question of one of `kinds`, of which the passages allow at least one."""
    for kind in rng.sample(kinds, len(kinds)):
        try:
            return sample_request(world, rng, chunks, kind)
        except ValueError:
            continue
    raise ValueError(f"the passages allow no question of the kinds {', '.join(kinds)}: raise --pool")


def row(one: Contender) -> dict[str, Any]:
    """A contender's row of the table."""
    ttft = [turn.ttft_s for turn in one.turns]
    tenths = statistics.quantiles(ttft, n=10, method="inclusive")
    scores = [turn.f1 for turn in one.turns if turn.f1 is not None]
    return {
        "method": one.name,
        "computed_tokens": sum(turn.computed_tokens for turn in one.turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in one.turns),
        "tokens_not_sent": sum(turn.tokens_not_sent for turn in one.turns),
        "chunks_not_sent": sum(turn.chunks_not_sent for turn in one.turns),
        "history_tokens": sum(turn.history_tokens for turn in one.turns),
        "ttft_median_s": statistics.median(ttft),
        "ttft_p10_s": tenths[0],
        "ttft_p90_s": tenths[-1],
        "f1": statistics.fmean(scores) if scores else None,
        "f1_by_turn": _f1_by_turn(one.turns),
    }


def _f1_by_turn(turns: Sequence[Turn]) -> list[float]:
    """Means over conversations, the first turn first; empty without scores."""
    scores: dict[int, list[float]] = {}
    for turn in turns:
        if turn.f1 is not None:
            scores.setdefault(turn.turn, []).append(turn.f1)
    return [statistics.fmean(scores[number]) for number in sorted(scores)]


def comparison(with_dedup: Contender, without: Contender) -> dict[str, Any]:
    """Deduplication compared with none, by turn, over turns from which it removed chunks."""
    pairs = [(one, other) for one, other in zip(with_dedup.turns, without.turns, strict=True) if one.chunks_not_sent]
    computed = [sum(turn.computed_tokens for turn in contender.turns) for contender in (with_dedup, without)]
    found: dict[str, Any] = {
        "method": with_dedup.method,
        "turns_compared": len(pairs),
        "computed_share": computed[0] / computed[1],
        "ttft_ratio_median": statistics.median(other.ttft_s / one.ttft_s for one, other in pairs) if pairs else None,
    }
    differences = [
        (one.conversation, one.f1 - other.f1) for one, other in pairs if one.f1 is not None and other.f1 is not None
    ]
    if differences:
        by_conversation: dict[int, list[float]] = {}
        for conversation, difference in differences:
            by_conversation.setdefault(conversation, []).append(difference)
        interval = mean_interval([statistics.fmean(values) for values in by_conversation.values()])
        found |= {
            "f1_difference": interval.mean,
            "f1_difference_low": interval.low,
            "f1_difference_high": interval.high,
            "p": _paired_p([difference for _, difference in differences]),
        }
    return found


def _paired_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t-test; None if no turns differ."""
    from scipy.stats import ttest_1samp

    if len(set(differences)) < 2:
        return None
    return float(ttest_1samp(differences, 0.0).pvalue)


def measure(arguments: argparse.Namespace, loaded: LoadedModel) -> tuple[list[Contender], dict[str, Any]]:
    """Run all conversations with all contenders; a conversation is closed before the next one starts."""
    field_of = contenders(loaded, arguments.methods.split(","))
    sampling = SamplingParams(max_new_tokens=arguments.max_new_tokens)
    scored = arguments.model is not None
    seen = retrieved = 0
    requests = list(
        conversations(
            arguments.conversations,
            arguments.turns,
            arguments.chunks,
            pool=arguments.pool,
            kinds=[QuestionKind(kind) for kind in arguments.kinds.split(",")],
            seed=arguments.seed,
        )
    )
    for number, turns in enumerate(track(requests, "talking", console=Console(stderr=True))):
        passages = list(dict.fromkeys(chunk for request in turns for chunk in request.chunks))
        there: set[object] = set()
        for one in field_of:
            one.engine.precompute(passages)
        for place, request in enumerate(turns):
            seen += sum(chunk in there for chunk in request.chunks)
            retrieved += len(request.chunks)
            there.update(request.chunks)
            for turn in range(len(field_of)):
                field_of[(number + place + turn) % len(field_of)].ask(number, place, request, sampling, scored)
        for one in field_of:
            one.engine.conversation(str(number)).close()
            one.engine.forget(passages)
    return field_of, {"repeated_chunk_share": seen / retrieved}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--pool", type=int, default=16, help="passages that a conversation is about")
    parser.add_argument("--kinds", default=ASKED, help=f"of {', '.join(KINDS)}; separated by commas")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    if (arguments.model is None) == (arguments.shape is None):
        parser.error("give either --model or --shape")
    if not set(arguments.kinds.split(",")) <= set(map(str, KINDS)):
        parser.error(f"--kinds takes {', '.join(KINDS)}, separated by commas")
    if arguments.out is not None:
        check_writable(arguments.out)
    torch.set_num_threads(arguments.threads)
    loaded = load_folder(arguments.model) if arguments.model else load_shape(arguments.shape)
    field_of, workload = measure(arguments, loaded)
    rows = [row(one) for one in field_of]
    pairs = [comparison(field_of[i], field_of[i + 1]) for i in range(0, len(field_of), 2)]
    print(f"{workload['repeated_chunk_share']:.0%} of the chunks of a turn were there already")
    for heads, cells in (_rows_table(rows), _pairs_table(pairs)):
        _show(heads, cells)
    if arguments.out is not None:
        origin = {name: str(value) for name, value in vars(arguments).items()} | {"warm": "alone"}
        more = {"workload": workload, "deduplication": pairs}
        command = shlex.join(["python", "benchmarks/conversations.py", *(sys.argv[1:] if argv is None else argv)])
        result = BenchmarkResult("conversations", command, arguments.seed, origin, rows, more)
        write_json(arguments.out, result.as_dict())


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation, as one."""
    share = f"{result['workload']['repeated_chunk_share']:.0%} of the retrieved chunks were there already."
    both = (markdown_table(*_rows_table(result["rows"])), markdown_table(*_pairs_table(result["deduplication"])))
    return {"conversations": "\n\n".join([share, *both])}


def _rows_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    heads = ["contender", "computed tokens", "of the prompts'", "not sent", "TTFT median", "p10", "p90", "F1"]
    return heads, [
        [
            one["method"],
            str(one["computed_tokens"]),
            f"{one['computed_tokens'] / one['prompt_tokens']:.1%}",
            str(one["tokens_not_sent"]),
            *(f"{one[name] * 1e3:.1f} ms" for name in ("ttft_median_s", "ttft_p10_s", "ttft_p90_s")),
            "-" if one["f1"] is None else f"{one['f1']:.3f}",
        ]
        for one in rows
    ]


def _pairs_table(pairs: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    heads = ["dedup against none", "turns", "computed", "sooner", "F1 difference", "95 % interval", "p"]
    cells = []
    for one in pairs:
        scored = "f1_difference" in one
        cells.append(
            [
                one["method"],
                str(one["turns_compared"]),
                f"{one['computed_share']:.1%}",
                "-" if one["ttft_ratio_median"] is None else f"{one['ttft_ratio_median']:.2f}x",
                f"{one['f1_difference']:+.3f}" if scored else "-",
                f"{one['f1_difference_low']:+.3f} to {one['f1_difference_high']:+.3f}" if scored else "-",
                f"{one['p']:.2f}" if scored and one["p"] is not None else "-",
            ]
        )
    return heads, cells


def _show(heads: list[str], rows: list[list[str]]) -> None:
    table = Table()
    for place, title in enumerate(heads):
        table.add_column(title, justify="right" if place else "left")
    for cells in rows:
        table.add_row(*cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
