"""`--weights native`: the numbers of a GGUF file's groups, multiplied without requantizing, and what is refused."""

import json
import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

from chunkweave import Engine
from chunkweave.cli import options
from chunkweave.config import ModelConfig, Weights
from chunkweave.errors import UsageError
from chunkweave.models import gguf_native, linear_weights, loading
from chunkweave.models.gguf import checkpoint_folder, dequantized_folder, models_folder
from chunkweave.models.linear_weights import GROUP, Int4Embedding, Int4Linear, PackedLinear
from chunkweave.models.loading import load_folder
from chunkweave.planning.calibration import stored_calibration
from chunkweave_server.app import create_app
from chunkweave_server.backend import Stage
from chunkweave_server.engine_backend import EngineBackend
from chunkweave_server.service import Service
from chunkweave_server.settings import resolve
from chunkweave_server.tenants import KeyRing
from tests.integration.command_line import invoke, succeed
from tests.integration.gguf_files import SMALL, write_gguf
from tests.server.conftest import Client, wait_until
from tests.toys import toy_model

pytestmark = [
    pytest.mark.skipif(not linear_weights.int4_half_block(), reason="PyTorch has no 4-bit products here"),
    pytest.mark.usefixtures("own_cache_folder"),
]
IDS = torch.arange(40) * 7919 % SMALL
FORMATS = {Kind.Q4_0: gguf_native.q4_0, Kind.Q4_1: gguf_native.q4_1, Kind.Q8_0: gguf_native.q8_0}
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def values_of(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Weights by their definition, float64."""
    return sum(
        (numbers.astype(np.float64) - 8) * np.repeat(scales.astype(np.float64), GROUP, 1)
        + np.repeat(offsets.astype(np.float64), GROUP, 1)
        for numbers, scales, offsets in parts
    )


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_groups_are_those_of_the_format(kind):
    weights = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    rows = gguf.quants.quantize(weights, kind)
    found = values_of(FORMATS[kind](rows))
    np.testing.assert_allclose(found, gguf.dequantize(rows, kind), rtol=0, atol=2e-6)


def test_groups_of_q4_k_have_scales_and_minima_of_six_bits():
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (5, 3, 144), dtype=np.uint8)
    blocks[..., :4] = rng.uniform(0.001, 0.1, (5, 3, 2)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(5, -1)
    np.testing.assert_allclose(
        values_of(gguf_native.q4_k(rows)), gguf.dequantize(rows, Kind.Q4_K), rtol=1e-5, atol=1e-5
    )


def filled(outputs: int, inputs: int, planes: int) -> Int4Linear:
    rng = np.random.default_rng(outputs)
    linear = Int4Linear(inputs, outputs, planes)
    groups = (outputs, inputs // GROUP)
    scales = rng.uniform(0, 0.01 / 16 ** (planes - 1), groups).astype(np.float32)
    numbers = rng.integers(0, 16, (2, outputs, inputs), dtype=np.uint8)
    offsets = rng.normal(0, 0.01, groups).astype(np.float32)
    parts = [(numbers[0], 16 * scales, offsets), (numbers[1], scales, np.zeros_like(scales))]
    linear.fill(0, parts if planes == 2 else [(numbers[1], scales, offsets)])
    return linear


@torch.inference_mode()
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (100, 96), (41, 32), (192, 576)])
@pytest.mark.parametrize("rows", [(), (0,), (1,), (1, 7), (33,), (200,)])
def test_products_are_those_of_the_dequantized_weights(planes, outputs, inputs, rows, monkeypatch):
    monkeypatch.setattr(linear_weights, "_TILE_WEIGHTS", 64 * inputs)
    linear = filled(outputs, inputs, planes)
    linear.bias = torch.randn(outputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    states = torch.randn(*rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = linear.outputs(torch.arange(outputs)).double()
    found, meant = linear(states), nn.functional.linear(states.double(), weights, linear.bias.double())
    assert (found.shape, found.dtype) == ((*rows, outputs), torch.bfloat16)
    torch.testing.assert_close(found.double(), meant, atol=0.02, rtol=0.02)


@torch.inference_mode()
def test_embeddings_are_single_outputs():
    linear = filled(100, 64, 2)
    ids = torch.tensor([[0, 99, 31], [32, 63, 64]])
    assert torch.equal(Int4Embedding(linear)(ids), linear.weight[ids])
    assert torch.equal(Int4Embedding(linear, 8.0)(ids), linear.weight[ids] * 8)


@torch.inference_mode()
@pytest.mark.parametrize("mean", [0, 3])
def test_the_planes_of_q8_0_do_not_cancel(mean):
    weights = np.random.default_rng(0).normal(0, 0.02, (256, 2048)).astype(np.float32)
    rows = gguf.quants.quantize(weights, Kind.Q8_0)
    linear = Int4Linear(2048, 256, 2)
    linear.fill(0, gguf_native.q8_0(rows))
    states = (torch.randn(16, 2048, generator=torch.Generator().manual_seed(1)) + mean).bfloat16()
    meant = states.double() @ torch.from_numpy(gguf.dequantize(rows, Kind.Q8_0)).double().T
    assert (linear(states).double() - meant).norm() / meant.norm() < 0.005


@pytest.mark.parametrize("wrong", [100, -1])
def test_an_output_that_is_not_there_is_an_error(wrong):
    embedding = Int4Embedding(filled(100, 64, 1))
    with pytest.raises(IndexError, match="100 outputs"):
        embedding(torch.tensor([0, wrong]))
    assert embedding(torch.tensor([], dtype=torch.int64)).shape == (0, 64)


def toy(family: str, *, tied: bool, **changes: object) -> nn.Module:
    tie = {"tie_word_embeddings": tied}
    return toy_model(family, dtype=torch.bfloat16, vocab_size=SMALL, **WIDE, **tie, **changes).model.model


@torch.inference_mode()
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_a_model_computes_nearly_what_its_dequantized_weights_do(family, tied, kind, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", toy(family, tied=tied), quantized=kind)
    native = load_folder(file, dtype="bfloat16", weights="native")
    assert dequantized_folder(file) is None, "nothing is dequantized on disk"
    assert not list(models_folder().rglob("*.safetensors"))
    wide, plain = (load_folder(file, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert len({one.fingerprint for one in (native, wide, plain)}) == 3
    body = native.model.model
    linear = [module for module in body.modules() if isinstance(module, nn.Linear | PackedLinear | Int4Linear)]
    assert {type(module) for module in linear} == {Int4Linear}
    assert isinstance(body.model.embed_tokens, Int4Embedding)
    assert (body.lm_head is body.model.embed_tokens.linear) is tied
    ours, rounded, theirs = (
        torch.log_softmax(one.model.model(IDS[None], use_cache=False).logits[0].float(), -1)
        for one in (native, plain, wide)
    )
    divergence, usual = ((theirs.exp() * (theirs - of)).sum(-1).mean() for of in (ours, rounded))
    assert divergence < 3 * usual + 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_other_formats_stay_bfloat16_and_the_head_shares_the_embeddings(tied, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", toy("llama", tied=tied), quantized=Kind.F16)
    native, plain = (load_folder(file, dtype="bfloat16", weights=weights) for weights in ("native", "plain"))
    assert not [module for module in native.model.model.modules() if isinstance(module, Int4Linear)]
    body = native.model.model
    assert (getattr(body.lm_head, "weight", None) is body.model.embed_tokens.weight) is tied
    ours, theirs = (one.model.model(IDS[None], use_cache=False).logits for one in (native, plain))
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


def test_a_file_that_moved_has_the_same_key_and_another_file_another_one(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", toy("llama", tied=True), quantized=Kind.Q4_1)
    first = load_folder(file, dtype="bfloat16", weights="native")
    again = load_folder(file.rename(tmp_path / "n.gguf"), dtype="bfloat16", weights="native")
    other = write_gguf(tmp_path / "o.gguf", toy("llama", tied=True), quantized=Kind.Q4_0)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != load_folder(other, dtype="bfloat16", weights="native").fingerprint


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"dtype": "float32"}, "bfloat16"),
        ({"model": "reader"}, "GGUF"),
        ({"model": "MAKER/NAME"}, "GGUF"),
        ({"adapter": True}, "adapter"),
    ],
    ids=["float32", "folder", "hub", "adapter"],
)
def test_it_is_refused_before_anything_is_converted(where, why, tmp_path):
    from tests.integration.adapter_files import write_adapter

    model = toy("llama", tied=True)
    file = write_gguf(tmp_path / "m.gguf", model, quantized=Kind.Q4_1)
    asked = {"model": file, "dtype": "bfloat16", **where}
    if "adapter" in where:
        asked["adapter"] = write_adapter(tmp_path / "adapter", model, size=0.2)
    with pytest.raises(UsageError, match=why):
        load_folder(asked.pop("model"), weights="native", **asked)
    assert not models_folder().exists()


def test_short_names_and_shapes_are_bfloat16_too(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "faster_dtype", lambda: "float32")
    assert loading.load_shape("demo", weights="native").model.dtype is torch.bfloat16
    file = write_gguf(tmp_path / "m.gguf", toy("llama", tied=True), quantized=Kind.Q4_1)
    assert load_folder(file, dtype="bf16", weights="native").model.dtype is torch.bfloat16
    with pytest.raises(UsageError, match="unknown dtype"):
        load_folder(file, dtype="bogus", weights="native")


def test_a_hub_model_is_refused_before_it_is_downloaded(monkeypatch):
    monkeypatch.setattr(options, "download_once", lambda model: pytest.fail("downloaded"))
    refused = invoke("ask", "--model", "MAKER/NAME", "--set", "weights=native", "Who?")
    assert refused.exit_code == 2
    assert "GGUF files" in refused.output
    how = options.ModelOptions(model=ModelConfig(model="m.gguf", weights=Weights.NATIVE)).how_to_calibrate
    assert how == "chunkweave calibrate m.gguf --weights native"


def test_it_is_refused_for_other_devices_and_orders(monkeypatch):
    with pytest.raises(UsageError, match="is for CPUs"):
        linear_weights.check_native("cuda", "bfloat16")
    monkeypatch.setattr(linear_weights, "int4_half_block", lambda: 0)
    with pytest.raises(UsageError, match="weights='auto'"):
        linear_weights.check_native("cpu", "bfloat16")


def test_weights_that_do_not_fit_are_a_warning_with_the_way_out(tmp_path, monkeypatch, caplog):
    file = write_gguf(tmp_path / "m.gguf", toy("llama", tied=True), quantized=Kind.Q4_1)
    checkpoint_folder(file)
    monkeypatch.setattr(loading, "free_memory_bytes", lambda: 1000)
    with caplog.at_level(logging.WARNING):
        load_folder(file, dtype="bfloat16")
    assert "weights='native'" in caplog.text


def test_random_weights_for_timing_are_of_four_bits():
    with Engine.load_shape("demo", dtype="bfloat16", weights="native") as engine:
        body = engine.loaded.model.model
        plain = [name for name, one in body.named_modules() if isinstance(one, nn.Linear | PackedLinear)]
        assert plain == ["lm_head"], "which shares the embeddings"
        assert body.lm_head.weight is body.model.embed_tokens.weight
        assert engine.generate("Who?", max_new_tokens=3).report.new_tokens == 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", toy("llama", tied=True), quantized=Kind.Q4_1)


def test_native_weights_are_calibrated_apart_from_converted_ones(file, tmp_path):
    lines = [{"question": f"Who is {name}?", "chunks": [f"{name} sails.", f"{name} rows."]} for name in ("Ann", "Ben")]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    sizes = ("--questions", 2, "--chunks", 2, "--new-tokens", 2, "--methods", "epic", "--recompute-ratio", "0.5,1")
    for weights, dtype in (("plain", "bfloat16"), ("native", "bfloat16 (native weights)")):
        command = ("calibrate", file, "--dataset", data, "--dtype", "bfloat16", "--weights", weights, *sizes)
        succeed(*command)
        with Engine.load(file, dtype="bfloat16", weights=weights) as engine:
            record = stored_calibration(None, engine.loaded.record_folder, engine.loaded.fingerprint)
        assert record is not None
        assert (record.dtype, record.fingerprint) == (dtype, engine.loaded.fingerprint)


def test_a_server_and_a_command_answer_from_native_weights(file):
    asked_for = {"model": str(file), "weights": "native", "dtype": "bfloat16", "served_model_name": "small"}
    found = resolve(asked_for, {})
    service = Service(found.settings, EngineBackend(found.settings), KeyRing())
    body = {"model": "small", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3}
    with Client(create_app(service)) as client:
        client.service = service
        wait_until(lambda: service.stage in (Stage.READY, Stage.FAILED))
        assert isinstance(client.engine.loaded.model.model.model.embed_tokens, Int4Embedding)
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    succeed(
        "ask",
        "--model",
        str(file),
        "--set",
        "weights=native",
        "--set",
        "dtype=bfloat16",
        "--max-new-tokens",
        "3",
        "Who?",
    )
    assert not list(models_folder().rglob("*.safetensors"))
