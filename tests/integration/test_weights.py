"""Weights of linear layers: packed for oneDNN they give the very results of plain ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chunkweave import Engine
from chunkweave.config import Weights
from chunkweave.errors import UsageError
from chunkweave.models import linear_weights
from chunkweave.models.linear_weights import PackedLinear
from chunkweave.models.loading import load_folder
from chunkweave_server.engine_backend import load_engine
from chunkweave_server.settings import resolve
from tests.integration.test_loading import save_checkpoint
from tests.toys import TOY_FAMILIES

CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
packs = pytest.mark.skipif(not linear_weights._packable(CPU), reason="oneDNN has no bfloat16 products here")
IDS = torch.arange(40) * 7919 % 300


pytestmark = pytest.mark.usefixtures("own_cache_folder")


def linear(inside=72, outside=40, *, bias=False) -> nn.Linear:
    torch.manual_seed(inside)
    return nn.Linear(inside, outside, bias=bias, dtype=torch.bfloat16)


def linear_modules(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear | PackedLinear)}


@packs
@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (8,), (1, 33), (0,)])
def test_packed_weights_give_the_same_bits(shape, bias):
    plain = linear(bias=bias)
    packed = PackedLinear(plain)
    states = torch.randn(*shape, 72).bfloat16()
    assert torch.equal(packed(states), plain(states))
    assert torch.equal(packed.weight, plain.weight)


@packs
@torch.inference_mode()
@pytest.mark.parametrize("family", sorted(TOY_FAMILIES))
def test_a_model_computes_the_same_with_packed_weights(family, tmp_path):
    folder = save_checkpoint(tmp_path / family, family)
    auto, plain = (load_folder(folder, dtype="bfloat16", weights=kept) for kept in ("auto", "plain"))
    assert PackedLinear in linear_modules(auto.model.model)
    assert linear_modules(plain.model.model) == {nn.Linear}
    assert auto.fingerprint == plain.fingerprint
    ours, theirs = (one.model.model(IDS[None], use_cache=False).logits for one in (auto, plain))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stay_as_they_are_where_packed_ones_are_of_no_use(dtype, tmp_path, monkeypatch):
    if dtype == "bfloat16":
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    loaded = load_folder(save_checkpoint(tmp_path / "base"), dtype=dtype)
    assert linear_modules(loaded.model.model) == {nn.Linear}


@packs
def test_packing_that_fails_here_costs_a_warning(tmp_path, monkeypatch, caplog):
    def fails(_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(linear_weights, "PackedLinear", fails)
    loaded = load_folder(save_checkpoint(tmp_path / "base"), dtype="bfloat16")
    assert linear_modules(loaded.model.model) == {nn.Linear}
    assert "no such operator" in caplog.text


@pytest.mark.parametrize("weights", ["int3", "int8"])
def test_an_unknown_format_is_refused_before_anything_is_loaded(weights, tmp_path):
    with pytest.raises(UsageError, match=rf"'{weights}'.*auto, plain"):
        load_folder(tmp_path / "not-there", weights=weights)
    with pytest.raises(UsageError, match=f"'{weights}'"):
        resolve({"model": "reader", "weights": weights}, {})


@packs
def test_the_server_and_its_environment_say_how_weights_are_kept(tmp_path):
    folder = str(save_checkpoint(tmp_path / "base"))
    told = resolve({"model": folder, "dtype": "bfloat16"}, {"CHUNKWEAVE_WEIGHTS": "plain"})
    with load_engine(told.settings) as engine:
        assert linear_modules(engine.loaded.model.model) == {nn.Linear}
    with Engine.load(folder, dtype="bfloat16", weights=Weights.AUTO) as engine:
        assert PackedLinear in linear_modules(engine.loaded.model.model)
