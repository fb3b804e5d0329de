"""Tells metrics, log and traces what became of each request."""

from dataclasses import dataclass

from chunkweave.engine.request import Answer
from chunkweave.metrics import ReuseReport
from chunkweave.server.logs import log_request
from chunkweave.server.metrics import Outcome, ServerMetrics, outcome_of
from chunkweave.server.refusals import RefusalError
from chunkweave.server.traces import RequestTraces


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is told of: its id, its tenant's name, and the span that it was asked in, if there is one."""

    request_id: str
    tenant: str
    traceparent: str | None = None


class Observer:
    """One call for each request, when it has ended."""

    def __init__(self, metrics: ServerMetrics, traces: RequestTraces) -> None:
        self.metrics = metrics
        self._traces = traces

    def answered(self, asked: Asked, answer: Answer) -> None:
        """It has its whole answer."""
        self.answered_with(asked, answer.report, finish_reason=answer.finish_reason)

    def answered_with(self, asked: Asked, report: ReuseReport, *, finish_reason: str) -> None:
        """The same for an answer that another process gave."""
        self.metrics.observe(report, finish_reason=finish_reason, tenant=asked.tenant)
        self._traces.record(
            report, request_id=asked.request_id, finish_reason=finish_reason, traceparent=asked.traceparent
        )
        log_request(Outcome.FINISHED, report, finish_reason=finish_reason)

    def failed(self, asked: Asked, error: BaseException) -> None:
        """It ended with an error."""
        refused = isinstance(error, RefusalError) and error.status_code < 500
        self._ended(asked, Outcome.REJECTED if refused else outcome_of(error), error)

    def given_up(self, asked: Asked) -> None:
        """Its client went before the answer's end."""
        self._ended(asked, Outcome.ABORTED, None)

    def close(self) -> None:
        """Send what is still to be sent."""
        self._traces.close()

    def _ended(self, asked: Asked, outcome: Outcome, error: BaseException | None) -> None:
        self.metrics.ended(outcome, tenant=asked.tenant)
        log_request(outcome, error=error)
