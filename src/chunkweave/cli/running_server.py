"""`chunkweave status` and `chunkweave server`: state of a running server, and commands for its cache."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
from rich.table import Table

from chunkweave.cli import console
from chunkweave.cli.console import Json, Output, counted, size, table_of
from chunkweave.cli.files import documents_read, read_all, say_what_was_left_out
from chunkweave.cli.options import with_blocks
from chunkweave.errors import ChunkweaveError, UsageError

if TYPE_CHECKING:
    from chunkweave.retrieval.documents import CorpusDocument

KEY_VARIABLE = "CHUNKWEAVE_API_KEY"
_QUICK_S = 10.0
_LONG_S = 3600.0

app = typer.Typer(no_args_is_help=True, help="Fill and empty the cache of a running server.")

USUAL_URL = "http://127.0.0.1:8000"
"""The default address of a server."""

Url = Annotated[str, typer.Argument(help=f"URL of the server, such as {USUAL_URL}.")]
Key = Annotated[str | None, typer.Option(help=f"API key; default: that in {KEY_VARIABLE}.")]


class ServerError(ChunkweaveError):
    """A running server cannot be reached, or refuses a request."""


def status(url: Url = USUAL_URL, key: Key = None, json: Json = False) -> None:
    """Show the state of a running server, and what its cache has saved; an admin's key also shows its contents.

    Exit code 1 if the server cannot be reached, or is not ready.
    """
    output = Output(json)
    ready = _call(url, "/ready", key, also=(503,))
    state: dict[str, Any] = {**ready, **_call(url, "/version", key)}
    if ready["ready"]:
        state["models"] = [model["id"] for model in _call(url, "/v1/models", key)["data"]]
        state["cache"] = _call(url, "/v1/cache", key)
    output.show(*_tables(state))
    output.finish(state)
    if not ready["ready"]:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class ServedChunks:
    """Server, and the chunks to select."""

    url: Url
    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", help="File or folder, each file as one document of a request; repeatable."),
    ] = None
    corpus: Annotated[str | None, typer.Option(help="Corpus of the server, instead of documents.")] = None
    key: Key = None
    json: Json = False

    def change(self, what: str, line: Callable[[Mapping[str, int]], str], *, everything: bool = False) -> None:
        """Send the command `what` to the server and show its answer: the text of `line`, or JSON.

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
            body = {"documents": [{"text": document.text, "id": document.id} for document in _read(self.docs or [])]}
        with console.status(f"{what}: waiting for the server"):
            done = _call(self.url, f"/v1/cache/{what}", self.key, body, timeout_s=_LONG_S)
        output = Output(self.json)
        output.show(line(done))
        output.finish(done)


def _read(paths: Sequence[Path]) -> "list[CorpusDocument]":
    reads = read_all(paths)
    documents = documents_read(reads)
    say_what_was_left_out(reads)
    return documents


@app.command()
@with_blocks
def warm(*, chosen: ServedChunks) -> None:
    """Compute those chunks of documents, or of a corpus, that are not stored, ahead of requests."""
    chosen.change(
        "warm",
        lambda done: f"computed {done['computed']} of {counted(done['chunks'], 'chunk')}; the others were stored",
    )


@app.command()
@with_blocks
def clear(
    *,
    chosen: ServedChunks,
    everything: Annotated[bool, typer.Option("--all", help="Chunks of all tenants; needs an admin's key.")] = False,
) -> None:
    """Remove stored chunks of documents, or of a corpus, from every tier. Exit code 1 if one could not be removed."""
    if everything and (chosen.docs or chosen.corpus):
        raise UsageError("give either --all or what to remove")
    chosen.change(
        "clear", lambda done: f"removed {counted(done['segments_removed'], 'segment')}", everything=everything
    )


def _call(
    url: str,
    path: str,
    key: str | None,
    body: Mapping[str, Any] | None = None,
    *,
    also: tuple[int, ...] = (),
    timeout_s: float = _QUICK_S,
) -> dict[str, Any]:
    """The JSON answer of a server; statuses in `also` count as success.

    Raises:
        UsageError: `url` is not an HTTP URL.
        ServerError: the server cannot be reached, or refuses; the message says why.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no URL of a server, such as {USUAL_URL}")
    key = os.environ.get(KEY_VARIABLE) if key is None else key
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{url.rstrip('/').removesuffix('/v1')}{path}", data, headers)  # noqa: S310  (the scheme is checked)
    try:
        with urlopen(request, timeout=timeout_s) as reply:  # noqa: S310
            answer = reply.read()
    except HTTPError as error:
        answer = error.read()
        if error.code == HTTPStatus.UNAUTHORIZED:
            wrong = "needs an API key" if not key else "does not know this API key"
            raise ServerError(f"{url} {wrong}: set {KEY_VARIABLE}, or give --key") from error
        if error.code not in also:
            raise ServerError(f"{url} refuses {path} ({error.code}): {_why(answer)}") from error
    except (URLError, HTTPException, OSError) as error:
        why = error.reason if isinstance(error, URLError) else error
        how = "start one with `chunkweave serve --model smollm2`, or give the URL of another"
        raise ServerError(f"no server answers at {url}: {why}; {how}") from error
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise ServerError(f"{url} is not a chunkweave server") from error
    if not isinstance(found, dict):
        raise ServerError(f"{url} is not a chunkweave server")
    return found


def _why(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace") or "no reason given"


def _count(name: str, value: float | None) -> tuple[str, str]:
    """A table row for a counter since the server's start."""
    if name == "time_saved_s":
        return "time saved", "not known yet" if value is None else f"{value:,.1f} s"
    if name == "saved_share":
        return "of full prefill's time", "not known yet" if value is None else f"{value:.0%}"
    if name == "full_s":
        return "full prefill's time", f"{value:,.1f} s"
    return name.replace("_", " "), f"{value:,}"


def _tables(state: Mapping[str, Any]) -> list[Table]:
    about = Table("", "", show_header=False)
    about.add_row("state", "ready" if state["ready"] else str(state["stage"]))
    about.add_row("version", state["version"])
    if "models" in state:
        about.add_row("models", ", ".join(state["models"]))
    cache: Mapping[str, Any] = state.get("cache", {})
    for name, value in cache.get("all_tenants", cache.get("tenant", {})).items():
        about.add_row(*_count(name, value))
    for name, reason in cache.get("off", {}).items():
        about.add_row(f"{name} weaves nothing", reason)
    levels = cache.get("store", {}).get("levels", {})
    tiers = table_of(
        levels.items(),
        ("tier", lambda level: level[0]),
        ("segments", lambda level: f"{level[1]['segments']:,}"),
        ("bytes", lambda level: size(level[1]["bytes"])),
        ("evictions", lambda level: f"{level[1]['evictions']:,}"),
    )
    replicas = table_of(
        cache.get("replicas", ()),
        ("vLLM server", "name"),
        ("up", lambda replica: "yes" if replica["up"] else "no"),
        *((name, name) for name in ("running", "waiting", "answered")),
        left=2,
    )
    return [about, *(table for table in (tiers, replicas) if table.row_count)]
