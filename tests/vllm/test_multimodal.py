"""Text prompts of models whose prompts may have images, against a reference of their language models."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from tests.vllm.checkpoints import MULTIMODAL, make_checkpoint
from tests.vllm.environment import ENVIRONMENT
from tests.vllm.reference_families import reference_of
from tests.vllm.serving import IN_PROCESS, serving
from tests.vllm.test_families import agree, agree_exactly

STAND_INS = str(Path(__file__).parent / "stand_ins")


@pytest.fixture(scope="module")
def environment():
    """A vLLM that takes text only, without torchvision and without a checkpoint's image processor.

    vLLM wants the processor of every model with a KV connector, for images that were computed elsewhere. And where
    torchvision is not installed, another module of that name is found, here and in vLLM's processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "_resolve_mm_embedding_inputs", lambda _config: None)
        if find_spec("torchvision") is not None:
            yield IN_PROCESS["environment"]
            return
        patch.setattr(sys, "path", [*sys.path, STAND_INS])
        yield {**IN_PROCESS["environment"], "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], STAND_INS])}


@pytest.fixture(scope="module", params=MULTIMODAL)
def family(request, tmp_path_factory, environment):
    """A server that takes text only, and what its language model computes."""
    folder = make_checkpoint(tmp_path_factory.mktemp("family"), request.param)
    options = {**IN_PROCESS, "environment": environment, "language_model_only": True}
    with serving(folder, max_num_batched_tokens=64, max_num_seqs=16, **options) as served:
        assert served.worker("chunkweave_state")[0]["weaves"]
        yield served, reference_of(folder)


@pytest.mark.parametrize("case", ["nothing", "some", "all"])
def test_first_tokens_and_chosen_positions(family, case):
    agree(*family, None, case)


def test_plain_requests_and_exact_prefixes(family):
    agree_exactly(*family, None)
