"""The connector's configuration, as vLLM hands it over."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from chunkweave.errors import ModelError, UsageError
from chunkweave.vllm import connector
from chunkweave.vllm.connector import ChunkweaveConnector
from tests.vllm.test_scheduler import FakeManager, by


def connect(monkeypatch, extra=None, **text_config) -> ChunkweaveConnector:
    monkeypatch.setattr(connector, "model_fingerprint", lambda _: "model")
    monkeypatch.setattr(connector, "usual_start", lambda _: ())
    monkeypatch.setattr(connector, "model_folder", lambda _: None)
    config = SimpleNamespace(
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}, kv_load_failure_policy="fail"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        model_config=SimpleNamespace(
            model="tiny", hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace(**text_config)
        ),
    )
    made = ChunkweaveConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[]))
    made.bind_kv_cache_manager(FakeManager())
    return made


def reported(made: ChunkweaveConnector, layer: int) -> dict:
    """What is reported of a request that checks this layer."""
    request = by(f"cacheblend:layers={layer}")
    made.on_new_request(request)
    return made.request_finished(request, [])[1]["chunkweave"]


def test_layers_are_checked_against_the_model(monkeypatch):
    made = connect(monkeypatch, num_hidden_layers=4)
    assert "4 layers" in reported(made, 4)["error"]


def test_a_model_that_does_not_tell_its_layers_is_served(monkeypatch):
    made = connect(monkeypatch)
    assert "error" not in reported(made, 40)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "four"])
def test_tokens_of_a_step_must_be_a_whole_number(monkeypatch, tokens):
    with pytest.raises(UsageError, match="weave_step_tokens"):
        connect(monkeypatch, {"weave_step_tokens": tokens})


def test_what_is_to_be_saved_is_copied_before_vllm_frees_its_blocks(monkeypatch):
    """vLLM calls this before it sleeps, from 0.33 on."""
    copied = []
    made = connect(monkeypatch)
    made.unregister_kv_caches()
    made._worker = SimpleNamespace(before_sleep=lambda: copied.append(True))
    made.unregister_kv_caches()
    made.restore_kv_caches()
    assert copied == [True]
    assert made.supports_sleep_mode(SimpleNamespace())


def failing_check(monkeypatch, error: Exception) -> ChunkweaveConnector:
    """A connector whose start-up check raises `error`."""

    def fails():
        raise error

    made = connect(monkeypatch)
    monkeypatch.setattr(connector, "loaded_model", fails)
    return made


@pytest.mark.parametrize(
    ("release", "error"), [(None, ModelError("it is unknown")), ("0.99.0", AttributeError("no layers"))]
)
def test_why_a_worker_weaves_nothing_is_sent(monkeypatch, release, error):
    """On an untested release anything may fail in the start-up check."""
    made, sent = failing_check(monkeypatch, error), []
    monkeypatch.setattr(connector, "untested_release", lambda: release)
    made._reports = SimpleNamespace(send_off=sent.append)
    made.register_kv_caches({})
    assert sent == [str(error)]
    assert made.get_handshake_metadata() is None


def test_a_fault_of_ours_on_a_tested_release_is_not_hidden(monkeypatch):
    made = failing_check(monkeypatch, AttributeError("no layers"))
    with pytest.raises(AttributeError):
        made.register_kv_caches({})
