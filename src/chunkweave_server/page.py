"""The page at `/`: what the server does now, one request at a time, a box to compare methods, corpora and the cache.

The page itself needs no key, it has no data. Its pieces do, are asked for under `/v1/page`, and are HTML. What it has
the server do, it asks for by the API, as every client.
"""

from collections.abc import Mapping
from statistics import median
from typing import Annotated

from fastapi import APIRouter, Depends, Header
from fastapi.responses import HTMLResponse, Response

import chunkweave
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.page import AnswerView, Bar, FullEstimate, asset, render, share_of_kinds
from chunkweave.page.render import STATIC
from chunkweave.page.views import share_of_tiers
from chunkweave.planning.method import RATIO_BUDGET, parameter_of
from chunkweave.plugins import METHODS
from chunkweave_server.errors import HttpError
from chunkweave_server.gate import NEEDS_KEY, OfTenant
from chunkweave_server.service import AnyService, Parts, ReadyParts
from chunkweave_server.threads import in_thread

WITHOUT_KEY = tuple(("GET", path) for path in ("/", *(f"/page/{name}" for name in STATIC)))
"""What needs no key."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_COLUMNS = 60
_LISTED = 30
_USUAL = ("cacheblend", "query", "full")
_EXACT = ("prefix", "full")
"""Asked last: what they leave behind is the prompt's exact prefix, and would be all that the others find."""


async def _from_the_page(hx_request: Annotated[str | None, Header()] = None) -> None:
    """Refuse what another site's form could have sent: it cannot set this header."""
    if hx_request is None:
        raise HttpError(403, "this is for the page at /: use the API", code="not_the_page")


shell = APIRouter(include_in_schema=False)
pieces = APIRouter(prefix="/v1/page", include_in_schema=False, dependencies=[*NEEDS_KEY, Depends(_from_the_page)])


@shell.get("/")
async def page(service: AnyService) -> HTMLResponse:
    """The page, empty."""
    methods = [*(name for name in METHODS.names if name not in _EXACT), *_EXACT]
    names = {"model": service.backend.name, "version": chunkweave.__version__}
    with_ratio = [name for name in METHODS.names if _takes_ratio(name)]
    asking = {"methods": methods, "usual": _USUAL, "with_ratio": with_ratio}
    text = render("page.html", **names, **asking, keys=bool(len(service.keys)))
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-store"}
    return HTMLResponse(text, headers=headers)


def _takes_ratio(method: str) -> bool:
    try:
        return parameter_of(method) == RATIO_BUDGET.parameter
    except UsageError:  # a method of a package that cannot be made: asking with it says why
        return False


@shell.get("/page/{name}")
async def static(name: str) -> Response:
    """A script or style of the page."""
    if name not in STATIC:
        raise HttpError(404, f"no file {name!r}")
    return Response(asset(name), media_type=STATIC[name], headers={"x-content-type-options": "nosniff"})


@pieces.get("/live")
async def live(parts: ReadyParts, tenant: OfTenant, since: str = "") -> Response:
    """What goes on now, and the last requests; 204 if all is as it was at `since`."""
    recent, (running, waiting) = parts.observer.recent, parts.answering.under_way(tenant)
    seen = list(recent.seen_by(tenant))
    version = f"{seen[0].key if seen else ''}-{running}-{waiting}"
    if version == since:
        return Response(status_code=204)
    reports = [one.report for one in seen if one.report is not None]
    estimate = FullEstimate.of(reports)
    newest = reports[:_COLUMNS]
    full = [seconds for report in newest if (seconds := estimate.ttft_s(report)) is not None]
    shown = render(
        "live.html",
        version=version,
        running=running,
        waiting=waiting,
        ttft_s=median(report.ttft_s for report in newest) if newest else None,
        full_s=median(full) if full else None,
        tiers=share_of_tiers(newest),
        kinds=share_of_kinds(newest),
        answered=newest,
        most=_COLUMNS,
        columns=[_column(report) for report in reversed(newest)],
        stored=await in_thread(lambda: _stored(parts)) if tenant.admin else {},
        tenants=tenant.admin and not tenant.anonymous,
        requests=[(one, one.report and estimate.ttft_s(one.report)) for one in seen[:_LISTED]],
    )
    return HTMLResponse(shown)


def _column(report: ReuseReport) -> list[Bar]:
    at, bars = 0.0, []
    for kind, tokens in report.tokens_by_source.items():
        share = tokens / report.prompt_tokens
        bars.append(Bar(at, share, kind, f"{report.method}: {tokens} tokens {kind}"))
        at += share
    return [bar for bar in bars if bar.width]


def _stored(parts: Parts) -> Mapping[str, tuple[float, float]]:
    """Bytes and segments by tier."""
    found = {one.name: one.values for one in parts.backend.samples()}
    segments = found.get("store_segments", {})
    return {tier: (nbytes, segments.get(tier, 0)) for tier, nbytes in found.get("store_bytes", {}).items()}


@pieces.get("/requests/{key}")
async def one_request(key: str, parts: ReadyParts, tenant: OfTenant, compared: bool = False) -> HTMLResponse:
    """One request: its prompt as a strip of parts, and where its time went; `compared` with others, without a title."""
    recent = parts.observer.recent
    found = recent.find(tenant, key)
    if found is None or found.report is None:
        raise HttpError(404, "this request is not kept any more")
    estimate = FullEstimate.of([one.report for one in recent.seen_by(tenant) if one.report is not None])
    view, full_s = AnswerView(found.report, named=found.tenant == tenant.name), estimate.ttft_s(found.report)
    return HTMLResponse(render("request.html", one=found, view=view, full_s=full_s, compared=compared))


@pieces.get("/corpora")
async def corpora(parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """The corpora, and what can be done with their KV."""
    shown = [one.as_dict() for one in parts.corpora.all(tenant)]
    commands = ("warm", "pin", "unpin", "clear") if parts.backend.cache.pins else ("warm", "clear")
    return HTMLResponse(render("corpora.html", corpora=shown, commands=commands, admin=tenant.admin))


@pieces.get("/corpora/options")
async def options(parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """The corpora as options of a list."""
    return HTMLResponse(render("options.html", corpora=parts.corpora.all(tenant)))
