"""Checkpoint folders: what loads, what is refused and with which words."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GemmaConfig, MistralConfig, Qwen2Config

from chunkweave import Engine
from chunkweave.errors import (
    ModelNotFoundError,
    UnknownMethodError,
    UnsupportedModelError,
    UsageError,
)
from chunkweave.models.anatomy import REFUSED
from chunkweave.models.huggingface import HuggingFaceModel, check_config, geometry_of
from chunkweave.models.loading import random_model, shape_config
from chunkweave.planning.cost import KNOWN_SHAPES
from tests.toys import TOY_FAMILIES, toy_config, toy_model

TOKENIZER = Path(str(__import__("chunkweave").__file__)).parent / "assets" / "tokenizer"


pytestmark = pytest.mark.usefixtures("own_cache_folder")


def save_checkpoint(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    model = toy_model(family, seed=seed).model.model
    model.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("family", sorted(TOY_FAMILIES))
def test_a_saved_checkpoint_answers_like_the_model_it_was_saved_from(family, tmp_path):
    folder = save_checkpoint(tmp_path / family, family)
    loaded = Engine.load(folder, dtype="float32")
    original = Engine(toy_model(family))
    ask = {"question": "Who?", "chunks": ["One.", "Two."], "max_new_tokens": 8}
    assert loaded.generate(**ask).token_ids == original.generate(**ask).token_ids
    assert loaded.loaded.name == family


def test_no_bars_where_there_is_no_terminal(tmp_path, capfd):
    folder = save_checkpoint(tmp_path / "a")
    capfd.readouterr()
    Engine.load(folder)
    assert capfd.readouterr().err == ""


def test_the_fingerprint_follows_content_not_place(tmp_path):
    here = save_checkpoint(tmp_path / "a")
    copy = Path(shutil.copytree(here, tmp_path / "b"))
    other = save_checkpoint(tmp_path / "c", seed=1)

    def prints(folder, dtype="float32"):
        return Engine.load(folder, dtype=dtype).loaded.fingerprint

    assert prints(here) == prints(copy)
    assert len({prints(here), prints(other), prints(here, "bfloat16")}) == 3


def test_changed_weights_of_the_same_size_change_the_fingerprint(tmp_path):
    folder = save_checkpoint(tmp_path / "a")
    before = Engine.load(folder).loaded.fingerprint
    save_checkpoint(folder, seed=5)
    assert Engine.load(folder).loaded.fingerprint != before


def test_a_hub_name_loads_from_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--maker--tiny"
    folder = save_checkpoint(repo / "snapshots" / ("c" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40, encoding="utf-8")
    engine = Engine.load("maker/tiny")
    assert (engine.loaded.name, engine.loaded.folder) == ("tiny", folder)


def test_a_missing_folder(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no model folder at .*nowhere"):
        Engine.load(tmp_path / "nowhere")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        Engine.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{ not json", "model"),
        ("config.json", b'{"hidden_size": 8}', "cannot be read"),
        ("model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!", "model"),
        ("model.safetensors", None, "cannot be loaded"),
    ],
    ids=["no JSON", "without a known type", "no weights", "missing weights"],
)
def test_a_corrupt_or_missing_file(tmp_path, file, content, message):
    folder = save_checkpoint(tmp_path / "model")
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=message):
        Engine.load(folder)


def test_a_model_without_a_tokenizer_is_refused_with_the_whole_reason(tmp_path):
    folder = save_checkpoint(tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelNotFoundError) as refused:
        Engine.load(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert not message.endswith(":")
    assert len(message) > len(str(folder)) + 200, "all lines of the reason"


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "RoPE type 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
            "M-RoPE",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per-layer RoPE"),
        ({"kv_lora_rank": 64}, "MLA"),
        ({"state_size": 16}, "Mamba"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_cannot_be_woven_is_refused_by_name(changes, feature):
    config = toy_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match=feature):
        check_config(config)


def test_longrope_bounds_the_prompt_to_where_its_angles_do_not_depend_on_the_length():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = toy_config("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert geometry_of(config).max_positions == 128


@pytest.mark.parametrize(
    ("family", "feature"),
    [("gpt2", "rotary"), ("gpt_neox", "outer"), ("granitemoeshared", "modules")],
)
def test_other_layer_anatomies_are_refused_by_name(family, feature):
    config = toy_config(family)
    with pytest.raises(UnsupportedModelError, match=feature):
        HuggingFaceModel(random_model(config, dtype=torch.float32, device="cpu", seed=0))


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_cannot_be_woven_are_refused_before_their_weights_are_read(family):
    config = AutoConfig.for_model(family)
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[family][0])):
        check_config(config)


def test_experts_count_as_many_times_as_a_token_passes_them():
    assert geometry_of(toy_config("mixtral")).intermediate_size == 2 * 96
    assert geometry_of(toy_config("qwen2_moe")).intermediate_size == 2 * 48 + 48


def test_a_model_that_looks_right_but_computes_otherwise_is_caught_by_the_probe():
    model = toy_model("llama").model
    model.verify()
    model.model.model.layers[1].register_forward_hook(lambda _layer, _inputs, hidden: hidden * 1.1)
    with pytest.raises(UnsupportedModelError, match="differ"):
        model.verify()


def test_a_window_that_the_geometry_does_not_know_of_is_caught_by_the_probe():
    model = toy_model("mistral", sliding_window=64).model
    model.verify()
    assert model.model.config.sliding_window == 64
    model.geometry = replace(model.geometry, windows=())
    with pytest.raises(UnsupportedModelError, match="differ"):
        model.verify()


def test_any_model_with_llama_like_layers_is_driven():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 256}
    config = GemmaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    HuggingFaceModel(random_model(config, dtype=torch.float32, device="cpu", seed=0)).verify()


def test_each_layer_has_its_window():
    assert geometry_of(MistralConfig(sliding_window=1024)).windows == (1024,) * MistralConfig().num_hidden_layers
    assert geometry_of(MistralConfig(sliding_window=None)).windows == ()
    assert geometry_of(Qwen2Config(use_sliding_window=False)).windows == ()
    assert geometry_of(toy_config("gemma3_text", sliding_window=64)).windows == (64, None, 64, None)
    engine = Engine(toy_model("mistral", sliding_window=64))
    assert engine.generate("Who?", ["word " * 80], max_new_tokens=4).token_ids


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [("cuda", "auto", "no CUDA"), ("cpu", "float16", "float16"), ("cpu", "int3", "int3")],
)
def test_devices_and_types_that_are_not_there(device, dtype, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = save_checkpoint(tmp_path / "model")
    with pytest.raises(UsageError, match=message):
        Engine.load(folder, device=device, dtype=dtype)


def test_shapes_have_the_sizes_of_the_models_they_name():
    billions = {
        "smollm2-135m": 0.135,
        "qwen2.5-0.5b": 0.494,
        "llama-3-8b": 8.03,
        "mistral-7b": 7.25,
        "qwen3-0.6b": 0.596,
    }
    for name, size in billions.items():
        with torch.device("meta"):
            model = random_model(shape_config(name), dtype=torch.bfloat16, device="meta", seed=0)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(size, rel=0.01)
    assert set(billions) <= set(KNOWN_SHAPES)
    with pytest.raises(UnknownMethodError, match="llama-3-8b"):
        shape_config("llama-9")


def test_equal_seeds_give_equal_shapes():
    a, b = (Engine.load_shape("demo", dtype="float32", seed=3) for _ in range(2))
    assert a.loaded.fingerprint == b.loaded.fingerprint != Engine.load_shape("demo", seed=4).loaded.fingerprint
    assert a.generate("Who?", max_new_tokens=5).token_ids == b.generate("Who?", max_new_tokens=5).token_ids
