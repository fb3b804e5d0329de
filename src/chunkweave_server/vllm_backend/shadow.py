"""The shadow check before vLLM: a woven prompt is sent again, to be prefilled in full, and both are compared."""

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
from chunkweave.scheduling.shadow import Divergence, ShadowMonitor
from chunkweave_server.errors import HttpError
from chunkweave_server.vllm_backend.fleet import Fleet, Placed

logger = logging.getLogger(__name__)


_ALTERNATIVES = 20
"""As many as vLLM gives unless it was started with another `--max-logprobs`."""
_LEAST = 1e-9
_AS_IDS = "return_tokens_as_token_ids"


@dataclass(frozen=True, slots=True)
class _Woven:
    """An answer to be checked: its prompt, what it said of its first token, and its tokens if they were greedy."""

    prompt_ids: tuple[int, ...]
    first: Mapping[str, float]
    token_ids: tuple[int, ...]
    body: Mapping[str, Any]


class VllmShadow:
    """Checks one in N woven answers when there is nothing else to do. Belongs to one event loop.

    A check is a request without chunks under a cache salt of its own, so that vLLM reuses nothing for it and nobody
    reuses what it leaves. Distributions are compared over the most likely tokens, all others as one.
    """

    def __init__(self, monitor: ShadowMonitor, fleet: Fleet) -> None:
        """Nothing to check yet."""
        self.monitor = monitor
        self._fleet = fleet
        self._pending: deque[_Woven] = deque()
        self._task: asyncio.Task[None] | None = None
        fleet.on_idle = self._begin

    @property
    def alternatives(self) -> int:
        """Most likely tokens that an answer must come with to be checked."""
        return _ALTERNATIVES

    @property
    def busy(self) -> bool:
        """Whether answers are checked now, or are to be."""
        return bool(self._pending) or (self._task is not None and not self._task.done())

    def offer(self, placed: Placed, body: Mapping[str, Any], choice: Choice) -> None:
        """A request was answered by weaving; if its turn has come, it waits to be checked."""
        config = self.monitor.config
        tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
        if not self.monitor.wants():
            return
        if len(self._pending) >= config.most_pending or not tops or not tops[0]:
            self.monitor.drop()
            return
        greedy = body.get("temperature") == 0
        tokens = tuple(choice["token_ids"][: config.compared_tokens]) if greedy else ()
        self._pending.append(_Woven(placed.prompt.token_ids, tops[0], tokens, body))

    async def close(self) -> None:
        """Drop whatever is left."""
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
                logger.warning("a shadow check failed; no answer is concerned: %s", error)
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
    """How far a woven answer strayed.

    `full` and `woven` are the most likely first tokens with their log-probabilities. Where one of the former is not
    among the latter it has at most what the least of these has, and at most what all others have together: that is
    taken, so that the divergence is at least the one computed here.

    >>> compare({"a": -0.1, "b": -2.4}, {"a": -0.1, "b": -2.4}, [1, 2], [1, 3])
    Divergence(kl=0.0, agrees=True, same_tokens=1, compared_tokens=2)
    """
    rest_full = max(_LEAST, 1.0 - sum(map(math.exp, full.values())))
    rest_woven = max(_LEAST, 1.0 - sum(map(math.exp, woven.values())))
    unknown = math.log(min(rest_woven, *map(math.exp, woven.values())))
    kl = sum(math.exp(log_p) * (log_p - woven.get(token, unknown)) for token, log_p in full.items())
    kl += rest_full * math.log(rest_full / rest_woven)
    same = 0
    for one, other in zip(full_ids, woven_ids, strict=False):
        if one != other:
            break
        same += 1
    agrees = max(full, key=full.__getitem__) == max(woven, key=woven.__getitem__)
    return Divergence(max(0.0, kl), agrees, same, len(woven_ids))
