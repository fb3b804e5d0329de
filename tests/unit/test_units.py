"""Sizes and durations as people write them."""

import doctest

import pytest

from chunkweave import settings
from chunkweave.errors import UsageError
from chunkweave.settings import parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("3 MB", 3_000_000), (" 7b ", 7), ("0", 0)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XB", "1e9", "2GiB and more"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="2GiB, 500MB"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("90m", 5400), ("1.5 h", 5400), ("7d", 604_800), ("0s", 0)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "2 weeks", "1e3", "7D"])
def test_what_is_no_duration(text):
    with pytest.raises(UsageError, match="30s, 90m"):
        parse_duration(text)


def test_the_worked_examples():
    result = doctest.testmod(settings)
    assert result.attempted
    assert not result.failed
