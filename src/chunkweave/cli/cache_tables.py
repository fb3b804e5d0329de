"""Tables of `chunkweave cache`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from chunkweave.cli.cache_folder import CachedSegment
from chunkweave.cli.tables import size

if TYPE_CHECKING:
    from chunkweave.tiers.disk_index import ProblemFile

_MOST_PROBLEMS = 50


def segments_table(listed: Sequence[CachedSegment], found: int, now_s: float) -> Table:
    """One line a segment."""
    caption = f"{len(listed)} of {found} segments" if len(listed) < found else f"{found} segments"
    table = Table(caption=caption, caption_justify="left")
    table.add_column("segment", no_wrap=True)
    table.add_column("chunk", no_wrap=True)
    table.add_column("document", overflow="fold")
    for name in ("tokens", "size", "context", "exact", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("codec", "dtype", "model", ""):
        table.add_column(name, no_wrap=True)
    for one in listed:
        record = one.record
        table.add_row(
            record.id[:12],
            record.chunk_id[:12],
            escape(record.source) or "-",
            str(len(record)),
            size(record.nbytes),
            str(len(record.context)),
            "yes" if record.exact else "no",
            age(max(0.0, now_s - one.created_s)),
            one.codec,
            one.dtype,
            one.fingerprint[:8],
            "pinned" if one.pinned else "",
        )
    return table


def stats_tables(report: dict[str, Any]) -> list[RenderableType]:
    """Sizes by model, by document, and the files that are not used."""
    models = Table(title="By model", title_justify="left")
    models.add_column("fingerprint", no_wrap=True)
    for name in ("segments", "chunks", "tokens", "size", "pinned", "oldest", "newest", "cost model"):
        models.add_column(name, justify="right")
    documents = Table(title="By document", title_justify="left")
    documents.add_column("model", no_wrap=True)
    documents.add_column("document", overflow="fold")
    for name in ("segments", "tokens", "size"):
        documents.add_column(name, justify="right")
    for model in report["models"]:
        counts = [str(model[name]) for name in ("segments", "chunks", "tokens")]
        ages = [age(model["oldest_s"]), age(model["newest_s"])]
        measured = "yes" if model["cost_model"] else "no"
        models.add_row(model["fingerprint"], *counts, size(model["bytes"]), str(model["pinned"]), *ages, measured)
        for row in model["documents"]:
            short, name = model["fingerprint"][:8], escape(row["document"]) or "-"
            documents.add_row(short, name, str(row["segments"]), str(row["tokens"]), size(row["bytes"]))
    shown: list[RenderableType] = [models, documents]
    if report["problems"]:
        shown.append(problems_table(report["problems"]))
    return shown


def problems_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Files that are not used, and why."""
    more = len(rows) - _MOST_PROBLEMS
    caption = f"and {more} more; --json lists all" if more > 0 else None
    table = Table(title="Files that are not used", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("file", overflow="fold")
    table.add_column("problem", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for row in rows[:_MOST_PROBLEMS]:
        removed = " (removed)" if row.get("repaired") else ""
        table.add_row(escape(row["file"]), row["problem"] + removed, escape(row["reason"]))
    return table


def problem_dict(problem: "ProblemFile", root: Path) -> dict[str, Any]:
    """JSON-able; the file is named from the cache directory on."""
    return {
        "file": str(problem.path.relative_to(root)),
        "problem": problem.problem.value,
        "reason": problem.reason,
    }


def age(value_s: float | None) -> str:
    """A duration in its largest sensible unit: `3 d`, `12 h`, `5 min`, `42 s`."""
    if value_s is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if value_s >= 2 * length_s:
            return f"{value_s / length_s:.0f} {unit}"
    return f"{value_s:.0f} s"
