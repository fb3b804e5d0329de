"""Writes a study's tables into its documentation page. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs_tables import put_into_page
from query_study_report import Cheapest, StudyReport, StudyRow


def update_page(page: Path, study: str, result: dict[str, Any]) -> None:
    """Put the tables of one study between its markers in `page`.

    Raises:
        DocumentError: the page has no place for them.
    """
    put_into_page(page, f"query-{study}", "\n\n".join(sections(result)))


def sections(result: dict[str, Any]) -> Iterator[str]:
    """The command, then every table under its title."""
    rows = tuple(StudyRow(**row) for row in result["rows"])
    report = StudyReport(rows, tuple(Cheapest(**one) for one in result["cheapest"]))
    yield f"    {result['command']}"
    for title, table in report.tables():
        yield f"**{title}**"
        yield table
