"""A KV cache of one byte a number: what is stored, moved and woven, against the values that follow by hand."""

import pytest
import torch

from tests.vllm.conftest import SLICED
from tests.vllm.prompts import behind_an_instruction, computed_alone, computed_in_context, one_missing
from tests.vllm.reference import Reference
from tests.vllm.serving import IN_PROCESS, serving

TOLERANCE = 0.2
"""A tie that is rounded otherwise moves an answer by some hundredths; not rounding at all by 0.7 and more."""
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Rounding(Reference):
    """Truncates computed keys and values, as vLLM's CPU kernel does, and rounds keys that are turned."""

    def __init__(self, folder, dtype) -> None:
        super().__init__(folder)
        self._dtype = dtype

    def _kept(self, states):
        near = states.to(self._dtype)
        above = near.float().abs() > states.abs()
        below = (near.view(torch.uint8) - above.to(torch.uint8)).view(self._dtype)
        return below.float()

    def _moved(self, keys):
        return keys.to(self._dtype).float()


@pytest.fixture(scope="module", params=DTYPES)
def rounding(request, checkpoint):
    folder = checkpoint("llama")
    with serving(folder, **SLICED, kv_cache_dtype=request.param, **IN_PROCESS) as served:
        assert served.worker("chunkweave_state")[0]["weaves"]
        yield served, Rounding(folder, DTYPES[request.param]), Reference(folder)


@pytest.mark.parametrize("make", [computed_alone, computed_in_context, behind_an_instruction, lambda: one_missing(2)])
@pytest.mark.parametrize(
    ("method", "ratio"), [("full-reuse", 0.0), ("cacheblend", 0.15), ("query", 0.3), ("epic", 0.3)]
)
def test_woven_answers(rounding, make, method, ratio):
    served, reference, unrounded = rounding
    scenario = make()
    scenario.precompute(served)
    got = served.answer(scenario.prompt.ask(method, ratio))[0]
    chosen = got.report["recomputed"]
    how = "cacheblend" if method == "cacheblend" else "random"
    wanted, other = (
        one.weave(scenario.pieces(one), how, ratio, chosen=chosen).log_probs for one in (reference, unrounded)
    )
    assert (got.log_probs[0] - wanted).abs().max().item() <= TOLERANCE
    assert (got.log_probs[0] - other).abs().max().item() > 2 * TOLERANCE, "this is not what rounding does"
