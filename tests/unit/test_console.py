"""What long work says of itself in a log."""

import time

from chunkweave.cli import console


def test_a_log_gets_a_line_each_half_minute(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.progress("copying segments") as report:
        for done in range(1, 9):
            now += 10.0
            report(done, 80)
    assert capsys.readouterr().err.splitlines() == [
        "copying segments: 3 of 80, 0:00:30 gone, 0:12:50 left",
        "copying segments: 6 of 80, 0:01:00 gone, 0:12:20 left",
    ]


def test_what_is_done_soon_leaves_no_line(capsys):
    with console.progress("copying segments") as report:
        report(1, 1)
    assert not capsys.readouterr().err


def test_a_log_gets_a_line_each_half_minute_of_what_has_no_known_length(monkeypatch, capsys):
    monkeypatch.setattr(console, "_LINE_S", 0.05)
    with console.status("loading a model"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"loading a model: 0:00:00 gone"}


def test_a_quick_one_leaves_no_line(capsys):
    with console.status("loading a model"):
        pass
    assert not capsys.readouterr().err


def test_names_between_colons_are_no_emoji(capsys):
    console.stderr().print("not a method: a:x:b")
    assert "a:x:b" in capsys.readouterr().err
