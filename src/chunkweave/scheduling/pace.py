"""How long the work of steps takes on this machine, learned from the steps that were made. Imports no torch."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import TypeVar

KeyT = TypeVar("KeyT")

LEAST_TOKENS = 16
"""The smallest piece of a prefill beside answers: a smaller one costs a run through the layers for next to nothing."""

_NEWEST = 0.3
"""Share of the newest measurement in an estimate."""

_MOST_CHANGE = 2.0
"""A measurement counts at most so many times the estimate, since a step may have been held up by another process; and
a piece of a prefill has at most so many times the tokens of the largest one that was measured."""

_MOST_WORTH = 100.0
"""A generated token counts as at most so many of a prefill."""

_STALE = 16
"""Measurements of prefills after which what answers take alone is measured anew."""


class StepPace:
    """Estimates of seconds: of a step by the requests that decode in it, and of a prefill by its tokens.

    Prefills have one estimate for slices by position and one for work by layers, which counts as tokens through all
    layers. While nothing was measured decoding takes no time and a piece has `LEAST_TOKENS`. Used by one thread.
    """

    def __init__(self) -> None:
        self._decoding_s: dict[int, float] = {}
        self._since_decoded = _STALE
        self._token_s: dict[bool, float] = {}
        self._largest: dict[bool, int] = {}

    @property
    def stale(self) -> bool:
        """Whether it is long ago, or never was, that a step in which requests only decode was measured."""
        return self._since_decoded >= _STALE

    def decoding_s(self, requests: int) -> float:
        """Seconds of a step in which so many `requests` decode and nothing else runs.

        Between and above the numbers that were measured it is linear, below the smallest proportional: that is too
        little, so fewer requests are let in beside those few, and what these take alone is measured next.
        """
        known = sorted(self._decoding_s)
        if not requests or not known:
            return 0.0
        if requests <= known[0] or len(known) == 1:
            return self._decoding_s[known[0]] * requests / known[0]
        high = min(bisect_left(known, requests), len(known) - 1)
        first, second = known[high - 1], known[high]
        low_s, high_s = self._decoding_s[first], self._decoding_s[second]
        return max(low_s, low_s + (high_s - low_s) * (requests - first) / (second - first))

    def tokens_within(self, seconds: float, *, by_layers: bool) -> int:
        """Tokens of prefills that so many `seconds` have room for, none if they are not positive."""
        most = int(_MOST_CHANGE * self._largest[by_layers]) if by_layers in self._largest else LEAST_TOKENS
        token_s = self._token_s.get(by_layers, 0.0)
        if seconds <= 0:
            return 0
        return most if most * token_s <= seconds else int(seconds / token_s)

    def tokens_worth(self, requests: int, *, least: float) -> float:
        """How many tokens of a prefill take as long as each of so many `requests` takes to decode one.

        It is `least` where less was measured, or nothing, and at most `_MOST_WORTH`.
        """
        token_s = self._token_s.get(False, 0.0)
        worth = self.decoding_s(requests) / requests / token_s if token_s else least
        return min(max(worth, least), _MOST_WORTH)

    def decoded(self, requests: int, seconds: float) -> None:
        """A step in which only so many `requests` decoded took so long."""
        self._decoding_s[requests] = _blended(self._decoding_s, requests, seconds)
        self._since_decoded = 0

    def prefilled(self, tokens: int, seconds: float, *, by_layers: bool) -> None:
        """So many `tokens` of prefills took so long, beside what decoded."""
        self._since_decoded += 1
        self._token_s[by_layers] = _blended(self._token_s, by_layers, max(0.0, seconds) / tokens)
        self._largest[by_layers] = max(tokens, self._largest.get(by_layers, 0))


def _blended(estimates: Mapping[KeyT, float], key: KeyT, measured: float) -> float:
    estimate = estimates.get(key)
    if not estimate:
        return measured
    return (1 - _NEWEST) * estimate + _NEWEST * min(measured, _MOST_CHANGE * estimate)
