"""`chunkweave profile` and `advise`: measure computing and loading, and choose a device for segments."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Json, Output, check_writable, progress, seconds, size, status, stderr, table_of
from chunkweave.cli.options import Only, SeededModelOptions, with_blocks
from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.planning.cost import CostModel, StorageDevice, choose_device, cost_model_path, ratio_that_hides
from chunkweave.settings import parse_bytes

if TYPE_CHECKING:
    from chunkweave.models.loading import LoadedModel
    from chunkweave.types import SegmentId


@with_blocks
def profile(
    *,
    model: SeededModelOptions,
    store: Annotated[StoreConfig, Only("cache_dir", "remote_url", "codec")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File for the cost model; default: in the cache directory, where it is used."),
    ] = None,
    cached_tokens: Annotated[str, typer.Option(help="Numbers of cached tokens before the new ones.")] = "0,512,2048",
    new_tokens: Annotated[str, typer.Option(help="Numbers of new tokens to prefill.")] = "32,128,512,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each pair; the median counts.")] = 3,
    segment_tokens: Annotated[int, typer.Option(min=1, help="Tokens per segment that tiers read.")] = 512,
    segments: Annotated[int, typer.Option(min=1, help="Number of segments that tiers read.")] = 8,
    json: Json = False,
) -> None:
    """Measure prefill times and each tier's throughput, and write the cost-model file.

    Exit code 1 if a tier could not be measured; the file then has the others.
    """
    cache_dir = store.cache_dir
    if out is None and cache_dir is None:
        raise UsageError("no place for the cost model: give --cache-dir or --out FILE")
    if out is not None:
        check_writable(out)
    model.named()
    cached, new = _axis(cached_tokens, 0, "--cached-tokens"), _axis(new_tokens, 1, "--new-tokens")
    with model.open() as engine:
        loaded = engine.loaded
    cost = _prefill_times(loaded, cached, new, repeats)
    tiers = _throughputs(loaded, store, segment_tokens, segments)
    cost = replace(cost, tier_bytes_per_s=tiers)
    path = out or _default_place(cache_dir, loaded.fingerprint)
    try:
        cost.save(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    _show_costs(Output(json), cost, path, model.name)
    asked = {"disk": cache_dir, "remote": store.remote_url}
    if any(place is not None and name not in tiers for name, place in asked.items()):
        raise typer.Exit(1)


def _prefill_times(loaded: "LoadedModel", cached: list[int], new: list[int], repeats: int) -> CostModel:
    from chunkweave.engine.profiling import profile_prefill

    limit = loaded.model.geometry.max_positions
    if max(cached) + min(new) >= limit:
        raise UsageError(f"cached and new tokens must fit the model's context of {limit}")
    with progress("measuring prefill") as report:
        return profile_prefill(
            loaded.model, loaded.fingerprint, cached_tokens=cached, new_tokens=new, repeats=repeats, progress=report
        )


def _axis(text: str, least: int, option: str) -> list[int]:
    values = options.whole_numbers(text, option)
    if min(values) < least:
        raise UsageError(f"{option} takes whole numbers from {least} on, not {text!r}")
    return sorted(set(values))


def _throughputs(loaded: "LoadedModel", store: StoreConfig, tokens: int, segments: int) -> dict[str, float]:
    """Bytes of KV per second of each tier asked for; one that fails is reported and left out."""
    from chunkweave.engine.profiling import measure_throughput

    measured: dict[str, float] = {}
    geometry, dtype = loaded.model.geometry, loaded.model.dtype
    tiers: dict[str, tuple[Any, Any]] = {
        "disk": (store.cache_dir, _scratch_disk),
        "remote": (store.remote_url, _scratch_remote),
    }
    for name, (place, scratch) in tiers.items():
        if place is None:
            continue
        try:
            with status(f"measuring the {name}"), scratch(place, store.codec) as (tier, forget):
                measured[name] = measure_throughput(
                    tier, geometry, dtype, tokens=tokens, segments=segments, drop_cache=forget
                )
        except OSError as error:
            stderr().print(f"[red]the {name} could not be measured: {escape(str(error))}[/red]")
    return measured


@contextmanager
def _scratch_disk(cache_dir: Path, codec: str) -> Iterator[tuple[Any, Any]]:
    """A temporary tier on the disk of the cache directory, and a function that drops a segment from the page cache."""
    from chunkweave.engine.profiling import drop_page_cache
    from chunkweave.tiers.disk import DiskTier

    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=cache_dir) as scratch:
        tier = DiskTier(Path(scratch), "profile", codec=codec)

        def forget(segment: "SegmentId") -> None:
            source = tier.get(segment)
            drop_page_cache([] if source is None else [source.path])

        yield tier, forget


@contextmanager
def _scratch_remote(url: str, codec: str) -> Iterator[tuple[Any, Any]]:
    """A tier in the remote under a random name, and a function that does nothing, because there is no page cache."""
    from chunkweave.kv.segment import make_codec
    from chunkweave.tiers.blobs import open_blobs
    from chunkweave.tiers.remote import RemoteTier

    blobs = open_blobs(url)
    try:
        name = f"profile-{os.urandom(8).hex()}"
        yield RemoteTier(blobs, name, codec=make_codec(codec), deadline_s=30.0), lambda _segment: None
    finally:
        blobs.close()


def _default_place(cache_dir: Path | None, fingerprint: str) -> Path:
    assert cache_dir is not None, "without a file to write to there is a cache directory"
    path = cost_model_path(cache_dir, fingerprint)
    for folder in (cache_dir, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _show_costs(output: Output, cost: CostModel, path: Path, name: str) -> None:
    rows = [
        {"cached": cached, **{f"{new} new": seconds(value) for new, value in zip(cost.new_tokens, row, strict=True)}}
        for cached, row in zip(cost.cached_tokens, cost.prefill_s, strict=True)
    ]
    title = f"{name}: prefill of new tokens behind cached ones"
    table = table_of(rows, *((column, column) for column in rows[0]), title=title)
    tiers = [
        f"{tier}: {size(int(speed))} of KV a second, {seconds(cost.load(512, tier))} for 512 tokens"
        for tier, speed in cost.tier_bytes_per_s.items()
    ]
    output.show(table, *tiers, f"{size(cost.kv_bytes_per_token)} of KV a token; written to {path}")
    output.finish({"file": str(path), **asdict(cost)})


@with_blocks
def advise(
    cost_model: Annotated[Path, typer.Argument(help="File that `chunkweave profile` wrote.")],
    device: Annotated[
        list[str],
        typer.Option("--device", help="NAME,THROUGHPUT,PRICE: bytes a second (1.5GB) and price per GiB and hour."),
    ],
    *,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request's reused chunks.")] = 3072,
    reuse: Annotated[ReuseConfig, Only("recompute_ratio")],
    output: Output,
) -> None:
    """Choose the cheapest device whose loading is hidden by recomputation, else the fastest (CacheBlend §5.1)."""
    recompute_ratio = reuse.recompute_ratio
    if not 0 < recompute_ratio <= 1:
        raise UsageError(f"--recompute-ratio must be above 0 and at most 1, not {recompute_ratio}")
    devices = [_parsed_device(text) for text in device]
    cost = CostModel.read(cost_model)
    chosen = choose_device(cost, tokens, devices, ratio=recompute_ratio)
    prefill_s = cost.prefill(tokens)
    rows: list[dict[str, Any]] = []
    for one in devices:
        load_s = tokens * cost.kv_bytes_per_token / one.bytes_per_s
        choice = ratio_that_hides(prefill_s, load_s, least_ratio=recompute_ratio)
        rows.append(
            {
                "device": one.name,
                "price_per_gib_hour": one.price_per_gib_hour,
                "load_s": load_s,
                "recompute_s": recompute_ratio * prefill_s,
                "hidden": load_s <= recompute_ratio * prefill_s,
                "ratio_that_hides": choice.ratio,
                "chosen": one is chosen,
            }
        )
    output.show(_devices_table(rows, tokens, recompute_ratio))
    output.finish({"tokens": tokens, "recompute_ratio": recompute_ratio, "devices": rows, "chosen": chosen.name})


def _devices_table(rows: Sequence[dict[str, Any]], tokens: int, recompute_ratio: float) -> Table:
    return table_of(
        rows,
        ("device", "device"),
        ("price per GiB-hour", lambda row: f"{row['price_per_gib_hour']:g}"),
        ("loading", lambda row: seconds(row["load_s"])),
        ("recomputing", lambda row: seconds(row["recompute_s"])),
        ("hidden", lambda row: "yes" if row["hidden"] else "no"),
        ("ratio that hides it", lambda row: f"{row['ratio_that_hides']:.2f}"),
        ("chosen", lambda row: "<--" if row["chosen"] else ""),
        title=f"{tokens} reused tokens, recompute ratio {recompute_ratio:g}",
        left=7,
    )


def _parsed_device(text: str) -> StorageDevice:
    name, *numbers = (part.strip() for part in text.split(","))
    try:
        throughput, price = numbers
        found = StorageDevice(name, float(parse_bytes(throughput)), float(price))
    except ValueError as error:
        raise UsageError(f"--device takes NAME,THROUGHPUT,PRICE such as ssd,1.5GB,0.0001, not {text!r}") from error
    if not name or found.bytes_per_s <= 0 or not found.price_per_gib_hour >= 0:
        raise UsageError(f"--device needs a name, a positive throughput and a price: {text!r}")
    return found
