"""Shadow checks with vLLM: woven prompts are sent again for full prefill, and both results are compared."""

import asyncio
import logging
import math
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkweave.conversation.answer import Choice, WholeChoices
from chunkweave.errors import ChunkweaveError
from chunkweave.prompt.parts import Prompt
from chunkweave.scheduling.shadow import Divergence, ShadowMonitor
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.fleet import Fleet

logger = logging.getLogger(__name__)


_ALTERNATIVES = 20
"""vLLM's default of `--max-logprobs`."""
_LEAST = 1e-9
_AS_IDS = "return_tokens_as_token_ids"


@dataclass(frozen=True, slots=True)
class _Woven:
    """An answer to check: its prompt, log-probabilities of its first token, and its tokens if decoding was greedy."""

    prompt_ids: tuple[int, ...]
    first: Mapping[str, float]
    token_ids: tuple[int, ...]
    body: Mapping[str, Any]


class VllmShadow:
    """Checks one in N woven answers while no request runs or waits. Used in one event loop only.

    A check is a request without chunks under a random cache salt, so that vLLM reuses nothing for it, and its KV is not
    reused. Distributions are compared over the most likely tokens; all other tokens count as one.
    """

    def __init__(self, monitor: ShadowMonitor, fleet: Fleet) -> None:
        """No checks are pending. Sets `fleet.on_idle`."""
        self.monitor = monitor
        self._fleet = fleet
        self._pending: deque[_Woven] = deque()
        self._task: asyncio.Task[None] | None = None
        fleet.on_idle = self._begin

    @property
    def alternatives(self) -> int:
        """Number of most likely tokens that an answer needs for a check."""
        return _ALTERNATIVES

    @property
    def busy(self) -> bool:
        """Whether checks are running or pending."""
        return bool(self._pending) or (self._task is not None and not self._task.done())

    def offer(self, prompt: Prompt, body: Mapping[str, Any], choice: Choice) -> None:
        """Count a woven answer, and queue it for a check if it is one in N. Drops it if the queue is full."""
        config = self.monitor.config
        tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
        if not self.monitor.wants():
            return
        if len(self._pending) >= config.most_pending or not tops or not tops[0]:
            self.monitor.drop()
            return
        greedy = body.get("temperature") == 0
        tokens = tuple(choice["token_ids"][: config.compared_tokens]) if greedy else ()
        self._pending.append(_Woven(prompt.token_ids, tops[0], tokens, body))

    async def close(self) -> None:
        """Drop pending checks and stop the running one."""
        self._fleet.on_idle = None
        for _ in self._pending:
            self.monitor.drop()
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        if self._pending and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._check_all(), name="shadow checks")

    async def _check_all(self) -> None:
        while self._pending and self._fleet.running + self._fleet.waiting <= self.monitor.config.beside:
            try:
                self.monitor.take(await self._check(self._pending.popleft()))
            except (ChunkweaveError, HttpError, LookupError, TypeError) as error:
                logger.warning("a shadow check failed; answers are not affected: %s", error)
                self.monitor.fail()

    async def _check(self, woven: _Woven) -> Divergence:
        body = {
            "model": woven.body["model"],
            "prompt": list(woven.prompt_ids),
            "max_tokens": max(1, len(woven.token_ids)),
            "temperature": 0,
            "logprobs": self.alternatives,
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
        full = whole.choices[0]
        return compare(full["logprobs"]["top_logprobs"][0], woven.first, full["token_ids"], woven.token_ids)


def compare(
    full: Mapping[str, float], woven: Mapping[str, float], full_ids: Sequence[int], woven_ids: Sequence[int]
) -> Divergence:
    """Divergence of a woven answer from full prefill.

    `full` and `woven` are the most likely first tokens with their log-probabilities. A token of `full` that is missing
    in `woven` has at most the probability of the least likely token in `woven`, and at most that of all others
    together. The smaller of these bounds is used, so the true divergence is at least the result.

    >>> compare({"a": -0.1, "b": -2.4}, {"a": -0.1, "b": -2.4}, [1, 2], [1, 3])
    Divergence(kl=0.0, agrees=True, same_tokens=1, compared_tokens=2)
    """
    rest_full = max(_LEAST, 1.0 - sum(map(math.exp, full.values())))
    rest_woven = max(_LEAST, 1.0 - sum(map(math.exp, woven.values())))
    unknown = math.log(min(rest_woven, *map(math.exp, woven.values())))
    kl = sum(math.exp(log_p) * (log_p - woven.get(token, unknown)) for token, log_p in full.items())
    kl += rest_full * math.log(rest_full / rest_woven)
    same = 0
    for full_id, woven_id in zip(full_ids, woven_ids, strict=False):
        if full_id != woven_id:
            break
        same += 1
    agrees = max(full, key=full.__getitem__) == max(woven, key=woven.__getitem__)
    return Divergence(max(0.0, kl), agrees, same, len(woven_ids))
