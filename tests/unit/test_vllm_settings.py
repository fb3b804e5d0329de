"""Every key of the connector's extra config, and what is said of wrong ones."""

from pathlib import Path

import pytest

from chunkweave import plugins
from chunkweave.config import (
    DEFAULT_MAX_VARIANTS,
    CaptureConfig,
    RequestDefaults,
    StoreConfig,
)
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.settings import GIB, Place, settings_at, settings_of
from chunkweave.vllm.request import SETTINGS, Defaults
from chunkweave.vllm.settings import PluginSettings
from chunkweave_server.settings import GROUPS
from tests.outside import FILE

EVERYTHING = {
    "host_budget": "2GiB",
    "policy": "pgdsf",
    "cache_dir": "/var/cache/kv",
    "disk_budget": "8GiB",
    "remote_url": "redis://localhost:6379",
    "codec": "int8",
    "ttl": "7d",
    "max_variants": 3,
    "weave_step_tokens": 64,
    "method": "cacheblend:ratio=0.2:layers=1",
}


def read(extra, **environment) -> PluginSettings:
    return PluginSettings.from_config(extra, environment)


def test_nothing_said_is_memory_alone():
    settings = read({})
    assert settings.store == StoreConfig(4 * GIB, max_variants=DEFAULT_MAX_VARIANTS)
    assert settings.step_tokens == 256
    assert settings.requests == {}


@pytest.mark.parametrize(("batched", "woven"), [(8192, 1024), (2048, 256), (4, 1)])
def test_a_step_weaves_an_eighth_of_what_it_may_compute(batched, woven):
    assert PluginSettings.from_config({}, {}, most_tokens=batched).step_tokens == woven
    assert PluginSettings.from_config({"weave_step_tokens": 64}, {}, most_tokens=batched).step_tokens == 64


def test_every_key_arrives():
    settings = read(EVERYTHING)
    assert settings.store == StoreConfig(
        2 * GIB,
        "pgdsf",
        cache_dir=Path("/var/cache/kv"),
        disk_budget_bytes=8 * GIB,
        remote_url="redis://localhost:6379",
        codec="int8",
        ttl_s=7 * 86400.0,
        max_variants=3,
    )
    assert settings.step_tokens == 64
    assert settings.requests == {"method": "cacheblend:ratio=0.2:layers=1"}


def test_null_is_no_limit_or_not_given():
    given = read({"max_variants": None, "cache_dir": None, "ttl": None})
    assert given.store == StoreConfig(max_variants=None)


def test_sizes_and_durations_may_be_numbers():
    assert read({"host_budget": 4096, "ttl": 30}).store == StoreConfig(4096, ttl_s=30.0)


def test_the_environment_says_where_to_share_unless_the_config_does():
    secret = {"CHUNKWEAVE_REMOTE_URL": "redis://:password@cache:6379"}
    assert read({}, **secret).store.remote_url == "redis://:password@cache:6379"
    assert read(EVERYTHING, **secret).store.remote_url == "redis://localhost:6379"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"budgets": 1}, r"budgets.*cache_dir.*host_budget.*quality"),
        ({"host_budget": "much"}, "not a size"),
        ({"ttl": "soon"}, "not a duration"),
        ({"max_variants": 1.5}, "max_variants"),
        ({"weave_step_tokens": True}, "weave_step_tokens"),
        ({"cache_dir": 5.5j}, "cache_dir"),
        ({"remote_url": "localhost"}, "URL"),
        ({"policy": "best"}, "eviction policy"),
        ({"codec": "zip"}, "codec"),
        ({"method": "epic:ratio=2"}, "recompute_ratio"),
    ],
)
def test_wrong_values_are_named(extra, message):
    with pytest.raises(UsageError, match=message):
        read(extra)


def test_the_connector_takes_each_setting_that_is_declared_for_it_and_no_other():
    declared = [settings_at(kind, Place.CONNECTOR) for kind in GROUPS.values()]
    known = {name: one for group in declared for name, one in group.items()}
    for name, one in known.items():
        default = one.default
        value = {"method": "full", "ttl": 60.0}.get(name, default)
        settings = read({name: list(value) if isinstance(value, tuple) else value})
        for group in (settings.store, settings.weave):
            if name in settings_of(type(group)):
                assert getattr(group, one.attribute) == value
    with pytest.raises(UsageError, match="there are: " + ", ".join(sorted(known))):
        read({"colour": "red"})


def test_a_misspelt_key_is_refused_with_the_one_that_is_close():
    with pytest.raises(UsageError, match=r"extra_config: colour, host_bugdet \(did you mean host_budget\?\); there"):
        read({"host_bugdet": "2GiB", "colour": "red"})


def test_a_request_may_say_no_more_than_the_connector_does():
    declared = {name for kind in (RequestDefaults, CaptureConfig) for name in settings_of(kind)}
    assert SETTINGS - {"capture"} <= declared  # which keeps profiles from the beginning


def test_a_file_brings_a_method_and_a_policy(tmp_path, monkeypatch):
    """Both are there before the other keys are read, in each of vLLM's processes."""
    monkeypatch.setattr(plugins, "_FILES", {})
    (tmp_path / "chunk_ends.py").write_text(FILE)
    (tmp_path / "first_in.py").write_text("from chunkweave.store.eviction import FIFOPolicy as POLICY\n")
    files = sorted(map(str, tmp_path.iterdir()))
    named = {"method": "chunk-ends", "policy": "first-in"}
    with pytest.raises(UnknownMethodError, match="unknown eviction policy 'first-in'"):
        read(named)
    for _ in range(2):
        settings = read({**named, "method_file": files})
        assert settings.requests == {"method": "chunk-ends"}
        assert settings.store.policy == "first-in"
        assert Defaults.from_config(settings.requests).chooser.choose_usual().method == "chunk-ends"
    with pytest.raises(UsageError, match=r"none.py is not a Python file"):
        read({"method_file": [str(tmp_path / "none.py")]})
    with pytest.raises(UsageError, match="method_file"):
        read({"method_file": 3})
