"""Throughput of layer-wise reads from disk, compared with one plain sequential read of the same bytes.

    python benchmarks/disk_throughput.py --out disk.json

Both read with the page cache dropped for these files (`posix_fadvise(DONTNEED)`), alternating. The plain read takes
whole files in 1 MiB pieces into one buffer and does nothing with them. `unchecked` reads layer by layer, opening the
file for each, and does nothing with them either. The others open, check and decode every layer into reused buffers, in
one thread and in `--loaders` threads, each with its own segments. `cached` is one thread with a warm page cache: what
checksum and decoding alone allow. The second
table has each codec's bytes and error, on KV that a model of random weights computed (`--shape`) and on normal KV whose
channels differ in size.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_program import parse, settings, write
from docs_tables import markdown_table
from rich.console import Console
from rich.table import Table

from chunkweave.config import ReuseConfig
from chunkweave.engine.runner import Runner
from chunkweave.kv.segment import CODECS, Codec, SegmentKV, SegmentSource
from chunkweave.models.loading import load_shape
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.disk import DiskTier
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId, SegmentId
from chunkweave.weaving.stores import drop_page_cache

FINGERPRINT = "b" * 32
PIECE_BYTES = 1 << 20


def channelled_kv(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal KV, the sizes of its channels log-normal (sigma 1), bf16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape[0], 2, 1, *shape[3:], generator=generator).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(torch.bfloat16)


def model_kv(name: str, tokens: int, seed: int) -> torch.Tensor:
    """KV that a model with random weights computes for random tokens, bf16."""
    loaded = load_shape(name, device="cpu", dtype="bfloat16", seed=seed)
    store: SegmentStore[SegmentSource] = SegmentStore(HostTier(), budget_bytes=1 << 33)
    runner = Runner(loaded.model, TieredStore([Level("host", store)]))
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(10, 4000, (tokens,), generator=generator).tolist())
    part = PromptPart(PartKind.CHUNK, ids, chunk_id(FINGERPRINT, "", ids))
    prompt = Prompt((PromptPart(PartKind.START, (1,)), part))
    prefilled = runner.prefill(prompt, make_method("full", ReuseConfig()))
    (capture,) = prefilled.captures
    return capture.segment().kv


def fill(root: Path, codec: str, shape: tuple[int, ...], segments: int, seed: int) -> DiskTier:
    tier = DiskTier(root, FINGERPRINT, codec=codec)
    for number in range(segments):
        kv = SegmentKV(channelled_kv(shape, seed + number))
        chunk = ChunkId(f"{number:032x}")
        record = SegmentRecord.of(chunk, (), tuple(range(shape[2])), exact=True, nbytes=kv.nbytes)
        tier.put(record, kv)
    return tier


def read_sequentially(paths: list[Path]) -> None:
    buffer = bytearray(PIECE_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_unchecked(tier: DiskTier, ids: list[SegmentId]) -> None:
    for segment in ids:
        source = tier.get(segment)
        assert source is not None
        length = source.header.layout.layer_bytes
        buffer = bytearray(length)
        for layer in range(source.header.layout.num_layers):
            file = os.open(source.path, os.O_RDONLY)
            os.preadv(file, [buffer], source.header.layer_offset(layer))
            os.close(file)


def read_layers(tier: DiskTier, ids: list[SegmentId], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda first: read_some_layers(tier, ids[first::threads]), range(threads)):
            pass


def read_some_layers(tier: DiskTier, ids: list[SegmentId]) -> None:
    scratch = torch.empty(0, dtype=torch.uint8)
    for segment in ids:
        source = tier.get(segment)
        assert source is not None
        if len(scratch) < source.header.layout.layer_bytes:
            scratch = torch.empty(source.header.layout.layer_bytes, dtype=torch.uint8)
        for layer in range(source.header.layout.num_layers):
            source.layer(layer, scratch)


def seconds(read: Callable[[], None]) -> float:
    started = time.perf_counter()
    read()
    return time.perf_counter() - started


def throughput_row(args: argparse.Namespace, root: Path, codec: str) -> dict[str, Any]:
    shape = (args.layers, 2, args.tokens, args.kv_heads, args.head_dim)
    tier = fill(root / codec, codec, shape, args.segments, args.seed)
    ids = [record.id for record in tier.records()]
    paths = [tier.folder / segment[:2] / f"{segment}.safetensors" for segment in ids]
    total = sum(path.stat().st_size for path in paths)
    times: dict[str, list[float]] = {"plain": [], "unchecked": [], "1 thread": [], "loaders": []}
    for _ in range(args.rounds):
        drop_page_cache(paths)
        times["plain"].append(seconds(lambda: read_sequentially(paths)))
        drop_page_cache(paths)
        times["unchecked"].append(seconds(lambda: read_unchecked(tier, ids)))
        drop_page_cache(paths)
        times["1 thread"].append(seconds(lambda: read_layers(tier, ids, 1)))
        drop_page_cache(paths)
        times["loaders"].append(seconds(lambda: read_layers(tier, ids, args.loaders)))
    cached_s = min(seconds(lambda: read_layers(tier, ids, 1)) for _ in range(args.rounds))
    row: dict[str, Any] = {"method": codec, "layer_bytes": layer_bytes(tier, ids[0])}
    row["sequential_bytes_per_s"] = total / statistics.median(times["plain"])
    row["unchecked_over_sequential"] = ratio(times["plain"], times["unchecked"])
    row["one_thread_over_sequential"] = ratio(times["plain"], times["1 thread"])
    row["loaders_over_sequential"] = ratio(times["plain"], times["loaders"])
    row["cached_bytes_per_s"] = total / cached_s
    return row


def ratio(plain_s: list[float], layers_s: list[float]) -> float:
    return statistics.median(plain / layers for plain, layers in zip(plain_s, layers_s, strict=True))


def layer_bytes(tier: DiskTier, segment: SegmentId) -> int:
    source = tier.get(segment)
    assert source is not None
    return source.header.layout.layer_bytes


def measure_error(codec: Codec, layers: torch.Tensor) -> tuple[float, float]:
    """How far KV is off after one round trip: L2 norm of the difference over that of the original, and the greatest
    difference of one element.
    """
    squared = original = greatest = 0.0
    for kv in layers:
        decoded = codec.decode_layer(codec.encode_layer(kv), kv.dtype)
        difference = decoded.double() - kv.double()
        squared += float(difference.square().sum())
        original += float(kv.double().square().sum())
        greatest = max(greatest, float(difference.abs().max()))
    return (squared / original) ** 0.5, greatest


def codec_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    inputs = {
        f"random weights, {args.shape}": model_kv(args.shape, args.tokens, args.seed),
        "normal, log-normal channels": channelled_kv((4, 2, args.tokens, 2, 64), args.seed),
    }
    rows = []
    for kind, kv in inputs.items():
        for name, codec in CODECS.items():
            relative_l2, max_abs = measure_error(codec, kv)
            stored = sum(tensor.nbytes for tensor in codec.layout(tuple(kv.shape[1:]), kv.dtype))
            rows.append(
                {
                    "codec": name,
                    "kv": kind,
                    "bytes_per_raw_byte": stored / kv[0].nbytes,
                    "relative_l2": relative_l2,
                    "max_abs": max_abs,
                    "max_abs_kv": float(kv.abs().max()),
                }
            )
    return rows


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation."""
    heads = ["codec", "sequential", "layer-wise, unchecked", "checked and decoded, 1 thread"]
    heads.append(f"checked and decoded, {result['config']['loaders']} threads")
    shares = ("unchecked_over_sequential", "one_thread_over_sequential", "loaders_over_sequential")
    read = [
        [
            f"`{row['method']}`",
            f"{row['sequential_bytes_per_s'] / 1e6:.0f} MB/s",
            *(f"{row[name]:.2f}" for name in shares),
        ]
        for row in result["rows"]
    ]
    coded = [
        [
            f"`{row['codec']}`",
            row["kv"],
            f"{row['bytes_per_raw_byte']:.3f}",
            f"{row['relative_l2']:.4f}",
            f"{row['max_abs']:.2g}",
            f"{row['max_abs_kv']:.2g}",
        ]
        for row in result["codecs"]
    ]
    code_heads = ["codec", "input", "bytes per raw byte", "relative L2 error", "largest error", "largest value"]
    return {"disk-throughput": markdown_table(heads, read), "codecs": markdown_table(code_heads, coded)}


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(formatted(name, value) for name, value in row.items()))
    Console(width=160).print(table)


def formatted(name: str, value: object) -> str:
    if name.endswith("bytes_per_s") and isinstance(value, float):
        return f"{value / 1e6:.0f} MB/s"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where to write the test files; default: a temporary folder here")
    parser.add_argument("--segments", type=int, default=12)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loaders", type=int, default=2, help="threads that read, check and decode side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", default="demo", help="random-weight model whose KV the codecs' error is measured on")
    return parse(parser)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="disk-throughput-", dir=args.folder or Path.cwd()))
    try:
        rows = [throughput_row(args, root, codec) for codec in CODECS]
    finally:
        shutil.rmtree(root)
    errors = codec_rows(args)
    show(rows, "Reading segments, page cache dropped (bar: 0.8 of sequential)")
    show(errors, "Codecs")
    config = {name: str(value) for name, value in settings(args).items()}
    write("disk-throughput", args, config, rows, {"codecs": errors})


if __name__ == "__main__":
    main()
