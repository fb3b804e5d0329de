"""What long work says of itself in a log."""

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
