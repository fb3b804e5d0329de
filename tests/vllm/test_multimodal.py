"""Text prompts of models whose prompts may have images, against a reference of their language models."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from tests.vllm.checkpoints import MULTIMODAL, make_checkpoint
from tests.vllm.environment import ENVIRONMENT
from tests.vllm.prompts import computed_alone
from tests.vllm.reference_families import reference_of
from tests.vllm.serving import IN_PROCESS, serving

TOLERANCE = 5e-4
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


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_first_tokens_and_chosen_positions(family, ratio):
    served, reference = family
    scenario = computed_alone()
    wanted = reference.weave(scenario.pieces(reference), "cacheblend", ratio)
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask("cacheblend", ratio))[0]
    assert got.report["effective_method"] == "cacheblend"
    assert got.report["recomputed"] == wanted.recomputed
    assert (got.log_probs[0] - wanted.log_probs).abs().max().item() <= TOLERANCE


def test_plain_requests_and_exact_prefixes(family):
    served, reference = family
    scenario = computed_alone()
    wanted = reference.log_probs(scenario.prompt.ids)
    scenario.precompute(served)
    for ask in (scenario.prompt.plain(), scenario.prompt.ask("prefix")):
        assert (served.answer(ask)[0].log_probs[0] - wanted).abs().max().item() <= TOLERANCE
