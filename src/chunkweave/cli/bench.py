"""`chunkweave bench`: benchmarks."""

import typer

from chunkweave.cli.bench_loading import loading
from chunkweave.cli.bench_quality import quality
from chunkweave.cli.bench_ttft import ttft

app = typer.Typer(no_args_is_help=True, help="Measure reuse methods against each other.")
app.command()(quality)
app.command()(loading)
app.command()(ttft)
