"""Weights of linear layers: packed for oneDNN they give the very results of plain ones, as int8 nearly those."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chunkweave import Engine
from chunkweave.config import Weights
from chunkweave.errors import UsageError
from chunkweave.models import linear_weights
from chunkweave.models.linear_weights import Int8Linear, PackedLinear
from chunkweave.models.loading import load_folder, load_shape
from chunkweave_server.app import create_app
from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend, load_engine
from chunkweave_server.service import Service
from chunkweave_server.settings import resolve
from chunkweave_server.tenants import KeyRing
from tests.integration.adapter_files import write_adapter
from tests.integration.test_loading import save_checkpoint
from tests.server.conftest import Client, wait_until
from tests.toys import TOY_FAMILIES

CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
packs = pytest.mark.skipif(not linear_weights._packable(CPU), reason="oneDNN has no bfloat16 products here")
IDS = torch.arange(40) * 7919 % 300


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def linear(inside=72, outside=40, *, bias=False) -> nn.Linear:
    torch.manual_seed(inside)
    return nn.Linear(inside, outside, bias=bias, dtype=torch.bfloat16)


def linear_modules(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear | PackedLinear | Int8Linear)}


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


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inside", "outside"), [(64, 40), (72, 41), (5, 3)])
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 40])
def test_int8_weights_are_off_by_half_a_step_at_most(rows, inside, outside, dtype):
    plain = linear(inside, outside, bias=True).to(dtype)
    quantized = Int8Linear(plain)
    step = plain.weight.float().abs().amax(1) / 127
    rounding = 2**-8 if dtype == torch.bfloat16 else 0
    assert bool(((quantized.weight - plain.weight).float().abs() <= (0.51 + 127 * rounding) * step[:, None]).all())
    states = torch.randn(rows, 1, inside, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, meant = quantized(states).double(), nn.functional.linear(states, quantized.weight, plain.bias).double()
    assert found.shape == meant.shape == (rows, 1, outside)
    torch.testing.assert_close(found, meant, atol=0.02 if dtype == torch.bfloat16 else 1e-5, rtol=0.01)


@torch.inference_mode()
def test_an_output_without_weights_stays_zero():
    plain = linear()
    plain.weight[3] = 0
    assert Int8Linear(plain)(torch.ones(1, 72, dtype=torch.bfloat16))[0, 3] == 0


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(TOY_FAMILIES))
def test_a_model_with_int8_weights_is_close_and_other_than_the_model(family, dtype, tmp_path):
    folder = save_checkpoint(tmp_path / family, family)
    plain, quantized = (load_folder(folder, dtype=dtype, weights=kept) for kept in ("plain", "int8"))
    assert Int8Linear in linear_modules(quantized.model.model)
    assert plain.fingerprint != quantized.fingerprint
    theirs, ours = (
        torch.log_softmax(one.model.model(IDS[None], use_cache=False).logits[0].double(), -1)
        for one in (plain, quantized)
    )
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert 0 < divergence.mean() < 0.01


def test_random_weights_as_int8_have_a_key_of_their_own():
    plain, quantized = (load_shape("demo", weights=kept) for kept in ("auto", "int8"))
    assert plain.fingerprint != quantized.fingerprint


@torch.inference_mode()
def test_an_adapter_is_merged_before_weights_are_rounded(tmp_path):
    folder = save_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", load_folder(folder, weights="plain").model.model, size=0.2)
    name = "model.layers.0.self_attn.q_proj"
    merged, quantized = (
        load_folder(folder, adapter=adapter, dtype="float32", weights=kept) for kept in ("plain", "int8")
    )
    wanted = Int8Linear(merged.model.model.get_submodule(name)).weight
    assert torch.equal(quantized.model.model.get_submodule(name).weight, wanted)
    assert len({one.fingerprint for one in (merged, quantized, load_folder(folder, weights="int8"))}) == 3


@pytest.mark.parametrize(
    ("device", "dtype", "why"), [("cuda", "bfloat16", "is for CPUs"), ("cpu", "float16", "float16")]
)
def test_int8_is_refused_where_it_cannot_be(device, dtype, why):
    with pytest.raises(UsageError, match=why):
        linear_weights.check_int8(device, dtype)


def test_an_unknown_way_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UsageError, match=r"'int3'.*auto, plain"):
        load_folder(tmp_path / "not-there", weights="int3")
    with pytest.raises(UsageError, match="'int3'"):
        resolve({"model": "reader", "weights": "int3"}, {})


def test_a_server_answers_from_int8_weights_that_its_settings_ask_for(tmp_path):
    folder = str(save_checkpoint(tmp_path / "base"))
    told = resolve({"model": folder, "weights": "int8", "served_model_name": "small"}, {})
    asked = {"model": "small", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3}
    service = Service(told.settings, EngineBackend(told.settings), KeyRing())
    with Client(create_app(service)) as client:
        client.service = service
        wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
        answer = client.post("/v1/chat/completions", json=asked)
        assert Int8Linear in linear_modules(client.engine.loaded.model.model)
    assert answer.status_code == 200, answer.text


@packs
def test_the_server_and_its_environment_say_how_weights_are_kept(tmp_path):
    folder = str(save_checkpoint(tmp_path / "base"))
    told = resolve({"model": folder, "dtype": "bfloat16"}, {"CHUNKWEAVE_WEIGHTS": "plain"})
    with load_engine(told.settings) as engine:
        assert linear_modules(engine.loaded.model.model) == {nn.Linear}
    with Engine.load(folder, dtype="bfloat16", weights=Weights.AUTO) as engine:
        assert PackedLinear in linear_modules(engine.loaded.model.model)
