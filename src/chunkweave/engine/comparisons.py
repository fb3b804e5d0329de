"""Comparisons: in idle time, answered prompts are woven again and compared with the exact way, token by token."""

import logging
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from chunkweave.config import ReuseConfig
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.engine.decode import DecodeState
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.runner import Decoding, Runner
from chunkweave.fusion.loop import PassInterrupted
from chunkweave.kv.segment import SegmentLost
from chunkweave.planning.cost import prefill_work
from chunkweave.planning.evidence import Compared, Evidence
from chunkweave.planning.method import make_method, one_pass, reuse_exact_prefix
from chunkweave.planning.method_choice import EXACT_METHOD, MethodChooser, MethodRequest
from chunkweave.planning.plan import KVSource, Plan
from chunkweave.prompt.parts import Prompt
from chunkweave.scheduling.budget import BlockPool
from chunkweave.store.index import PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import CacheUse, ChunkId

logger = logging.getLogger(__name__)

COMPARED_TOKENS = 16
"""Most tokens of an answer that are compared."""
SLICE_TOKENS = 256
"""Most tokens of a pass that one step computes, if the pass can be cut. Others stop between two layers."""
WOVEN_EVERY = 200
"""One in this many woven answers is compared: it costs a full prefill."""
SAVED_EVERY = 10
"""The evidence is saved whenever this many answers were compared."""
MOST_PENDING_TOKENS = 1 << 18
"""Most tokens of all prompts that wait; about 40 bytes each."""


def kl_divergence(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergences, in nats, of distributions from expected ones, both as logits `[..., vocab]`."""
    log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (expected, actual))
    return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def compare(expected: torch.Tensor, actual: torch.Tensor) -> Compared:
    """Compare the logits `[tokens, vocab]` of one answer's tokens; a divergence that is no number counts as 1 nat."""
    kl = kl_divergence(expected, actual).nan_to_num(nan=1.0).clamp(0.0, 1.0)
    agrees = expected.argmax(-1) == actual.argmax(-1)
    return Compared(float(agrees.double().mean()), float(kl.mean()))


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """An answered prompt: its first `token_ids`, where its exact prefix ended when it was asked, and its tenant."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    exact_until: int
    tenant: str


class Comparisons:
    """Compares answered prompts while nothing else runs, for the `evidence` of which methods may serve.

    A prompt is computed twice or more often along its own answer's tokens: exactly, which after an exact answer costs
    little because its path is stored, and by each method that the evidence wants. What the answer itself stored is left
    out, so chunks come from other prompts. Only prompts that weaving makes cheaper are compared. Owned by the thread
    that runs the model; a failure is counted and logged, and affects no answer.
    """

    def __init__(self, runner: Runner, chooser: MethodChooser, evidence: Evidence, file: Path | None = None) -> None:
        """No comparisons are pending. `file` keeps the evidence over restarts."""
        self.evidence = evidence
        self._file = file
        evidence.load(file)
        self.compared = self.dropped = self.failed = 0
        """Numbers of answers, by what became of them."""
        self._runner = runner
        self._chooser = chooser
        self._woven = 0
        self._pending: deque[Answered] = deque()
        self._running: Generator[None, None, tuple[dict[str, Compared], str]] | None = None
        self._pool: BlockPool | None = None
        self._interrupt: Callable[[], bool] | None = None

    def __bool__(self) -> bool:
        """Whether any comparison is pending or running."""
        return self.pending > 0

    @property
    def pending(self) -> int:
        """Answers that wait for a comparison, or are being compared. Safe from any thread."""
        return len(self._pending) + (self._running is not None)

    @property
    def pending_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return sum(len(answered.prompt) for answered in self._pending)

    def offer(self, prepared: PreparedRequest, decode: DecodeState) -> None:
        """Queue an answered request, if a learned or calibrated method could have answered it.

        A woven answer is queued one time in `WOVEN_EVERY`; one that finds no room is dropped.
        """
        judged = prepared.choice.learns and prepared.request.cache is CacheUse.USE and prepared.mean is None
        if not judged or not decode.token_ids:
            return
        plan = decode.prefilled.plan
        if plan.tokens(KVSource.REUSED):
            self._woven += 1
            if self._woven % WOVEN_EVERY:
                return
        prompt = prepared.weavable or prepared.prompt
        if self.pending_tokens + len(prompt) > MOST_PENDING_TOKENS:
            self.dropped += 1
            return
        tokens = tuple(decode.token_ids[:COMPARED_TOKENS])
        exact_until = max((span.stop for span in plan.spans(KVSource.EXACT)), default=0)
        self._pending.append(Answered(prompt, tokens, exact_until, prepared.request.tenant))

    def step(self, pool: BlockPool | None = None, interrupt: Callable[[], bool] | None = None) -> None:
        """Run one piece of a comparison, if there is one.

        With a `pool` it borrows KV memory, and ends without a result when a request needs that memory. `interrupt` is
        called before every layer; where it is true, the piece ends there and is repeated later.
        """
        self._interrupt = interrupt
        try:
            if self._running is None and not self._begin(pool):
                return
            assert self._running is not None, "a comparison has begun"
            next(self._running)
        except StopIteration as ended:
            self._take(*ended.value)
        except SegmentLost:
            self._drop_running()
        except Exception:  # the boundary between a comparison and the answers
            logger.warning("a comparison failed; no answer is affected", exc_info=True)
            self.failed += 1
            self._end()

    def run(self) -> None:
        """Run all pending comparisons to their end."""
        while self:
            self.step()

    def drop_all(self) -> None:
        """Drop all pending and running comparisons: the engine ends, or a text is removed, which one of them may have.

        New ones may be offered afterwards.
        """
        self.dropped += len(self._pending)
        self._pending.clear()
        self._drop_running()

    def save(self) -> None:
        """Write the evidence to its file, if it has one."""
        self.evidence.save(self._file)

    def _begin(self, pool: BlockPool | None) -> bool:
        if not self._pending:
            return False
        answered = self._pending.popleft()
        tokens = len(answered.prompt) + len(answered.token_ids)
        if pool is not None and not pool.lend(tokens, self._drop_running):
            self.dropped += 1
            return False
        self._pool = pool
        self._running = self._compare(answered)
        return True

    def _drop_running(self) -> None:
        """End the running comparison: a request needs the memory, or what it reads is gone."""
        self.dropped += self._running is not None
        self._end()

    def _take(self, results: dict[str, Compared], tenant: str) -> None:
        self._end()
        if results:
            self.compared += 1
            self.evidence.take(results, tenant)
            if self.compared % SAVED_EVERY == 0:
                self.save()
        else:
            self.dropped += 1

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.give_back()

    def _compare(self, answered: Answered) -> Generator[None, None, tuple[dict[str, Compared], str]]:
        """Compare one prompt, piece by piece; returns no results if weaving would not have saved anything."""
        lookup = self._runner.store.lookup(answered.prompt)
        before = _as_asked(lookup, answered)
        geometry = self._runner.model.geometry
        exact_work = _work(one_pass(EXACT_METHOD, reuse_exact_prefix(before)), self._runner)
        plans: dict[str, Plan] = {}
        for spec in self.evidence.wanted():
            plan = self._chooser.choose(MethodRequest(spec)).made.plan(before, geometry)
            if plan.tokens(KVSource.REUSED) and _work(plan, self._runner) < exact_work:
                plans[spec] = plan
        if not plans:
            return {}, answered.tenant
        expected = yield from self._logits(answered, one_pass(EXACT_METHOD, reuse_exact_prefix(lookup)))
        results = {}
        for spec, plan in plans.items():
            results[spec] = compare(expected, (yield from self._logits(answered, plan)))
        return results, answered.tenant

    def _logits(self, answered: Answered, plan: Plan) -> Generator[None, None, torch.Tensor]:
        """The logits `[tokens, vocab]` of an answer's tokens, behind its prompt computed by a plan."""
        behind = answered.token_ids[:-1]
        options = PrefillOptions(new_tokens=len(behind), capture=False, plan=plan)
        with self._runner.start(answered.prompt, make_method(EXACT_METHOD, ReuseConfig()), options) as job:
            while job.prefilled is None:
                try:
                    self._runner.step([], [(job, SLICE_TOKENS)], interrupt=self._interrupt)
                except PassInterrupted:
                    logger.debug("a comparison makes way for a request")
                yield
            prefilled = job.prefilled
            try:
                if not behind:
                    return prefilled.logits[None]
                decoding = Decoding(prefilled.cache, behind, len(answered.prompt), len(behind))
                rows = self._runner.step([decoding], [])
                return torch.cat([prefilled.logits[None], rows])
            finally:
                prefilled.cache.free()
                if prefilled.lease is not None:
                    prefilled.lease.release()


def _work(plan: Plan, runner: Runner) -> float:
    placed = plan.prompt_tokens - plan.tokens(KVSource.COMPUTED)
    return prefill_work(plan.passes, runner.model.geometry, placed=placed, prompt_tokens=plan.prompt_tokens)


def _as_asked(lookup: PromptLookup, answered: Answered) -> PromptLookup:
    """A lookup without what the answer to this prompt stored: its own path behind what was stored before."""

    def others(variants: tuple[SegmentRecord, ...], context: tuple[ChunkId, ...]) -> tuple[SegmentRecord, ...]:
        return tuple(record for record in variants if record.context != context)

    parts = zip(lookup.parts, answered.prompt.contexts(), strict=True)
    return PromptLookup(
        tuple(
            entry
            if entry.span.stop <= answered.exact_until
            else replace(entry, exact=None, variants=others(entry.variants, context))
            for entry, context in parts
        )
    )
