"""Checks whether the engine became slower: compares ratios of a small fixed run with docs/results/guard.json.

    python benchmarks/bench_guard.py --against docs/results/guard.json      # what `make bench-guard` runs
    python benchmarks/bench_guard.py --out docs/results/guard.json          # keep new ones

Random weights of SmolLM2-135M's geometry, six chunks of 256 tokens, one thread; contenders alternate question by
question. A ratio is a time divided by another time of the same run, median over the rounds, so a faster or slower
machine changes little; lower is better. Each may exceed the stored one by `BOUND`. Another kind of processor has other
ratios: store new ones there first. A worse ratio is measured a second time, and the better of the two counts, so that
other load on the machine does not fail the check.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from docs_tables import markdown_table, read_result
from rich.console import Console

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import check_writable, progress, write_json
from chunkweave.errors import ChunkweaveError

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.planning.method import ReuseMethod
    from chunkweave.prompt.parts import Prompt

BOUND = 0.30
"""Allowed increase of a ratio, as a share of the stored one."""

SHAPE = "smollm2-135m"
CHUNKS, CHUNK_TOKENS = 6, 256
ROUNDS = 7
DECODED = 12
"""Tokens that are decoded in a round."""

REUSE, HUGGING_FACE = "full-reuse", "hf-forward"
METHODS = (REUSE, "query@0.15", "cacheblend@0.15")
HEADS = ["time", "over the time of", "ratio"]


def worse(kept: Mapping[str, float], now: Mapping[str, float], bound: float = BOUND) -> dict[str, str]:
    """A sentence on each ratio that exceeds the stored one by more than `bound`, by name.

    A ratio that is no longer measured counts as worse; one that was not stored does not.

    >>> worse({"a over b": 0.5}, {"a over b": 0.64}), worse({"a over b": 0.5}, {"a over b": 0.66})
    ({}, {'a over b': 'a over b is 0.660, more than 30 % above 0.500'})
    """
    found = {}
    for name, before in kept.items():
        if name not in now:
            found[name] = f"{name} is not measured any more, it was {before:.3f}"
        elif now[name] > before * (1 + bound):
            found[name] = f"{name} is {now[name]:.3f}, more than {bound:.0%} above {before:.3f}".replace("%", " %")
    return found


def better_of(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The lower of two measurements of each ratio."""
    return {name: min(value, second.get(name, value)) for name, value in first.items()}


def ratios_of(times: Mapping[str, list[float]], pairs: Mapping[str, str]) -> dict[str, float]:
    """Medians over the rounds of the ratios of times named by `pairs`."""
    return {
        f"{name} over {other}": median(a / b for a, b in zip(times[name], times[other], strict=True))
        for name, other in pairs.items()
    }


PAIRS = {
    "full": HUGGING_FACE,
    **dict.fromkeys(METHODS, "full"),
    "decode": "hf-decode",
    "decode step": "weights read once",
}
"""Pairs of times whose ratio is measured."""


def measured() -> dict[str, list[float]]:
    """Seconds of each timed operation by round."""
    import torch
    from first_tokens import comparison, contenders, tasks_of

    from chunkweave import Engine
    from chunkweave.calibration.fidelity import prepare

    torch.set_num_threads(1)
    config = comparison(METHODS, chunks=CHUNKS, chunk_tokens=CHUNK_TOKENS)
    with Engine.load_shape(SHAPE) as engine:
        tasks, runs = tasks_of(engine, config, ROUNDS), contenders(engine, config)
        times: dict[str, list[float]] = {name: [] for name in runs}
        with progress("first tokens") as report:
            for index, task in enumerate(tasks):
                prepare(engine, tasks, index, config.warm)
                for name in () if index else runs:  # once uncounted
                    runs[name](task.prompt)
                turn = index % len(runs)
                for name in [*runs][turn:] + [*runs][:turn]:
                    started = time.perf_counter()
                    runs[name](task.prompt)
                    times[name].append(time.perf_counter() - started)
                report(index + 1, len(tasks))
        times |= _decoding(engine, tasks[0].prompt, config.contenders()[REUSE])
    return times


def _decoding(engine: "Engine", prompt: "Prompt", method: "ReuseMethod") -> dict[str, list[float]]:
    """Times of decoding by the engine and by Hugging Face's forward, and of reading all weights once."""
    import torch

    from chunkweave.models.loading import load_shape

    runner, plain = engine.runner, load_shape(SHAPE, weights="plain").model.model
    cache = runner.prefill(prompt, method, new_tokens=DECODED * (ROUNDS + 1), capture=False).cache
    weights = [one for one in plain.parameters() if one.dim() == 2]
    vectors = {one.shape[1]: torch.ones(1, one.shape[1], dtype=one.dtype) for one in weights}
    times: dict[str, list[float]] = {"decode": [], "hf-decode": [], "decode step": [], "weights read once": []}
    with torch.inference_mode():
        past = plain(torch.tensor([prompt.token_ids]), use_cache=True, logits_to_keep=1).past_key_values
        for number in range(ROUNDS + 1):
            started = time.perf_counter()
            for place in range(DECODED):
                at = len(prompt) + number * DECODED + place
                runner.decode([cache], [5], [at]).argmax().item()
            own = time.perf_counter()
            for _ in range(DECODED):
                plain(torch.tensor([[5]]), past_key_values=past, use_cache=True).logits.argmax().item()
            theirs = time.perf_counter()
            for one in weights:
                torch.nn.functional.linear(vectors[one.shape[1]], one)
            read = time.perf_counter()
            if number:  # the first round warms up
                times["decode"].append(own - started)
                times["decode step"].append((own - started) / DECODED)
                times["hf-decode"].append(theirs - own)
                times["weights read once"].append(read - theirs)
    return times


def guard(kept: Mapping[str, float], say: Console) -> int:
    """Measure, compare, print what is worse; returns the exit code."""
    now = ratios_of(measured(), PAIRS)
    if found := worse(kept, now):
        say.print(f"worse at first: {', '.join(found)}; measuring once more", highlight=False)
        now = better_of(now, ratios_of(measured(), PAIRS))
        found = worse(kept, now)
    for name, value in now.items():
        before = f"{kept[name]:.3f}" if name in kept else "not kept"
        say.print(f"{name}: {value:.3f} (kept: {before})", highlight=False, markup=False)
    for sentence in found.values():
        say.print(f"slower than before: {sentence}", highlight=False, markup=False)
    return 1 if found else 0


def rows_of(times: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """The rows of a result: each ratio with the median times in seconds that it is computed from."""
    found = ratios_of(times, PAIRS)
    return [
        {
            "ratio": f"{name} over {other}",
            "time": name,
            "over": other,
            "value": found[f"{name} over {other}"],
            "median_s": median(times[name]),
            "over_median_s": median(times[other]),
        }
        for name, other in PAIRS.items()
    ]


def main() -> None:
    """Store ratios, or compare new ones with the stored ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--against", type=Path, metavar="FILE", help="ratios that were kept")
    what.add_argument("--out", type=Path, metavar="FILE", help="where to keep the ratios")
    args = parser.parse_args()
    try:
        if args.against is not None:
            kept = {row["ratio"]: float(row["value"]) for row in read_result(args.against)["rows"]}
            sys.exit(guard(kept, Console()))
        check_writable(args.out)
    except ChunkweaveError as error:
        parser.error(str(error))
    config = {"shape": SHAPE, "chunks": CHUNKS, "chunk_tokens": CHUNK_TOKENS, "rounds": ROUNDS, "bound": BOUND}
    command = shlex.join(["python", "benchmarks/bench_guard.py", "--out", args.out.name])
    rows = rows_of(measured())
    write_json(args.out, BenchmarkResult("guard", command, 0, {**config, "threads": 1}, rows, {}).as_dict())
    Console().print(markdown_table(HEADS, [[row["time"], row["over"], f"{row['value']:.3f}"] for row in rows]))


if __name__ == "__main__":
    main()
