"""Starts of pages and headings in the text of a document, and the page and heading of a chunk."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from chunkweave.prompt.tables import Table

MOST_SECTIONS = 20_000
"""Maximum sections of a document; chunks after the last section count to it."""

_MOST_HEADING_CHARACTERS = 160
MOST_HEADER_CHARACTERS = 1 << 12
"""Maximum characters of a table's header row that chunks repeat."""

_FENCE = re.compile(r" {0,3}(```|~~~)")
_MARKDOWN_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk is in its document: its first and last page, from 1, and the heading that it is under, if known."""

    page: int | None = None
    last_page: int | None = None
    heading: str = ""

    def __str__(self) -> str:
        pages = "" if self.page is None else f"page {self.page}"
        if self.last_page != self.page:
            pages = f"pages {self.page} to {self.last_page}"
        return ", ".join(filter(None, (pages, self.heading)))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"page": self.page, "last_page": self.last_page, "heading": self.heading}


NO_PLACE = Place()


@dataclass(frozen=True, slots=True)
class Section:
    """A page, or the text under a heading: where it begins, in characters of the text. Pages count from 1."""

    start: int
    page: int | None = None
    heading: str = ""


def place_of(sections: Sequence[Section], start: int, stop: int) -> Place:
    """The place of the characters `start <= position < stop`. Text before the first heading counts to that heading."""
    first = max(0, bisect_right(sections, start, key=lambda section: section.start) - 1)
    last = bisect_right(sections, stop - 1, key=lambda section: section.start) - 1
    if last < 0:
        return NO_PLACE
    return Place(sections[first].page, sections[last].page, sections[first].heading)


def markdown_sections(text: str) -> tuple[Section, ...]:
    """One section per heading (`# ...`), except in blocks of code."""
    return _sections(_markdown_headings(text))


def markdown_tables(text: str) -> tuple[Table, ...]:
    """The tables whose header row is followed by a row of dashes."""
    tables = (table for table in _markdown_tables(text) if table.rows - table.start <= MOST_HEADER_CHARACTERS)
    return tuple(islice(tables, MOST_SECTIONS))


def page_sections(pages: Sequence[str]) -> tuple[str, tuple[Section, ...]]:
    """The text of all pages, and a section for each page that has text."""
    texts = []
    sections = []
    start = 0
    for number, page in enumerate(pages, start=1):
        if text := page.strip():
            sections.append(Section(start, number))
            texts.append(text)
            start += len(text) + len(_BETWEEN_PAGES)
    return _BETWEEN_PAGES.join(texts), tuple(sections[:MOST_SECTIONS])


_BETWEEN_PAGES = "\n\n"


def _sections(headings: Iterable[tuple[int, str]]) -> tuple[Section, ...]:
    return tuple(
        Section(start, heading=heading[:_MOST_HEADING_CHARACTERS]) for start, heading in islice(headings, MOST_SECTIONS)
    )


def _markdown_headings(text: str) -> Iterator[tuple[int, str]]:
    fence = ""
    for start, line in _lines(text):
        if mark := _FENCE.match(line):
            fence = "" if mark[1] == fence else fence or mark[1]
        elif not fence and line[:4].lstrip(" ").startswith("#") and (heading := _MARKDOWN_HEADING.match(line)):
            yield start, heading[1]


def _markdown_tables(text: str) -> Iterator[Table]:
    header = rows = -1
    previous_line = ""
    before_start = 0
    for start, line in _lines(text):
        if rows < 0 and "|" in previous_line and _is_rule(line):
            header = before_start
            rows = text.find("\n", start) + 1 or len(text)
        elif rows >= 0 and "|" not in line:
            yield Table(header, rows, start)
            rows = -1
        previous_line = line
        before_start = start
    if rows >= 0:
        yield Table(header, rows, len(text))


def _is_rule(line: str) -> bool:
    return "|" in line and "-" in line and not line.strip("|:- \t")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Each line with its start; a long line is cut, because it cannot be a heading."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, text[start : min(end, start + _MOST_LINE_CHARACTERS)].rstrip()
        start = end + 1


_MOST_LINE_CHARACTERS = 400
