"""Logs of requests: each line knows whose it is, and none tells what was asked or answered."""

import asyncio
import io
import json
import logging

import pytest

from chunkweave import Chunk, Engine, Request, SamplingParams
from chunkweave.engine.runner import Runner
from chunkweave.errors import ChunkweaveError, DeadlineError, RequestFailedError
from chunkweave_server.metrics import outcome_of
from chunkweave_server.observability import (
    JsonFormatter,
    configure_logging,
    log_request,
    request_id_of,
    request_logger,
    serving,
)
from chunkweave_server.settings import LogForm
from tests.integration.test_batching_core import run_async
from tests.toys import toy_model


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    names = ("", "chunkweave", "uvicorn", "httpx", "httpcore", "uvicorn.access")
    before = {name: logging.getLogger(name).level for name in names}
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def lines():
    """Everything logged from here on, as JSON objects, when called."""
    stream = io.StringIO()
    configure_logging(LogForm.JSON, "DEBUG", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_ids_are_the_clients_if_they_are_plain_words_and_new_ones_else():
    assert request_id_of("abc-1.2_X") == "abc-1.2_X"
    made = [request_id_of(given) for given in (None, "", "a b", 'a"\n{"level": "error"}', "x" * 129, "ü")]
    assert len(set(made)) == len(made)
    assert all(len(one) == 32 and one.isalnum() for one in made)


def test_lines_carry_the_request_of_the_task_that_logs(lines):
    log = logging.getLogger("chunkweave.somewhere")

    async def serve(request_id):
        with serving(request_id):
            log.info("begins")
            await asyncio.sleep(0.001)
            await asyncio.to_thread(log.info, "in a thread")
            await asyncio.create_task(later())

    async def later():
        log.info("ends")

    async def main():
        await asyncio.gather(*(serve(one) for one in ("one", "two", "three")))
        log.info("nobody's")

    asyncio.run(main())
    for one in ("one", "two", "three"):
        assert [line["message"] for line in lines() if line.get("request_id") == one] == [
            "begins",
            "in a thread",
            "ends",
        ]
    assert "request_id" not in lines()[-1]


def test_a_request_is_one_line_with_its_report_and_the_engines_lines_are_its_own(lines, monkeypatch):
    """A segment is lost while the engine's own thread works for the request: that line has the request's id too."""
    engine = Engine(toy_model("llama"))
    chunks = ["The ferry leaves at noon.", "Pilots board two miles west."]
    engine.precompute(chunks)
    for record in engine.store.records():
        level = engine.store.levels[0]
        level.store.tier.delete(record.id)

    async def ask(batching, request_id):
        with serving(request_id):
            answer = await batching.submit(
                Request("When?", chunks, sampling=SamplingParams(3)), method="full-reuse"
            ).answer()
            log_request("finished", answer.report, finish_reason=answer.finish_reason)
            return answer.report

    async def work(batching):
        return await ask(batching, "r-1")

    report = run_async(work, engine)
    own = [line for line in lines() if line.get("request_id") == "r-1"]
    assert any("computed instead" in line["message"] for line in own)
    [line] = [line for line in own if line.get("event") == "request"]
    assert line["outcome"] == "finished"
    assert line["method"] == report.method
    names = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(line[name] for name in names) == line["prompt_tokens"] == report.prompt_tokens
    assert line["ttft_s"] == pytest.approx(report.ttft_s, abs=1e-6)
    assert line["lost_segments"] == report.lost_segments > 0


SECRETS = ("Xyzzyquestion", "Xyzzydocument", "Xyzzysystem", "Xyzzystop")


def test_nothing_of_what_users_send_or_get_is_logged(lines, monkeypatch, capsys):
    """Requests that are answered, that fail twice, time out and are wrong: none leaves a word behind."""
    engine = Engine(toy_model("llama"))
    answers = []

    def request(tokens=4):
        chunks = [Chunk("Xyzzydocument about ferries.", "ferries")]
        return Request(
            "Xyzzyquestion?", chunks, "Xyzzysystem", SamplingParams(tokens, stop=("Xyzzystop",)), "salty-Xyzzy"
        )

    async def ended(batching, request, **options):
        with serving("r-1"):
            try:
                answer = await batching.submit(request, method="cacheblend", **options).answer()
                answers.append(answer.text)
                log_request("finished", answer.report, finish_reason=answer.finish_reason)
            except ChunkweaveError as error:
                log_request(outcome_of(error), error=error)
                return type(error)

    async def work(batching):
        await ended(batching, request())
        assert await ended(batching, request(500), deadline_s=0.05) is DeadlineError
        assert await ended(batching, Request("Xyzzyquestion?", [""])) is not None
        assert await ended(batching, Request("Xyzzyquestion " * 1000)) is not None
        with monkeypatch.context() as patched:
            patched.setattr(Runner, "step", lambda *_, **__: 1 / 0)
            assert await ended(batching, request()) is RequestFailedError

    run_async(work, engine)
    text = json.dumps(lines()) + capsys.readouterr().err
    assert "ZeroDivisionError" in text
    assert answers[0].strip()
    for secret in (*SECRETS, answers[0].strip(), "salty"):
        assert secret.lower() not in text.lower()
    outcomes = [line["outcome"] for line in lines() if line.get("event") == "request"]
    assert outcomes == ["finished", "timed_out", "rejected", "rejected", "failed"]


def test_fields_cannot_forge_what_the_line_itself_says():
    record = logging.LogRecord("chunkweave.x", logging.INFO, "", 0, 'say "%s"', ("\n{}",), None)
    record.fields = {"level": "error", "more": 1}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert (json.loads(line)["level"], json.loads(line)["more"]) == ("info", 1)


def test_a_plain_line_is_for_people():
    stream = io.StringIO()
    configure_logging(LogForm.PLAIN, "INFO", stream)
    with serving("0123456789abcdef"):
        request_logger.info("request %s", "aborted")
    logging.getLogger("chunkweave.x").debug("not shown")
    logging.getLogger("somebody.else").info("not shown")
    [line] = stream.getvalue().splitlines()
    assert line.split(" ", 1)[1] == "INFO    [01234567] request aborted"
