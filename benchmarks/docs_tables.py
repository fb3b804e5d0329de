"""Writes tables into a documentation page, between markers that name them."""

import re
from pathlib import Path

from chunkweave.errors import DocumentError


def put_into_page(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->` in `page`.

    Raises:
        DocumentError: the page cannot be read, or has no such markers.
    """
    try:
        before = page.read_text(encoding="utf-8")
    except OSError as error:
        raise DocumentError(f"cannot read {page}: {error.strerror or error}") from error
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    lines = text.strip("\n")  # a command that stands first keeps its indentation
    after, found = pattern.subn(lambda match: f"{match[1]}\n{lines}\n\n{match[2]}", before)
    if not found:
        raise DocumentError(f"{page} has no place for {name!r}: put <!-- {name} --> and <!-- /{name} --> into it")
    page.write_text(after, encoding="utf-8")


def markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text and the others numbers."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
