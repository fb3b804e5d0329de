"""`chunkweave vllm-check`, and the table of what is woven in docs/vllm.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chunkweave.errors import UsageError
from chunkweave.vllm import check as checking
from chunkweave.vllm.architectures import ARCHITECTURES, RUN_BY_TRANSFORMERS
from tests.vllm.support import FLAGS, NOT_WOVEN
from tests.vllm.test_families import FAMILIES
from tests.vllm.test_more_families import MORE_FAMILIES

NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], None),
        (["--speculative-config", NGRAM], None),
        (["--kv-cache-dtype", "fp8"], None),
        (["--pipeline-parallel-size", "2"], "pipeline parallelism"),
    ],
    ids=["none", "ngram", "fp8", "pipeline"],
)
def test_it_says_what_the_worker_says(checkpoint, flags, reason):
    found = checking.check(str(checkpoint("llama")), [*flags, "--max-model-len", "512", "--port", "1"])
    assert (found.architecture, found.tested, found.not_read) == ("LlamaForCausalLM", True, ("--port", "1"))
    assert found.woven == (reason is None)
    assert reason is None or reason in found.reasons[0]


def test_a_class_that_is_not_known_is_named(checkpoint):
    found = checking.check(str(checkpoint("olmo")), ["--max-model-len", "512"])
    assert "the architecture is not one of LlamaForCausalLM" in found.reasons[0]


def test_what_vllm_refuses_is_said(checkpoint):
    with pytest.raises(UsageError, match="vLLM does not take these flags: argument --max-model-len"):
        checking.check(str(checkpoint("llama")), ["--max-model-len", "long"])


def test_an_untested_release_that_lacks_something_is_not_woven(checkpoint, monkeypatch):
    monkeypatch.setattr(checking, "untested_release", lambda: "0.99.0")
    monkeypatch.setattr(checking, "broken_contract", lambda: "vllm.x has no y")
    found = checking.check(str(checkpoint("llama")), [])
    assert not found.tested
    assert "does not work with it (vllm.x has no y)" in found.reasons[0]


def test_the_command_ends_with_one_where_nothing_is_woven():
    command = [sys.executable, "-m", "chunkweave", "vllm-check", "reader", "--pipeline-parallel-size", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["woven"], said["architecture"]) == (1, False, "LlamaForCausalLM")


def test_each_flag_of_the_table_names_the_file_that_tries_it():
    assert all((Path(__file__).parent / flag.test).is_file() for flag in FLAGS)
    assert NOT_WOVEN


def test_every_family_that_vllm_runs_by_transformers_is_tried():
    tried = {name.split()[0] for name in (*FAMILIES, *MORE_FAMILIES)}
    assert RUN_BY_TRANSFORMERS.keys() <= tried
    assert len(tried - RUN_BY_TRANSFORMERS.keys()) >= len(ARCHITECTURES) - 4, (
        "Llama, Qwen2 and Qwen3 are tried elsewhere"
    )
