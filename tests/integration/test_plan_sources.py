"""The segments of one plan, from memory and from disk."""

import threading
import time

import pytest
import torch

from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.planning.cost import CostModel
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.tiers.preload import Gone
from chunkweave.tiers.segment_file import DiskSegment
from chunkweave.types import Geometry
from chunkweave.weaving.segments import PlanSources, WeavingStore
from chunkweave.weaving.stores import open_store
from tests.integration.segments import FINGERPRINT, make_segment

LAYERS = 3
CPU = torch.device("cpu")
GEOMETRY = Geometry(LAYERS, 8, 4, 2, 8, 16, 64, 256)
SEGMENTS = [make_segment(number, contexts=0) for number in (1, 3)]
PROMPT = Prompt(
    (
        *(PromptPart(PartKind.CHUNK, record.token_ids, record.chunk_id) for record, _ in SEGMENTS),
        PromptPart(PartKind.QUESTION, (5, 6)),
    )
)


@pytest.fixture
def folder(tmp_path):
    """Where both segments lie on disk."""
    store = opened(tmp_path)
    for record, kv in SEGMENTS:
        assert store.insert(record, kv)
    assert store.close()
    return tmp_path


def opened(folder):
    return open_store(StoreConfig(cache_dir=folder), FINGERPRINT, torch.device("cpu"))


@pytest.fixture
def store(folder):
    """Opened over the folder."""
    opened_again = opened(folder)
    yield opened_again
    opened_again.check()
    opened_again.close()


def plan_of(store):
    return make_method("full-reuse", ReuseConfig()).plan(store.lookup(PROMPT), GEOMETRY)


def wait_for(segments: PlanSources) -> None:
    ends_s = time.monotonic() + 10
    while not segments.complete and segments.failure is None:
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def test_what_is_on_disk_comes_in_layer_by_layer(store):
    segments = WeavingStore(store, GEOMETRY, CPU).pin(plan_of(store))
    wait_for(segments)
    for placement, (_, kv) in zip(segments.placements, SEGMENTS, strict=True):
        assert len(placement.span) == kv.tokens
        assert all(torch.equal(placement.segment.layer(layer), kv.layer(layer)) for layer in range(LAYERS))
    for segment, whole in segments.loaded():
        assert store.promote(segment, whole)
    assert [store.tier_of(record.id) for record, _ in SEGMENTS] == ["host", "host"]
    segments.close()
    again = WeavingStore(store, GEOMETRY, CPU).pin(plan_of(store))
    assert again.complete
    assert not list(again.loaded())
    again.close()


def test_one_that_is_gone_is_named_and_the_others_are_not_pinned(folder, store):
    plan = plan_of(store)
    lost = SEGMENTS[1][0].id
    next(folder.rglob(f"{lost}.safetensors")).unlink()
    segments = WeavingStore(store, GEOMETRY, CPU).pin(plan)
    assert [one.segment.name for one in segments.placements if isinstance(one.segment, Gone)] == [lost]
    assert segments.failure.segment == lost
    segments.close()
    assert store.levels[1].store.drop(SEGMENTS[0][0].id)


def test_a_damaged_layer_is_a_failure_that_is_known_beforehand(folder, store):
    plan = plan_of(store)
    path = next(folder.rglob(f"{SEGMENTS[0][0].id}.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    segments = WeavingStore(store, GEOMETRY, CPU).pin(plan)
    wait_for(segments)
    assert segments.failure is not None
    assert segments.failure.segment == SEGMENTS[0][0].id
    assert not segments.complete
    segments.close()


@pytest.mark.parametrize(("share", "kept"), [(2.0, [True, True]), (4.0, [True, False])])
def test_a_plan_takes_what_was_read_ahead_or_will_be_in_sooner_than_it_is_computed(store, monkeypatch, share, kept):
    """Two of the second segment's three layers are in: a third of its loading is left."""
    gate, read = threading.Event(), DiskSegment.layer
    layers: list[int] = []

    def layer(self, index, scratch=None):
        if len(layers) == 2 * LAYERS - 1:
            gate.wait(10)
        layers.append(index)
        return read(self, index, scratch)

    monkeypatch.setattr(DiskSegment, "layer", layer)
    second_s = 10.0  # to compute a token; far longer than a test waits for a layer
    cost = CostModel((0,), (1, 1000), ((second_s, 1000 * second_s),), 1000, {"disk": 1000 / (share * second_s)})
    weaving = WeavingStore(store, GEOMETRY, CPU, cost)
    found, method = store.lookup(PROMPT), make_method("full-reuse", ReuseConfig())
    with weaving.prefetch(weaving.plan(found, method)) as ahead:
        ends_s = time.monotonic() + 10
        while len(layers) < 2 * LAYERS - 1:
            assert time.monotonic() < ends_s
            time.sleep(0.001)
        loading = weaving.loading(ahead)
        plan = weaving.plan(found, method, loading=loading)
        assert [plan.parts[number].segment is not None for number in range(2)] == kept
        assert loading.seconds(SEGMENTS[0][0].id, 100) == 0.0
        assert not any(part.segment for part in weaving.plan(found, method, loading=weaving.loading()).parts)
        pinned = weaving.pin(plan, prefetched=ahead)
        gate.set()
        wait_for(pinned)
        assert [len(list(pinned.loaded())), pinned.failure] == [sum(kept), None]
        pinned.close()
