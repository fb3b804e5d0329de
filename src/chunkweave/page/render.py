"""Templates and static files of the page."""

from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from chunkweave.metrics import parameter_text

STATIC = {"htmx.min.js": "text/javascript", "page.js": "text/javascript", "page.css": "text/css"}
"""The static files, with their types."""


def render(template: str, **values: Any) -> str:
    """A template of this package, filled. Every value is escaped."""
    return _environment().get_template(template).render(**values)


@cache
def asset(name: str) -> str:
    """A static file.

    Raises:
        KeyError: there is none of that name.
    """
    if name not in STATIC:
        raise KeyError(name)
    return files("chunkweave.page").joinpath("static", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("chunkweave.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        seconds=_seconds, percent=_percent, count=_count, size=_size, clock=_clock, parameter=parameter_text
    )
    return made


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%H:%M:%S")
