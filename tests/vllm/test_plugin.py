"""The entry point: what it changes in vLLM, and what happens on a release that was not tested."""

import logging
import subprocess
import sys

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from chunkweave.errors import ModelError
from chunkweave.vllm import plugin, releases
from chunkweave.vllm.connector import ChunkweaveConnector
from tests.vllm.serving import IN_PROCESS, Ask, serving


def test_the_connector_loads_nothing_of_the_server_the_laboratory_our_engine_and_transformers():
    """vLLM brings its own version of transformers."""
    code = """
import sys, chunkweave.vllm.connector, chunkweave.vllm.plugin, chunkweave.vllm.untested

def of(value):
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]

own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "chunkweave"}
print([name for name in sys.modules if name.startswith(("chunkweave_server", "chunkweave_lab"))])
print([name for name in own if name.startswith(("chunkweave.engine", "chunkweave.models.loading"))])
print([name for name, module in own.items() if "transformers" in map(of, vars(module).values())])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-3:]) == (0, ["[]"] * 3), done.stderr


@pytest.fixture
def untouched(monkeypatch):
    """As vLLM is before any plug-in."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setattr(plugin, "_loaded_models", [])
    load_model = getattr(BaseModelLoader.load_model, "__wrapped__", BaseModelLoader.load_model)
    monkeypatch.setattr(BaseModelLoader, "load_model", load_model)
    get_spec = getattr(Attention.get_kv_cache_spec, "__wrapped__", Attention.get_kv_cache_spec)
    monkeypatch.setattr(Attention, "get_kv_cache_spec", get_spec)


def test_this_vllm_is_a_tested_one():
    assert releases.vllm_version() in releases.TESTED
    assert releases.untested_release() is None


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.34.0rc1", "1.0"])
def test_any_other_version_is_untested(monkeypatch, found):
    monkeypatch.setattr(releases, "version", lambda _: f"{found}+cpu")
    assert releases.untested_release() == found


def test_registering_makes_the_connector_known_once(untouched):
    plugin.register()
    wrapped = BaseModelLoader.load_model
    plugin.register()
    assert BaseModelLoader.load_model is wrapped
    connector = KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR)
    assert connector.__name__ == plugin.CONNECTOR


@pytest.fixture
def untested(untouched, monkeypatch):
    """As on a release that was not tested."""
    monkeypatch.setattr(releases, "version", lambda _: "0.99.0")
    monkeypatch.delitem(sys.modules, "chunkweave.vllm.untested", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    yield
    sys.modules.pop("chunkweave.vllm.untested", None)


def test_on_an_untested_release_that_has_everything_it_is_the_same_connector_with_a_warning(untested, caplog):
    plugin.register()
    with caplog.at_level(logging.WARNING, logger="vllm.chunkweave"):
        connector = KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR)
    assert connector is ChunkweaveConnector
    assert "chunkweave was tested with vLLM 0.32.0 and 0.33.0, not with 0.99.0" in caplog.text


def test_a_release_without_known_connectors_is_left_alone(untested, monkeypatch, caplog):
    monkeypatch.delattr(KVConnectorFactory, "register_connector")
    before = BaseModelLoader.load_model
    with caplog.at_level(logging.WARNING, logger="vllm.chunkweave"):
        plugin.register()
    assert "chunkweave's plug-in is off: it does not know the connectors of vLLM 0.99.0" in caplog.text
    assert BaseModelLoader.load_model is before


def test_the_model_that_was_loaded_last_is_remembered(untouched, monkeypatch):
    monkeypatch.setattr(BaseModelLoader, "load_model", lambda self, name: f"model {name}")
    plugin.register()
    with pytest.raises(ModelError, match="saw no model being loaded"):
        plugin.loaded_model()
    for name in ("one", "two"):
        assert BaseModelLoader.load_model(object(), name) == f"model {name}"
    assert plugin.loaded_model() == "model two"


def test_the_first_request_for_log_probabilities_finds_them_compiled(checkpoint):
    torch._dynamo.reset()  # what engines before it compiled in this process
    with serving(checkpoint("llama"), **IN_PROCESS) as served, torch.compiler.set_stance("fail_on_recompile"):
        for count in (1, 3):
            answers = served.answer(*(Ask([5, 6, 7 + number], top=3) for number in range(count)))
            assert all(answer.log_probs.isfinite().any() for answer in answers)
