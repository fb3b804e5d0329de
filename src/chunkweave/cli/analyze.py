"""`chunkweave analyze`: what requests have in common, and what each chunk order would save of their prefill."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Json, Out, Output, progress, status
from chunkweave.errors import UsageError

if TYPE_CHECKING:
    from chunkweave.eval.chunk_order.caches import PathCache
    from chunkweave.eval.chunk_order.overlap import Overlap
    from chunkweave.eval.chunk_order.replay import Savings
    from chunkweave.eval.simulator.trace import Arrival

_BOUND = "bound"


def analyze(
    trace: Annotated[
        Path,
        typer.Option(help="A request trace (JSONL, ours or Mooncake's), or a data set (MuSiQue or SQuAD JSON, JSONL)."),
    ],
    orderings: Annotated[
        str, typer.Option(help="Chunk orders, separated by commas; `oracle` knows all requests.")
    ] = "original,frequency,tree-greedy,oracle",
    top_k: Annotated[int | None, typer.Option(min=1, help="Take only so many chunks of each request.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Take only so many requests.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Requests that chunks are counted over.")] = 1000,
    promote: Annotated[
        int | None, typer.Option(min=1, help="Store a prefix once each of its chunks was asked for so often.")
    ] = None,
    budget_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens that the cache holds, evicted by --policy; unlimited if left out.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction policy, with --budget-tokens.")] = "lru",
    seed: options.Seed = 0,
    json: Json = False,
    out: Out = None,
) -> None:
    """Print prefix and total overlap, repeats across turns, and the prefill that each chunk order would save."""
    from chunkweave.eval.chunk_order.overlap import overlap_of, repeated_across_turns
    from chunkweave.eval.chunk_order.replay import ReplayConfig, replay, saving_bound
    from chunkweave.eval.chunk_order.sources import read_requests

    output = Output(json, out)
    names = _known(options.names(orderings))
    with status(f"reading {trace}"):
        kind, arrivals = read_requests(trace, top_k=top_k, seed=seed)
    arrivals = arrivals[:requests]
    asked, left_out = _affordable(names, arrivals)
    documents = [[part.name for part in arrival.documents] for arrival in arrivals]
    with progress("comparing requests") as report:
        overlap = overlap_of(documents, report)
    turns = repeated_across_turns([(one.conversation, own) for one, own in zip(arrivals, documents, strict=True)])
    found = []
    for name in asked:
        with progress(f"replaying in {name} order") as report:
            cache = _cache(budget_tokens, policy)
            found.append(replay(arrivals, name, ReplayConfig(window, promote), cache=cache, progress=report))
    with progress("bound") as report:
        bound = saving_bound(arrivals, report)
    output.show(_overlap_table(trace.name, kind, arrivals, overlap, turns), "", _savings_table(found, bound, left_out))
    config = {"trace": trace.name, "kind": kind, "top_k": top_k, "requests": len(arrivals), "window": window}
    config |= {"promotion_threshold": promote, "budget_tokens": budget_tokens, "policy": policy}
    more = {"overlap": asdict(overlap), "repeated_across_turns": turns, "bound_tokens": bound, "left_out": left_out}
    output.finish(_analysis_result(seed, config, found, more))


def _known(names: Sequence[str]) -> list[str]:
    from chunkweave.eval.chunk_order.replay import ORACLE
    from chunkweave.ordering.registry import make_ordering

    if not names:
        raise UsageError("name at least one ordering")
    for name in names:
        if name != ORACLE:
            make_ordering(name)
    return list(dict.fromkeys(names))


def _affordable(names: Sequence[str], arrivals: Sequence["Arrival"]) -> tuple[list[str], list[str]]:
    """The orderings to replay, and those that would take too long for requests of so many chunks."""
    from chunkweave.eval.chunk_order.replay import MOST_ORACLE_CHUNKS, ORACLE

    most = max(len(arrival.documents) for arrival in arrivals)
    left_out = [name for name in names if name == ORACLE and most > MOST_ORACLE_CHUNKS]
    return [name for name in names if name not in left_out], left_out


def _cache(budget_tokens: int | None, policy: str) -> "PathCache":
    from chunkweave.eval.chunk_order.caches import LimitedCache, UnlimitedCache

    return UnlimitedCache() if budget_tokens is None else LimitedCache(budget_tokens, policy)


def _overlap_table(
    name: str, kind: str, arrivals: Sequence["Arrival"], overlap: "Overlap", turns: float | None
) -> Table:
    from chunkweave.eval.chunk_order.sources import MOONCAKE

    chunks = [len(arrival.documents) for arrival in arrivals]
    warning = (
        "Blocks of this trace are named for all before them: their order is not free.\n" if kind == MOONCAKE else ""
    )
    table = Table(
        title=f"{name} ({kind}): {len(arrivals)} requests of {sum(chunks) / len(chunks):.1f} chunks on average",
        title_justify="left",
        caption=f"{warning}prefix, total: with the one earlier request that fits best (CRAFT §3.1)",
        caption_justify="left",
    )
    for head in ("prefix overlap", "total overlap", "chunks seen before", "repeated across turns"):
        table.add_column(head, justify="right")
    shares = (overlap.prefix, overlap.total, overlap.seen)
    table.add_row(*(f"{share:.1%}" for share in shares), "no turns" if turns is None else f"{turns:.1%}")
    return table


def _savings_table(found: Sequence["Savings"], bound: int, left_out: Sequence[str]) -> Table:
    caption = f"{', '.join(left_out)}: too many chunks for every permutation; see --top-k" if left_out else ""
    table = Table(title="KV computation of documents", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("order")
    for head in ("tokens saved", "of all", "chunks found", "requests found whole"):
        table.add_column(head, justify="right")
    for one in found:
        table.add_row(
            one.ordering,
            f"{one.saved_tokens:,}",
            f"{one.saved_share:.1%}",
            f"{one.hit_chunks / one.chunks:.1%}" if one.chunks else "-",
            f"{one.full_hits / one.requests:.1%}",
        )
    total = found[0].document_tokens
    table.add_row(_BOUND, f"{bound:,}", f"{bound / total:.1%}" if total else "-", "", "")
    return table


def _analysis_result(seed: int, config: dict[str, Any], found: Sequence["Savings"], more: dict[str, Any]) -> dict[str, Any]:
    from chunkweave.eval.results import BenchmarkResult

    rows = [one.as_dict() for one in found]
    return BenchmarkResult("chunk-order", options.command_line(), seed, config, rows, more).as_dict()
