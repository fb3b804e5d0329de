"""After vLLM has slept, or its weights were replaced and its caches reset, nothing computed before is used."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu_worker import Worker

from tests.vllm.conftest import SLICED
from tests.vllm.prompts import Given, computed_in_context, tokens
from tests.vllm.serving import IN_PROCESS, Served, serving

TOLERANCE = 5e-4


def reset(served: Served) -> None:
    served.worker("chunkweave_scale_norms", 1.3)
    assert served.llm.reset_prefix_cache(reset_connector=True)


def reset_with_requests(served: Served) -> None:
    """They are preempted, and computed anew."""
    served.send(Given([tokens(40), tokens(90)]).ask(new_tokens=20))
    for _ in range(4):
        served.step()
    served.worker("chunkweave_scale_norms", 1.3)
    assert served.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    served.finish()


def slept(level: int) -> Callable[[Served], None]:
    def sleep(served: Served) -> None:
        served.llm.sleep(level)
        served.worker("chunkweave_scale_norms", 1.3)
        served.llm.wake_up()

    return sleep


WAYS = {"reset": reset, "reset-running": reset_with_requests, "sleep-1": slept(1), "sleep-2": slept(2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def served(checkpoint, folder):
    with serving(checkpoint("llama"), extra={"cache_dir": str(folder)}, **SLICED, **IN_PROCESS) as running:
        yield running


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["full-reuse", "prefix"])
def test_nothing_of_the_old_weights_is_used(served, way, method):
    scenario = computed_in_context()
    prompt = scenario.prompt if method == "full-reuse" else Given(scenario.prompt.chunks)
    scenario.precompute(served)
    old = served.answer(scenario.prompt.ask("full-reuse"), prompt.ask())
    assert old[0].report["reused_tokens"] > 0 or old[0].report["prefix_exact_tokens"] > 0
    assert served.blocks_are_free()  # vLLM resets nothing before that
    WAYS[way](served)
    got = served.answer(prompt.ask(method))[0]
    assert got.report["computed_tokens"] == len(prompt.ids)
    wanted = served.answer(prompt.ask("full"))[0]
    assert (got.log_probs - wanted.log_probs).abs().max().item() <= TOLERANCE
    assert (old[1].log_probs - wanted.log_probs).abs().max().item() > 100 * TOLERANCE, "the weights are others"
    assert served.worker("chunkweave_state")[0]["in_memory"] == len(prompt.chunks), "those of one prompt"
    again = served.answer(prompt.ask(method))[0]
    assert again.report["computed_tokens"] < len(prompt.ids), "what is computed since then is used"
    assert (again.log_probs - wanted.log_probs).abs().max().item() <= TOLERANCE


def test_kv_of_other_weights_is_not_written_where_other_servers_read(served, folder):
    def written() -> int:
        served.worker("chunkweave_flush")
        return sum(1 for path in folder.rglob("*") if path.is_file())

    assert served.blocks_are_free()
    reset(served)
    served.answer(Given([tokens(64)]).ask())
    before = written()
    served.answer(Given([tokens(64)]).ask())
    assert written() == before


def test_kv_to_be_saved_is_copied_before_vllms_workers_sleep(served):
    """From 0.33 on vLLM says so; before, its worker class is wrapped."""
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        worker = resolve_obj_by_qualname(served.llm.llm_engine.vllm_config.parallel_config.worker_cls)
        assert worker.sleep.copies
        assert worker.discard.copies
        return
    for frees, call in (Worker.sleep, "suspend("), (Worker.discard, "discard(tags)"):
        before, found, _ = inspect.getsource(frees).partition(f"self.sleep_mode_backend.{call}")
        assert found
        assert "get_kv_transfer_group().unregister_kv_caches()" in before
