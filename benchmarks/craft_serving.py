"""Engines that serve the same sequence of requests in different orders: for `craft_ordering.py`."""

import fcntl
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chunkweave.calibration.questions import Example
from chunkweave.calibration.summaries import mean_interval
from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.metrics import ReuseReport
from chunkweave.models.loading import LoadedModel
from chunkweave.ordering.ordering import OrderingConfig
from chunkweave.settings import GIB
from chunkweave_lab.summaries import best_scores

FULL = "full"


@dataclass(frozen=True, slots=True)
class Spec:
    """The specification of a contender: `cacheblend`, `prefix+frequency`, `cacheblend+tree-greedy/0`.

    A method, an ordering after `+`, and after `/` the threshold of promotion or, for methods that weave, of
    continuation (default 2 or 4; 0 for none).
    """

    method: str
    ordering: str | None = None
    threshold: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Parse a specification."""
        method, _, rest = text.partition("+")
        ordering, _, threshold = rest.partition("/")
        return cls(method, ordering or None, int(threshold) if threshold else None)

    def config(self, window: int) -> OrderingConfig:
        """The engine's configuration."""
        config = OrderingConfig(self.ordering or "original", window)
        if self.threshold is None:
            return config
        return replace(
            config, promotion_threshold=self.threshold or None, continuation_threshold=self.threshold or None
        )


@dataclass(slots=True)
class Contender:
    """An engine with its own store, and its measurements."""

    name: str
    spec: Spec
    engine: Engine
    reports: list[ReuseReport] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)

    def serve(self, example: Example, max_new_tokens: int, *, counted: bool) -> None:
        """Serve one request; new chunks are stored. Answers of more than one token are scored."""
        order = "free" if self.spec.ordering else "fixed"
        answer = self.engine.generate(
            example.question, example.chunks, max_new_tokens=max_new_tokens, order=order, method=self.spec.method
        )
        if counted:
            self.reports.append(answer.report)
            if example.answers and max_new_tokens > 1:
                self.f1.append(best_scores(answer.text, example.answers)["f1"])


def contenders(
    loaded: LoadedModel, names: Sequence[str], reuse: ReuseConfig, *, window: int, budget_bytes: int = GIB
) -> list[Contender]:
    """`full` first, then each of `names`."""
    made = []
    for name in dict.fromkeys((FULL, *names)):
        spec = Spec.parse(name)
        engine = Engine(loaded, store=StoreConfig(budget_bytes), reuse=reuse, ordering=spec.config(window))
        made.append(Contender(name, spec, engine))
    return made


def serve_all(
    field_of: Sequence[Contender],
    requests: Sequence[Example],
    *,
    warm_up: int,
    max_new_tokens: int,
    alone: bool,
    lock: Path | None = None,
) -> Iterator[int]:
    """Let every contender serve every request, rotating which one is first; yields the number of finished requests.

    The first `warm_up` requests are not counted; `full`, which reuses nothing, skips them. With `alone` every chunk is
    computed context-free in every store before. `lock` is held from the first counted request.
    """
    reusing = [one for one in field_of if one.name != FULL]
    if alone:
        chunks = list(dict.fromkeys(chunk for example in requests for chunk in example.chunks))
        for one in reusing:
            one.engine.precompute(chunks)
    for number, example in enumerate(requests[:warm_up]):
        for one in reusing:
            one.serve(example, max_new_tokens, counted=False)
        yield number + 1
    with nullcontext() if lock is None else held(lock):
        for number, example in enumerate(requests[warm_up:], warm_up):
            for turn in range(len(field_of)):
                one = field_of[(number + turn) % len(field_of)]
                one.serve(example, max_new_tokens, counted=True)
            yield number + 1


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Wait for a file's lock, as `flock` does, and hold it."""
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def row(one: Contender, reference: Contender, partner: Contender) -> dict[str, Any]:
    """A contender's row of the table; `partner` is the same method in the caller's order."""
    times = [report.ttft_s for report in one.reports]
    speedups = [base.ttft_s / own for base, own in zip(reference.reports, times, strict=True)]
    prompt = sum(report.prompt_tokens for report in one.reports)
    found: dict[str, Any] = {
        "method": one.name,
        "ttft_median_s": statistics.median(times),
        "ttft_p10_s": statistics.quantiles(times, n=10)[0],
        "ttft_p90_s": statistics.quantiles(times, n=10)[-1],
        "ttft_mean_s": statistics.fmean(times),
        "speedup_median": statistics.median(speedups),
        "speedup_of_means": statistics.fmean(report.ttft_s for report in reference.reports) / statistics.fmean(times),
        "exact_share": sum(report.prefix_exact_tokens for report in one.reports) / prompt,
        "computed_share": sum(report.computed_tokens + report.recomputed_tokens for report in one.reports) / prompt,
        "flops_share": sum(r.prefill_flops for r in one.reports) / sum(r.full_prefill_flops for r in one.reports),
        "segments": len(one.engine.store),
        "store_bytes": one.engine.store.used_bytes,
    }
    if one.f1:
        found["f1"] = statistics.fmean(one.f1)
        for name, other in (("full", reference), ("original", partner)):
            found[f"f1_minus_{name}"] = paired(one.f1, other.f1)
    return found


def paired(own: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Mean difference with its bootstrap interval, and p of the paired t-test (as CRAFT §3.2); 1 if all are equal."""
    from scipy.stats import ttest_rel

    differences = [a - b for a, b in zip(own, other, strict=True)]
    interval = mean_interval(differences)
    p = float(ttest_rel(own, other).pvalue) if any(differences) else 1.0
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "p": p}


def close(field_of: Sequence[Contender]) -> None:
    """Close all engines."""
    for one in field_of:
        one.engine.close()
