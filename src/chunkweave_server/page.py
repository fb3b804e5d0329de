"""The page at `/`: what the server does now, one request at a time, a box to compare methods, corpora and the cache.

The page itself needs no key, it has no data. Its pieces do, are asked for under `/v1/page`, and are HTML.
"""

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Form, Header, Request
from fastapi.responses import HTMLResponse, Response

import chunkweave
from chunkweave.metrics import ReuseReport
from chunkweave.page import AnswerView, Bar, FullEstimate, asset, render, share_of_kinds
from chunkweave.page.render import STATIC
from chunkweave.page.views import KINDS, kind_tokens, share_of_tiers
from chunkweave.planning.method import parameter_of
from chunkweave.plugins import METHODS
from chunkweave_server.auth import Tenant
from chunkweave_server.bodies import validated
from chunkweave_server.errors import HttpError
from chunkweave_server.observability import RequestMeta
from chunkweave_server.requests import Body, ChatBody, ChunksBody, ClearBody
from chunkweave_server.routes import (
    NEEDS_KEY,
    AnyService,
    OfTenant,
    ReadyParts,
    clear,
    pin,
    unpin,
    warm,
    whole_answer,
)
from chunkweave_server.service import Parts
from chunkweave_server.threads import in_thread

WITHOUT_KEY = tuple(("GET", path) for path in ("/", *(f"/page/{name}" for name in STATIC)))
"""What needs no key."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
BodyT = TypeVar("BodyT", bound=Body)

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
    text = render("page.html", **names, keys=bool(len(service.keys)), methods=methods, usual=_USUAL)
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-store"}
    return HTMLResponse(text, headers=headers)


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
    for kind, tokens in zip(KINDS, kind_tokens(report), strict=True):
        share = tokens / report.prompt_tokens
        bars.append(Bar(at, share, kind, f"{report.method}: {tokens} tokens {kind}"))
        at += share
    return [bar for bar in bars if bar.width]


def _stored(parts: Parts) -> Mapping[str, tuple[float, float]]:
    """Bytes and segments by tier."""
    found: dict[str, Mapping[str, float]] = {}
    for source in parts.started.samples:
        found |= {one.name: one.values for one in source() if one.name in ("store_bytes", "store_segments")}
    segments = found.get("store_segments", {})
    return {tier: (nbytes, segments.get(tier, 0)) for tier, nbytes in found.get("store_bytes", {}).items()}


@pieces.get("/requests/{key}")
async def one_request(key: str, parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """One request: its prompt as a strip of parts, and where its time went."""
    recent = parts.observer.recent
    found = recent.find(tenant, key)
    if found is None or found.report is None:
        raise HttpError(404, "this request is not kept any more")
    estimate = FullEstimate.of([one.report for one in recent.seen_by(tenant) if one.report is not None])
    view = AnswerView(found.report, named=found.tenant == tenant.name)
    return HTMLResponse(render("request.html", one=found, view=view, full_s=estimate.ttft_s(found.report)))


class Asked:
    """What the box's form says, as the bodies of requests."""

    def __init__(
        self,
        question: Annotated[str, Form()] = "",
        documents: Annotated[str, Form()] = "",
        corpus: Annotated[str, Form()] = "",
        top_k: Annotated[str, Form()] = "",
        max_tokens: Annotated[str, Form()] = "",
        ratio: Annotated[str, Form()] = "",
    ) -> None:
        self.question = question.strip()
        self.documents = [text.strip() for text in documents.replace("\r\n", "\n").split("\n\n") if text.strip()]
        self.corpus = corpus
        self.top_k, self.max_tokens, self.ratio = top_k, max_tokens, ratio

    def chunks(self) -> ChunksBody:
        """The passages."""
        return _checked(ChunksBody, documents=self.documents, corpus=self.corpus or None)

    def chat(self, method: str) -> ChatBody:
        """The question with a method, and the ratio if the method has one."""
        takes_ratio = parameter_of(method) == "recompute_ratio"
        reuse = {
            "method": method,
            "recompute_ratio": _number(self.ratio, "recompute ratio", float) if takes_ratio else None,
            "corpus": self.corpus or None,
            "top_k": _number(self.top_k, "passages", int) if self.corpus else None,
        }
        return _checked(
            ChatBody,
            messages=[{"role": "user", "content": self.question}],
            documents=self.documents,
            max_tokens=_number(self.max_tokens, "tokens of answer", int),
            temperature=0.0,
            chunkweave=reuse,
        )


def _number(text: str, what: str, kind: type) -> Any:
    try:
        return kind(text) if text.strip() else None
    except ValueError:
        raise HttpError(400, f"{what}: {text!r} is no number") from None


def _checked(kind: type[BodyT], **fields: Any) -> BodyT:
    return validated(kind, fields)


FromForm = Annotated[Asked, Depends()]


@pieces.post("/ask")
async def ask(
    asked: FromForm, methods: Annotated[tuple[str, ...], Form()] = (), warm: Annotated[str, Form()] = ""
) -> HTMLResponse:
    """A place for each answer, which then asks for it: one after the other, so that none waits for another's work."""
    if not asked.question:
        raise HttpError(400, "the question is empty")
    if not methods:
        raise HttpError(400, "choose a method")
    if unknown := [name for name in methods if name not in METHODS.names]:
        raise HttpError(400, f"no method {unknown[0]!r}")
    there = bool(asked.documents or asked.corpus)
    return HTMLResponse(render("asked.html", methods=methods, warm=bool(warm) and there))


@pieces.post("/warm")
async def warm_first(asked: FromForm, request: Request, parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """Compute the passages."""
    done = await warm(asked.chunks(), request, parts, tenant)
    return HTMLResponse(f"<p>{done['chunks']} passages, {done['computed']} of them computed now.</p>")


@pieces.post("/answer")
async def answer(
    asked: FromForm,
    method: Annotated[str, Form()],
    request: Request,
    parts: ReadyParts,
    tenant: OfTenant,
) -> HTMLResponse:
    """One answer, with its report."""
    if method not in METHODS.names:
        raise HttpError(400, f"no method {method!r}")
    body = asked.chat(method)
    meta = RequestMeta(request.state.request_id, tenant.name)
    running = await parts.answering.start(tenant, body, meta)
    choices, end = await whole_answer(running, request.receive)
    view = AnswerView(end.report)
    return HTMLResponse(render("answer.html", method=method, text=choices[0]["text"], view=view))


@pieces.get("/corpora")
async def corpora(parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """The corpora, and what can be done with their KV."""
    return _corpora(parts, tenant, "")


@pieces.get("/corpora/options")
async def options(parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """The corpora as options of a list."""
    return HTMLResponse(render("options.html", corpora=parts.corpora.all(tenant)))


@pieces.post("/corpora/{name}/{what}")
async def corpus_command(
    name: str,
    what: Literal["warm", "pin", "unpin", "clear"],
    request: Request,
    parts: ReadyParts,
    tenant: OfTenant,
) -> HTMLResponse:
    """Do one thing with the KV of a corpus."""
    body = ChunksBody(corpus=name)
    if what == "warm":
        done = await warm(body, request, parts, tenant)
    elif what == "clear":
        done = await clear(ClearBody(corpus=name), parts, tenant)
    else:
        done = await (pin if what == "pin" else unpin)(body, parts, tenant)
    return _corpora(parts, tenant, f"{name}: {_in_words(done)}")


@pieces.post("/clear")
async def clear_everything(parts: ReadyParts, tenant: OfTenant) -> HTMLResponse:
    """Remove everything that is stored."""
    return _corpora(parts, tenant, _in_words(await clear(ClearBody(everything=True), parts, tenant)))


def _in_words(done: Mapping[str, Any]) -> str:
    return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in done.items())


def _corpora(parts: Parts, tenant: Tenant, said: str) -> HTMLResponse:
    shown = [one.as_dict() for one in parts.corpora.all(tenant)]
    commands = ("warm", "pin", "unpin", "clear") if parts.started.cache.pins else ("warm", "clear")
    return HTMLResponse(render("corpora.html", corpora=shown, said=said, commands=commands, admin=tenant.admin))
