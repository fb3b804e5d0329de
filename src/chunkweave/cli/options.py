"""Options that several commands share, as annotated types."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkweave.config import ReuseConfig, StoreConfig, parse_bytes
from chunkweave.errors import UsageError
from chunkweave.tiers.blobs import without_secrets

Model = Annotated[
    Path | None,
    typer.Option("--model", help="Checkpoint folder in Hugging Face format, or `reader`, the bundled model."),
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="Random-weight model of a known geometry, for timing: its text means nothing."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
StoreBudget = Annotated[str, typer.Option(help="Most memory for stored segments, for example 2GiB.")]
RecomputeRatio = Annotated[
    float, typer.Option(help="Share of the reused chunks' tokens that is computed again, 0 to 1.")
]
AskedRatio = Annotated[
    float | None,
    typer.Option("--recompute-ratio", help="Share of the reused chunks' tokens that --method computes again, 0 to 1."),
]
AskedAlpha = Annotated[
    float | None, typer.Option("--alpha", help="Scale of what cachecraft computes again: 0 nothing, 3 nearly all.")
]
Quality = Annotated[
    str | None,
    typer.Option(help="exact, balanced or fast: how close to full prefill; the last two need `chunkweave calibrate`."),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON to this file.")]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="Folder that keeps segments on disk, for later runs and for other processes.",
        file_okay=False,
    ),
]
DiskBudget = Annotated[str, typer.Option(help="Most disk space for stored segments, with --cache-dir.")]
RemoteUrl = Annotated[
    str | None,
    typer.Option(
        "--remote-url",
        envvar="CHUNKWEAVE_REMOTE_URL",
        help="Another machine that keeps segments too: redis://..., s3://..., file://...",
    ),
]
Codec = Annotated[str, typer.Option(help="How segments are encoded on disk and remote: raw, int8 or fp8.")]
Ttl = Annotated[str | None, typer.Option(help="Drop segments older than that: 30s, 90m, 12h or 7d.")]
CacheFolderPath = Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="The folder given as --cache-dir.")]
Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="Only this model's; the beginning of its fingerprint is enough.")
]
Document = Annotated[str | None, typer.Option("--document", help="Only segments of the document of this name.")]
ChunkPrefix = Annotated[
    str | None, typer.Option("--chunk", help="Only segments of this chunk: its id, or its beginning.")
]
SegmentPrefix = Annotated[str | None, typer.Option("--segment", help="Only this segment: its id, or its beginning.")]

DEFAULT_STORE_BUDGET = "4GiB"
DEFAULT_DISK_BUDGET = "64GiB"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
_DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def store_config(
    *,
    store_budget: str = DEFAULT_STORE_BUDGET,
    cache_dir: Path | None = None,
    disk_budget: str = DEFAULT_DISK_BUDGET,
    remote_url: str | None = None,
    codec: str = "raw",
    ttl: str | None = None,
) -> StoreConfig:
    """What the options of a command ask for.

    Raises:
        UsageError: a size, a duration, a codec or the cache folder is not one.
    """
    if cache_dir is not None and cache_dir.exists() and not cache_dir.is_dir():
        raise UsageError(f"--cache-dir {cache_dir} is not a folder")
    return StoreConfig(
        parse_bytes(store_budget),
        cache_dir=cache_dir,
        disk_budget_bytes=parse_bytes(disk_budget),
        remote_url=remote_url,
        codec=codec,
        ttl_s=None if ttl is None else parse_duration(ttl),
    )


def reuse_config(method: str | None, recompute_ratio: float | None, alpha: float | None) -> ReuseConfig:
    """What a named method is to be told.

    Raises:
        UsageError: a value is out of range, or there is no method that it could be for.
    """
    asked = {"recompute_ratio": recompute_ratio, "alpha": alpha}
    told: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    config = ReuseConfig(**told)
    if told and method is None:
        raise UsageError("--recompute-ratio and --alpha set a method: name it with --method")
    return config


def kept(store: StoreConfig) -> dict[str, Any]:
    """What a benchmark's result says about where segments were kept."""
    tiers = ["host"] + ["disk"] * (store.cache_dir is not None) + ["remote"] * (store.remote_url is not None)
    return {"tiers": tiers, "codec": store.codec}


def command_line() -> str:
    """The command as it was called, for a result that others read: URLs come without user, password and options."""
    return shlex.join(["chunkweave", *(_URL.sub(lambda url: without_secrets(url[0]), word) for word in sys.argv[1:])])


def parse_duration(text: str) -> float:
    """Seconds named by a text such as `90m`, `7d` or `30`.

    Raises:
        UsageError: the text is no duration.

    >>> parse_duration("1.5h")
    5400.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if match is None:
        raise UsageError(f"not a duration: {text!r}; write for example 30s, 90m, 12h or 7d")
    return float(match[1]) * _DURATION_UNITS_S[match[2] or "s"]


def numbers(text: str, option: str) -> list[float]:
    """The numbers of a list such as `0.5,1,2`.

    Raises:
        UsageError: it is no such list; the message names the option.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} takes numbers separated by commas, not {text!r}") from error


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """The whole numbers of a list such as `1,2,3`.

    Raises:
        UsageError: it is no such list; the message names the option.
    """
    values = numbers(text, option)
    if any(value != int(value) for value in values):
        raise UsageError(f"{option} takes whole numbers separated by commas, not {text!r}")
    return tuple(int(value) for value in values)
