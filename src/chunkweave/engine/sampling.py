"""Chooses the next token from logits."""

import torch

from chunkweave.config import SamplingParams


class Sampler:
    """Greedy or nucleus sampling for one request; owns the request's random state."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        elif params.temperature > 0:
            self._generator.seed()

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id from `logits` `[vocab]`; the first of equals when greedy."""
        if self._params.temperature == 0.0:
            return int(logits.argmax())
        behind_best = logits.double().cpu() - logits.max().double().cpu()  # so that no temperature is too low for it
        probabilities = torch.softmax(behind_best / self._params.temperature, dim=-1)
        if self._params.top_p < 1.0:
            probabilities = _nucleus(probabilities, self._params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the fewest most likely tokens, one at least, whose probabilities reach `top_p`."""
    ranked, order = probabilities.sort(descending=True, stable=True)
    outside = ranked.cumsum(0) - ranked >= top_p
    outside[0] = False  # `top_p` may be too small to be told from 0
    return probabilities.index_fill(0, order[outside], 0.0)
