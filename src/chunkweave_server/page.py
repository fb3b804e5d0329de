"""The page at `/`: static files without data, so they need no key. Its script is a client of the API."""

from fastapi import APIRouter
from fastapi.responses import Response

from chunkweave.page import STATIC, asset
from chunkweave_server.errors import HttpError

_INDEX = "page.html"

WITHOUT_KEY = tuple(("GET", path) for path in ("/", *(f"/page/{name}" for name in STATIC if name != _INDEX)))
"""Methods and paths that need no key."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-store"}

shell = APIRouter(include_in_schema=False)


@shell.get("/")
async def page() -> Response:
    """The page without data."""
    return Response(asset(_INDEX), media_type=STATIC[_INDEX], headers=_HEADERS)


@shell.get("/page/{name}")
async def static(name: str) -> Response:
    """A script or style of the page."""
    if name not in STATIC or name == _INDEX:
        raise HttpError(404, f"no file {name!r}")
    return Response(asset(name), media_type=STATIC[name], headers=_HEADERS)
