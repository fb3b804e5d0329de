"""How much a batching engine takes on at once."""

from dataclasses import dataclass
from math import isfinite

from chunkweave.errors import UsageError
from chunkweave.scheduling.budget import TokenBudget
from chunkweave.scheduling.queue import DEFAULT_WINDOW


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """The limits of a batching engine.

    At most `max_running` requests are worked on, `step_tokens` tokens in a step. The KV of all of them together has
    room for `kv_tokens`, shared out in blocks of `block_tokens`. At most `max_waiting` more wait, each passed over at
    most `window` times. A request that names no deadline gets `deadline_s` seconds (None: any time), and one that was
    not begun within `queue_timeout_s` is given up. A prompt has at most `max_prompt_tokens` (None: as many as fit).

    Speculations run only in steps in which nothing else can, with `speculation_tokens` tokens each (None:
    `step_tokens`; fewer read the weights more often): whoever arrives meanwhile waits for one layer of so many at most.
    Of the next `prefetch_requests` that wait, segments on slow levels are read ahead, `prefetch_bytes` at most at any
    time; 0 reads nothing ahead.
    """

    max_running: int = 8
    step_tokens: int = 512
    kv_tokens: int = 32768
    block_tokens: int = 32
    max_waiting: int = 256
    window: int = DEFAULT_WINDOW
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    max_prompt_tokens: int | None = None
    speculation_tokens: int | None = None
    prefetch_requests: int = 2
    prefetch_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        TokenBudget(tokens=self.step_tokens, max_running=self.max_running)
        if self.speculation_tokens is not None:
            TokenBudget(tokens=self.speculation_tokens, max_running=self.max_running)
        if min(self.prefetch_requests, self.prefetch_bytes) < 0:
            raise UsageError(
                f"{self.prefetch_requests} requests and {self.prefetch_bytes} bytes to prefetch: 0 is least"
            )
        if not 1 <= self.block_tokens <= self.kv_tokens:
            raise UsageError(f"{self.kv_tokens} tokens of KV have no block of {self.block_tokens} tokens")
        if self.max_waiting < 1 or self.window < 0:
            raise UsageError(f"room to wait ({self.max_waiting}) must be at least 1, the window ({self.window}) 0")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise UsageError(f"max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}")
        for name, limit in (("deadline_s", self.deadline_s), ("queue_timeout_s", self.queue_timeout_s)):
            if limit is not None and not (isfinite(limit) and limit > 0):
                raise UsageError(f"{name} must be a positive number of seconds, not {limit}")

    @property
    def tokens_of_speculations(self) -> int:
        """Tokens in a step of speculations: what was asked for, and no more than in any other step."""
        return self.step_tokens if self.speculation_tokens is None else min(self.step_tokens, self.speculation_tokens)
