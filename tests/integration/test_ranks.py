"""Heads that are divided over two ranks show what all heads show together, and both ranks see the same."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from chunkweave.config import CaptureConfig, Combine
from chunkweave.fusion.capture import AttentionCapture, FocusWatch, QuestionWatch
from chunkweave.fusion.rows import measure
from chunkweave.models.attention import ALONE, Ranks
from chunkweave.planning.plan import Evidence, KVSource, PartPlan, StopUnfocused, Watch
from chunkweave.prompt.parts import PartKind, PromptPart
from chunkweave.types import PLAIN_SCORES, ChunkId, Geometry, Span

TOKENS, HEADS, KV_HEADS, DIM = 24, 8, 4, 16
GEOMETRY = Geometry(4, 64, HEADS, KV_HEADS, DIM, 64, 100, 128)
CPU = torch.device("cpu")
QUESTION = Span(20, 24)


class Together:
    """Two ranks in two threads that meet wherever they combine something."""

    def __init__(self) -> None:
        self._barrier = Barrier(2)
        self._given: list[torch.Tensor | None] = [None, None]

    def both(self, rank: int, states: torch.Tensor) -> torch.Tensor:
        self._given[rank] = states
        self._barrier.wait(10)
        stacked = torch.stack([given for given in self._given if given is not None])
        self._barrier.wait(10)
        return stacked

    def run(self, work: Callable[[Ranks], object]) -> list[object]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: work(OneOfTwo(rank, self)), range(2)))


class OneOfTwo:
    def __init__(self, rank: int, together: Together) -> None:
        self.rank, self._together = rank, together

    def own_heads(self, num_heads: int) -> range:
        return range(self.rank * num_heads // 2, (self.rank + 1) * num_heads // 2)

    def mean(self, states):
        return self._together.both(self.rank, states).mean(0)

    def maximum(self, states):
        return self._together.both(self.rank, states).amax(0)

    def norm(self, norms):
        return self._together.both(self.rank, norms).pow(2).sum(0).sqrt()


def states(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, DIM, generator=torch.Generator().manual_seed(seed)) * 2


def mine(ranks: Ranks, tensor: torch.Tensor) -> torch.Tensor:
    heads = ranks.own_heads(tensor.shape[-2])
    return tensor[..., heads.start : heads.stop, :]


def agree(work: Callable[[Ranks], object], close: Callable[[object, object], None]) -> None:
    whole = work(ALONE)
    for found in Together().run(work):
        close(found, whole)


@pytest.mark.parametrize("over_heads", list(Combine))
@pytest.mark.parametrize("over_tokens", list(Combine))
def test_question_attention(over_heads, over_tokens):
    def work(ranks: Ranks) -> torch.Tensor:
        watch = QuestionWatch(Watch(QUESTION, (0, 1), over_heads, over_tokens), CPU, ranks=ranks)
        for layer in range(2):
            watch.look(
                mine(ranks, states(layer, 4, HEADS)),
                mine(ranks, states(9 + layer, TOKENS, KV_HEADS)),
                None,
                PLAIN_SCORES,
            )
        return watch.attention

    agree(work, torch.testing.assert_close)


def test_focus():
    chunks = (Span(1, 7), Span(7, 13), Span(13, 20))

    def work(ranks: Ranks) -> list[frozenset[int] | None]:
        watch = FocusWatch(StopUnfocused(chunks, QUESTION, window=1), CPU, ranks=ranks)
        found = []
        for layer in range(4):
            queries, keys = states(layer, 4, HEADS), states(9 + layer, TOKENS, KV_HEADS)
            found.append(watch.look(mine(ranks, queries), mine(ranks, keys), None, PLAIN_SCORES))
        return found

    def same(found: object, whole: object) -> None:
        assert found == whole

    agree(work, same)


@pytest.mark.parametrize("by", list(Evidence))
def test_deviation(by):
    fresh, cached, read = states(0, 6, KV_HEADS), torch.stack([states(1, 6, KV_HEADS)] * 2), torch.rand(6)

    def work(ranks: Ranks) -> torch.Tensor:
        return measure(by, mine(ranks, fresh), mine(ranks, fresh), mine(ranks, cached), read, ranks=ranks)

    agree(work, torch.testing.assert_close)


@pytest.mark.parametrize("heads", [None, 1, 3, 4])
def test_profiles(heads):
    """With one captured head, or three, the ranks have not as many of them; one has none."""
    first, second = (ChunkId(name) for name in "ab")
    parts = (
        PartPlan(PromptPart(PartKind.START, (1,)), Span(0, 1), KVSource.COMPUTED),
        PartPlan(PromptPart(PartKind.CHUNK, tuple(range(9)), first), Span(1, 10), KVSource.COMPUTED),
        PartPlan(PromptPart(PartKind.CHUNK, tuple(range(14)), second), Span(10, 24), KVSource.COMPUTED),
    )

    def work(ranks: Ranks) -> list[float]:
        config = CaptureConfig(layers=None, heads=heads)
        capture = AttentionCapture(parts, GEOMETRY, config, device=CPU, ranks=ranks)
        capture.follow(range(TOKENS), range(TOKENS))
        for layer in range(3):
            assert capture.wants(layer)
            capture.read(layer, mine(ranks, states(layer, TOKENS, HEADS)), mine(ranks, states(9, TOKENS, KV_HEADS)))
        profile = capture.profile(parts[2], range(14))
        assert profile is not None
        return [*profile.inter, profile.intra, profile.sink, *profile.outward]

    agree(work, lambda found, whole: torch.testing.assert_close(torch.tensor(found), torch.tensor(whole)))
