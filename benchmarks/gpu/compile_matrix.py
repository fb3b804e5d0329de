"""Compiles the attention kernel for GPUs that are not here, and compares its shared memory with what they have.

    make compile-matrix         # about an hour on one core; continues where it stopped
    PYTHONPATH=src python benchmarks/gpu/compile_matrix.py --archs 89 --dims 128 --dtypes bfloat16

Triton's compiler needs no GPU: a stand-in for its driver names the target, and the start-up of `triton_attention` then
gives the kernels that a model with these heads compiles there. Exits with 1 if a kernel needs more shared memory than a
block may have, or does not compile. Rows of an earlier run of the same code are kept.
"""

import argparse
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from chunkweave.calibration.results import commit, machine
from chunkweave.models import triton_attention
from chunkweave.models.kernels import device_code
from chunkweave.types import Geometry

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Most shared memory of a block, by architecture (CUDA C++ Programming Guide, technical specifications)."""

MATRIX_PRODUCT = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The instruction of the newest matrix units, where it is not `mma.sync`; tiles of 16 rows are too small for it."""

MORE_HEADS = ((32, 1, 128), (64, 1, 128), (71, 1, 64))
"""Query heads, key heads and dimensions with larger tiles: up to Falcon-7B's 71 query heads for one key head."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


RESULTS = ("shared_kib", "of_kib", "fits", "products", "ahead", "seconds", "note")
"""What `compiled` adds to a kernel's description."""


class AbsentGpu:
    """What `JITFunction` asks of Triton's driver before it compiles. Nothing can be launched."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        """The only device."""
        return self.target.arch

    def get_current_stream(self, _device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target


@contextmanager
def requested_kernels(arch: int) -> Iterator[dict[str, dict[str, Any]]]:
    """The kernels that launches inside request, by Triton's key; nothing is compiled or launched."""
    requested: dict[str, dict[str, Any]] = {}

    def note(**event: Any) -> bool:
        requested[str(event["key"])] = event
        return True  # Triton then neither compiles nor launches

    driver.set_active(AbsentGpu(arch))
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield requested
    finally:
        knobs.runtime.jit_cache_hook = before


def start_up_kernels(arch: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The attention kernels that the start-up compiles for a model with these heads."""
    geometry = Geometry(1, heads * dim, heads, kv_heads, dim, 1, 1, 4096)
    with requested_kernels(arch) as requested:
        triton_attention.compile_and_compare(geometry, dtype, torch.device("cpu"))
    return [event for event in requested.values() if event["fn"].name.endswith("scattered_attention")]


def sizes_of(event: dict[str, Any]) -> dict[str, Any]:
    """What tells a model's kernels apart."""
    names = event["fn"].jit_function.arg_names
    info = event["compile"]
    constants = {names[path[0]]: value for path, value in info["constants"].items()}
    return {
        "rows": constants["BLOCK_M"],
        "keys": constants["BLOCK_N"],
        "parts": constants["PARTS"],
        "partial": info["signature"]["out_ptr"] != info["signature"]["queries_ptr"],
        "warps": info["num_warps"],
        "stages": info["num_stages"],
    }


def compiled(event: dict[str, Any], arch: int) -> dict[str, Any]:
    """Compile one kernel to machine code: its shared memory, and what its assembly has."""
    info = event["compile"]
    source = ASTSource(event["fn"].jit_function, info["signature"], info["constants"], info["configs"][0])
    options = {"num_warps": info["num_warps"], "num_stages": info["num_stages"]}
    began = time.perf_counter()
    try:
        done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # noqa: BLE001 - a kernel that does not compile is a row, and others continue
        return {"fits": False, "note": f"{type(error).__name__}: {str(error)[:80]}"}
    kib = done.metadata.shared / 1024
    assembly = done.asm["ptx"]
    return {
        "shared_kib": kib,
        "of_kib": SHARED_KIB[arch],
        "fits": kib <= SHARED_KIB[arch],
        "products": assembly.count(MATRIX_PRODUCT.get(arch, "mma.sync")),
        "ahead": assembly.count("cp.async.c"),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Compile, print, write after each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", type=int, nargs="+", default=list(SHARED_KIB), choices=list(SHARED_KIB))
    parser.add_argument("--dims", type=int, nargs="+", default=list(reversed(triton_attention.SUPPORTED_HEAD_DIMS)))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--parts", type=int, nargs="+", default=[0, *triton_attention.PART_SIZES])
    parser.add_argument("--most-heads", action="store_true", help="many query heads for one key head, too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows, earlier = [], earlier_rows(arguments.out)
    requested = list(all_kernels(arguments))
    for number, (kernel, arch, event) in enumerate(requested, 1):
        row = earlier.get(json.dumps(kernel)) or {**kernel, **compiled(event, arch)}
        rows.append(row)
        print(f"{number} of {len(requested)}:", ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        write(rows, arguments.out)
    bad = [row for row in rows if not row["fits"]]
    print(f"{len(rows)} kernels, {len(bad)} that do not fit or compile; most shared memory by architecture:")
    for arch in arguments.archs:
        kib = max((row["shared_kib"] for row in rows if row["arch"] == arch and row["fits"]), default=0.0)
        print(f"sm_{arch}: {kib:.1f} of {SHARED_KIB[arch]} KiB")
    sys.exit(bool(bad))


def all_kernels(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]]]:
    """What to compile: a kernel's description, its architecture, and Triton's request."""
    shapes = [(32, 8, dim) for dim in arguments.dims] + list(MORE_HEADS if arguments.most_heads else ())
    for dtype, shape, arch in product(arguments.dtypes, shapes, arguments.archs):
        if dtype == "float16" and shape != (32, 8, 128):
            continue  # as bfloat16, but for the name of the product
        for event in start_up_kernels(arch, *shape, DTYPES[dtype]):
            sizes = sizes_of(event)
            if sizes["parts"] in arguments.parts:
                yield {"arch": arch, "dtype": dtype, "heads": "{}/{} of {}".format(*shape), **sizes}, arch, event


def write(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Replace the file at once, because a run may be stopped at any time."""
    if out is None:
        return
    origin = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), "machine": machine()}
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(json.dumps({**origin, "code": code_state(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


def code_state() -> str:
    """Changes with the kernel's code and with Triton."""
    files = (Path(device_code.__file__), Path(triton_attention.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16] + " " + triton.__version__


def earlier_rows(out: Path | None) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run of the same code with the same Triton, by the kernel's description."""
    if out is None or not out.exists():
        return {}
    earlier = json.loads(out.read_text(encoding="utf-8"))
    rows = earlier["rows"] if earlier["code"] == code_state() else []
    return {json.dumps({name: row[name] for name in row if name not in RESULTS}): row for row in rows}


if __name__ == "__main__":
    main()
