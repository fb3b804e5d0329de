"""KV events that vLLM publishes for the plug-in: what a router and other fronts read of the stores."""

import json
import os
import subprocess
from collections import Counter
from urllib.request import Request, urlopen

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from chunkweave.store.records import segment_id
from chunkweave.vllm import kv_events
from chunkweave.vllm.orders import StepResults
from chunkweave.vllm.removal import removal_params
from chunkweave_server.vllm_backend.process import free_port
from tests.server.conftest import wait_until
from tests.vllm.checkpoints import BOS
from tests.vllm.prompts import Given, tokens
from tests.vllm.serving import IN_PROCESS, Ask, serving
from tests.vllm.test_scheduler import BLOCK, CHUNKS, IDS, FakeRequest, bound, stored_chunks


class Listener:
    """A subscriber, as a router is one."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def take(self, served) -> list[tuple[int, list]]:
        """The batches since the last call: what is stored is published in later steps."""
        taken = []
        for _ in range(6):
            served.answer(Ask([1, 2, 3]))
            while self._socket.poll(100):
                _, number, batch = self._socket.recv_multipart()
                taken.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1]))
        return taken

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture(scope="module")
def heard(checkpoint):
    port = free_port()
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}")
    with serving(checkpoint("llama"), kv_events_config=config, **IN_PROCESS) as served:
        listener = Listener(f"tcp://127.0.0.1:{port}")
        listener.take(served)
        yield served, listener
        listener.close()


class Replica:
    """What a router reads of this server from its events: chains of blocks, by salt and tokens from their beginning."""

    def __init__(self) -> None:
        self._chains: dict[object, tuple[str, tuple[int, ...]]] = {}
        self._block_tokens = 0

    def read(self, batches) -> None:
        for event in ours(batches):
            if event["type"] == "BlockStored":
                self._add(event)
            else:
                for block in event["block_hashes"]:
                    self._chains.pop(block, None)

    def cached(self, *chunks, salt="", weaves=True) -> int:
        """Tokens of these chunks that need not be computed, in a prompt of them."""
        held, tokens, exact = 0, [BOS], True
        for chunk in chunks:
            tokens += chunk
            exact = exact and self._has(tokens, salt)
            alone = weaves and self._has(chunk, salt)
            held += len(chunk) * (exact or alone)
        return held

    def _has(self, tokens, salt) -> bool:
        """Whether all whole blocks of these tokens are announced."""
        size, chains = min(self._block_tokens, len(tokens)) or 1, set(self._chains.values())
        stops = range(size, len(tokens) + 1, size)
        return all((salt, tuple(tokens[:stop])) in chains for stop in stops)

    def _add(self, event) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        first = (event.get("extra_keys") or [None])[0] or ("",)
        salt, before = (str(first[-1]), ()) if parent is None else self._chains[parent]
        for number, block in enumerate(event["block_hashes"], start=1):
            self._chains[block] = salt, (*before, *event["token_ids"][: number * size])
        self._block_tokens = max(self._block_tokens, size)


def ours(batches) -> list[dict]:
    return [event for _, events in batches for event in events if event.get("medium") == "CPU"]


def test_a_front_reads_what_another_ones_request_stored(heard):
    served, listener = heard
    a, b, short = tokens(70), tokens(52), tokens(20)
    served.answer(Given([a, b, short]).ask("prefix"))
    batches = listener.take(served)
    replica = Replica()
    replica.read(batches)
    assert replica.cached(a, b, short, weaves=False) == 70 + 52 + 20
    assert replica.cached(b, weaves=False) == 0, "it begins no prompt"
    assert Replica().cached(b, a) == 0
    assert replica.cached(short, b, a) == 70 + 52 + 20
    assert replica.cached(a, salt="other") == 0
    plain = {block for _, events in batches for event in events for block in event["block_hashes"]}
    paths = [event for event in ours(batches) if event["parent_block_hash"] or event["token_ids"][0] == BOS]
    of_vllm = {
        block
        for _, events in batches
        for event in events
        if event["type"] == "BlockStored" and event["medium"] == "GPU"
        for block in event["block_hashes"]
    }
    assert paths
    assert all(block in of_vllm for event in paths for block in event["block_hashes"]), (
        "the hashes of vLLM's own blocks"
    )
    chunks = [event for event in ours(batches) if event not in paths]
    assert [event["block_size"] for event in chunks] == [32, 32, 20]
    assert not of_vllm & {block for event in chunks for block in event["block_hashes"]}
    assert len(plain) == len(of_vllm) + 2 + 1 + 1, "vLLM's, and the three chunks' own"


def test_what_is_removed_is_announced(heard):
    served, listener = heard
    a, b = tokens(64), tokens(40)
    served.answer(Given([a, b]).ask("prefix"))
    replica = Replica()
    replica.read(listener.take(served))
    assert replica.cached(b, a) == 40 + 64
    served.answer(Ask([BOS, 5], removal_params([a], (BOS,))))
    replica.read(listener.take(served))
    assert replica.cached(b) == 0, "it was computed behind what is removed"
    served.answer(Given([a]).ask("prefix"))
    replica.read(listener.take(served))
    assert replica.cached(b, a) == 64


def test_a_salt_is_a_key_of_the_first_block(heard):
    served, listener = heard
    a = tokens(64)
    asked = Given([a]).ask("prefix")
    served.answer(Ask(asked.ids, asked.params, salt="tenant"))
    batches = listener.take(served)
    replica = Replica()
    replica.read(batches)
    assert (replica.cached(a), replica.cached(a, salt="tenant")) == (0, 64)
    assert [event["extra_keys"][0] for event in ours(batches)] == [["tenant"]] * 2


@pytest.mark.skipif("CHUNKWEAVE_DYNAMO" not in os.environ, reason="CHUNKWEAVE_DYNAMO: a Python with ai-dynamo-runtime")
def test_a_router_of_dynamo_finds_prefixes_and_chunks(heard):
    served, listener = heard
    port = free_port()
    command = [os.environ["CHUNKWEAVE_DYNAMO"], "-m", "dynamo.indexer", "--block-size", "32", "--port", str(port)]
    indexer = subprocess.Popen([*command, "--model-name", "m", "--workers", f"1={listener.endpoint}"])
    a, b = tokens(70), tokens(52)
    try:
        wait_until(lambda: found_by_dynamo(port, a) == 0)
        listener.take(served)
        served.answer(Given([a, b]).ask("prefix"))
        listener.take(served)
        wait_until(lambda: found_by_dynamo(port, a) == 64)
        assert found_by_dynamo(port, b) == 32
        assert found_by_dynamo(port, (BOS, *a, *b)) == 96
        assert found_by_dynamo(port, (*b, *a)) == 32, "it looks for prefixes: a router has to ask for each chunk"
        served.answer(Ask([BOS, 5], removal_params([a, b], (BOS,))))
        listener.take(served)
        wait_until(lambda: found_by_dynamo(port, a) == found_by_dynamo(port, b) == 0)
    finally:
        indexer.terminate()
        indexer.wait()


def found_by_dynamo(port: int, ids) -> int | None:
    """The longest prefix of these tokens that the indexer knows in host memory; None before it answers."""
    body = json.dumps({"token_ids": list(ids), "model_name": "m"}).encode()
    request = Request(f"http://127.0.0.1:{port}/query", body, {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=5) as reply:
            return json.load(reply)["instances"].get("1", {}).get("cpu", 0)
    except OSError:
        return None


def test_without_a_subscriber_there_are_no_events():
    side = bound()
    stored_chunks(side, 0, 1)
    assert list(side.take_events()) == []


def chunk_events(side) -> Counter:
    """How often chunks and exact segments were announced, and taken back."""
    found = Counter()
    for event in side.take_events():
        found[type(event)] += 1
    return found


def test_only_what_all_ranks_hold_is_announced():
    side = bound(events=True, ranks=2)
    request = FakeRequest(CHUNKS)
    side.add(request)
    parts = side._requests["a"].parts
    held = Counter([parts[0].id, segment_id(parts[0].id, parts[0].context)])
    side.note(StepResults(copies=held), set())
    assert not chunk_events(side)
    side.note(StepResults(copies=held), set())
    assert chunk_events(side) == {BlockStored: 2}
    side.note(StepResults(copies=Counter({parts[0].id: -1})), set())
    assert chunk_events(side) == {BlockRemoved: 1}
    again = FakeRequest(CHUNKS, name="b")
    side.add(again)
    side.note(StepResults(copies=Counter({parts[0].id: 1})), set())
    assert chunk_events(side) == {BlockStored: 1}


def test_nothing_is_held_once_weights_may_have_changed():
    side = bound(events=True)
    stored_chunks(side, 0, 1, 2)
    events = list(side.take_events())
    assert sum(len(event.block_hashes) for event in events if event.parent_block_hash) + 2 == 121 // BLOCK
    side.reset()
    gone = [block for event in side.take_events() for block in event.block_hashes]
    assert sorted(gone) == sorted(block for event in events for block in event.block_hashes)
    stored_chunks(side, 0)
    assert chunk_events(side) == {BlockStored: 2}


def test_few_tokens_are_kept_of_what_is_never_stored(monkeypatch):
    monkeypatch.setattr(kv_events, "_MOST_UNSTORED_TOKENS", 1000)
    side = bound(events=True)
    for number in range(20):
        ids = [BOS, *range(1000 * number, 1000 * number + 130)]
        request = FakeRequest(CHUNKS, name=str(number), ids=ids)
        side.add(request)
        side.finished(request)
    assert 900 < side._events._waiting_tokens <= 1000
    assert not chunk_events(side)


def test_no_block_is_announced_before_its_parent():
    """Two prompts with the same beginning wait; all of both is stored in one step, or the beginning last."""
    for steps in ((("S", "A", "B"),), (("B",), ("A",), ("S",))):
        side = bound(events=True)
        for name, last in (("a", IDS[91:]), ("b", [*range(300, 339)])):
            side.add(FakeRequest(CHUNKS, name=name, ids=[*IDS[:91], *last]))
        parts = {"S": [side._requests["a"].segments[0]], "A": [side._requests["a"].segments[1]]}
        parts["B"] = [side._requests[name].segments[2] for name in "ab"]
        known: set = set()
        for step in steps:
            side.note(StepResults(copies=Counter(one for name in step for one in parts[name])), set())
            for event in side.take_events():
                assert event.parent_block_hash is None or event.parent_block_hash in known
                known.update(event.block_hashes)
        assert len(known) == 5 + 2 * 2


def test_blocks_of_two_ways_to_cut_a_prompt_stay_while_one_is_stored():
    side = bound(events=True)
    for name, chunks in (("a", CHUNKS), ("b", {"chunks": [[1, 91], [91, 121]]})):
        side.add(FakeRequest(chunks, name=name))
    cut, whole = (side._requests[name].segments for name in "ab")
    side.note(StepResults(copies=Counter([*cut[:2], whole[0]])), set())
    published = {block for event in side.take_events() for block in event.block_hashes}
    side.note(StepResults(copies=Counter({whole[0]: -1})), set())
    assert not list(side.take_events())
    side.note(StepResults(copies=Counter(dict.fromkeys(cut[:2], -1))), set())
    assert {block for event in side.take_events() for block in event.block_hashes} == published
