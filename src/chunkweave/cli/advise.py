"""`chunkweave advise`: where to keep segments, by a cost model and a table of devices with prices."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.console import Output
from chunkweave.cli.option_blocks import with_blocks
from chunkweave.cli.tables import seconds
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.errors import UsageError
from chunkweave.planning.cost_model import CostModel
from chunkweave.planning.loading_controller import StorageDevice, choose_device, ratio_that_hides
from chunkweave.units import parse_bytes


@with_blocks
def advise(
    cost_model: Annotated[Path, typer.Argument(help="File that `chunkweave profile` wrote.")],
    device: Annotated[
        list[str],
        typer.Option("--device", help="NAME,THROUGHPUT,PRICE: bytes a second (1.5GB) and price per GiB and hour."),
    ],
    *,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request's reused chunks.")] = 3072,
    recompute_ratio: options.RecomputeRatio = DEFAULT_RECOMPUTE_RATIO,
    output: Output,
) -> None:
    """The cheapest device whose loading hides behind recomputation, else the fastest (CacheBlend §5.1)."""
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
    table = Table(title=f"{tokens} reused tokens, recompute ratio {recompute_ratio:g}", title_justify="left")
    for name in ("device", "price per GiB-hour", "loading", "recomputing", "hidden", "ratio that hides it", "chosen"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            str(row["device"]),
            f"{row['price_per_gib_hour']:g}",
            seconds(row["load_s"]),
            seconds(row["recompute_s"]),
            "yes" if row["hidden"] else "no",
            f"{row['ratio_that_hides']:.2f}",
            "<--" if row["chosen"] else "",
        )
    return table


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
