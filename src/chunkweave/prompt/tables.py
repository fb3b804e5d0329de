"""Where the tables of a text are, so that each of their chunks can begin with the header row."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table in a text: where its header row, its rows, and the text behind it begin, in characters."""

    start: int
    rows: int
    stop: int


def header_at(text: str, tables: Sequence[Table], position: int) -> str:
    """The header row to repeat before a chunk that begins at `position`; "" if that is not among a table's rows.

    `tables` are in the order of the text.
    """
    number = bisect_left(tables, position, key=lambda table: table.start) - 1
    if number < 0 or position >= tables[number].stop:
        return ""
    return text[tables[number].start : tables[number].rows]
