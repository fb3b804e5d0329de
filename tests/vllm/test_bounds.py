"""What the plug-in keeps of requests that have ended, and what it says of wrong ones, has a bound."""

import pytest

from chunkweave.conversation.answer import PrefillReport
from chunkweave.planning.plan import KVSource
from chunkweave.types import Span
from chunkweave.vllm import scheduler
from chunkweave.vllm.orders import StepResults
from chunkweave.vllm.scheduler import ConnectorScheduler
from tests.vllm.test_scheduler import BOS, CHUNKS, FakeRequest, begun, by, side, stored_chunks, woven

__all__ = ["side"]


def ids_of(number: int) -> list[int]:
    return [BOS, *range(1000 * number, 1000 * number + 130)]


def answered(side: ConnectorScheduler, number: int, recomputed: int) -> None:
    """A prompt of its own was woven, and so many of its positions recomputed."""
    stored_chunks(side, 0, 1, 2, ids=ids_of(number), exact=False)
    request = by("cacheblend", ids=ids_of(number))
    woven(side, request)
    spans = {KVSource.EXACT: [Span(0, 1)], KVSource.REUSED: [Span(1, 121)], KVSource.COMPUTED: [Span(121, 131)]}
    report = PrefillReport(spans, range(1, 1 + recomputed), recomputed)
    side.note(StepResults(reports={request.request_id: report}), set())
    side.finished(request)


def found_again(side: ConnectorScheduler, number: int) -> dict:
    """What is reported of a prompt which vLLM finds in its own cache."""
    request = by("cacheblend", name="again", ids=ids_of(number))
    begun(side, request, 128)
    return side.finished(request)[1]["chunkweave"]


def test_reports_of_long_prompts_leave_room_for_fewer(side, monkeypatch):
    monkeypatch.setattr(scheduler, "_REMEMBERED_POSITIONS", 100)
    for number in range(1, 6):
        answered(side, number, 40)
    found = [found_again(side, number) for number in range(1, 6)]
    assert [one["recomputed_tokens"] for one in found] == [0] * 3 + [40] * 2
    assert {(one["effective_method"], one["prefix_exact_tokens"]) for one in found} == {("cacheblend", 1)}, "woven"


@pytest.mark.parametrize("wrong", [{"x" * 5_000_000: 1}, {"method": "x" * 5_000_000}, {"promoted": "x" * 5_000_000}])
def test_a_wrong_field_is_quoted_in_part(side, wrong, caplog):
    request = FakeRequest({**CHUNKS, **wrong})
    side.add(request)
    assert len(caplog.text) < 2000
    reason = side.finished(request)[1]["chunkweave"]["error"]
    assert 0 < len(reason) <= 1000
