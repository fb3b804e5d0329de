"""Counters of a batching engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchingStats:
    """What a batching engine does now and has done so far; blocks are those of its KV memory.

    `pending` requests wait for, or are in, prefill: the size of RAGCache's pool. `speculating` are those, waiting or
    running, that were not confirmed yet, `speculations_running` how many of them run. Of what was `preempted`,
    `speculations_preempted` had not been confirmed; `interrupted` are steps of speculations that were stopped between
    two layers, since a request arrived. `prefetched_bytes` are held for requests that wait.
    """

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
    pending: int = 0
    speculating: int = 0
    speculations_running: int = 0
    speculations_preempted: int = 0
    interrupted: int = 0
    prefetched_bytes: int = 0
