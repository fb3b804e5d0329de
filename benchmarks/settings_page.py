"""Write the table of all settings into docs/settings.md: python benchmarks/settings_page.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_tables import rewrite_page

from chunkweave.settings import Place, Setting, settings_of
from chunkweave_server.settings import GROUPS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_COLUMNS = {
    Place.COMMANDS: "commands",
    Place.ENGINE: "`serve`",
    Place.VLLM: "`vllm-serve`",
    Place.CONNECTOR: "connector",
    Place.REQUEST: "request",
}


def tables(_: Mapping[str, Any]) -> dict[str, str]:
    """The table for the page."""
    return {"settings": settings_table()}


def settings_table() -> str:
    """One table a group: what each setting is called, its default, where it can be changed, what it means."""
    parts = []
    for kind in GROUPS.values():
        rows = [f"### {(kind.__doc__ or '').partition('.')[0]}: `{kind.__name__}`", ""]
        rows += ["| setting | default | where | |", "|---|---|---|---|"]
        rows += [_row(one) for one in settings_of(kind).values()]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _row(one: Setting) -> str:
    default = _shown(one, one.default)
    others = {place: _shown(one, value) for place, value in one.defaults.items() if value != one.default}
    default += "".join(f"; {_COLUMNS[place]}: {value}" for place, value in others.items())
    where = ", ".join(name for place, name in _COLUMNS.items() if place in one.places)
    attribute = "" if one.attribute == one.name else f"<br>`{one.attribute}`"
    return f"| `{one.name}`{attribute} | {default} | {where} | {one.meaning} |"


def _shown(one: Setting, value: object) -> str:
    return "" if value == () else f"`{one.text(value)}`"


if __name__ == "__main__":
    rewrite_page(PAGE)
