"""Comparisons with vLLM: woven prompts are sent again for full prefill, and the first tokens are compared."""

import asyncio
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chunkweave.conversation.answer import Choice, WholeChoices
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.errors import ChunkweaveError
from chunkweave.planning.evidence import Compared, Evidence
from chunkweave.prompt.parts import Prompt
from chunkweave.types import CacheUse
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.fleet import Fleet

logger = logging.getLogger(__name__)

WOVEN_EVERY = 200
"""One in this many woven answers is compared: it costs a full prefill."""
_MOST_PENDING = 4
_ALTERNATIVES = 20
"""vLLM's default of `--max-logprobs`."""
_LEAST = 1e-9
_AS_IDS = "return_tokens_as_token_ids"


@dataclass(frozen=True, slots=True)
class _Woven:
    """An answer to compare: its prompt, log-probabilities of its first token, its method, and its tenant."""

    prompt: Prompt
    first: Mapping[str, float]
    method: str
    tenant: str
    body: Mapping[str, Any]


class VllmComparisons:
    """Compares one in N woven answers while no request runs or waits. Used in one event loop only.

    A comparison is a request without chunks under a random cache salt, so that vLLM reuses nothing for it, and its KV
    is not reused. Distributions are compared over the most likely tokens; all other tokens count as one.
    """

    def __init__(self, evidence: Evidence, fleet: Fleet) -> None:
        """Nothing is pending. Sets `fleet.on_idle`."""
        self.evidence = evidence
        self.counts = Counter({"compared": 0, "dropped": 0, "failed": 0})
        self._woven = 0
        self._fleet = fleet
        self._pending: deque[_Woven] = deque()
        self._task: asyncio.Task[None] | None = None
        fleet.on_idle = self._begin

    @property
    def pending(self) -> int:
        """Answers that wait for a comparison, or are being compared."""
        return len(self._pending) + (self._task is not None and not self._task.done())

    def alternatives(self, prepared: PreparedRequest) -> int | None:
        """Number of most likely tokens that a request's answer needs if it is to be compared; None if it is not."""
        if not (prepared.choice.learns and prepared.weaves) or prepared.request.cache is not CacheUse.USE:
            return None
        self._woven += 1
        return None if self._woven % WOVEN_EVERY else _ALTERNATIVES

    def offer(self, prepared: PreparedRequest, body: Mapping[str, Any], choice: Choice) -> None:
        """Queue a woven answer if it has the alternatives. Drops it if the queue is full."""
        if not prepared.choice.learns or (body.get("logprobs") or 0) < _ALTERNATIVES:
            return
        tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
        if len(self._pending) >= _MOST_PENDING or not tops or not tops[0]:
            self.counts["dropped"] += 1
            return
        request = prepared.request
        self._pending.append(_Woven(prepared.prompt, tops[0], prepared.choice.spec, request.tenant, body))

    async def drop_all(self) -> None:
        """Drop pending comparisons and stop the running one: a text is removed, which one of them may have."""
        self.counts["dropped"] += len(self._pending)
        self._pending.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Drop all, and begin no more."""
        self._fleet.on_idle = None
        await self.drop_all()

    def _begin(self) -> None:
        if self._pending and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._compare_all(), name="comparisons")

    async def _compare_all(self) -> None:
        while self._pending and not self._fleet.running + self._fleet.waiting:
            woven = self._pending.popleft()
            try:
                self.evidence.take({woven.method: await self._compare(woven)}, woven.tenant)
                self.counts["compared"] += 1
            except (ChunkweaveError, HttpError, LookupError, TypeError) as error:
                logger.warning("a comparison failed; answers are not affected: %s", error)
                self.counts["failed"] += 1

    async def _compare(self, woven: _Woven) -> Compared:
        body = {
            "model": woven.body["model"],
            "prompt": list(woven.prompt.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": _ALTERNATIVES,
            "return_token_ids": True,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(16),
            "stream": True,
            _AS_IDS: woven.body.get(_AS_IDS, False),
        }
        whole = WholeChoices()
        async for event in self._fleet.least_loaded().upstream.complete(body, secrets.token_hex(16)):
            if event.get("choices"):
                whole.add(event["choices"])
        return compare(whole.choices[0]["logprobs"]["top_logprobs"][0], woven.first)


def compare(full: Mapping[str, float], woven: Mapping[str, float]) -> Compared:
    """Compare the most likely first tokens, with their log-probabilities.

    A token of `full` that is missing in `woven` has at most the probability of the least likely token in `woven`, and
    at most that of all others together. The smaller of these bounds is used, so the true divergence is at least the
    result.

    >>> compare({"a": -0.1, "b": -2.4}, {"a": -0.1, "b": -2.4})
    Compared(agreement=1.0, kl=0.0)
    """
    rest_full = max(_LEAST, 1.0 - sum(map(math.exp, full.values())))
    rest_woven = max(_LEAST, 1.0 - sum(map(math.exp, woven.values())))
    unknown = math.log(min(rest_woven, *map(math.exp, woven.values())))
    kl = sum(math.exp(log_p) * (log_p - woven.get(token, unknown)) for token, log_p in full.items())
    kl += rest_full * math.log(rest_full / rest_woven)
    agrees = max(full, key=full.__getitem__) == max(woven, key=woven.__getitem__)
    return Compared(float(agrees), max(0.0, kl))
