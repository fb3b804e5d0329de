"""Shared by the programs of this folder: writing results with their settings, and tables on the terminal."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli.console import check_writable, write_json


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line with `--out` in addition to the program's options.

    Raises:
        UsageError: the result could not be written; this is checked before measuring.
    """
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    arguments = parser.parse_args(argv)
    if arguments.out is not None:
        check_writable(arguments.out)
    return arguments


def settings(arguments: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """The settings of a run, without `--out` and without `left_out`."""
    return {name: value for name, value in vars(arguments).items() if name not in ("out", *left_out)}


def write(
    benchmark: str,
    arguments: argparse.Namespace,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    more: dict[str, Any] | None = None,
    *,
    complete: bool = True,
) -> None:
    """Write the result of a program to `--out`, if given.

    Raises:
        UsageError: the file cannot be written.
    """
    if arguments.out is not None:
        command = shlex.join(["python", *sys.argv])
        seed = getattr(arguments, "seed", 0)  # some use no random numbers
        result = BenchmarkResult(benchmark, command, seed, config, rows, more or {}, complete)
        write_json(arguments.out, result.as_dict())


def prepare_vllm() -> None:
    """Set the environment for a vLLM engine within a process, on one thread of a CPU; before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def show(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table whose first column is text and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
