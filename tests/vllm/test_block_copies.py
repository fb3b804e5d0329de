"""vLLM's copies of blocks against our reads of them.

Model Runner V2 copies blocks on write before it notifies the connector of preemptions. So the target of a copy must not
be a block that a preempted request has just lost, because our copy of its KV may not have ended. This cannot happen:
only a partial hit of vLLM's prefix cache has a target, and models with such hits are refused. For other models a step
that preempts has no target either, unless a reset has preempted the requests.
"""

import inspect

import pytest
import torch
from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from chunkweave.errors import UnsupportedModelError
from chunkweave.vllm.model_check import check_supported
from tests.vllm.test_unsupported import FULL, WINDOWED, fakes

MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


def test_runner_v2_copies_before_it_notifies_of_preemptions():
    """The reason for this file: if it changes, the other tests are not needed."""
    source = inspect.getsource(GPUModelRunner.execute_model)
    assert source.index("self.update_requests(") < source.index("self.kv_connector.pre_forward(")
    assert "copy_kv_cache_blocks_inplace(" in inspect.getsource(GPUModelRunner.update_requests)


def test_a_step_that_preempts_admits_no_request():
    """Only an admitted request has a partial hit, and with it a target."""
    source = inspect.getsource(Scheduler.schedule)
    admits = source.index("if not preempted_reqs and self._pause_state")
    assert source.index("preempted_reqs.append(") < admits < source.index("new_computed_blocks")


def test_copies_are_for_partial_hits_alone():
    copying = "_pending_cow_copies.append("
    methods = vars(SingleTypeKVCacheManager).items()
    appending = [name for name, one in methods if callable(one) and copying in inspect.getsource(one)]
    assert appending == ["_apply_cow"]
    assert "if request_id in self._partial_hit_reqs" in inspect.getsource(SingleTypeKVCacheManager.allocate_new_blocks)


@pytest.mark.parametrize("spec", [FULL, WINDOWED])
def test_models_that_are_woven_have_no_partial_hits(spec):
    groups = [KVCacheGroupSpec(["layer"], spec)]
    assert not partial_hash_hits_enabled(groups, hash_block_size=spec.block_size // 2)
    assert partial_hash_hits_enabled([*groups, KVCacheGroupSpec(["state"], MAMBA)], hash_block_size=8)


def test_models_with_partial_hits_are_refused():
    with pytest.raises(UnsupportedModelError, match="MambaSpec"):
        check_supported(*fakes(spec=MAMBA))
