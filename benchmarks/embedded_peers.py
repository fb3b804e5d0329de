"""Compares chunkweave's engine with alternatives on a laptop: the same weights, prompts and threads.

    python benchmarks/embedded_peers.py --dataset musique_150.json --llama-server llama-server --gguf smollm2.gguf \
        --python .venv-vllm/bin/python --out docs/results/embedded-peers.json

Contenders:

- `transformers`: Hugging Face's own forward, which keeps nothing of earlier prompts;
- `llama.cpp`: its server with its prompt cache; `llama.cpp:cache-reuse`: the same with one slot and `--cache-reuse`;
- `vllm`: vLLM for CPUs with its prefix cache (`make test-vllm` makes the environment for `--python`);
- `own:METHOD`, `own:METHOD@RATIO`: our engine, each with a store of its own; `+native` computes with the file's
  quantized weights as they are, `+drafts` with draft tokens (prompt lookup).

`--gguf` is a file with quantized weights. llama.cpp and `+native` compute with it; the others, which have no kernels
for it, with the same weights in `--dtype`: the first start dequantizes it. llama.cpp comes with the source package of
llama-cpp-python (`pip download --no-deps --no-binary :all: llama-cpp-python`): `cmake -S vendor/llama.cpp -B build
-DLLAMA_OPENSSL=OFF`, `cmake --build build --target llama-server`.

All get the same token ids and take turns prompt by prompt; each keeps at most `--memory-gib` of KV besides running
requests. Workloads, in this order, over passages of `--passage-tokens`:

- `cold`: nothing was asked about these passages before. Prefill speed is that of these prompts;
- `repeated`: the same prompts again, with answers of `--new-tokens` tokens, from which decoding speed comes;
- `reordered`: half of a prompt's passages and as many of other prompts, in a new order, with the same length of answer;
- `checked`: the same with one token;
- `novel`: the same with a third of the passages new;
- `together`: `--at-once` repeated prompts at a time, with whole answers.

TTFT is the client's with servers, on the same machine, and the engine's own with the others. A ratio is a median over
prompts. Fidelity is that of the first tokens of `checked`: their distance (KL, of the 20 likeliest) from full prefill
by transformers, and the share that is the same token. Memory is the peak of a contender's processes. `bars` are the
targets. An unavailable contender gets a row with the reason.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from docs_tables import command_block, markdown_table
from embedded_contenders import (
    FAILURES,
    LLAMA,
    LLAMA_SHIFTING,
    OWN,
    TRANSFORMERS,
    VLLM,
    Answered,
    Contender,
    Settings,
    opened,
)
from peers import Model, environment, without_folder
from peers_workload import Asked, Corpus, shuffled
from rich.console import Console

from chunkweave.calibration.contenders import make_contenders
from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import check_writable, progress, write_json
from chunkweave.errors import ChunkweaveError
from chunkweave.prompt.parts import Prompt
from chunkweave.settings import GIB
from chunkweave_lab.datasets import load_dataset

PEERS = (TRANSFORMERS, LLAMA, LLAMA_SHIFTING, VLLM)
CONTENDERS = (
    *PEERS,
    *("own:full", "own:query@0.15", "own:query@0.05", "own:full+native", "own:query@0.15+native+drafts"),
)
COLD, REPEATED, REORDERED, CHECKED, NOVEL = WORKLOADS = ("cold", "repeated", "reordered", "checked", "novel")
ANSWER, DECODE, DIVERGENCE = "answer", "decode", "KL"
ENGINE = f"{OWN}:full"
"""Against the peers it shows the gain by the engine; other methods show against it the gain by caching."""
EVERY = "every"
"""All workloads together, for contenders that prefill every prompt in full."""
NEW_SHARE = 1 / 3
_WARM_UP_TOKENS = 4
HEADS = (
    *("contender", "prefill tokens/s", "decode tokens/s", "at once"),
    *(*(f"TTFT {name}" for name in WORKLOADS if name != CHECKED), "answer, reordered"),
    *(f"sooner than {LLAMA}", f"than {ENGINE}", "KL", "top-1", "memory"),
)

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Bar:
    """What was to be reached: `figure` of `contender` over that of `other`, or the other way round for times and KL."""

    contender: str
    figure: str
    other: str
    least: float


BARS = (
    *(Bar(f"own:query@{ratio}", REORDERED, LLAMA, least) for ratio, least in (("0.15", 4.0), ("0.05", 7.0))),
    Bar("own:query@0.15+native+drafts", ANSWER, LLAMA, 3.0),
    Bar("own:full+native", DECODE, LLAMA, 0.7),
    Bar("own:query@0.15+native+drafts", DECODE, LLAMA, 1.0),
    Bar("own:full+native", DIVERGENCE, LLAMA, 0.9),
    Bar("own:full", DECODE, TRANSFORMERS, 2.5),
    Bar("own:full", EVERY, TRANSFORMERS, 1.3),
)
FIGURES = {
    DECODE: "decoding",
    EVERY: "full prefill",
    REORDERED: "first token, reordered",
    ANSWER: "whole answer, reordered",
    DIVERGENCE: "KL of first tokens",
}


@dataclass(slots=True)
class Measured:
    """The answers of one contender by workload, in the order of the prompts; `why` it has no more of them."""

    name: str
    answers: dict[str, list[Answered]] = field(default_factory=dict)
    together_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    why: str = ""

    def times(self, workload: str) -> list[float]:
        """Seconds to first tokens, or to the last ones of reordered prompts' answers."""
        if workload == ANSWER:
            return [one.first.ttft_s + one.decode_s for one in self.answers.get(REORDERED, ())]
        workloads = WORKLOADS if workload == EVERY else (workload,)
        return [one.first.ttft_s for name in workloads for one in self.answers.get(name, ())]

    def rates(self) -> list[float]:
        """Tokens a second behind the first ones."""
        return [(one.tokens - 1) / one.decode_s for one in self.answers.get(REPEATED, ()) if one.decode_s]


def novel(known: Sequence[Asked], corpus: Corpus, count: int, rng: Random) -> Iterator[Asked]:
    """Questions over known chunks and a third of new ones, in random order."""
    for _ in range(count):
        asked = rng.choice(known)
        new = max(1, round(NEW_SHARE * len(asked.chunks)))
        chunks = [chunk for one in known for chunk in one.chunks]
        mixed = [*rng.sample(chunks, len(asked.chunks) - new), *corpus.take(new).chunks]
        yield replace(asked, chunks=tuple(rng.sample(mixed, len(mixed))))


def workloads_of(corpus: Corpus, args: argparse.Namespace) -> dict[str, list[Asked]]:
    """Questions by workload; the key "" has the warm-up questions."""
    rng = Random(f"embedded {args.seed}")

    def cold(count: int, chunks: int) -> list[Asked]:
        taken = (corpus.take(chunks) for _ in range(count))
        return [Asked(one.question, one.chunks) for one in taken]

    known = cold(args.distinct, args.chunks)
    return {
        "": cold(1, 1),
        COLD: known,
        REPEATED: known,
        REORDERED: list(shuffled(known, args.requests, rng)),
        CHECKED: list(shuffled(known, args.checked, rng)),
        NOVEL: list(novel(known, corpus, args.checked, rng)),
    }


Step = Callable[[], None]


def measure(
    contenders: Mapping[str, Contender],
    measured: Mapping[str, Measured],
    prompts: Sequence[Prompt],
    workload: str,
    new_tokens: int,
    done: Step,
) -> None:
    """Measure one workload with alternating contenders; one that fails is skipped from then on."""
    names = list(contenders)
    for number, prompt in enumerate(prompts):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            if not measured[name].why:
                try:
                    answered = contenders[name].answer(prompt, new_tokens)
                except FAILURES as error:
                    measured[name].why = reason_of(error)
                else:
                    measured[name].answers.setdefault(workload, []).append(answered)
            done()


def measure_together(
    contenders: Mapping[str, Contender],
    measured: Mapping[str, Measured],
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    done: Step,
) -> None:
    """Measure prompts at once, with alternating contenders; one that cannot has no figure."""
    for first in range(0, len(prompts) - args.at_once + 1, args.at_once):
        for name, contender in contenders.items():
            if not measured[name].why and name not in (TRANSFORMERS, LLAMA_SHIFTING):
                try:
                    seconds = contender.together(prompts[first : first + args.at_once], args.new_tokens)
                except FAILURES as error:
                    console.print(f"{name} does not answer several at once: {reason_of(error)}", highlight=False)
                else:
                    measured[name].together_s.append(seconds)
            done()


def reason_of(error: BaseException) -> str:
    """Why a contender is unavailable, in one line and without folders of this machine."""
    said = re.sub(r"(?:/[^\s/'\"]+)+/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said}"


def rows_of(
    measured: Mapping[str, Measured], prompt_tokens: Sequence[int], together_tokens: int = 0
) -> list[dict[str, Any]]:
    """A row for each contender; `prompt_tokens` are those of the cold prompts, `together_tokens` of answers at once."""
    reference = measured.get(TRANSFORMERS)
    full = reference.answers.get(CHECKED, []) if reference else []
    return [
        {"contender": name, "why": one.why}
        if one.why
        else {
            "contender": name,
            "peak_rss_bytes": one.peak_rss_bytes,
            "prefill_tokens_per_s": median(n / s for n, s in zip(prompt_tokens, one.times(COLD), strict=True)),
            "decode_tokens_per_s": median(one.rates()),
            "together_tokens_per_s": together_tokens / median(one.together_s) if one.together_s else None,
            "ttft_p50_s": {name: median(one.times(name)) for name in WORKLOADS},
            "answer_p50_s": median(one.times(ANSWER)),
            "server_p50_s": _server_times(one),
            "sooner_than": {
                other: {workload: sooner(one, measured[other], workload) for workload in (*WORKLOADS, ANSWER, EVERY)}
                for other in (*PEERS, ENGINE)
                if other in measured and not measured[other].why
            },
            **fidelity(one.answers[CHECKED], full),
            "samples": {name: [_sample(each) for each in one.answers[name]] for name in WORKLOADS},
        }
        for name, one in measured.items()
    ]


def sooner(one: Measured, other: Measured, workload: str) -> float:
    """How many times sooner the first token or the answer comes than the other's: the median over the same prompts."""
    return median(theirs / own for own, theirs in zip(one.times(workload), other.times(workload), strict=True))


def fidelity(own: Sequence[Answered], full: Sequence[Answered]) -> dict[str, float | None]:
    """Mean KL divergence of first tokens from full prefill's, and the share of equal ones; None without it."""
    pairs = [(one.first, other.first) for one, other in zip(own, full, strict=False)]
    if not pairs:
        return {"kl": None, "top_1": None}
    return {
        "kl": fmean(one.differs(other) for one, other in pairs),
        "top_1": fmean(one.token == other.token for one, other in pairs),
    }


def _server_times(one: Measured) -> dict[str, float] | None:
    found = {name: [each.server_s for each in one.answers[name] if each.server_s is not None] for name in WORKLOADS}
    return {name: median(times) for name, times in found.items()} if all(found.values()) else None


def _sample(one: Answered) -> dict[str, float | int]:
    return {"ttft_s": one.first.ttft_s, "decode_s": one.decode_s, "stored_tokens": one.first.stored_tokens}


def bars_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The result for each bar; None if one of the two was not measured."""
    measured = {row["contender"]: row for row in rows if "why" not in row}
    found = []
    for bar in BARS:
        value = None
        if bar.contender in measured and bar.other in measured:
            own, other = measured[bar.contender], measured[bar.other]
            if bar.figure == DECODE:
                value = own["decode_tokens_per_s"] / other["decode_tokens_per_s"]
            elif bar.figure == DIVERGENCE:
                value = other["kl"] / own["kl"] if own["kl"] else None
            else:
                value = own["sooner_than"][bar.other][bar.figure]
        one = {"contender": bar.contender, "figure": bar.figure, "other": bar.other, "least": bar.least}
        found.append({**one, "value": value, "met": None if value is None else value >= bar.least})
    return found


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """A contender's line of the table."""
    over = [row["sooner_than"].get(other, {}).get(REORDERED) for other in (LLAMA, ENGINE)]
    return [
        f"`{row['contender']}`",
        f"{row['prefill_tokens_per_s']:.0f}",
        f"{row['decode_tokens_per_s']:.1f}",
        "" if row["together_tokens_per_s"] is None else f"{row['together_tokens_per_s']:.1f}",
        *(f"{row['ttft_p50_s'][name]:.2f} s" for name in WORKLOADS if name != CHECKED),
        f"{row['answer_p50_s']:.2f} s",
        *("" if value is None else f"{value:.2f}x" for value in over),
        "" if row["kl"] is None else f"{row['kl']:.4f}",
        "" if row["top_1"] is None else f"{row['top_1']:.0%}",
        f"{row['peak_rss_bytes'] / GIB:.1f} GiB",
    ]


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """All that was measured, and why contenders are missing."""
    made = markdown_table(HEADS, [cells_of(row) for row in rows if "why" not in row])
    missing = [f"- `{row['contender']}`: not measured; {row['why']}" for row in rows if "why" in row]
    return "\n\n".join([made, "\n".join(missing)] if missing else [made])


def table_of_bars(bars: Sequence[Mapping[str, Any]]) -> str:
    """The targets and the results."""
    cells = [
        [
            f"`{bar['contender']}`: {FIGURES[bar['figure']]}, against `{bar['other']}`",
            f"{bar['least']:g}x",
            "not measured" if bar["value"] is None else f"{bar['value']:.2f}x",
            "" if bar["met"] is None else "met" if bar["met"] else "missed",
        ]
        for bar in bars
    ]
    return markdown_table(["bar", "at least", "found", ""], cells)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation, the first one below its command."""
    made = f"{command_block(result['command'])}\n\n{table_of(result['rows'])}"
    return {"embedded-peers": made, "embedded-bars": table_of_bars(result["bars"])}


def main() -> None:
    """Parse the command line, measure, print and write."""
    args = _parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that servers started here are stopped
    os.environ |= environment(args.threads)
    model = Model.of(str(args.gguf), args.dtype)
    corpus = Corpus(load_dataset(args.dataset, seed=args.seed), model.tokenizer, args.passage_tokens)
    prompts = {
        name: [model.builder.build(one.question, one.chunks) for one in asked]
        for name, asked in workloads_of(corpus, args).items()
    }
    settings = Settings(
        *(model.folder, args.dtype, args.threads, args.max_model_len, int(args.memory_gib * GIB)),
        *(args.llama_server, args.gguf, args.python, args.port, args.log, args.at_once),
    )
    left_out = ("contenders", "dataset", "python", "llama_server", "gguf", "port", "log", "out")
    config = {key: value for key, value in vars(args).items() if key not in left_out}
    config |= {
        "dataset": args.dataset.name,
        "gguf": args.gguf.name,
        "prompt_tokens": round(fmean(map(len, prompts[COLD]))),
    }
    command = shlex.join(["python", "benchmarks/embedded_peers.py", *map(without_folder, sys.argv[1:])])
    measured = {name: Measured(name) for name in args.contenders}
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for number, (name, one) in enumerate(measured.items()):
            console.print(f"starting {name}", highlight=False)
            try:
                contenders[name] = stack.enter_context(opened(name, settings, number))
            except FAILURES as error:
                one.why = reason_of(error)
        _run(contenders, measured, prompts, args)
        for name, contender in contenders.items():
            measured[name].peak_rss_bytes = contender.peak_rss_bytes()
    rows = rows_of(measured, [len(prompt) for prompt in prompts[COLD]], args.at_once * args.new_tokens)
    bars = bars_of(rows)
    if args.out is not None:
        result = BenchmarkResult("embedded-peers", command, args.seed, config, rows, {"bars": bars})
        write_json(args.out, result.as_dict())
    if args.json:
        print(json.dumps({"rows": rows, "bars": bars}, indent=2))
    else:
        shown = f"{table_of(rows)}\n\n{table_of_bars(bars)}"
        Console(width=220).print(shown, highlight=False, markup=False)


def _run(
    contenders: Mapping[str, Contender],
    measured: Mapping[str, Measured],
    prompts: Mapping[str, Sequence[Prompt]],
    args: argparse.Namespace,
) -> None:
    """Every workload after the other."""
    groups = len(prompts[REPEATED]) // args.at_once
    total, count = len(contenders) * (sum(map(len, prompts.values())) + groups), 0
    with progress("measuring") as report:

        def done() -> None:
            nonlocal count
            count += 1
            report(count, total)

        for workload, asked in prompts.items():
            tokens = {"": _WARM_UP_TOKENS, REPEATED: args.new_tokens, REORDERED: args.new_tokens}.get(workload, 1)
            measure(contenders, measured, asked, workload, tokens, done)
        measure_together(contenders, measured, prompts[REPEATED], args, done)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, metavar="NAME")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--dataset", type=Path, required=True, help="as `chunkweave bench` takes it")
    parser.add_argument("--passage-tokens", type=int, default=512, help="passages are cut there")
    parser.add_argument("--chunks", type=int, default=6, help="passages of a prompt")
    parser.add_argument("--distinct", type=int, default=8, help="prompts that are cold, and come again")
    parser.add_argument("--requests", type=int, default=40, help="that are reordered")
    parser.add_argument("--checked", type=int, default=16, help="that are checked, and that have novel passages")
    parser.add_argument("--at-once", type=int, default=8, help="prompts that are answered together")
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer to a repeated or reordered prompt")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of KV, for each contender")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="of the environment with vLLM")
    parser.add_argument("--llama-server", type=Path, default=Path("llama-server"), help="llama.cpp's program")
    parser.add_argument("--gguf", type=Path, required=True, help="a file with quantized weights")
    parser.add_argument("--port", type=int, default=8121, help="and those above it")
    parser.add_argument("--log", type=Path, default=Path("embedded-peers.log"), help="what servers print")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.distinct < 2 or args.chunks < 2 or args.new_tokens < 2:
        parser.error("passages are shuffled among two prompts or more, and decoding takes a token behind the first")
    if not 1 <= args.at_once <= args.distinct:
        parser.error("--at-once is at least 1, and at most --distinct")
    args.contenders = list(dict.fromkeys(args.contenders))
    try:
        make_contenders([name.partition(":")[2].partition("+")[0] for name in args.contenders if _is_own(name)])
        if unknown := [name for name in args.contenders if name not in PEERS and not _is_own(name)]:
            parser.error(f"no contender {unknown[0]!r}: there are {', '.join(CONTENDERS)}, and other methods")
        if args.out is not None:
            check_writable(args.out)
    except ChunkweaveError as error:
        parser.error(str(error))
    return args


def _is_own(name: str) -> bool:
    return name.startswith(f"{OWN}:")


if __name__ == "__main__":
    main()
