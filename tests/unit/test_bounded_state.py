"""What is kept for long has a bound, whatever comes in."""

from dataclasses import replace

from chunkweave.conversation.turns import SentChunks
from chunkweave.metrics import ChunkReport
from chunkweave.ordering.arrangement import COUNTS_FILE, Arranger
from chunkweave.ordering.ordering import OrderingConfig
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.prompt.request import Request
from chunkweave.prompt.tokenizer import TokenCache
from chunkweave.scheduling.routing import SentPaths
from chunkweave.store.records import SegmentRecord
from chunkweave.types import MOST_SOURCE_CHARACTERS, Chunk, ChunkId
from chunkweave_server.observability import MOST, RecentRequests
from chunkweave_server.tenants import Tenant
from tests.unit.test_explain import REPORT


def test_a_source_is_kept_in_part():
    long = "a" * MOST_SOURCE_CHARACTERS + "b"
    assert Chunk("text", long).source == long[:-1]
    assert Chunk("text", long[:-1]).source == long[:-1]
    assert replace(Chunk("text"), source=long).source == long[:-1]
    record = SegmentRecord.of(ChunkId("0" * 32), (), (1, 2), exact=True, nbytes=8, source=long)
    assert record.source == long[:-1], "also of a file that an earlier version wrote"


def test_short_texts_do_not_fill_a_cache_of_tokens_with_entries():
    cache = TokenCache(max_tokens=4000)
    for number in range(4000):
        cache.put(f"text {number}", (number,))
        cache.put(f"nothing {number}", ())
    assert len(cache) <= 500
    assert cache.get("text 3999") == (3999,)
    assert cache.get("nothing 3999") is None


def test_chunks_that_were_sent_are_remembered_for_a_while_of_each_tenant():
    now = 0.0
    sent = SentChunks(most_turns=3, clock=lambda: now)

    def asked(number: int, salt: str) -> Request:
        return Request("And?", history=[(f"Question {number}?", "Yes.")], cache_salt=salt)

    def note(number: int, salt: str, text: str) -> None:
        sent.note(Request(f"Question {number}?", cache_salt=salt), [Chunk(text)])

    note(0, "small", "a")
    for number in range(5):
        note(number, "large", "many letters")
    assert len(sent) == 3
    assert sent.before(asked(0, "small")) == ((Chunk("a"),),)
    assert [bool(sent.before(asked(number, "large"))[0]) for number in range(5)] == [False, False, False, True, True]
    now = 3601.0
    assert sent.before(asked(4, "large")) == ((),)
    assert len(sent) == 2
    note(9, "large", "x" * (33 << 20))
    assert len(sent) == 1, "the largest holder gives its text up"


def test_short_chunks_do_not_fill_what_was_sent_with_paths():
    sent = SentPaths(64_000)
    for number in range(400):
        sent.note([ChunkId(f"{number}-{place}") for place in range(32)], [1] * 32, weaves=False)
        sent.check()
        assert sent.segments <= 4000
    assert sent.segments == 4000


def test_of_answered_requests_the_last_are_kept_without_their_parts():
    recent = RecentRequests()
    chunk = ChunkReport(ChunkId("c"), "notes", "reused", None, None, 10, 0)
    for number in range(2 * MOST):
        recent.answered(str(number), "", replace(REPORT, chunks=(chunk,)))
    requests = list(recent.seen_by(Tenant(admin=True)))
    assert [request.id for request in requests] == [str(number) for number in reversed(range(MOST, 2 * MOST))]
    assert not any(request.report.chunks for request in requests if request.report is not None)


def test_requests_are_counted_of_so_many_tenants_and_a_damaged_file_counts_nothing(tmp_path, caplog):
    def asked(number: int) -> Prompt:
        return Prompt((PromptPart(PartKind.CHUNK, (number + 1,), ChunkId(str(number))),))

    arranger = Arranger(OrderingConfig(window=2), SentPaths(1000).tree)
    for number in range(300):
        for _ in range(3):
            arranger.count(asked(number), free=True, tenant=str(number))
    arranger.save(tmp_path / COUNTS_FILE)
    later = Arranger(OrderingConfig(window=2), SentPaths(1000).tree)
    later.load(tmp_path / COUNTS_FILE)
    assert [later.table(str(number)).count(ChunkId(str(number))) for number in (299, 100, 43, 0)] == [2, 2, 0, 0]
    (tmp_path / COUNTS_FILE).write_text('{"format": 1, "requests": {"a": [[true]]}}')
    later.load(tmp_path / COUNTS_FILE)
    assert "start at 0" in caplog.text
