"""Open-loop load on a real clock: requests arrive at given times, whether or not earlier ones are answered.

A closed loop sends the next request after an answer, so a slower system gets less load, which hides waiting times. Here
all times count from the planned arrival, so a generator that falls behind hides nothing either.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from statistics import fmean
from typing import Any

from chunkweave.calibration.summaries import percentile
from chunkweave.errors import ChunkweaveError, UsageError

Ask = Callable[[int], AsyncIterator[int]]
"""Sends request number n (from 0) and yields the number of new tokens whenever some arrive."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one prompt counted by the server; `cached_tokens` of them were not computed."""

    prompt_tokens: int
    cached_tokens: int


def reuse_of(usages: Sequence[Usage]) -> dict[str, float]:
    """Mean tokens of a prompt, the reused share of all prompts' tokens, and mean computed tokens.

    JSON-able; empty if nothing was counted.
    """
    if not usages:
        return {}
    prompts, cached = sum(one.prompt_tokens for one in usages), sum(one.cached_tokens for one in usages)
    return {
        "prompt_tokens_mean": prompts / len(usages),
        "reused_share": cached / prompts,
        "computed_tokens_mean": (prompts - cached) / len(usages),
    }


@dataclass(frozen=True, slots=True)
class LoadedRequest:
    """One request: its planned arrival and, in seconds from then, the times of its first and last tokens.

    `error` is why there is no answer or only a part of one; None if it is whole.
    """

    arrival_s: float
    ttft_s: float | None
    total_s: float
    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of a run in order of arrival. The run took `duration_s` from its start to its last token.

    `usages` are of the whole answers whose tokens the server has counted, `answers` are the texts of whole answers;
    both in order of completion.
    """

    requests: tuple[LoadedRequest, ...]
    duration_s: float
    usages: tuple[Usage, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def answered(self) -> tuple[LoadedRequest, ...]:
        """Requests with a whole answer; all statistics except the error rate are over these."""
        return tuple(request for request in self.requests if request.error is None)

    @property
    def error_rate(self) -> float:
        """Share of the requests without a whole answer."""
        return 1.0 - len(self.answered) / len(self.requests)

    @property
    def ttft_mean_s(self) -> float:
        """Mean time to the first token; infinite if nothing was answered."""
        return fmean(self._ttfts()) if self.answered else float("inf")

    @property
    def answer_mean_s(self) -> float:
        """Mean time to the last token; infinite if nothing was answered."""
        return fmean(one.total_s for one in self.answered) if self.answered else float("inf")

    @property
    def requests_per_s(self) -> float:
        """Whole answers a second."""
        return len(self.answered) / self.duration_s

    @property
    def offered_per_s(self) -> float | None:
        """Requests a second until the last one was due; None if all were due at once."""
        last_s = self.requests[-1].arrival_s
        return len(self.requests) / last_s if last_s else None

    def ttft_s(self, percent: float) -> float:
        """A percentile of the time to the first token."""
        return percentile(self._ttfts(), percent / 100)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; undefined figures are None."""
        summary: dict[str, Any] = {
            "requests": len(self.requests),
            "error_rate": self.error_rate,
            "duration_s": self.duration_s,
            "offered_per_s": self.offered_per_s,
            "requests_per_s": self.requests_per_s,
            "ttft_mean_s": self.ttft_mean_s if self.answered else None,
            **reuse_of(self.usages),
        }
        for percent in (50, 90, 99):
            summary[f"ttft_p{percent}_s"] = self.ttft_s(percent) if self.answered else None
        return summary

    def _ttfts(self) -> list[float]:
        return [request.ttft_s for request in self.answered if request.ttft_s is not None]


def poisson_arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """`count` arrival times of a Poisson process, in seconds from the start of a run.

    Raises:
        UsageError: the rate is not positive.
    """
    if not rate_per_s > 0:
        raise UsageError(f"a rate must be positive, not {rate_per_s}")
    rng = Random(f"load {seed}")
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(rate_per_s)
        times.append(now_s)
    return times


async def run_load(
    ask: Ask,
    arrivals: Sequence[float],
    *,
    timeout_s: float | None = None,
    errors: tuple[type[Exception], ...] = (ChunkweaveError,),
) -> LoadResult:
    """Send request n at `arrivals[n]` seconds from now, and return when all are answered or have failed.

    Args:
        ask: makes a request; its iterator is closed if it takes too long.
        arrivals: from `poisson_arrivals`, or of a trace; ascending.
        timeout_s: a request that is not answered so long after its arrival has failed.
        errors: exceptions that are failures of a request; others end the run.

    Raises:
        UsageError: no arrivals, or they are not ascending.
    """
    if not arrivals or list(arrivals) != sorted(arrivals) or arrivals[0] < 0:
        raise UsageError("a load needs arrivals, ascending, from 0 seconds on")
    start = time.perf_counter()

    async def one(number: int) -> LoadedRequest:
        return LoadedRequest(arrivals[number], *await _asked(ask, number, start + arrivals[number], timeout_s, errors))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(len(arrivals))]
    return LoadResult(tuple(task.result() for task in tasks), time.perf_counter() - start)


async def _asked(
    ask: Ask, number: int, due: float, timeout_s: float | None, errors: tuple[type[Exception], ...]
) -> tuple[float | None, float, int, str | None]:
    """Seconds to the first and the last token, the number of tokens, and the error."""
    ttft_s, last_s, tokens, error = None, 0.0, 0, None
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    left_s = None if timeout_s is None else due + timeout_s - time.perf_counter()
    try:
        async with asyncio.timeout(left_s):
            pieces = ask(number)
            try:
                async for new in pieces:
                    if new:
                        last_s = time.perf_counter() - due
                        ttft_s = last_s if ttft_s is None else ttft_s
                        tokens += new
            finally:
                if hasattr(pieces, "aclose"):
                    await pieces.aclose()
    except TimeoutError:
        error = f"no answer within {timeout_s:g} s"
    except errors as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and ttft_s is None:
        error = "an answer without a token"
    return ttft_s, last_s if ttft_s is not None else time.perf_counter() - due, tokens, error


SERVED_SHARE, RUN_ANSWERS = 0.95, 20.0
"""A rate is sustained only if this share of it is served, in a run at least this many unloaded answers long."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Most seconds to the first token, on average, and the mean seconds of a whole answer of the unloaded server."""

    ttft_s: float
    answer_s: float

    def is_met(self, run: Mapping[str, Any]) -> bool:
        """Whether a run (`LoadResult.as_dict`) sustained the offered rate.

        A shorter run is not enough: its few requests are answered soon at any rate.
        """
        return bool(
            run["error_rate"] == 0.0
            and run["ttft_mean_s"] <= self.ttft_s
            and run["duration_s"] >= RUN_ANSWERS * self.answer_s
            and run["requests_per_s"] >= SERVED_SHARE * (run["offered_per_s"] or inf)
        )

    def requests(self, rate_per_s: float, least: int) -> int:
        """The number of requests for a long enough run at a rate, with a margin for early arrivals."""
        return max(least, ceil(1.5 * RUN_ANSWERS * self.answer_s * rate_per_s))

    def sustained(self, runs: Iterable[Mapping[str, Any]]) -> tuple[float, float | None]:
        """The highest sustained rate (0 if none), and the lowest one above that was not sustained."""
        offered = [(run["offered_per_s"], self.is_met(run)) for run in runs]
        best = max((rate for rate, met in offered if met), default=0.0)
        return best, min((rate for rate, met in offered if not met and rate > best), default=None)
