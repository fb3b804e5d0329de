"""What long work says of itself in a log."""

import re
import time

import pytest
from rich.console import Console

from chunkweave.cli import console


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(console, "_FIRST_S", 0.01)
    monkeypatch.setattr(console, "_LINE_S", 0.01)


def test_a_log_says_how_far_it_is_and_about_how_long_it_takes(soon, capsys):
    with console.progress("copying segments") as report:
        report(1000, 3000)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    told = re.compile(r"copying segments: 1,000 of 3,000, 0:00:0\d so far, about 0:00:\d\d left")
    assert all(map(told.fullmatch, lines)), lines


def test_the_time_that_is_left_follows_from_what_is_done(monkeypatch):
    monkeypatch.setattr(console.time, "monotonic", lambda: 100.0)
    lines = console.ProgressLines("copying segments")
    lines.report(3, 80)
    assert lines.line(130.0) == "copying segments: 3 of 80, 0:00:30 so far, about 0:12:50 left"


@pytest.mark.parametrize("shown_work", [console.progress, console.status])
def test_a_long_first_step_is_not_silent(soon, capsys, shown_work):
    with shown_work("measuring"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"measuring: 0:00:0\d so far", line) for line in lines), lines


@pytest.mark.parametrize("shown_work", [console.progress, console.status])
def test_what_is_done_soon_leaves_no_line(capsys, shown_work):
    with shown_work("measuring"):
        pass
    assert not capsys.readouterr().err


def test_names_between_colons_are_no_emoji(capsys):
    console.stderr().print("not a method: a:x:b")
    assert "a:x:b" in capsys.readouterr().err


ROWS = [
    {"method": "query:whole:late:stored", "what": "reads what the question looks at", "speed": "1.52x"},
    {"method": "cacheblend", "what": "recomputes some tokens", "speed": "1.10x"},
]


def shown(width: int) -> list[str]:
    table = console.table_of(ROWS, ("method", "method"), ("what it does", "what"), ("speed-up", "speed"), left=2)
    screen = Console(width=width, highlight=False)
    with screen.capture() as captured:
        screen.print(table)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [120, 80, 60, 50, 44])
def test_tables_wrap_between_words(width):
    lines = shown(width)
    assert max(map(len, lines)) <= width
    words = {word for row in ROWS for cell in row.values() for word in cell.split()}
    assert words <= {word for line in lines for word in line.replace("│", " ").split()}


def test_rows_are_blocks_where_their_words_do_not_fit_side_by_side():
    assert sum("query:whole:late:stored" in line for line in shown(60)) == 1
    assert [line for line in shown(44) if "speed-up" in line] == [
        line for line in shown(44) if "1.52x" in line or "1.10x" in line
    ]


def test_what_is_counted_once_is_singular():
    assert [console.counted(count, "segment") for count in (0, 1, 2)] == ["0 segments", "1 segment", "2 segments"]
