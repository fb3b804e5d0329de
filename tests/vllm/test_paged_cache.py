"""A request's KV for passes, over blocks that are a plain tensor: what goes where, and when it is read back."""

from types import SimpleNamespace

import pytest
import torch

from chunkweave.kv.request_cache import Placement
from chunkweave.kv.segment import SegmentKV
from chunkweave.types import Geometry, Span
from chunkweave.vllm.paged_kv import PagedKV
from chunkweave.vllm.weave import PagedCache

LAYERS, HEADS, DIM, CAPACITY = 2, 1, 2, 20


class FakePaged:
    """Slots as they are; counts what is written and read."""

    shape = (HEADS, DIM)
    dtype = stored_dtype = torch.float32
    quantized = False
    scales_name = ""
    device = torch.device("cpu")
    groups = (0,) * LAYERS

    def __init__(self) -> None:
        self.kv = torch.full((LAYERS, 2, CAPACITY + 10, HEADS, DIM), -1.0)
        self.reads = 0

    def write(self, layer, slots, keys, values):
        self.kv[layer, 0, slots], self.kv[layer, 1, slots] = keys, values

    def place(self, layer, slots, keys, values):
        self.write(layer, slots, keys, values)

    def opened(self, _layer, kv):
        return kv

    def rounded(self, _layer, keys):
        return keys

    def read(self, layer, slots):
        self.reads += 1
        return self.kv[layer][:, slots].clone()

    read_stored = read


def turn(states, positions):
    return states + positions[:, None, None]


def rotate(_layer, states, positions):
    return turn(states, positions)


def turn_between(_layer, states, at, to):
    return states + (to.clamp(min=0) - at.clamp(min=0))[:, None, None]


def slots(positions):
    return positions + 10


def segment(tokens: int, value: float, keys_at: int | None = None) -> SegmentKV:
    kv = torch.full((LAYERS, 2, tokens, HEADS, DIM), value) + torch.arange(LAYERS)[:, None, None, None, None]
    if keys_at is not None:
        kv[:, 0] += torch.arange(keys_at, keys_at + tokens)[:, None, None]
    return SegmentKV(kv, keys_at)


@pytest.fixture
def paged() -> FakePaged:
    return FakePaged()


def cache(paged: FakePaged, *placements, first=0, stop=16, begins=0) -> PagedCache:
    geometry = Geometry(2, HEADS * DIM, HEADS, HEADS, DIM, 4, 8, CAPACITY)
    rotations = SimpleNamespace(turn=turn_between)
    layers = SimpleNamespace(paged=paged, geometry=geometry, rotations=rotations, device=paged.device, num_layers=2)
    table = SimpleNamespace(slots=slots, begins=begins)
    blocks = SimpleNamespace(of=lambda _layer: table, whole=not begins)
    return PagedCache(layers, blocks, placements, first=first, stop=stop, capacity=CAPACITY)


TWO = (Placement(Span(2, 8), segment(6, 100.0)), Placement(Span(10, 18), segment(8, 200.0)))


ROTATED = (
    Placement(Span(2, 8), segment(6, 100.0, keys_at=2)),
    Placement(Span(10, 18), segment(8, 200.0, keys_at=30)),
)
"""The same; the first is where it was computed."""


def row_of(made: PagedCache, layer: int) -> tuple[list[float], list[float]]:
    keys, values = made.view(layer, CAPACITY)
    return keys[:, 0, 0].tolist(), values[:, 0, 0].tolist()


@pytest.mark.parametrize("placements", [TWO, ROTATED, (TWO[0], ROTATED[1]), (ROTATED[0], TWO[1])])
def test_a_layer_is_laid_out_with_keys_turned_to_their_positions(paged, placements):
    made = cache(paged, *placements)
    made.load_layer(1, rotate)
    keys, values = row_of(made, 1)
    assert keys[2:8] == [101.0 + position for position in range(2, 8)]
    assert keys[10:18] == [201.0 + position for position in range(10, 18)]
    assert values[10:18] == [201.0] * 8
    assert paged.kv[1, 0, 12:18, 0, 0].tolist() == keys[2:8]
    assert paged.kv[1, 1, 20:26, 0, 0].tolist() == [201.0] * 6
    assert (paged.kv[1, :, 26:] == -1).all()  # from `stop` on there are no blocks
    assert paged.reads == 0


@pytest.mark.parametrize("first", [0, 5])
def test_keys_that_stay_where_they_were_computed_are_not_turned(paged, monkeypatch, first):
    made = cache(paged, ROTATED[0], Placement(Span(10, 18), segment(8, 200.0, keys_at=10)), first=first)
    monkeypatch.setattr(made._rotations, "turn", None)
    made.load_layer(0, rotate)
    made.fill(1, torch.arange(6))
    assert row_of(made, 0)[0][10:18] == [200.0 + position for position in range(10, 18)]


def test_what_a_pass_wrote_stays_for_the_next_one(paged):
    made = cache(paged, *TWO)
    made.load_layer(0, rotate)
    fresh = torch.full((3, HEADS, DIM), 7.0)
    made.write(0, torch.tensor([3, 11, 17]), fresh, fresh)
    assert [row_of(made, 0)[0][position] for position in (3, 11, 17)] == [7.0] * 3
    made.load_layer(1, rotate)
    made.load_layer(0, rotate)
    keys, _ = row_of(made, 0)
    assert (keys[3], keys[4], keys[11]) == (7.0, 104.0, 7.0)
    assert keys[17] == 217.0  # a layer at a time: behind `stop` nothing is kept
    assert paged.reads == 1


def test_what_has_left_a_window_is_laid_out_anew_for_every_pass(paged):
    made = cache(paged, *TWO, begins=6)
    made.load_layer(0, rotate)
    made.write(0, torch.tensor([0, 3, 11]), torch.full((3, HEADS, DIM), 7.0), torch.full((3, HEADS, DIM), 8.0))
    assert (paged.kv[0, :, :16] == -1).all(), "there are no blocks before position 6"
    written = [106.0, 107.0, -1, -1, 210.0, 7.0, *(200.0 + position for position in range(12, 16)), -1, -1]
    assert paged.kv[0, 0, 16:28, 0, 0].tolist() == written
    made.load_layer(1, rotate)
    made.load_layer(0, rotate)
    keys, values = row_of(made, 0)
    assert (keys[0], keys[3], keys[11]) == (7.0, 7.0, 7.0), "what an earlier pass computed is held"
    assert (values[0], values[3], values[4]) == (8.0, 8.0, 100.0)
    assert keys[2:8] == [102.0, 7.0, 104.0, 105.0, 106.0, 107.0]
    assert keys[12:18] == [200.0 + position for position in range(12, 18)]


def test_a_pass_that_needs_no_row_fills_what_has_blocks(paged):
    made = cache(paged, *TWO, begins=6)
    made.fill(0, torch.arange(14))
    written = (paged.kv[0, 0, :, 0, 0] != -1).nonzero().squeeze(1).tolist()
    assert written == [16, 17, *range(20, 26)]


def test_what_lies_before_the_first_position_comes_from_the_blocks(paged):
    paged.kv[0, :, 10:15] = 55.0
    made = cache(paged, *TWO, first=5)
    made.load_layer(0, rotate)
    keys, _ = row_of(made, 0)
    assert keys[:5] == [55.0] * 5
    assert keys[5:8] == [105.0, 106.0, 107.0]
    assert made.cached.tolist() == [5, 6, 7, *range(10, 18)]
    assert (paged.kv[0, :, 12:15] == 55).all()


@pytest.mark.parametrize("placements", [TWO, ROTATED])
def test_a_pass_that_needs_no_row_fills_what_it_does_not_compute(paged, placements):
    made = cache(paged, *placements)
    made.fill(0, torch.tensor([0, 1, 6, 13]))
    written = (paged.kv[0, 0, :, 0, 0] != -1).nonzero().squeeze(1).tolist()
    assert written == [12, 13, 20]  # the last place lies behind `stop`
    assert paged.kv[0, 0, [12, 13, 20], 0, 0].tolist() == [102.0, 103.0, 210.0]
    made.fill(0, torch.tensor([2]))
    assert paged.kv[0, 0, 14, 0, 0] == -1, "a layer is filled once: a later pass must not undo an earlier one"


@pytest.mark.parametrize("placements", [TWO, ROTATED, (TWO[0], ROTATED[1])])
def test_cached_kv_is_found_by_position(paged, placements):
    found = cache(paged, *placements, first=3).cached_before_rope(1, torch.tensor([4, 12, 17]))
    assert found[0, :, 0, 0].tolist() == [101.0, 201.0, 201.0]


def test_hidden_rows_are_finite_and_leave_the_blocks_alone(paged):
    made = cache(paged)
    made.load_layer(0, rotate)
    made.clear(0, torch.tensor([4, 5]))
    assert row_of(made, 0)[0][4:6] == [0.0, 0.0]
    assert (paged.kv == -1).all()


def test_one_layer_is_at_hand(paged):
    made = cache(paged, *TWO)
    made.load_layer(0, rotate)
    with pytest.raises(AssertionError):
        made.view(1, 4)


class Backend:
    """An attention layer whose blocks have keys by dim and values by token, or both with the tokens' halves swapped."""

    num_kv_heads, head_size, tokens = 2, 4, 8

    def __init__(self, *, affine: bool, by_token: bool) -> None:
        self.impl = self
        self.affine = affine
        shape = (6, self.tokens, 2, 2 * self.head_size) if by_token else (6, 2, self.tokens, 2 * self.head_size)
        self.kv_cache = torch.zeros(shape)
        if by_token:
            self.kv_cache = self.kv_cache.transpose(1, 2)

    def do_kv_cache_update(self, _layer, keys, values, cache, slots):
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            block, row = divmod(slot, self.tokens)
            if self.affine:
                by_dim = cache[block].reshape(2, 2 * self.head_size, self.tokens)
                by_dim[:, : self.head_size, row] = key
                cache[block] = by_dim.view(2, self.tokens, 2 * self.head_size)
                halves = cache[block].reshape(2, 2, self.tokens, self.head_size)
                halves[:, 1, row] = value
                cache[block] = halves.view(2, self.tokens, 2 * self.head_size)
            else:
                cache[block, :, row ^ 5] = torch.cat((value, key), dim=-1)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_what_a_backend_wrote_is_read_however_it_lays_it_out(affine, by_token):
    layers = [Backend(affine=affine, by_token=by_token) for _ in range(2)]
    paged = PagedKV(layers, block_size=8)
    where = torch.tensor([3, 40, 11, 12, 7])
    keys, values = torch.randn(2, len(where), 2, 4)
    paged.write(1, where, keys, values)
    assert torch.equal(paged.read(1, where), torch.stack((keys, values)))
    assert not paged.read(0, where).any()
