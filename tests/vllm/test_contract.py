"""What is checked on a release of vLLM that was not tested: each thing that the plug-in relies on is found missing."""

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from chunkweave.vllm.connector import ChunkweaveConnector
from chunkweave.vllm.contract import broken_contract


def test_the_installed_release_has_everything():
    assert broken_contract() is None


def renamed_parameter(patch):
    patch.setattr(BlockHashToBlockMap, "get_one_block", lambda self, block: None)


def missing_function(patch):
    patch.delattr(kv_cache_utils, "get_block_hash")


def missing_field(patch):
    patch.delitem(SchedulerOutput.__annotations__, "preempted_req_ids")
    patch.delattr(SchedulerOutput, "preempted_req_ids", raising=False)  # its default, if it has one


def another_method(patch):
    patch.delattr(KVConnectorBase_V1, "get_transfer_results")


def new_duty(patch):
    patch.setattr(ChunkweaveConnector, "__abstractmethods__", frozenset({"flush_everything"}))


def other_arguments(patch):
    patch.setattr(KVConnectorBase_V1, "request_finished", lambda self, request, block_ids, status: None)


def independent_hashes(patch):
    hashes = kv_cache_utils.hash_block_tokens
    patch.setattr(kv_cache_utils, "hash_block_tokens", lambda fn, _before, tokens, extra=None: hashes(fn, b"-", tokens))


def unsalted_hashes(patch):
    patch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda *_: (None, 0))


def other_requests(patch):
    patch.setattr(Request, "__init__", lambda self, name: None)


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (renamed_parameter, "get_one_block takes no key"),
        (missing_function, "get_block_hash"),
        (missing_field, "SchedulerOutput has no preempted_req_ids"),
        (another_method, "vLLM's connectors have no get_transfer_results"),
        (new_duty, "vLLM's connectors must have flush_everything"),
        (other_arguments, "vLLM gives request_finished of connectors other arguments"),
        (independent_hashes, "does not depend on that of the block before it"),
        (unsalted_hashes, "does not depend on its cache_salt"),
        (other_requests, "TypeError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_missing_is_named(monkeypatch, breaks, reason):
    breaks(monkeypatch)
    assert reason in str(broken_contract())
