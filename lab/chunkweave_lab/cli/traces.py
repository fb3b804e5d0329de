"""`chunkweave simulate` and `analyze`: request traces through policies, queues and chunk orders."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.calibration.results import BenchmarkResult
from chunkweave.cli import options
from chunkweave.cli.console import Output, Report, progress, seconds, size, status, table_of
from chunkweave.cli.options import with_blocks
from chunkweave.errors import UsageError
from chunkweave.plugins import ORDERINGS, POLICIES
from chunkweave.settings import parse_bytes

if TYPE_CHECKING:
    from chunkweave.planning.cost import CostModel
    from chunkweave_lab.chunk_order import Overlap, Savings
    from chunkweave_lab.simulator.simulation import Bounds, SimulationConfig, SimulationResult
    from chunkweave_lab.simulator.trace import Arrival, Trace


_DEFAULT_SHAPE = "mistral-7b"
_DRAWN, _CACHE, _CLOCK = "How requests are drawn", "The cache", "How long things take"


@with_blocks
def simulate(
    trace: Annotated[
        str,
        typer.Option(
            help="A trace (JSONL, in Mooncake's format or ours), a data set (JSON) whose questions recur, "
            "or a generated workload: mmlu-like, zipf."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            help=f"Eviction policies, separated by commas. There are: {POLICIES.listed}.",
            rich_help_panel=_CACHE,
        ),
    ] = "pgdsf,gdsf,lru,lfu",
    budget: Annotated[
        str, typer.Option(help="Memory for segments; several sizes separated by commas.", rich_help_panel=_CACHE)
    ] = "2GiB",
    device_budget: Annotated[
        str | None,
        typer.Option(
            help="Size of a faster tier above; segments that it evicts go to --budget.", rich_help_panel=_CACHE
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="The model whose KV sizes and speed are assumed.", rich_help_panel=_CLOCK)
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            help="A file of measured costs (setting `cost_model`), in place of --teraflops.", rich_help_panel=_CLOCK
        ),
    ] = None,
    teraflops: Annotated[float, typer.Option(help="Speed of prefill in 10^12 FLOP/s.", rich_help_panel=_CLOCK)] = 50.0,
    host_bandwidth: Annotated[
        str, typer.Option(help="Bytes per second from --budget to --device-budget.", rich_help_panel=_CLOCK)
    ] = "20GB",
    window: Annotated[
        int,
        typer.Option(
            min=0, help="How often a request may be overtaken; 0 serves in order of arrival.", rich_help_panel=_CACHE
        ),
    ] = 32,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests; default: 10000 drawn ones, or a whole trace.", rich_help_panel=_DRAWN),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, Poisson; default: a trace's own times.", rich_help_panel=_DRAWN),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Documents per drawn request.", rich_help_panel=_DRAWN)
    ] = None,
    zipf: Annotated[float | None, typer.Option(help="Zipf exponent of the popularity.", rich_help_panel=_DRAWN)] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Number of documents of a generated workload.", rich_help_panel=_DRAWN)
    ] = 10_000,
    drift: Annotated[
        float,
        typer.Option(
            help="Share of a generated workload's documents whose popularity changes every 1000 requests.",
            rich_help_panel=_DRAWN,
        ),
    ] = 0.0,
    replicas: Annotated[
        int, typer.Option(min=0, help="Hot upper nodes kept on both tiers.", rich_help_panel=_CACHE)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed.", rich_help_panel=_DRAWN)] = 0,
    *,
    output: Output,
) -> None:
    """Replay requests and print hit rates, time to first token, and the bound that no policy can exceed."""
    from chunkweave_lab.simulator.simulation import bounds_of
    from chunkweave_lab.simulator.simulation import simulate as replay
    from chunkweave_lab.simulator.trace import build_trace
    from chunkweave_lab.simulator.workloads import SourceConfig, open_source

    cost, model = _cost(shape, cost_model, teraflops, parse_bytes(host_bandwidth))
    runs = _runs(policy, budget, device_budget, window, replicas)
    source = SourceConfig(requests, rate, top_k, zipf, documents, drift, seed)
    with status(f"reading {trace}"):
        replayed = build_trace(Path(trace).name, open_source(trace, source), cost.kv_bytes_per_token)
    results: list[SimulationResult] = []
    bounds: list[Bounds] = []
    with progress("replaying") as report:
        for number, config in enumerate(runs):
            results.append(replay(replayed, config, cost, _part_of(report, number, len(runs))))
            bounds.append(bounds_of(replayed, sum(tier.budget_bytes for tier in config.tiers)))
    output.show(_simulation_table(replayed, model, results, bounds))
    rows = [{**result.as_dict(), "bound": asdict(bound)} for result, bound in zip(results, bounds, strict=True)]
    more = {
        "requests": len(replayed.requests),
        "working_set_bytes": replayed.working_set_bytes,
        "equal_sizes": replayed.equal_sizes,
        "cost_model": {"kv_bytes_per_token": cost.kv_bytes_per_token, "tier_bytes_per_s": cost.tier_bytes_per_s},
    }
    summary = {"trace": replayed.name, "model": model, **asdict(source)}
    output.finish(BenchmarkResult("simulation", options.command_line(), seed, summary, rows, more).as_dict())


def _part_of(report: Report, number: int, count: int) -> Report:
    """A progress callback for run `number` of `count` equal ones."""
    return lambda done, total: report(number * total + done, count * total)


def _cost(shape: str | None, file: Path | None, teraflops: float, host_bytes_per_s: int) -> tuple["CostModel", str]:
    """The cost model and its name."""
    from chunkweave.planning.cost import CostModel, known_shape
    from chunkweave_lab.simulator.analytic_cost import analytic_cost

    if file is not None:
        if shape is not None:
            raise UsageError("give either --shape or --cost-model: a cost model has its own bytes per token")
        cost = CostModel.read(file)
        return cost, str(file)
    if not teraflops > 0 or not host_bytes_per_s:
        raise UsageError("--teraflops and --host-bandwidth must be positive")
    name = shape or _DEFAULT_SHAPE
    geometry = known_shape(name).geometry
    tiers = {"host": float(host_bytes_per_s)}
    return analytic_cost(geometry, flops_per_s=teraflops * 1e12, tier_bytes_per_s=tiers), name


def _runs(
    policies: str, budgets: str, device_budget: str | None, window: int, replicas: int
) -> list["SimulationConfig"]:
    from chunkweave.store.eviction import make_policy
    from chunkweave_lab.simulator.simulation import SimulationConfig, Tier

    names = [name.strip() for name in policies.split(",")]
    for name in names:
        make_policy(name)
    if replicas and device_budget is None:
        raise UsageError("--replicas copies from --device-budget to --budget: give both")
    above = () if device_budget is None else (Tier("device", parse_bytes(device_budget)),)
    return [
        SimulationConfig(name, (*above, Tier("host", parse_bytes(size))), window, replicas=replicas)
        for size in budgets.split(",")
        for name in names
    ]


def _simulation_table(
    trace: "Trace", model: str, results: Sequence["SimulationResult"], bounds: Sequence["Bounds"]
) -> Table:
    kind = "Belady's MIN" if trace.equal_sizes else "a relaxation (sizes differ)"
    asked = f"working set {size(trace.working_set_bytes)}"
    return table_of(
        list(zip(results, bounds, strict=True)),
        ("memory", lambda run: " + ".join(size(tier.budget_bytes) for tier in run[0].config.tiers)),
        ("policy", lambda run: run[0].config.policy),
        ("hit rate", lambda run: f"{run[0].hit_rate:.1%}"),
        ("bound", lambda run: f"{run[1].hit_rate:.1%}"),
        ("token hits", lambda run: f"{run[0].token_hit_rate:.1%}"),
        ("bound", lambda run: f"{run[1].token_hit_rate:.1%}"),
        ("TTFT mean", lambda run: seconds(run[0].ttft_mean_s)),
        ("p50", lambda run: seconds(run[0].ttft_percentile_s(50))),
        ("p90", lambda run: seconds(run[0].ttft_percentile_s(90))),
        ("p99", lambda run: seconds(run[0].ttft_percentile_s(99))),
        ("passed over", lambda run: str(run[0].most_passed_over)),
        title=f"{trace.name}: {len(trace.requests)} requests, {model}, {asked}",
        caption=f"Bounds: {kind} for documents, Belady's MIN over tokens for tokens; they ignore the tree."
        "\nOne prefill at a time; decoding is not simulated; the cold start is included.",
        left=2,
        section=lambda run: run[0].config.tiers,
    )


@with_blocks
def analyze(
    trace: Annotated[
        Path,
        typer.Option(help="A request trace (JSONL, ours or Mooncake's), or a data set (MuSiQue or SQuAD JSON, JSONL)."),
    ],
    orderings: Annotated[
        str,
        typer.Option(help=f"Chunk orders, separated by commas. There are: {ORDERINGS.listed}."),
    ] = "original,frequency",
    top_k: Annotated[int | None, typer.Option(min=1, help="Maximum chunks of each request.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Number of requests over which chunks are counted.")] = 1000,
    promote: Annotated[
        int | None, typer.Option(min=1, help="Requests of each chunk before a prefix is stored.")
    ] = None,
    seed: options.Seed = 0,
    *,
    output: Output,
) -> None:
    """Print prefix and total overlap, repeats across turns, and the prefill that each chunk order would save."""
    from chunkweave_lab.chunk_order import (
        ReplayConfig,
        overlap_of,
        read_requests,
        repeated_across_turns,
        replay,
        saving_bound,
    )

    names = _known(options.names(orderings))
    with status(f"reading {trace}"):
        kind, arrivals = read_requests(trace, top_k=top_k, seed=seed)
    arrivals = arrivals[:requests]
    documents = [[part.name for part in arrival.documents] for arrival in arrivals]
    with progress("comparing requests") as report:
        overlap = overlap_of(documents, report)
    turns = repeated_across_turns([(one.conversation, own) for one, own in zip(arrivals, documents, strict=True)])
    found = []
    for name in names:
        with progress(f"replaying in {name} order") as report:
            found.append(replay(arrivals, name, ReplayConfig(window, promote), report))
    with progress("bound") as report:
        bound = saving_bound(arrivals, report)
    output.show(_overlap_table(trace.name, kind, arrivals, overlap, turns), "", _savings_table(found, bound))
    config: dict[str, Any] = {"trace": trace.name, "kind": kind, "top_k": top_k, "requests": len(arrivals)}
    config |= {"window": window, "promotion_threshold": promote}
    more = {"overlap": asdict(overlap), "repeated_across_turns": turns, "bound_tokens": bound}
    rows = [one.as_dict() for one in found]
    output.finish(BenchmarkResult("chunk-order", options.command_line(), seed, config, rows, more).as_dict())


def _known(names: Sequence[str]) -> list[str]:
    from chunkweave.ordering.ordering import make_ordering

    if not names:
        raise UsageError("name at least one ordering")
    for name in names:
        make_ordering(name)
    return list(dict.fromkeys(names))


def _overlap_table(
    name: str, kind: str, arrivals: Sequence["Arrival"], overlap: "Overlap", turns: float | None
) -> Table:
    from chunkweave_lab.chunk_order import MOONCAKE

    chunks = [len(arrival.documents) for arrival in arrivals]
    warning = (
        "Block names of this trace depend on all earlier blocks: their order is not free.\n" if kind == MOONCAKE else ""
    )
    table = Table(
        title=f"{name} ({kind}): {len(arrivals)} requests of {sum(chunks) / len(chunks):.1f} chunks on average",
        title_justify="left",
        caption=f"{warning}prefix, total: with the best matching earlier request (CRAFT §3.1)",
        caption_justify="left",
    )
    for head in ("prefix overlap", "total overlap", "chunks seen before", "repeated across turns"):
        table.add_column(head, justify="right")
    shares = (overlap.prefix, overlap.total, overlap.seen)
    table.add_row(*(f"{share:.1%}" for share in shares), "no turns" if turns is None else f"{turns:.1%}")
    return table


def _savings_table(found: Sequence["Savings"], bound: int) -> Table:
    table = table_of(
        found,
        ("order", lambda one: one.ordering),
        ("tokens saved", lambda one: f"{one.saved_tokens:,}"),
        ("of all", lambda one: f"{one.saved_share:.1%}"),
        ("chunks found", lambda one: f"{one.hit_chunks / one.chunks:.1%}" if one.chunks else "-"),
        ("requests found whole", lambda one: f"{one.full_hits / one.requests:.1%}"),
        title="KV computation of documents",
    )
    total = found[0].document_tokens
    table.add_row("bound", f"{bound:,}", f"{bound / total:.1%}" if total else "-", "", "")
    return table
