"""Write the table of all settings into docs/settings.md: python benchmarks/settings_page.py."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from docs_tables import rewrite_page

from chunkweave.settings import SERVERS, Place, Setting, settings_of
from chunkweave_server.settings import GROUPS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_WHERE = {
    frozenset({Place.COMMANDS}): "commands",
    SERVERS: "servers",
    frozenset({Place.ENGINE}): "`serve`",
    frozenset({Place.VLLM}): "`vllm-serve`",
    frozenset({Place.CONNECTOR}): "connector",
    frozenset({Place.REQUEST}): "request",
}
"""Names of places in the table; `SERVERS` come before each of them."""


def tables(_: Mapping[str, Any]) -> dict[str, str]:
    """The table for the page."""
    return {"settings": settings_table()}


def settings_table() -> str:
    """One table per group: each setting's name, default, sources and meaning."""
    parts = []
    for kind in GROUPS.values():
        rows = [f"### {(kind.__doc__ or '').partition('.')[0]}: `{kind.__name__}`", ""]
        rows += ["|setting|default|where||", "|---|---|---|---|"]
        rows += [_row(one) for one in settings_of(kind).values()]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _row(one: Setting) -> str:
    default = "" if one.default in ((), "") else f"`{one.text(one.default)}`"
    attribute = "" if one.attribute == one.name else f"<br>`{one.attribute}`"
    return f"|`{one.name}`{attribute}|{default}|{', '.join(_named(one.places))}|{one.meaning}|"


def _named(places: Collection[Place]) -> list[str]:
    left, names = set(places), []
    for group, name in _WHERE.items():
        if group <= left:
            left -= group
            names.append(name)
    return names


if __name__ == "__main__":
    rewrite_page(PAGE)
