"""Cache-Craft's variants in steady state, as served: their savings and their cost in fidelity.

    python benchmarks/cachecraft_steady.py --model smollm2 --dataset xquad.en.json --out cachecraft-steady.json

Requests have `--chunks` of `--passages` passages of a data set, drawn by Zipf's law, and a question of the data set
about the first of them. They go to a `chunkweave serve` of this process, over HTTP, one after the other; each setting
has a server and a store of its own and gets the same requests. The first `--warm-up` fill the store and are not
counted. A setting is `alpha:variant_fraction:max_variants`, by default also `:variant_generations`; a fraction of
`none` stores no variants, so that less is recomputed by a lower alpha alone.

`recomputed` is the share of the reused chunks' tokens that is computed again, over all layers, `computed` that of the
whole prompt's tokens with what was not stored and the question; both are from the served reports. Before a counted
request is sent, the server's own engine answers it from the same store without storing anything: `kl` is the mean
divergence from full prefill at the first `--tokens` tokens of its greedy answer, as `chunkweave calibrate` measures.
`saved` is what a setting computes less than alpha alone does at its `kl`, by straight lines between the settings
without variants.

Each finished setting is written; with the same `--out`, settings in the file are not measured again.
"""

import argparse
import json
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import httpx
import torch
from bench_program import parse, settings, show, write
from docs_tables import markdown_table
from rich.console import Console
from rich.progress import track
from server_thread import ServerThread

from chunkweave.calibration.fidelity import decode_greedily, divergence, log_probabilities
from chunkweave.config import ReuseConfig
from chunkweave.engine.engine import Engine
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import Prompt
from chunkweave.types import Chunk
from chunkweave_lab.datasets import load_dataset
from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from chunkweave_server.settings import Settings, resolve

SETTINGS = ("1:none:5", "1:0:5", "0.5:none:5", "0.3:none:5", "1:0:5:1", "1:0:1", "1:0.5:5", "0.7:none:5")
Row = dict[str, Any]
_KEPT = (
    "prompt_tokens",
    "prefix_exact_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "computed_tokens",
    "recompute_fraction",
)
HEADS = ["alpha : least share : variants", "recomputed", "computed", "KL", "same token", "computed less at equal KL"]


@dataclass(frozen=True, slots=True)
class Request:
    """A question over chunks."""

    question: str
    chunks: tuple[str, ...]

    def body(self, alpha: float, *, focus: bool) -> dict[str, Any]:
        """The request's body; it asks only for the first token."""
        return {
            "messages": [{"role": "user", "content": self.question}],
            "documents": list(self.chunks),
            "max_tokens": 1,
            "temperature": 0,
            "chunkweave": {"method": f"cachecraft:alpha={alpha}:{'focus' if focus else 'no-focus'}"},
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, by its text."""

    label: str

    @property
    def alpha(self) -> float:
        return float(self.label.split(":")[0])

    @property
    def varies(self) -> bool:
        """Whether variants are stored."""
        return self.label.split(":")[1] != "none"

    def applied(self, settings: Settings) -> Settings:
        """A server's settings with this one."""
        fraction, *numbers = (None if text == "none" else float(text) for text in self.label.split(":")[1:])
        counts = [None if number is None else int(number) for number in numbers]
        capture = replace(settings.capture, variant_fraction=fraction)
        if len(counts) > 1:
            capture = replace(capture, variant_generations=counts[1])
        store = replace(settings.store, max_variants=counts[0]) if counts else settings.store
        return replace(settings, capture=capture, store=store)


def requests_of(args: argparse.Namespace) -> list[Request]:
    """All requests, the same for every setting."""
    asked: dict[str, str] = {}
    for example in load_dataset(args.dataset, squad_chunks=1):
        asked.setdefault(example.chunks[0].text, example.question)
    rng = Random(f"cachecraft steady {args.seed}")
    passages = rng.sample(sorted(asked), args.passages)
    weights = list(accumulate((rank + 1) ** -args.zipf for rank in range(len(passages))))
    requests = []
    for _ in range(args.warm_up + args.requests):
        drawn: dict[str, None] = {}
        while len(drawn) < args.chunks:
            drawn[rng.choices(passages, cum_weights=weights)[0]] = None
        first, *_ = drawn
        requests.append(Request(asked[first], tuple(drawn)))
    return requests


class Reference:
    """Full prefill's answers, computed once for all settings."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._known: dict[Request, tuple[tuple[int, ...], torch.Tensor]] = {}

    def compare(self, engine: Engine, request: Request, alpha: float, *, focus: bool) -> tuple[float, float]:
        """KL and agreement of the engine's current answer. Does not change its store."""
        prompt = engine.builder.build(request.question, [Chunk(text) for text in request.chunks])
        if request not in self._known:
            self._known[request] = self._answer(engine, prompt)
        continuation, expected = self._known[request]
        method = make_method("cachecraft", ReuseConfig(alpha=alpha, focus=focus, capture=engine.runner.capture))
        prefilled = engine.runner.prefill(prompt, method, new_tokens=self._tokens + 1, capture=False, asked=False)
        kl, agrees = divergence(expected.double(), *log_probabilities(engine.loaded.model, prefilled, continuation))
        return fmean(kl), fmean(agrees)

    def _answer(self, engine: Engine, prompt: Prompt) -> tuple[tuple[int, ...], torch.Tensor]:
        full = engine.runner.prefill(
            prompt, make_method("full"), new_tokens=self._tokens + 1, capture=False, asked=False
        )
        continuation = decode_greedily(engine, [full], self._tokens)[0].token_ids
        return continuation, log_probabilities(engine.loaded.model, full, continuation)[0].float()


def measure(args: argparse.Namespace, setting: Setting, requests: Sequence[Request], reference: Reference) -> Row:
    """One setting's row: starts a server, warms it up, and measures."""
    given = {"model": args.model, "dtype": args.dtype, "host_budget": args.host_budget}
    resolved = setting.applied(resolve(given, {}).settings)
    backend = EngineBackend(resolved)
    service = Service(resolved, backend)
    reports, divergences = [], []
    with ServerThread(service) as server, httpx.Client(base_url=server.url, timeout=600) as client:
        while service.stage is not Stage.READY:
            time.sleep(0.05)
        for number, request in enumerate(track(requests, setting.label, console=Console(stderr=True))):
            counted = number >= args.warm_up
            if counted:
                divergences.append(reference.compare(backend.engine, request, setting.alpha, focus=args.focus))
            body = request.body(setting.alpha, focus=args.focus)
            reply = client.post("/v1/chat/completions", json=body).raise_for_status()
            if counted:
                reports.append(reply.json()["chunkweave"])
        stats = backend.engine.store.stats
    return {
        "setting": setting.label,
        "recomputed": _mean(reports, _recomputed, lambda report: report["reused_tokens"] + report["recomputed_tokens"]),
        "computed": _mean(
            reports,
            lambda report: _recomputed(report) + report["computed_tokens"],
            lambda report: report["prompt_tokens"],
        ),
        "kl": fmean(kl for kl, _ in divergences),
        "same_token": fmean(same for _, same in divergences),
        "reports": [{name: report[name] for name in _KEPT} for report in reports],
        "kls": [kl for kl, _ in divergences],
        "segments": stats.segments,
        "variants": {str(count): chunks for count, chunks in stats.variants.items()},
        "variants_dropped": stats.variants_dropped,
        "bytes": stats.bytes,
    }


def _recomputed(report: Row) -> float:
    """Tokens of reused chunks that were computed again, over all layers."""
    return (report["recompute_fraction"] or 0.0) * (report["reused_tokens"] + report["recomputed_tokens"])


def _mean(reports: Sequence[Row], part: Callable[[Row], float], whole: Callable[[Row], float]) -> float:
    return sum(map(part, reports)) / max(1, sum(map(whole, reports)))


def saved_at_equal_kl(rows: Sequence[Row]) -> dict[str, float | None]:
    """The work that each setting with variants saves over alpha alone at equal KL; None outside the measured range.

    >>> figures = [("1:none:5", 1.0, 0.6), (".5:none:5", 3.0, 0.2), ("1:0:5", 2.0, 0.3)]  # alpha alone computes .4
    >>> saved_at_equal_kl([dict(zip(("setting", "kl", "computed"), row)) for row in figures])
    {'1:0:5': 0.25}
    """
    line = sorted((row["kl"], row["computed"]) for row in rows if not Setting(row["setting"]).varies)
    saved: dict[str, float | None] = {}
    for row in rows:
        if Setting(row["setting"]).varies:
            place = bisect(line, (row["kl"],))
            saved[row["setting"]] = None
            if 0 < place < len(line):
                (kl, computed), (next_kl, next_computed) = line[place - 1 : place + 1]
                there = computed + (row["kl"] - kl) / (next_kl - kl) * (next_computed - computed)
                saved[row["setting"]] = round(1.0 - row["computed"] / there, 4)
    return saved


def main() -> None:
    """Measure missing settings, print a table, write JSON after each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="alpha:fraction:variants[:generations], ...")
    parser.add_argument("--passages", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=5)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the popularity")
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of the answer that are compared")
    parser.add_argument("--focus", action="store_true", help="stop recomputing chunks that the question does not read")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host-budget", default="8GiB")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    torch.set_num_threads(args.threads)
    config = {name: str(value) for name, value in settings(args).items()}
    rows: list[Row] = []
    if args.out is not None and args.out.exists():
        before = json.loads(args.out.read_text())
        rows = before["rows"] if before["config"] == config else []
    requests, reference = requests_of(args), Reference(args.tokens)
    wanted = [Setting(label) for label in args.settings.split(",")]
    for setting in wanted:
        if all(row["setting"] != setting.label for row in rows):
            rows.append(measure(args, setting, requests, reference))
            more = {"saved": saved_at_equal_kl(rows)}
            write("cachecraft-steady", args, config, rows, more, complete=len(rows) == len(wanted))
    show(HEADS, _cells(rows, saved_at_equal_kl(rows)))


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The table of a result for the documentation."""
    return {"cachecraft-steady": markdown_table(HEADS, _cells(result["rows"], result["saved"]))}


def _cells(rows: Sequence[Row], saved: Mapping[str, float | None]) -> list[list[str]]:
    return [
        [
            row["setting"],
            f"{row['recomputed']:.1%}",
            f"{row['computed']:.1%}",
            f"{row['kl']:.4f}",
            f"{row['same_token']:.1%}",
            "" if (less := saved.get(row["setting"])) is None else f"{less:.0%}",
        ]
        for row in rows
    ]


if __name__ == "__main__":
    main()
