"""Options that several commands share, as annotated types."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkweave.config import StoreConfig
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
Attention = Annotated[str, typer.Option(help="What computes attention: auto, triton or sdpa.")]
DecodeGraphs = Annotated[bool, typer.Option(help="On CUDA, decode by recorded graphs.")]
StoreBudget = Annotated[str, typer.Option(help="Most memory for stored segments, for example 2GiB.")]
RecomputeRatio = Annotated[
    float, typer.Option(help="Share of the reused chunks' tokens that is computed again, 0 to 1.")
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Warm = Annotated[str, typer.Option(help="`alone`, or `queries:N` by N earlier requests.")]
CheckLayers = Annotated[str, typer.Option(help="CacheBlend's check layers, separated by commas.")]
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
DocumentName = Annotated[str | None, typer.Option("--document", help="Only segments of the document of this name.")]
ChunkPrefix = Annotated[
    str | None, typer.Option("--chunk", help="Only segments of this chunk: its id, or its beginning.")
]
SegmentPrefix = Annotated[str | None, typer.Option("--segment", help="Only this segment: its id, or its beginning.")]

DEFAULT_STORE_BUDGET = "4GiB"
DEFAULT_DISK_BUDGET = "64GiB"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)


def kept(store: StoreConfig) -> dict[str, Any]:
    """What a benchmark's result says about where segments were kept."""
    tiers = ["host"] + ["disk"] * (store.cache_dir is not None) + ["remote"] * (store.remote_url is not None)
    return {"tiers": tiers, "codec": store.codec}


def command_line() -> str:
    """The command as it was called, for a result that others read: URLs come without user, password and options."""
    return shlex.join(["chunkweave", *(_URL.sub(lambda url: without_secrets(url[0]), word) for word in sys.argv[1:])])


def names(text: str) -> tuple[str, ...]:
    """The names of a list such as `cacheblend,epic`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
