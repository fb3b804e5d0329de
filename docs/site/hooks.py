"""What MkDocs is told beside mkdocs.yml: the README is the first page, links between folders hold on the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
PAGES["CHANGELOG.md"] = "changelog.md"
"""Pages that lie beside the folder of the documentation, and what they are called on the site."""

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_relinked(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page to what is not on the site are its path; to a page that lies elsewhere they are to that."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return _relinked(markdown, (ROOT / "docs" / page.file.src_uri).parent)


def _relinked(text: str, folder: Path) -> str:
    """A page's text with its links as they are on the site, where all pages are in one folder but tables of results."""
    up = "../" * len(folder.relative_to(ROOT / "docs").parts) if folder.is_relative_to(ROOT / "docs") else ""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        there = (folder / path).resolve().relative_to(ROOT)
        if there.as_posix() in PAGES:
            return f"[{words}]({up}{PAGES[there.as_posix()]}{hash_}{anchor})"
        if there.parts[0] == "docs":
            return f"[{words}]({up}{there.relative_to('docs').as_posix()}{hash_}{anchor})"
        return f"{words} (`{there.as_posix()}`)"

    pieces, at = [], 0
    for fence in _FENCE.finditer(text):
        pieces += [_LINK.sub(link, text[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*pieces, _LINK.sub(link, text[at:])])
