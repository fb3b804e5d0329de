"""The connector's extra config: every key that vLLM's user may give, checked before anything is loaded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkweave.config import StoreConfig
from chunkweave.errors import UsageError
from chunkweave.kv.segment import make_codec
from chunkweave.settings import parse_duration
from chunkweave.store.eviction import make_policy
from chunkweave.vllm.request import SETTINGS, Defaults

REMOTE_URL_VARIABLE = "CHUNKWEAVE_REMOTE_URL"
"""The environment variable that says where segments are shared, so that a password stands in no log of vLLM's."""

_TEXTS = {"host_budget", "policy", "disk_budget", "remote_url", "remote_budget", "codec", "ttl"}
_COUNTS = {"admission", "max_variants", "max_instances"}
_WEAVING = {"step_tokens", "load_timeout", "ask_timeout"}
_KEYS = _TEXTS | _COUNTS | _WEAVING | {"cache_dir"} | SETTINGS


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """What the connector is told: where segments are kept, how weaves share a step, what requests get by default.

    `requests` are the keys that a request may give too, for `Defaults.from_config`. In a step that computes other
    requests too, weaves compute about `step_tokens` tokens through all layers. A request whose segments were not read
    within `load_timeout_s` seconds is computed by vLLM, and so is one for whose chunks the shared tiers were asked for
    `ask_timeout_s` in vain.
    """

    store: StoreConfig
    requests: Mapping[str, Any]
    step_tokens: int = 256
    load_timeout_s: float = 10.0
    ask_timeout_s: float = 0.5

    @classmethod
    def from_config(
        cls, extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ, *, most_tokens: int = 2048
    ) -> "PluginSettings":
        """Read `kv_connector_extra_config`. Without `remote_url` the environment's is used.

        Without `step_tokens` it is an eighth of `most_tokens`, which vLLM computes at most in a step.

        Raises:
            UsageError: an unknown key, or a value that is out of range or of the wrong type.
            UnknownMethodError: no such eviction policy, codec or method.
        """
        unknown = sorted(str(key) for key in extra if key not in _KEYS)
        if unknown:
            known = ", ".join(sorted(_KEYS))
            raise UsageError(f"unknown keys of kv_connector_extra_config: {', '.join(unknown)}; there are: {known}")
        store = _store(extra, environment.get(REMOTE_URL_VARIABLE))
        make_policy(store.policy)  # refused now, not in every worker
        make_codec(store.codec)
        requests = {key: extra[key] for key in SETTINGS & extra.keys()}
        Defaults.from_config({key: value for key, value in requests.items() if key != "quality"})  # that needs a record
        return cls(
            store,
            requests,
            _whole(extra.get("step_tokens", max(1, most_tokens // 8)), "step_tokens"),
            _wait_s(extra.get("load_timeout", "10s"), "load_timeout"),
            _wait_s(extra.get("ask_timeout", "0.5s"), "ask_timeout"),
        )


def _store(extra: Mapping[str, Any], remote_url: str | None) -> StoreConfig:
    given: dict[str, Any] = {} if not remote_url else {"remote_url": remote_url}
    for key in _TEXTS & extra.keys():
        given["store_budget" if key == "host_budget" else key] = _text(extra[key], key)
    for key in _COUNTS & extra.keys():
        limitless = extra[key] is None and key != "admission"
        given[key] = None if limitless else _whole(extra[key], key)
    if extra.get("cache_dir") is not None:
        given["cache_dir"] = Path(_text(extra["cache_dir"], "cache_dir") or "").expanduser()
    return StoreConfig.parse(**given)


def _text(value: Any, key: str) -> str | None:
    """A size or a duration may be given as a plain number too; null is what is not given."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise UsageError(f"{key} must be a text, not {value!r}")
    return None if value is None else str(value)


def _wait_s(value: Any, key: str) -> float:
    wait_s = parse_duration(str(value))
    if wait_s <= 0:
        raise UsageError(f"{key} must be positive")
    return wait_s


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} must be a whole number from 1 on, not {value!r}")
    return value
