"""The rows that a pass starts with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkweave.planning.plan import Pass, TopBy
from chunkweave.types import Scattered, Span


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """`positions` `[rows]`, ascending, on the device, and which rows are `candidates`, ascending.

    `where` are the positions as the host knows them: not if evidence chose some of them. None is at `stop` or behind.
    """

    positions: torch.Tensor
    candidates: torch.Tensor
    stop: int
    where: Sequence[int] | None


def starting_rows(
    a_pass: Pass, tokens: int, device: torch.device, *, evidence: torch.Tensor | None, recomputed: Sequence[Span]
) -> Start:
    """The rows of `a_pass` over a prompt of so many `tokens`.

    If it starts by `evidence` `[tokens]`, that is on the device, and so is the choice: of equal candidates the earlier
    ones; what was `recomputed` before is not chosen again.
    """
    required = torch.zeros(tokens, dtype=torch.bool)
    candidate = torch.zeros(tokens, dtype=torch.bool)
    mark(required, a_pass.required)
    mark(candidate, a_pass.candidates)
    candidate &= ~required
    if a_pass.start is None:
        positions = torch.nonzero(required | candidate).squeeze(1)
        candidates = torch.nonzero(candidate[positions]).squeeze(1)
        where = positions.tolist()
        return Start(positions.to(device), candidates.to(device), where[-1] + 1 if where else 0, where)
    assert evidence is not None, "a pass that starts by evidence is given it"
    done = torch.zeros(tokens, dtype=torch.bool)
    mark(done, recomputed)
    candidate &= ~done
    last = torch.nonzero(required | candidate)[-1:]
    stop = int(last) + 1 if len(last) else 0
    from_which = torch.nonzero(candidate).squeeze(1).to(device)
    order = torch.sort(evidence[from_which], descending=True, stable=True).indices
    chosen = from_which[order[: a_pass.start.count]].sort().values
    positions = torch.cat((torch.nonzero(required).squeeze(1).to(device), chosen)).sort().values
    return Start(positions, torch.searchsorted(positions, chosen), stop, None)


def weighted(evidence: torch.Tensor, a_pass: Pass, start: TopBy) -> torch.Tensor:
    """The evidence times the weights of the candidates; where they are no candidates it does not matter."""
    if not start.weights:
        return evidence
    where = [position for span in a_pass.candidates for position in span.positions()]
    result = evidence.clone()
    result[where] *= evidence.new_tensor(start.weights)
    return result


def mark(flags: torch.Tensor, spans: Sequence[Span | Scattered]) -> None:
    """Set the flags of these positions."""
    for span in spans:
        if isinstance(span, Scattered):
            flags[span.positions()] = True
        else:
            flags[span.start : span.stop] = True
