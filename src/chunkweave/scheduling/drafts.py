"""Prompt lookup decoding: draft tokens copied from the prompt or the answer so far. No torch here.

Answers over chunks quote them. The tokens that followed an earlier occurrence of the answer's last ones are guessed to
follow again; the model checks all of them in one step, which reads its weights once (Saxena 2023, "Prompt Lookup
Decoding"). Deviations: any match counts, the longest first and the latest among equals; and the number of drafts
follows from what was accepted before and from the measured time of a step.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LONGEST_MATCH = 16
"""Tokens compared at most; longer matches are equally good."""

_PRIOR_ACCEPTED = 1.0
_PRIOR_TRIED = 2.0
"""What a request without drafts is assumed to have: half of its drafts accepted."""

_KEPT = 0.9
"""Factor on a request's counts per match: drafts that failed are tried again when the text has changed."""

_ROW_COST = 0.03
"""Assumed time of one more row before it is measured, as a share of a step; low, so that it is measured."""

_UP = 0.2
_DOWN = 0.4
"""Weights of a new measurement above and below the estimate: what other processes do makes steps only longer."""

_REMEASURED = 32
"""Steps after which a step without drafts is measured again: contexts and the machine's load change."""

_FORGOTTEN = 512
"""Steps after which a measurement is repeated: another process may have delayed it."""


class Drafts:
    """The tokens of one request, searched for earlier occurrences of the last ones; used by one thread."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_tokens = self._count = len(prompt_ids)
        self._tokens = np.array(prompt_ids, dtype=np.int64)
        self._accepted = self._tried = 0.0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft token is accepted if those before it are."""
        return (self._accepted + _PRIOR_ACCEPTED) / (self._tried + _PRIOR_TRIED)

    def find(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow the prompt and `generated`; empty if there is no match.

        `generated` only grows between calls.
        """
        self._add(generated[self._count - self._prompt_tokens :])
        tokens = self._tokens[: self._count]
        if most < 1 or not len(tokens):
            return ()
        matches = np.flatnonzero(tokens[:-1] == tokens[-1])
        for length in range(1, _LONGEST_MATCH):
            longer = matches[matches >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]] if len(tokens) > length else longer[:0]
            if not len(longer):
                break
            matches = longer
        if not len(matches):
            return ()
        self._accepted *= _KEPT
        self._tried *= _KEPT
        follows = int(matches[-1]) + 1
        return tuple(tokens[follows : follows + most].tolist())

    def checked(self, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted; those behind the next were not tried."""
        self._accepted += accepted
        self._tried += min(drafted, accepted + 1)

    def _add(self, more: Sequence[int]) -> None:
        if self._count + len(more) > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[: self._count], np.empty(2 * len(more) + 64, dtype=np.int64)))
        self._tokens[self._count : self._count + len(more)] = more
        self._count += len(more)


class StepCosts:
    """Learns what draft tokens cost a decoding step, in times of the same step without them; used by one thread.

    A few rows more are nearly free where weights are read once for all, but kernels switch at certain numbers of rows.
    So each number is measured.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._plain: dict[int, tuple[float, int]] = {}  # by requests: seconds, step
        self._factors: dict[int, dict[int, tuple[float, int]]] = {}  # by requests and drafts: factor, step

    def ran(self, requests: int, drafted: int, seconds: float) -> None:
        """Record a step of `requests` decoding requests with `drafted` draft tokens in all, and nothing else."""
        self._steps += 1
        if not drafted:
            average, _ = self._plain.get(requests, (seconds, 0))
            self._plain[requests] = _blended(average, seconds), self._steps
            return
        plain_s, _ = self._plain.get(requests, (0.0, 0))
        if plain_s > 0:
            factor = min(max(seconds / plain_s, 1.0), 1.0 + drafted)
            factors = self._factors.setdefault(requests, {})
            average, _ = factors.get(drafted, (1.0 + _ROW_COST * drafted, 0))
            factors[drafted] = _blended(average, factor), self._steps

    def stale(self, requests: int) -> bool:
        """Whether a step of `requests` requests without drafts was not measured recently."""
        return self._steps - self._plain.get(requests, (0.0, -_REMEASURED))[1] >= _REMEASURED

    def allot(self, offers: Sequence[tuple[int, float]], most: int) -> list[int]:
        """How many drafts each request gets, at most `most` in all, so that the step gives most tokens per second.

        Each request offers a number of drafts, with the probability that one is accepted if those before it are.
        """
        requests = len(offers)
        ranked = sorted(
            ((chance**place, index) for index, (count, chance) in enumerate(offers) for place in range(1, 1 + count)),
            reverse=True,
        )[:most]
        expected = requests + np.cumsum([0.0, *(chance for chance, _ in ranked)])
        best = int(np.argmax(expected / self._factors_to(requests, len(ranked))))
        counts = Counter(index for _, index in ranked[:best])
        return [counts[index] for index in range(requests)]

    def _factors_to(self, requests: int, most: int) -> NDArray[np.float64]:
        """Time of a step with 0 to `most` drafts, in times of one without; linear between measured numbers."""
        recent = {
            number: factor
            for number, (factor, step) in self._factors.get(requests, {}).items()
            if self._steps - step < _FORGOTTEN
        }
        counts = np.array([0, *sorted(recent)])
        numbers = np.arange(1 + most)
        factors = np.interp(numbers, counts, [1.0, *(recent[number] for number in sorted(recent))])
        return np.asarray(factors + _ROW_COST * np.maximum(0, numbers - counts[-1]))


def _blended(average: float, measured: float) -> float:
    return average + (_UP if measured > average else _DOWN) * (measured - average)
