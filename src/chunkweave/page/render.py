"""The static files of the server's page, and the templates of HTML files."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from chunkweave.metrics import parameter_text

STATIC = {
    "page.html": "text/html",
    "page.js": "text/javascript",
    "drawing.js": "text/javascript",
    "page.css": "text/css",
}
"""The static files, with their media types."""


def render(template: str, **values: Any) -> str:
    """Fill a template of this package. Every value is escaped."""
    return _environment().get_template(template).render(**values)


@cache
def asset(name: str) -> str:
    """A static file.

    Raises:
        KeyError: there is no file of that name.
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
    made.filters.update(seconds=_seconds, count=_count, parameter=parameter_text)
    return made


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
