"""Adds up what the tokens of a prompt's parts attend to, for the profiles that are stored with their KV."""

from collections.abc import Sequence

import torch

from chunkweave.chunking.prompt import PartKind
from chunkweave.config import CaptureConfig
from chunkweave.fusion.woven_profile import woven_profile
from chunkweave.models.attention_mass import AttentionMeter
from chunkweave.models.flat_attention import KeyParts, Measured
from chunkweave.models.ranks import ALONE, Ranks
from chunkweave.planning.plan import PartPlan
from chunkweave.store.attention_profile import AttentionProfile
from chunkweave.types import ChunkId, Geometry


class AttentionCapture:
    """The attention mass of one prompt's tokens on its parts, summed over the captured layers.

    Owned by the request. Its rows tell it which tokens to follow and show it queries and keys layer by layer; the
    profiles are made from the sums when the request ends. All layers, heads and tokens count alike (DESIGN §5).
    """

    def __init__(
        self,
        parts: Sequence[PartPlan],
        geometry: Geometry,
        config: CaptureConfig,
        *,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """`parts` are all parts of the prompt. Of the captured heads this rank reads its own.

        The last layer is never captured: it is finished for one token only.
        """
        self._parts = tuple(parts)
        below_last = geometry.num_layers - 1
        self._layers = frozenset(evenly_spread(config.layers, below_last))
        here = ranks.own_heads(geometry.num_heads)
        captured = evenly_spread(config.heads, geometry.num_heads)
        heads = tuple(head - here.start for head in captured if head in here)
        self._heads = None if len(heads) == len(here) else heads  # all at once need no copy of their keys
        self._num_heads = len(heads)
        self._ranks = ranks
        self._weight = geometry.num_heads / len(here) * len(heads) / len(captured)
        self._tokens = parts[-1].span.stop
        self._by_part = torch.zeros(self._tokens, len(self._parts), device=device)
        self._received = torch.zeros(self._tokens, device=device)
        self._layers_read: set[int] = set()
        self._totals: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows = self._positions = torch.empty(0, dtype=torch.long, device=device)
        self._where: list[int] = []
        self._key_parts: KeyParts | None = None
        self._meter: AttentionMeter | None = None
        self._marked = self._by_part, self._received
        self.scores = 0
        """Attention weights that one `read` works out: followed tokens by the keys that each sees by heads."""

    def mark(self) -> None:
        """Remember the sums as they are, so that `undo` can go back to them."""
        self._marked = self._by_part.clone(), self._received.clone()

    def undo(self) -> None:
        """Forget what was read since `mark`: the same tokens will be read again."""
        self._by_part, self._received = self._marked
        self._totals = None

    def wants(self, layer: int) -> bool:
        """Whether this layer is captured, and anything is followed."""
        return layer in self._layers and len(self._rows) > 0

    def follow(self, rows: Sequence[int], where: Sequence[int]) -> None:
        """From now on these `rows` of the active ones, which stand at positions `where`, are captured."""
        positions = [where[row] for row in rows]
        if positions != self._where:
            self._meter = None
            self.scores = (sum(positions) + len(positions)) * self._num_heads
            self._where = positions
            self._positions = torch.tensor(positions, dtype=torch.long, device=self._received.device)
        self._rows = torch.tensor(rows, dtype=torch.long, device=self._received.device)

    def read(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, measured: Measured | None = None) -> None:
        """Add one layer of the followed tokens.

        `queries` `[active rows, heads, head_dim]` and `keys` `[positions, kv_heads, head_dim]` are after RoPE; the keys
        start at position 0. `measured` is what the attention kernel summed of the active rows' weights on the way; None
        if it did not, and they are worked out once more.
        """
        self._layers_read.add(layer)
        self._totals = None
        if not self._num_heads:
            return
        if self._meter is None:
            spans = [part.span for part in self._parts]
            self._meter = AttentionMeter(self._positions, spans, heads=self._heads, where=self._where)
        rows = self._rows
        if measured is None:
            mass = self._meter.read(queries[rows], keys)
        else:
            mass = self._meter.finish(
                queries[rows],
                keys,
                by_part=measured.by_part[rows],
                own=measured.own[rows],
                log_sum_exp=measured.log_sum_exp[rows],
            )
        self._by_part.index_add_(0, self._positions, mass.by_part)
        self._received[: len(mass.received)] += mass.received

    @property
    def key_parts(self) -> KeyParts:
        """The part of every key of the prompt, for a kernel that is to sum by part."""
        if self._key_parts is None:
            table = torch.full((self._tokens,), -1, dtype=torch.int32)
            for index, part in enumerate(self._parts):
                table[part.span.start : part.span.stop] = index
            self._key_parts = KeyParts(table.to(self._received.device), len(self._parts))
        return self._key_parts

    def profile(
        self, part: PartPlan, recomputed: Sequence[int], before: AttentionProfile | None = None
    ) -> AttentionProfile | None:
        """The profile of a part that was followed through all layers.

        None if no layer was captured, or if the model's attention is not finite.
        Only the tokens `recomputed` (0 is the part's first) have fresh attention; the others' is carried over from the
        profile `before` of the segment that they came from.
        """
        if not self._layers_read:
            return None
        own = self._parts.index(part)
        earlier = range(own)
        chunks = [index for index in earlier if self._parts[index].part.kind in (PartKind.CHUNK, PartKind.TURN)]
        others = [index for index in earlier if index not in chunks]
        rows = slice(part.span.start, part.span.stop)
        mass = torch.zeros(len(part.span), len(self._parts), dtype=torch.float64)
        by_part, by_all = self._over_ranks()
        mass[list(recomputed)] = (by_part[rows].double() / len(self._layers_read)).cpu()[list(recomputed)]
        received = (by_all[rows].double() / len(self._layers_read)).cpu()
        if not (mass.isfinite().all() and received.isfinite().all()):
            return None
        fresh = AttentionProfile(
            chunks=tuple(_id_of(self._parts[index]) for index in chunks),
            lengths=tuple(len(self._parts[index].span) for index in chunks),
            inter=tuple(mass[:, chunks].sum(0).tolist()),
            intra=float(mass[:, own].sum()),
            sink=float(mass[:, others].sum()),
            outward=tuple(mass[:, chunks].sum(1).tolist()),
            received=tuple(received.tolist()),
        )
        return woven_profile(fresh, before, recomputed)

    def _over_ranks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums over the captured heads of all ranks; they are exchanged once, behind the last layer."""
        if self._totals is None:
            weight = self._weight
            self._totals = self._ranks.mean(self._by_part * weight), self._ranks.mean(self._received * weight)
        return self._totals


def evenly_spread(count: int | None, total: int) -> tuple[int, ...]:
    """`count` of the numbers below `total`, in the middles of as many equal stretches; all if None or too many.

    >>> evenly_spread(4, 14)
    (1, 5, 8, 12)
    """
    if count is None or count >= total:
        return tuple(range(total))
    return tuple((2 * i + 1) * total // (2 * count) for i in range(count))


def _id_of(part: PartPlan) -> ChunkId:
    assert part.part.id is not None, "chunks have ids"
    return part.part.id
