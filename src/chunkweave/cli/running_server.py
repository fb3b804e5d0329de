"""`chunkweave status` and `chunkweave server`: what a running server does, and its cache."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
from rich.table import Table

from chunkweave.cli import console
from chunkweave.cli.console import Json, Output, size
from chunkweave.cli.options import with_blocks
from chunkweave.errors import ChunkweaveError, UsageError
from chunkweave.prompt.documents import read_documents

KEY_VARIABLE = "CHUNKWEAVE_API_KEY"
_QUICK_S, _LONG_S = 10.0, 3600.0

app = typer.Typer(no_args_is_help=True, help="Fill, pin and empty the cache of a running server.")

Url = Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")]
Key = Annotated[str | None, typer.Option(help=f"An API key; left out: that in {KEY_VARIABLE}.")]


class ServerError(ChunkweaveError):
    """A running server cannot be reached, or refuses."""


def status(url: Url, key: Key = None, json: Json = False) -> None:
    """Show how far a running server is, and what its cache has saved; an admin's key shows what it holds.

    Exit code 1 if it cannot be reached, or is not ready.
    """
    output = Output(json)
    ready = _call(url, "/ready", key, also=(503,))
    shown: dict[str, Any] = {**ready, **_call(url, "/version", key)}
    if ready["ready"]:
        shown["models"] = [one["id"] for one in _call(url, "/v1/models", key)["data"]]
        shown["cache"] = _call(url, "/v1/cache", key)
    output.show(*_tables(shown))
    output.finish(shown)
    if not ready["ready"]:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class ServedChunks:
    """Which chunks of which server."""

    url: Url
    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", help="Text file or folder of them, each file as one document of a request; repeatable."),
    ] = None
    corpus: Annotated[str | None, typer.Option(help="A corpus of the server's, instead of documents.")] = None
    key: Key = None
    json: Json = False

    def change(self, what: str, line: str, *, everything: bool = False) -> None:
        """Have the server do it, and show what it answers, for people as `line`.

        Raises:
            UsageError: neither documents nor a corpus are named, or both.
            ServerError: the server refuses.
        """
        if everything:
            body: dict[str, Any] = {"everything": True}
        elif (self.docs is None) == (self.corpus is None):
            raise UsageError("say what: either --docs or --corpus")
        elif self.corpus is not None:
            body = {"corpus": self.corpus}
        else:
            body = {"documents": [{"text": one.text, "id": one.name} for one in read_documents(self.docs or [])]}
        with console.status(f"{what}: waiting for the server"):
            done = _call(self.url, f"/v1/cache/{what}", self.key, body, timeout_s=_LONG_S)
        output = Output(self.json)
        output.show(line.format_map(done))
        output.finish(done)


@app.command()
@with_blocks
def warm(*, chosen: ServedChunks) -> None:
    """Compute what is not stored of documents, or of a corpus, before a request needs it."""
    chosen.change("warm", "computed {computed} of {chunks} chunks; the others were there")


@app.command()
@with_blocks
def pin(*, chosen: ServedChunks) -> None:
    """Keep what is stored of them from eviction, until it is unpinned or the server ends."""
    chosen.change("pin", "pinned {segments_pinned} segments of {chunks} chunks")


@app.command()
@with_blocks
def unpin(*, chosen: ServedChunks) -> None:
    """Take pins back."""
    chosen.change("unpin", "unpinned {chunks_unpinned} of {chunks} chunks")


@app.command()
@with_blocks
def clear(
    *,
    chosen: ServedChunks,
    everything: Annotated[bool, typer.Option("--all", help="Of all tenants; takes an admin's key.")] = False,
) -> None:
    """Remove what is stored of them from every tier. Exit code 1 if anything could not be removed."""
    if everything and (chosen.docs or chosen.corpus):
        raise UsageError("give either --all or what to remove")
    chosen.change("clear", "removed {segments_removed} segments", everything=everything)


def _call(
    url: str,
    path: str,
    key: str | None,
    body: Mapping[str, Any] | None = None,
    *,
    also: tuple[int, ...] = (),
    timeout_s: float = _QUICK_S,
) -> dict[str, Any]:
    """What a server answers, with status 200 or `also` others.

    Raises:
        UsageError: `url` is none of HTTP.
        ServerError: it cannot be reached, or refuses; the message says why.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
    key = os.environ.get(KEY_VARIABLE) if key is None else key
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    asked = Request(f"{url.rstrip('/').removesuffix('/v1')}{path}", data, headers)  # noqa: S310  (the scheme is checked)
    try:
        with urlopen(asked, timeout=timeout_s) as reply:  # noqa: S310
            answer = reply.read()
    except HTTPError as error:
        answer = error.read()
        if error.code not in also:
            raise ServerError(f"{url} refuses {path} ({error.code}): {_why(answer)}") from error
    except (URLError, HTTPException, OSError) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise ServerError(f"no server answers at {url}: {why}") from error
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise ServerError(f"what answers at {url} is no chunkweave server") from error
    if not isinstance(found, dict):
        raise ServerError(f"what answers at {url} is no chunkweave server")
    return found


def _why(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace") or "no reason given"


def _tables(shown: Mapping[str, Any]) -> list[Table]:
    about = Table("", "", show_header=False)
    about.add_row("state", "ready" if shown["ready"] else str(shown["stage"]))
    about.add_row("version", shown["version"])
    if "models" in shown:
        about.add_row("models", ", ".join(shown["models"]))
    cache: Mapping[str, Any] = shown.get("cache", {})
    for name, value in cache.get("tenant", {}).items():
        about.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    levels = cache.get("store", {}).get("levels", {})
    tiers = Table("tier", "segments", "bytes", "evictions")
    for name, level in levels.items():
        tiers.add_row(name, f"{level['segments']:,}", size(level["bytes"]), f"{level['evictions']:,}")
    replicas = Table("vLLM server", "up", "running", "waiting", "answered")
    for one in cache.get("replicas", ()):
        up = "yes" if one["up"] else "no"
        replicas.add_row(one["name"], up, str(one["running"]), str(one["waiting"]), str(one["answered"]))
    return [about, *(table for table in (tiers, replicas) if table.row_count)]
