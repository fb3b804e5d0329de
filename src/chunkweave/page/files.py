"""The static files of the server's page."""

from functools import cache
from importlib.resources import files

STATIC = {
    "page.html": "text/html",
    "page.js": "text/javascript",
    "drawing.js": "text/javascript",
    "page.css": "text/css",
}
"""The static files, with their media types."""


@cache
def asset(name: str) -> str:
    """A static file.

    Raises:
        KeyError: there is no file of that name.
    """
    if name not in STATIC:
        raise KeyError(name)
    return files("chunkweave.page").joinpath("static", name).read_text(encoding="utf-8")
