"""Shadow checks: in idle time, recompute woven answers by full prefill and compare."""

import logging
from collections import deque
from dataclasses import dataclass

import torch

from chunkweave.config import ReuseConfig
from chunkweave.engine.decode import DecodeState
from chunkweave.engine.prefill import Prefilled, PrefillOptions
from chunkweave.engine.runner import Runner
from chunkweave.planning.methods.positional import FullPrefill
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import Prompt
from chunkweave.scheduling.budget import BlockPool
from chunkweave.scheduling.shadow import Divergence, ShadowMonitor
from chunkweave.store.index import look_up

logger = logging.getLogger(__name__)


def kl_divergence(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Kullback-Leibler divergence, in nats, of one token's distribution from another's, both as logits `[vocab]`."""
    log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (expected, actual))
    return float(torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True))


@dataclass(frozen=True, slots=True, eq=False)
class Woven:
    """A woven answer to check: its prompt, the first token's `logits` `[vocab]`, and its tokens.

    `token_ids` is empty for sampled answers, because greedy decoding need not reproduce them.
    """

    prompt: Prompt
    logits: torch.Tensor
    token_ids: tuple[int, ...]


class ShadowCheck:
    """The check of one answer, piece by piece: full prefill in slices, then greedy decoding while tokens agree.

    It neither reads nor writes the store. It owns its KV cache; close it.
    """

    def __init__(self, runner: Runner, woven: Woven) -> None:
        """Prepare the check; computes nothing."""
        self._runner = runner
        self._woven = woven
        method = FullPrefill(ReuseConfig())
        plan = method.plan(look_up(woven.prompt, (), lambda _: ()), runner.model.geometry)
        options = PrefillOptions(new_tokens=len(woven.token_ids), capture=False, plan=plan)
        self._job = runner.start(woven.prompt, method, options)
        self._prefilled: Prefilled | None = None
        self._same = 0

    def step(self, slice_tokens: int) -> Divergence | None:
        """Compute at most `slice_tokens` of the prompt, or one token of the answer; returns the result at the end."""
        if self._prefilled is None:
            self._runner.step([], [(self._job, slice_tokens)])
            self._prefilled = self._job.prefilled
            return None if self._prefilled is None else self._compare(self._prefilled.logits)
        token = self._woven.token_ids[self._same - 1]
        position = len(self._woven.prompt) + self._same - 1
        return self._compare(self._runner.decode([self._prefilled.cache], [token], [position])[0])

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._job.close()
        if self._prefilled is not None:
            self._prefilled.cache.free()

    def _compare(self, logits: torch.Tensor) -> Divergence | None:
        """Compare the next token with the woven answer's; None while more tokens may agree."""
        tokens = self._woven.token_ids
        if self._same < len(tokens) and int(logits.argmax()) == tokens[self._same]:
            self._same += 1
            if self._same < len(tokens):
                return None
        assert self._prefilled is not None, "there are logits"
        expected = self._prefilled.logits
        actual = self._woven.logits
        agrees = int(expected.argmax()) == int(actual.argmax())
        return Divergence(kl_divergence(expected, actual), agrees, self._same, len(tokens))


class ShadowChecks:
    """The pending shadow checks and the running one. Owned by the thread that runs the model.

    A failed check is counted and logged; it affects no answer.
    """

    def __init__(self, runner: Runner, monitor: ShadowMonitor) -> None:
        """Make an empty queue of checks."""
        self._runner = runner
        self._monitor = monitor
        self._pool: BlockPool | None = None
        self._pending: deque[Woven] = deque()
        self._check: ShadowCheck | None = None

    def __bool__(self) -> bool:
        """Whether any check is pending or running."""
        return self._check is not None or bool(self._pending)

    @property
    def beside(self) -> int:
        """Most active requests beside which a check may run."""
        return self._monitor.config.beside

    def offer(self, decode: DecodeState, *, greedy: bool) -> None:
        """Queue the check of an answered request, if it was woven and is sampled."""
        prefilled = decode.prefilled
        config = self._monitor.config
        if all(part.kv_source is not KVSource.REUSED for part in prefilled.plan.parts) or not self._monitor.wants():
            return
        if len(self._pending) >= config.most_pending:
            self._monitor.drop()
            return
        tokens = decode.token_ids[: config.compared_tokens] if greedy else ()
        try:
            self._pending.append(Woven(prefilled.prompt, prefilled.logits.clone(), tuple(tokens)))
        except Exception:  # the boundary between a check and the answers
            logger.warning("a shadow check could not be queued; no answer is affected", exc_info=True)
            self._monitor.fail()

    def step(self, pool: BlockPool | None = None) -> None:
        """Run one piece of a check, if there is one.

        With a `pool`, the check borrows KV memory from it, and ends without a result when a request needs that memory.
        """
        try:
            if self._check is None and not self._begin(pool):
                return
            assert self._check is not None, "a check has begun"
            divergence = self._check.step(self._monitor.config.slice_tokens)
        except Exception:  # the boundary between a check and the answers
            logger.warning("a shadow check failed; no answer is affected", exc_info=True)
            self._monitor.fail()
            self._end()
            return
        if divergence is not None:
            self._end()
            self._monitor.take(divergence)

    def run(self) -> None:
        """Run all pending checks to their end."""
        while self:
            self.step()

    def close(self) -> None:
        """Drop all pending and running checks."""
        for _ in self._pending:
            self._monitor.drop()
        self._pending.clear()
        if self._check is not None:
            self._taken_back()
            self._end()

    def _begin(self, pool: BlockPool | None) -> bool:
        if not self._pending:
            return False
        woven = self._pending.popleft()
        tokens = len(woven.prompt) + len(woven.token_ids)
        if pool is not None and not pool.lend(tokens, self._taken_back):
            self._monitor.drop()
            return False
        self._pool = pool
        self._check = ShadowCheck(self._runner, woven)
        return True

    def _taken_back(self) -> None:
        """End the running check: a request needs the memory."""
        self._monitor.drop()
        if self._check is not None:
            self._check.close()
            self._check = None

    def _end(self) -> None:
        if self._check is not None:
            self._check.close()
            self._check = None
        if self._pool is not None:
            self._pool.give_back()
            self._pool = None
