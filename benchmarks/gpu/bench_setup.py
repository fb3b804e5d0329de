"""What the GPU benchmarks share: arguments, models and prompts, timing, the machine's measured ceilings, output."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # a bare machine has chunkweave as a folder only

import torch

from chunkweave.calibration.results import commit, machine, versions
from chunkweave.config import ComputeConfig
from chunkweave.engine.runner import Runner
from chunkweave.kv.segment import SegmentSource
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import random_model, shape_config
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.level import Level
from chunkweave.store.store import TieredStore
from chunkweave.store.tier import Tier
from chunkweave.store.tier_store import SegmentStore

FINGERPRINT = "gpu-benchmark"
_ROOM = 1 << 40


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine can do at most, measured once: a large product, and large copies (bytes read and written)."""

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


def load_model(shape: str, arguments: argparse.Namespace, max_tokens: int) -> HuggingFaceModel:
    """A random-weight model of a known shape whose context has room for `max_tokens`."""
    config = shape_config("demo" if arguments.tiny else shape)
    config.max_position_embeddings = max(max_tokens, config.max_position_embeddings)
    return HuggingFaceModel(random_model(config, dtype=dtype_of(arguments), device=arguments.device, seed=0))


def runner_over(model: HuggingFaceModel, name: str, tier: Tier[SegmentSource], compute: ComputeConfig) -> Runner:
    """A runner whose store is one tier without a bound."""
    return Runner(model, TieredStore([Level(name, SegmentStore(tier, budget_bytes=_ROOM))]), compute=compute)


def prompt_of(chunks: int, chunk_tokens: int, *, question: int = 32, seed: int = 0) -> Prompt:
    """START, so many chunks of random tokens, a question."""
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
    """Compute every chunk alone and store it, unless it is there."""
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
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def ceilings(arguments: argparse.Namespace) -> Ceilings:
    """Measure this machine's own, on random data."""
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
    """Collects a benchmark's rows, prints one table last and writes everything as JSON."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.complete = True
        self._name = name
        self._arguments = arguments
        self._ends = time.monotonic() + 60 * arguments.minutes

    def out_of_time(self) -> bool:
        """Whether what is left should not be begun; the table then says that it is not whole."""
        if time.monotonic() > self._ends:
            self.complete = False
        return not self.complete

    def add(self, **row: Any) -> None:
        """Take a row, show it on the way, and write what there is, should the machine not wait for the rest."""
        self.rows.append(row)
        self._write(complete=False)
        print({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}, flush=True)

    def finish(self) -> None:
        """Write the JSON, then print the table."""
        result = self._write(complete=self.complete)
        print(f"\n{self._name}: {gpu_name(self._arguments.device)}, {result['date']}, torch {torch.__version__}")
        if not self.complete:
            print("not whole: out of time")
        print(table_of(self.rows), flush=True)

    def _write(self, *, complete: bool) -> dict[str, Any]:
        arguments = self._arguments
        config = {key: value for key, value in vars(arguments).items() if key != "out"}
        result = {
            "benchmark": f"gpu-{self._name}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": complete,
            "machine": machine() | {"gpu": gpu_name(arguments.device)},
            "versions": versions() | {"cuda": torch.version.cuda, "triton": _triton_version()},
            "commit": commit(),
            "seed": 0,
            "config": config,
            **self.more,
            "rows": self.rows,
        }
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
        return result


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; columns are those of all rows."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        cells = [row.get(head, "") for head in heads]
        lines.append([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gpu_name(device: str) -> str:
    """The GPU's name, or the device itself."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def as_row(ceiling: Ceilings) -> dict[str, float]:
    """The ceilings for the JSON."""
    return asdict(ceiling)


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version
