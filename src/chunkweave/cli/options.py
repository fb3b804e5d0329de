"""Options that several commands share, as annotated types."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path | None, typer.Option("--model", help="Checkpoint folder in Hugging Face format.")]
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
Seed = Annotated[int, typer.Option(help="Random seed.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON to this file.")]
