"""`/v1/chat/completions`, `/v1/completions`, `/v1/models`."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from chunkweave.server.access import NEEDS_KEY, AnyService, OfTenant, ReadyParts
from chunkweave.server.answering import Question, RunningAnswer
from chunkweave.server.keys import Tenant
from chunkweave.server.observer import Asked
from chunkweave.server.refusals import RefusalError
from chunkweave.server.replies import ReplyForm
from chunkweave.server.requests import Asking, ChatBody, CompletionBody
from chunkweave.server.schema import STREAMED, refusals
from chunkweave.server.service import Parts, Service
from chunkweave.server.streams import EventStream, answer_events, unless_gone, whole_answer
from chunkweave.server.turns import question_of

router = APIRouter(prefix="/v1", tags=["answers"], dependencies=NEEDS_KEY)


@router.post("/chat/completions", responses={**STREAMED, **refusals(400, 404, 429, 503, 504)})
async def chat(body: ChatBody, request: Request, service: AnyService, parts: ReadyParts, tenant: OfTenant) -> Response:
    """Answer the user's message over `documents`, over what a corpus has about it, or over nothing."""
    question = question_of(body)
    return await _answered(question, body, request, service, parts, tenant)


@router.post("/completions", responses={**STREAMED, **refusals(400, 404, 429, 503, 504)})
async def complete(
    body: CompletionBody, request: Request, service: AnyService, parts: ReadyParts, tenant: OfTenant
) -> Response:
    """The same for one prompt: it is the question of a chat without a system message."""
    if not body.question.strip():
        raise RefusalError(400, "the prompt is empty", param="prompt")
    return await _answered(Question(body.question), body, request, service, parts, tenant)


@router.get("/models", responses=refusals(503))
async def models(service: AnyService) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(service)]}


@router.get("/models/{name}", responses=refusals(404, 503))
async def model(name: str, service: AnyService) -> dict[str, Any]:
    """The model, if it is called so."""
    _require_model(name, service)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    name = service.settings.model.name
    return {"id": name, "object": "model", "created": service.created, "owned_by": "chunkweave"}


def _require_model(name: str | None, service: Service) -> None:
    if name not in (None, service.settings.model.name):
        told = f"no model {name!r}: this server has {service.settings.model.name!r}"
        raise RefusalError(404, told, param="model", code="model_not_found")


async def _answered(
    question: Question, body: Asking, request: Request, service: Service, parts: Parts, tenant: Tenant
) -> Response:
    _require_model(body.model, service)
    form = ReplyForm(isinstance(body, ChatBody), service.settings.model.name, body.with_usage)
    asked = Asked(request.state.request_id, tenant.name, request.headers.get("traceparent"))
    running = await unless_gone(request, parts.answering.start(tenant, question, body, asked))
    if body.stream:
        return await _streamed(running, form, request, service)
    try:
        answer = await unless_gone(request, whole_answer(running))
    finally:
        await running.aclose()
    return JSONResponse(form.whole(answer, running.retrieved))


async def _streamed(running: RunningAnswer, form: ReplyForm, request: Request, service: Service) -> Response:
    """The answer as a stream, which closes it."""
    try:
        # Before the first piece there is still a status that can say what went wrong.
        first = await unless_gone(request, anext(running))
    except BaseException:
        await running.aclose()
        raise
    stalled_s = service.settings.listen.stalled_s
    return EventStream(running, answer_events(running, first, form), stalled_s=stalled_s)
