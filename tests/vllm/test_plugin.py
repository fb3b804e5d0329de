"""The entry point: which vLLM it accepts, and what it changes there."""

import logging
import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from chunkweave.errors import ModelError
from chunkweave.vllm import plugin


def test_the_connector_loads_neither_the_server_nor_the_laboratory():
    code = (
        "import sys, chunkweave.vllm.connector, chunkweave.vllm.plugin; "
        "print([name for name in sys.modules if name.startswith(('chunkweave_server', 'chunkweave_lab'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


@pytest.fixture
def untouched(monkeypatch):
    """As vLLM is before any plug-in."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setattr(plugin, "_loaded_models", [])
    load_model = getattr(BaseModelLoader.load_model, "__wrapped__", BaseModelLoader.load_model)
    monkeypatch.setattr(BaseModelLoader, "load_model", load_model)
    get_spec = getattr(Attention.get_kv_cache_spec, "__wrapped__", Attention.get_kv_cache_spec)
    monkeypatch.setattr(Attention, "get_kv_cache_spec", get_spec)


def test_this_vllm_is_the_supported_one():
    assert plugin.vllm_version() == plugin.SUPPORTED_VLLM
    assert plugin.version_problem(plugin.vllm_version()) is None


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.32.0rc1", "1.0"])
def test_another_version_is_refused_with_the_one_to_install(found):
    problem = plugin.version_problem(found)
    assert f"this is vLLM {found}" in problem
    assert f"works only with vLLM {plugin.SUPPORTED_VLLM}" in problem


def test_registering_makes_the_connector_known_once(untouched):
    plugin.register()
    wrapped = BaseModelLoader.load_model
    plugin.register()
    assert BaseModelLoader.load_model is wrapped
    connector = KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR)
    assert connector.__name__ == plugin.CONNECTOR


def test_with_another_version_vllm_is_left_alone_and_the_connector_refuses(untouched, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.0")
    before = BaseModelLoader.load_model
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm.chunkweave"):
        plugin.register()
    assert "chunkweave's plug-in is off: this is vLLM 0.99.0" in caplog.text
    assert BaseModelLoader.load_model is before
    with pytest.raises(ModelError, match=r"this is vLLM 0\.99\.0"):
        KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR)


def test_the_model_that_was_loaded_last_is_remembered(untouched, monkeypatch):
    monkeypatch.setattr(BaseModelLoader, "load_model", lambda self, name: f"model {name}")
    plugin.register()
    with pytest.raises(ModelError, match="saw no model being loaded"):
        plugin.loaded_model()
    for name in ("one", "two"):
        assert BaseModelLoader.load_model(object(), name) == f"model {name}"
    assert plugin.loaded_model() == "model two"
