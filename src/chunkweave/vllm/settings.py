"""The connector's extra config: every key, checked before anything is loaded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from chunkweave.config import (
    FindConfig,
    PluginConfig,
    RequestDefaults,
    StoreConfig,
    WeaveConfig,
)
from chunkweave.errors import UsageError, unknown_names
from chunkweave.kv.segment import make_codec
from chunkweave.planning.cost import given_cost_model
from chunkweave.settings import Place, from_mapping, settings_at
from chunkweave.store.eviction import make_policy
from chunkweave.vllm.request import SETTINGS, Defaults

REMOTE_URL_VARIABLE = "CHUNKWEAVE_REMOTE_URL"
"""Environment variable for `remote_url`: vLLM logs its config, and a URL may hold a password."""

LOAD_TIMEOUT_S = 10.0
"""Maximum wait for segments, and for chunks that another request computes; then vLLM prefills normally."""

_GROUPS = (PluginConfig, StoreConfig, WeaveConfig, FindConfig, RequestDefaults)
_KNOWN = {name: setting for kind in _GROUPS for name, setting in settings_at(kind, Place.CONNECTOR).items()}


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """Settings of the store, weaves' share of a step, and finding chunks; `requests` is for `Defaults.from_config`."""

    store: StoreConfig
    weave: WeaveConfig
    requests: Mapping[str, Any]
    finding: FindConfig
    step_tokens: int
    """`weave.weave_step_tokens`, or its default for this vLLM."""

    @classmethod
    def from_config(
        cls, extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ, *, most_tokens: int = 2048
    ) -> "PluginSettings":
        """Read `kv_connector_extra_config`; `remote_url` defaults to the environment's.

        `weave_step_tokens` defaults to an eighth of `most_tokens`, vLLM's maximum per step.

        Raises:
            UsageError: an unknown key, or a value that is out of range or of the wrong type.
            UnknownMethodError: no such eviction policy, codec or method.
        """
        if unknown := unknown_names(extra, {*_KNOWN, *SETTINGS}):
            known_keys = ", ".join(sorted(_KNOWN))
            raise UsageError(f"unknown keys of kv_connector_extra_config: {unknown}; there are: {known_keys}")
        url = environment.get(REMOTE_URL_VARIABLE)
        values = ({"remote_url": url} if url else {}) | dict(extra)
        from_mapping(PluginConfig, values)  # first: other settings may name plug-ins in its files
        store = from_mapping(StoreConfig, values)
        if store.cache_dir is not None:
            store = replace(store, cache_dir=store.cache_dir.expanduser())
        make_policy(store.policy)  # raise here, not in every worker
        make_codec(store.codec)
        given_cost_model(store.cost_model, None)
        requests = {key: values[key] for key in SETTINGS & values.keys() if values[key] is not None}
        Defaults.from_config({key: value for key, value in requests.items() if key != "quality"})  # that needs a record
        weave = from_mapping(WeaveConfig, values)
        finding = from_mapping(FindConfig, values)
        return cls(store, weave, requests, finding, weave.weave_step_tokens or max(1, most_tokens // 8))
