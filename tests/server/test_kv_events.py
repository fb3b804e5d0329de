"""KV events of vLLM servers: what several fronts learn from them, and what is lost, wrong or old."""

import threading
import time
from contextlib import ExitStack
from math import inf

import msgspec
import pytest
import zmq

from chunkweave.errors import UsageError
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.scheduling.routing import ReplicaContents
from chunkweave_server.settings import FleetSettings
from chunkweave_server.vllm_backend import kv_events
from chunkweave_server.vllm_backend.kv_events import AnnouncedBlocks, EventEndpoints
from tests.server.conftest import wait_until
from tests.server.fake_vllm import FakeVllm
from tests.server.fronts import DOCUMENTS, MORE, running_front

BLOCK = 16
WEAVE = {"method": "cacheblend", "recompute_ratio": 0.25, "order": "fixed"}


def stored(tokens, *, name="a", parent=None, salt=None, block=BLOCK, medium="CPU", adapter=None):
    """The event of the whole blocks of some tokens, as the plug-in makes it."""
    size = min(block, len(tokens))
    count = len(tokens) // size
    keys = [tuple(filter(None, (adapter, salt))) or None, *[None] * (count - 1)]
    return {
        "type": "BlockStored",
        "block_hashes": [f"{name}{number}" for number in range(count)],
        "parent_block_hash": parent,
        "token_ids": list(tokens[: count * size]),
        "block_size": size,
        "lora_id": None,
        "lora_name": adapter,
        "extra_keys": keys,
        "medium": medium,
    }


def removed(*blocks):
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "CPU"}


def prompt_of(*chunks, salt=""):
    """A prompt of BOS, a system part, these chunks and a question."""
    system = tuple(range(1, 20))
    parts = [PromptPart(PartKind.START, (0,)), PromptPart(PartKind.SYSTEM, system, id=chunk_id("m", salt, system))]
    parts += [PromptPart(PartKind.CHUNK, one, id=chunk_id("m", salt, one)) for one in chunks]
    return Prompt((*parts, PromptPart(PartKind.QUESTION, (7, 8, 9))))


A, B = tuple(range(100, 150)), tuple(range(200, 240))
SHORT = (5, 6, 7)


class Assumed:
    """One replica's announced blocks, over empty assumed contents."""

    def __init__(self, most_tokens=10_000) -> None:
        self.announced = AnnouncedBlocks(most_tokens)

    def apply(self, *events) -> None:
        self.announced.apply(self.announced.next_batch, events)

    def tokens(self, *chunks, salt="", weaves=True) -> int:
        prompt = prompt_of(*chunks, salt=salt)
        parts = [part for part in prompt.parts if part.id is not None]
        there = ReplicaContents(10_000).cached_parts(
            [part.id for part in parts], weaves=weaves, announced=self.announced.of(prompt, salt, weaves=weaves)
        )
        return sum(len(part) for part, held in zip(parts, there, strict=True) if held)


def test_a_chunk_counts_anywhere_in_a_prompt_that_weaves():
    held = Assumed()
    held.apply(stored(A), stored(SHORT, name="short"))
    assert held.tokens(B, A) == len(A), "its last tokens fill no block"
    assert held.tokens(B, SHORT) == len(SHORT)
    assert held.tokens((*A, 1)) == len(A) + 1, "it may be another one: reports correct that"
    assert held.tokens(B, A, weaves=False) == 0


def test_an_exact_path_counts_up_to_its_first_gap():
    held = Assumed()
    ids = prompt_of(A, B).token_ids
    held.apply(stored(ids[:32], name="x"), stored(ids[32:48], name="y", parent="x1"))
    assert held.tokens(A, B, weaves=False) == 19, "the chunk's last whole block is not there"
    held.apply(stored(ids[48:64], name="z", parent="y0"))
    assert held.tokens(A, B, weaves=False) == 19 + len(A)
    assert held.tokens(B, A, weaves=False) == 19, "the instruction alone"
    held.apply(stored(ids[64:96], name="lost", parent="unknown"))
    assert len(held.announced) == 4, "what these begin with is not known"


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_chunk_counts_under_its_own_salt_only(adapter):
    held = Assumed()
    held.apply(stored(A, salt="tenant", adapter=adapter))
    assert held.tokens(A) == held.tokens(A, salt="other") == 0
    assert held.tokens(A, salt="tenant") == len(A)


def test_what_is_removed_counts_no_longer():
    held = Assumed()
    held.apply(stored(A), stored(B, name="b"))
    assert held.tokens(A, B) == len(A) + len(B)
    held.apply(removed("a0", "a1", "a2"), removed("unknown"))
    assert held.tokens(A, B) == len(B)
    held.apply(stored(A, name="once"), stored(A, name="twice"), removed("once0", "once1", "once2"))
    assert held.tokens(A) == len(A), "another rank's, or a later one"


def test_other_events_have_no_effect_and_the_oldest_blocks_are_dropped():
    held = Assumed(most_tokens=64)
    held.apply(stored(A, medium="GPU"), {"type": "AllBlocksCleared"}, ["BlockStored"], 5)
    assert len(held.announced) == 0
    held.apply(stored(A), stored(B, name="b"))
    assert len(held.announced) == 4
    assert held.tokens(A) == 0
    assert held.tokens(B) == len(B)
    held.announced.clear()
    assert (len(held.announced), held.announced.next_batch) == (0, 0)


def test_endpoints_are_read_and_numbered_by_rank():
    one = EventEndpoints.parse("tcp://host:5557,tcp://host:5600")
    assert one.of_rank(0) == one
    assert one.of_rank(2) == EventEndpoints("tcp://host:5559", "tcp://host:5602")
    assert EventEndpoints.parse("ipc:///run/events").of_rank(1) == EventEndpoints("ipc:///run/events")
    for wrong in ("", "host:5557", "tcp://a:1,", "tcp://a:1,tcp://a:2,tcp://a:3"):
        with pytest.raises(UsageError, match="ENDPOINT"):
            EventEndpoints.parse(wrong)


def test_each_upstream_has_its_events():
    for upstream in ((), ("http://a", "http://b")):
        with pytest.raises(UsageError, match="one each"):
            FleetSettings(upstream=upstream, upstream_events=("tcp://a:1",))


class Publisher:
    """Publishes batches as vLLM does: numbered, with a replay of those that it kept."""

    def __init__(self, *, replays=True, first=0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.left_out: set[int] = set()
        self._number = first
        self._closed = threading.Event()
        self._thread = None
        if replays:
            self._router = self._context.socket(zmq.ROUTER)
            self.endpoint += f",tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def send(self, *events, lost=False) -> None:
        batch = msgspec.msgpack.encode([time.time(), events, 0])
        self.send_bytes(batch, lost=lost)

    def send_bytes(self, batch, *, lost=False) -> None:
        number, self._number = self._number, self._number + 1
        self.kept.append((number, batch))
        if not lost:
            self._socket.send_multipart([b"", number.to_bytes(8, "big"), batch])

    def _serve(self) -> None:
        while not self._closed.is_set():
            if not self._router.poll(50):
                continue
            client, _, first = self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, batch in self.kept:
                if number >= self.asked[-1] and number not in self.left_out:
                    self._router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), batch])
            self.left_out.clear()
            self._router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
        self._router.close(linger=0)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def publisher(request):
    made = Publisher(**getattr(request, "param", {}))
    yield made
    made.close()


def announced(front, place=0):
    return front.service.backend.fleet.replicas[place].announced


def test_two_fronts_know_what_each_others_requests_stored():
    """The second front, started later, sends a request to where the first front's documents are."""
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeVllm()) for _ in range(2)]
        publishers = [Publisher(), Publisher()]
        for one in publishers:
            stack.callback(one.close)
        events = tuple(one.endpoint for one in publishers)
        first = stack.enter_context(running_front(*fakes, upstream_events=events))
        first.ask(documents=[MORE], chunkweave=WEAVE)
        first.ask(documents=DOCUMENTS, chunkweave=WEAVE)
        (sent,) = fakes[1].seen
        chunks = sent["kv_transfer_params"]["chunkweave"]["chunks"]
        for number, (start, stop) in enumerate(chunks):
            publishers[1].send(stored(sent["prompt"][start:stop], name=f"{number}-"))
        second = stack.enter_context(running_front(*fakes, upstream_events=events))
        wait_until(lambda: announced(second, 1).next_batch == len(chunks))
        report = second.ask(documents=DOCUMENTS[::-1], chunkweave=WEAVE).json()["chunkweave"]
        assert report["replica"] == "upstream-1"
        shown = second.get("/v1/cache").json()["replicas"]
        assert [bool(one["announced_blocks"]) for one in shown] == [False, True]
        assert shown[1]["expected_tokens"] >= sum(stop - start for start, stop in chunks)
        assert (
            f'replica_announced_blocks{{model_name="m",replica="upstream-1"}} {float(len(announced(second, 1)))}'
            in (second.get("/metrics").text)
        )


@pytest.fixture
def front(publisher):
    with FakeVllm() as vllm, running_front(vllm, upstream_events=(publisher.endpoint,)) as client:
        yield client
        client.vllm = vllm


def test_batches_that_did_not_arrive_are_asked_for(publisher, front):
    wait_until(lambda: publisher.asked == [0])
    publisher.send(stored(A), lost=True)
    _send_until(lambda: publisher.send(), lambda: len(publisher.asked) > 1)
    wait_until(lambda: len(announced(front)) == 3)
    publisher.send(stored(B, name="b"))
    wait_until(lambda: len(announced(front)) == 5)
    publisher.send(removed("a0", "a1", "a2"))
    wait_until(lambda: len(announced(front)) == 2)
    assert publisher.asked[1] == 0


@pytest.mark.parametrize("publisher", [{"replays": False}], indirect=True)
def test_without_a_replay_what_was_announced_before_a_gap_is_forgotten(publisher, front):
    _send_until(lambda: publisher.send(stored(A)), lambda: len(announced(front)) == 3)
    publisher.send(removed("a0", "a1", "a2"), lost=True)
    publisher.send(stored(B, name="b"))
    wait_until(lambda: len(announced(front)) == 2)


@pytest.mark.parametrize(
    "wrong",
    [b"\xc1", msgspec.msgpack.encode([1.0, [{"medium": "CPU"}], 0]), msgspec.msgpack.encode({"a": 1})]
    + [b"\x91" * 100_000]
    + [msgspec.msgpack.encode([1.0, [stored(A) | {"block_size": size}], 0]) for size in (0, -3, 7, "x", inf, 1)]
    + [msgspec.msgpack.encode([1.0, [stored(A) | {"token_ids": [one] * 48}], 0]) for one in (1 << 33, -1, "x", None)],
)
def test_events_that_are_not_understood_are_forgotten(publisher, front, wrong):
    wait_until(lambda: publisher.asked == [0])
    _send_until(lambda: publisher.send(stored(A)), lambda: len(announced(front)) == 3)
    publisher.send_bytes(wrong)
    publisher.send(stored(B, name="b"))
    wait_until(lambda: len(announced(front)) == 2)
    assert front.ask(documents=DOCUMENTS).status_code == 200


def test_a_server_that_starts_again_unseen_is_followed_anew(publisher, front):
    wait_until(lambda: publisher.asked == [0])
    _send_until(lambda: publisher.send(stored(A)), lambda: len(announced(front)) == 3)
    publisher.kept.clear()
    publisher._number = 0
    publisher.send(stored(B, name="b"))
    wait_until(lambda: len(announced(front)) == 2)
    publisher.send(removed("b0", "b1"))
    wait_until(lambda: len(announced(front)) == 0)


def test_a_replay_that_leaves_batches_out_is_asked_for_again(publisher):
    """vLLM's socket drops what a slow subscriber has no room for."""
    for number in range(6):
        publisher.send(stored(A, name=f"{number}-"), lost=True)
    publisher.left_out = {3}
    with FakeVllm() as vllm, running_front(vllm, upstream_events=(publisher.endpoint,)) as client:
        wait_until(lambda: len(announced(client)) == 6 * 3)
    assert publisher.asked == [0, 3]


def test_a_first_replay_that_fails_does_not_end_the_following(publisher, monkeypatch):
    failing, read = iter([True]), kv_events._frames

    def frames(found):
        if next(failing, False):
            raise RuntimeError("a foreign answer")
        return read(found)

    monkeypatch.setattr(kv_events, "_frames", frames)
    monkeypatch.setattr(kv_events, "_PAUSE_S", 0.01)
    publisher.send(stored(A, name="early"), lost=True)
    with FakeVllm() as vllm, running_front(vllm, upstream_events=(publisher.endpoint,)) as client:
        wait_until(lambda: len(announced(client)) == 3)
    assert publisher.asked == [0, 0]


@pytest.mark.parametrize("publisher", [{"first": 4}], indirect=True)
def test_what_vllm_has_not_kept_is_no_reason_to_forget_the_rest(publisher):
    for number in range(3):
        publisher.send(stored(A, name=f"{number}-"), lost=True)
    with FakeVllm() as vllm, running_front(vllm, upstream_events=(publisher.endpoint,)) as client:
        wait_until(lambda: len(announced(client)) == 3 * 3)


def test_the_end_of_a_chain_is_dropped_before_its_beginning():
    held = Assumed(most_tokens=96)
    ids = prompt_of(A, B).token_ids
    held.apply(stored(ids[:32], name="x"), stored(ids[32:64], name="y", parent="x1"))
    for number in range(10):
        held.apply(stored(tuple(range(1000 * number, 1000 * number + 32)), name=f"{number}-", parent="x1"))
    assert held.tokens(A, weaves=False) == 19, "the instruction is still there"
    assert len(held.announced) == 6


def test_a_server_that_starts_again_is_followed_from_its_first_batch(publisher, front):
    wait_until(lambda: publisher.asked == [0])
    _send_until(lambda: publisher.send(stored(A)), lambda: len(announced(front)) == 3)
    fleet = front.service.backend.fleet
    fleet.down("upstream-0")
    publisher.kept.clear()
    publisher._number = 0
    fleet.up("upstream-0")
    assert len(announced(front)) == 0
    publisher.send(stored(B, name="b"))
    wait_until(lambda: len(announced(front)) == 2)


@pytest.mark.parametrize("endpoints", ["nothing://", "tcp://127.0.0.1:1,nothing://"])
def test_an_endpoint_of_no_known_kind_is_refused_at_the_start(endpoints):
    with (
        FakeVllm() as vllm,
        pytest.raises(AssertionError, match="events at nothing://"),
        running_front(vllm, upstream_events=(endpoints,)),
    ):
        pass


def test_what_reads_events_may_be_missing(monkeypatch):
    monkeypatch.setattr(kv_events, "find_spec", lambda name: None if name == "zmq" else name)
    with pytest.raises(UsageError, match="upstream_events needs zmq: pip install msgspec pyzmq"):
        kv_events.event_endpoints(["tcp://host:5557"])
    assert kv_events.event_endpoints([]) == []


def _send_until(send, reached) -> None:
    """Send batches until they arrive: a subscription takes effect some time after it was made."""
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        send()
        time.sleep(0.05)
