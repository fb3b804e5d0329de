"""A report as it is shown on a screen."""

from dataclasses import replace

import pytest
from rich.console import Console

from chunkweave.cli.ask import explanation, variant_text
from chunkweave.metrics import ChunkReport, ReuseReport
from chunkweave.types import ChunkId, SegmentId

SEGMENT = SegmentId("ab" * 16)
REASONS = {"overlap": 0.5, "cci": 0.75, "cfo": 0.25, "coverage": 1.0, "generation": 0}
STORMS = ChunkReport(ChunkId("c1"), "storms", "reused", SEGMENT, "disk", 12, 3, reasons=REASONS)
SYSTEM = ChunkReport(ChunkId("c0"), "system", "prefix-exact", SEGMENT, "host", 10, 0)
BOATS = ChunkReport(ChunkId("c2"), "boats", "computed", None, None, 9, 0)
REPORT = ReuseReport(
    method="cachecraft",
    prompt_tokens=49,
    prefix_exact_tokens=10,
    reused_tokens=20,
    recomputed_tokens=10,
    computed_tokens=9,
    recompute_fraction=0.25,
    queue_s=0.0,
    weave_s=0.1,
    ttft_s=0.1,
    decode_s=0.0,
    new_tokens=3,
    chunks=(SYSTEM, STORMS, BOATS),
    why="calibrated",
    parameters={"alpha": 0.5},
    check_layers=(1, 4),
    stopped_at_layer=5,
)


def rendered(renderable) -> str:
    console = Console(width=150, record=True, file=None, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(renderable)
    return capture.get()


def test_the_whole_report_on_a_screen():
    shown = rendered(explanation(REPORT))
    for said in (
        "cachecraft (calibrated): 49 tokens: 10 prefix-exact, 20 reused, 10 recomputed, 9 computed\nalpha 0.5\n",
        "tokens chosen at layer 1, 4",
        "from layer 5 on only chunks that the question attends to",
        "0.250",
        "first token after",
    ):
        assert said in shown
    rows = [[word for word in line.split() if word not in ("│", "┃")] for line in shown.splitlines()]
    assert ["storms", "12", "reused", "disk", "abababab", "0.75", "0.50", "0.25", "3"] in rows
    assert ["boats", "9", "computed", "-", "-", "-", "-", "-", "-"] in rows
    exact = rendered(explanation(replace(REPORT, check_layers=(), stopped_at_layer=None, parameters={})))
    assert "layer" not in exact


@pytest.mark.parametrize(
    ("chunk", "words"),
    [(BOATS, "-"), (STORMS, "abababab"), (replace(STORMS, contexts=3), "abababab, a mean over 3 contexts")],
)
def test_variants_in_words(chunk, words):
    assert variant_text(chunk) == words


def test_source_names_are_no_markup():
    chunks = (replace(STORMS, source="[red]x[/red]"),)
    assert rendered(explanation(replace(REPORT, chunks=chunks))).count("[red]x[/red]") == 1
