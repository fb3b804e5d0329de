"""The worker's side with weaves that compute nothing: what it remembers, and that saving cannot end the engine."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from chunkweave.config import StoreConfig
from chunkweave.kv.segment import SegmentKV
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Geometry
from chunkweave.vllm import worker_side
from chunkweave.vllm.messages import SaveOrder, StepOrders, WeaveOrder
from chunkweave.vllm.request import Defaults, WeaveRequest, parse
from chunkweave.vllm.worker_side import WorkerSide

LAYERS, HEADS, HEAD_DIM = 2, 1, 4
GEOMETRY = Geometry(LAYERS, 8, 2, HEADS, HEAD_DIM, 8, 64, 256)
IDS = tuple(range(40))
BLOCKS = (3, 4, 5)


class FakePaged:
    """Blocks that read as zeros, or cannot be read."""

    block_size = kernel_block = 16
    shape = (HEADS, HEAD_DIM)
    dtype = torch.float32
    device = torch.device("cpu")
    broken = False

    def read(self, layer, slots):
        if self.broken:
            raise RuntimeError("the device is out of memory")
        return torch.zeros(2, len(slots), *self.shape)


class FakeJob:
    """A weave that chooses position 21 at layer 1 and notes what it was told to choose."""

    given: ClassVar[list] = []

    def __init__(self, *_args, chosen=None, **_kwargs) -> None:
        self.given.append(chosen)
        self.chosen = {1: torch.tensor([21])}
        self.recomputed = [21]
        self.recompute_work = LAYERS

    def run(self, layers):
        return True


@pytest.fixture
def paged() -> FakePaged:
    return FakePaged()


@pytest.fixture
def side(paged, monkeypatch):
    monkeypatch.setattr(worker_side, "WeaveJob", FakeJob)
    monkeypatch.setattr(FakeJob, "given", [])
    rotation = SimpleNamespace(inverse=lambda keys, _: keys)
    layers = SimpleNamespace(paged=paged, device=paged.device, rotation=rotation)
    made = WorkerSide(layers, GEOMETRY, "model", StoreConfig(), layers_per_step=1)
    yield made
    made.close()


def request(method: str = "cacheblend") -> WeaveRequest:
    params = {"chunks": [[10, 20], [20, 35]], "method": method}
    return parse(params, IDS, fingerprint="model", salt="", bos=None, defaults=Defaults())


def hold(side: WorkerSide, context: tuple = ()) -> None:
    """Let the store hold the request's two chunks as computed behind `context`."""
    for part in list(request().stored_parts())[1:]:
        kv = SegmentKV(torch.zeros(LAYERS, 2, len(part.span), HEADS, HEAD_DIM))
        assert side._store.insert(
            SegmentRecord.of(part.id, context, part.token_ids, exact=not context, nbytes=kv.nbytes), kv
        )


def weave(side: WorkerSide, name: str, first: int = 0) -> None:
    side.step(StepOrders(weaves=[WeaveOrder(name, request(), BLOCKS, first, 35)]))
    arrived, broken, results = side.take_outcome()
    assert (arrived, broken, results.failed) == ({name}, set(), set())
    side.forget([name])


def test_a_weave_behind_cached_blocks_chooses_what_the_whole_one_chose(side):
    hold(side)
    weave(side, "whole")
    weave(side, "rest", first=16)
    nothing, remembered = FakeJob.given
    assert nothing is None
    assert remembered[1].tolist() == [21]


def test_a_choice_is_not_remembered_for_other_segments(side):
    hold(side)
    weave(side, "whole")
    side._store.clear()
    hold(side, context=("elsewhere",))
    weave(side, "rest", first=16)
    assert FakeJob.given == [None, None]


def test_what_cannot_be_read_from_the_blocks_is_not_stored_and_nobody_is_hurt(side, paged, caplog):
    order = SaveOrder("a", request(), BLOCKS, 0, 40, True)
    paged.broken = True
    side.save(StepOrders(saves=[order]))
    assert "not stored" in caplog.text
    assert not len(side._store)
    paged.broken = False
    side.save(StepOrders(saves=[order]))
    assert len(side._store) == 3
    assert side.take_outcome()[2].stored == {part.id for part in request().stored_parts()}


def test_what_is_computed_before_the_first_reused_chunk_is_exact(side):
    hold(side)
    weave(side, "whole")
    system, *chunks = (
        [record for record in side._store.records() if record.chunk_id == part.id] for part in request().stored_parts()
    )
    assert [record.exact for record in system] == [True]
    assert all(record.context == () for records in chunks for record in records)
