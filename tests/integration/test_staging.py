"""Device memory of what is sent ahead of its use: within one budget for all requests, and freed."""

import gc
import time

import pytest
import torch

from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.kv.segment import SegmentKV
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers import preload
from chunkweave.tiers.device import Staging
from chunkweave.types import Geometry
from chunkweave.weaving.segments import PlanSources, WeavingStore
from chunkweave.weaving.stores import open_store
from tests.unit.tier_fakes import id_of

LAYERS, HEADS, DIM = 4, 1, 2
GEOMETRY = Geometry(LAYERS, 8, 4, HEADS, DIM, 16, 64, 1 << 17)
CHUNKS, TOKENS = 4, 8192
"""Of one prompt, and of one chunk: 32k tokens in all."""
LAYER_BYTES = 2 * TOKENS * HEADS * DIM * 2
"""Of a chunk."""
CUDA = torch.device("cuda")
"""The store asks for the type only."""


class Device:
    """Counts the copies on it that exist, and those that were ever made."""

    def __init__(self) -> None:
        self.live_bytes = self.most_bytes = self.sent = self.copies = 0

    def send(self, tensors: list[torch.Tensor]) -> "list[Copy]":
        self.copies += len(tensors)
        self.sent += sum(map(len, tensors))  # layers
        self.live_bytes += sum(tensor.nbytes for tensor in tensors)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        return [Copy(tensor, self) for tensor in tensors]


class Copy:
    """Exists until its last reference is gone."""

    def __init__(self, tensor: torch.Tensor, device: Device) -> None:
        self._tensor, self._device = tensor, device

    def receive(self) -> torch.Tensor:
        return self._tensor.clone()

    def __del__(self) -> None:
        self._device.live_bytes -= self._tensor.nbytes


@pytest.fixture(scope="module")
def store():
    made = open_store(StoreConfig(), "model", torch.device("cpu"))
    for prompt in range(4):
        for part in prompt_of(prompt).parts[:-1]:
            kv = SegmentKV(torch.full((LAYERS, 2, TOKENS, HEADS, DIM), float(part.token_ids[0]), dtype=torch.bfloat16))
            assert made.insert(SegmentRecord.of(part.id, (), part.token_ids, exact=False, nbytes=kv.nbytes), kv)
    yield made
    made.close()


def prompt_of(number: int) -> Prompt:
    chunks = (
        PromptPart(PartKind.CHUNK, (10 * number + chunk,) * TOKENS, id_of(f"{number}{chunk}"))
        for chunk in range(CHUNKS)
    )
    return Prompt((*chunks, PromptPart(PartKind.QUESTION, (5, 6))))


def pinned(store, device: Device, staging: Staging, number: int = 0, first: int = 0) -> PlanSources:
    weaving = WeavingStore(store, GEOMETRY, CUDA, send=device.send, staging=staging)
    plan = make_method("full-reuse", ReuseConfig()).plan(store.lookup(prompt_of(number)), GEOMETRY)
    sources = weaving.pin(plan, first=first)
    ends_s = time.monotonic() + 10
    while not sources.complete:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    return sources


def use(sources: PlanSources, prompt: int = 0) -> None:
    """Compute a prompt layer by layer."""
    for layer in range(LAYERS):
        for number, placement in enumerate(sources.placements):
            kv = placement.segment.layer(layer)
            assert kv.unique().tolist() == [float(10 * prompt + number)]


@pytest.mark.parametrize("layers", [0, 1, 5, 7, 1000])
def test_four_prompts_of_32k_tokens_are_sent_within_the_budget(store, layers):
    """The layers of chunks that fit the budget are sent ahead, and further ones when these are used."""
    device, staging = Device(), Staging(layers * LAYER_BYTES)
    prompts = [pinned(store, device, staging, number) for number in range(4)]
    assert device.live_bytes == staging.used_bytes == min(layers, 4 * CHUNKS * LAYERS) * LAYER_BYTES
    for number, sources in enumerate(prompts):
        use(sources, number)
        sources.close()
        assert device.live_bytes == staging.used_bytes
    assert device.most_bytes <= layers * LAYER_BYTES
    assert device.live_bytes == staging.used_bytes == 0
    assert device.sent >= min(layers, 1) * 3 * (CHUNKS * LAYERS - CHUNKS)


@pytest.mark.parametrize(("together", "copies"), [(1, LAYERS), (2, 3), (100, 3)])
def test_later_layers_are_sent_together(store, monkeypatch, together, copies):
    """A copy costs the host time; the first layers are computed while others are sent."""
    monkeypatch.setattr(preload, "_TOGETHER_BYTES", together * LAYER_BYTES)
    device, staging = Device(), Staging()
    sources = pinned(store, device, staging)
    use(sources, 0)
    assert (device.sent, device.copies) == (CHUNKS * LAYERS, CHUNKS * copies)
    assert staging.used_bytes == 0
    sources.close()


def test_of_layers_that_do_not_fit_together_some_are_sent(store):
    device, staging = Device(), Staging(9 * LAYER_BYTES)  # two layers of each chunk, and one more
    sources = pinned(store, device, staging)
    assert device.live_bytes == 9 * LAYER_BYTES
    use(sources)
    sources.close()


def test_what_ends_before_the_first_position_is_not_sent(store):
    device, staging = Device(), Staging()
    sources = pinned(store, device, staging, first=2 * TOKENS)
    assert (device.sent, staging.used_bytes) == (2 * LAYERS, 2 * LAYERS * LAYER_BYTES)
    use(sources)  # a preempted request may need it again
    assert (device.sent, staging.used_bytes) == (2 * LAYERS, 0)
    sources.close()


def test_a_chunk_that_is_also_behind_the_first_position_is_sent(store):
    device = Device()
    sources = pinned(store, device, Staging(), first=2 * TOKENS - 1)
    assert device.sent == 3 * LAYERS
    sources.close()


@pytest.mark.parametrize("how", ["close", "drop_sent"])
def test_closing_frees_what_was_sent_and_not_used(store, how):
    device, staging = Device(), Staging()
    sources = pinned(store, device, staging)
    sources.placements[0].segment.layer(0)
    getattr(sources, how)()
    gc.collect()
    assert (device.live_bytes, staging.used_bytes) == (0, 0)
    use(sources)
    assert device.sent == CHUNKS * LAYERS
    sources.close()


def test_a_prefetch_sends_nothing_before_its_request_runs(store):
    device, staging = Device(), Staging()
    weaving = WeavingStore(store, GEOMETRY, CUDA, send=device.send, staging=staging)
    plan = make_method("full-reuse", ReuseConfig()).plan(store.lookup(prompt_of(0)), GEOMETRY)
    with weaving.prefetch(plan) as ahead:
        while any(ahead.left(segment) for segment in plan.segments()):
            time.sleep(0.001)
        assert device.sent == 0
        sources = weaving.pin(plan, prefetched=ahead, first=TOKENS)
        assert device.sent == 3 * LAYERS
        sources.close()
        assert (device.live_bytes, staging.used_bytes) == (0, 0)
