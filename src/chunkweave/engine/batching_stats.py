"""Counters of a batching engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchingStats:
    """What a batching engine does now and has done so far; blocks are those of its KV memory."""

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    blocks_reserved: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    timed_out: int = 0
    failed: int = 0
    tried_again: int = 0
    preempted: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
