"""LoRA adapters: what is merged, what is refused, and what they are called and keyed by."""

import json
import logging
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from chunkweave import Engine
from chunkweave.config import StoreConfig
from chunkweave.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from chunkweave.models.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from chunkweave.models.loading import load_folder
from chunkweave.planning.calibration import CALIBRATION_FILE, read_records
from chunkweave_server.engine_backend import EngineBackend, load_engine
from chunkweave_server.settings import resolve
from chunkweave_server.vllm_backend.prepare import chooser_for
from tests.integration.adapter_files import LINEAR, write_adapter
from tests.integration.command_line import invoke, refusal, succeed
from tests.integration.test_loading import save_checkpoint
from tests.toys import toy_model

Q0 = "model.layers.0.self_attn.q_proj"
IN_FILE = f"base_model.model.{Q0}"


pytestmark = pytest.mark.usefixtures("own_cache_folder")


@pytest.fixture
def base(tmp_path) -> Path:
    return save_checkpoint(tmp_path / "base")


@pytest.fixture
def weights():
    """Of the checkpoint, before anything is merged."""
    return toy_model("llama").model.model


def change(folder: Path, **config: object) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **config}), encoding="utf-8")


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_logits_are_those_of_pefts_own_model(tmp_path, family):
    base = save_checkpoint(tmp_path / "base", family)
    model = toy_model(family).model.model
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        rank_pattern={r"layers\.1\..*o_proj": 2, "down_proj": 8},
        alpha_pattern={r"layers\.1\..*o_proj": 3},
        use_rslora=True,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    adapted.save_pretrained(tmp_path / "a")
    ids = torch.arange(7, 47)[None]
    plain, merged = (
        load_folder(base, adapter=adapter, dtype="float32", weights="plain").model.model
        for adapter in (None, tmp_path / "a")
    )
    assert not any("lora" in name for name, _ in merged.named_modules())
    with torch.inference_mode():
        wanted, logits, unadapted = (one(ids).logits for one in (adapted, merged, plain))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert (logits - unadapted).abs().max() > 0.1


def test_an_engine_answers_with_it_and_is_called_and_keyed_by_it(base, weights, tmp_path):
    adapters = [write_adapter(tmp_path / name, weights, seed=seed) for name, seed in (("one", 1), ("two", 2))]
    ask = {"question": "Who?", "chunks": ["One.", "Two."], "max_new_tokens": 8}
    engines = [Engine.load(base, adapter=one, dtype="float32") for one in (None, *adapters)]
    assert len({engine.generate(**ask).token_ids for engine in engines}) == 3
    assert len({engine.loaded.fingerprint for engine in engines}) == 3
    assert [engine.loaded.name for engine in engines] == ["base", "base+one", "base+two"]


def test_the_fingerprint_is_that_of_the_base_where_there_is_no_adapter(base, weights, tmp_path):
    """Segments that were stored before there were adapters are found."""
    from chunkweave.models.fingerprint import fingerprint_folder

    loaded = load_folder(base, dtype="float32")
    assert loaded.fingerprint == fingerprint_folder(base, loaded.model.model.config, "float32")


def test_the_key_follows_configuration_and_weights_not_the_folder(weights, tmp_path):
    adapter = write_adapter(tmp_path / "a", weights)
    key = read_adapter(adapter).key
    copy = Path(shutil.copytree(adapter, tmp_path / "b"))
    assert read_adapter(copy).key == key
    change(copy, lora_alpha=9)
    assert read_adapter(copy).key != key
    write_adapter(adapter, weights, seed=7)
    assert read_adapter(adapter).key != key


def test_what_one_has_stored_is_not_found_with_another(base, weights, tmp_path):
    adapters = [
        None,
        write_adapter(tmp_path / "one", weights, seed=1),
        write_adapter(tmp_path / "two", weights, seed=2),
    ]
    ask = {"question": "Who?", "chunks": ["One.", "Two."], "max_new_tokens": 1, "method": "full-reuse"}
    for again in (False, True):
        for adapter in adapters:
            with Engine.load(
                base, adapter=adapter, dtype="float32", store=StoreConfig(cache_dir=tmp_path / "s")
            ) as engine:
                report = engine.generate(**ask).report
            assert bool(report.prefix_exact_tokens or report.reused_tokens) == again


def test_one_for_another_base_is_loaded_with_a_warning(base, weights, tmp_path, caplog):
    adapter = write_adapter(tmp_path / "a", weights, base_model_name_or_path="maker/other")
    with caplog.at_level(logging.WARNING, "chunkweave"):
        load_folder(base, adapter=adapter)
    assert "names maker/other as its base model, not base" in caplog.text
    caplog.clear()
    change(adapter, base_model_name_or_path="maker/Base")
    with caplog.at_level(logging.WARNING, "chunkweave"):
        load_folder(base, adapter=adapter)
    assert not caplog.text


def test_it_is_merged_into_a_gguf_file_too(tmp_path):
    from tests.integration.gguf_files import write_gguf

    file = write_gguf(tmp_path / "tiny.gguf")
    base = load_folder(file, dtype="float32")
    adapter = write_adapter(tmp_path / "a", base.model.model)
    loaded = load_folder(file, adapter=adapter, dtype="float32")
    halves = load_file(adapter / WEIGHTS_FILE)
    down, up = (halves[f"base_model.model.{Q0}.lora_{half}.weight"] for half in "AB")
    before, after = (one.model.model.state_dict()[f"{Q0}.weight"] for one in (base, loaded))
    torch.testing.assert_close(after, before + 2 * up @ down)
    assert (loaded.name, loaded.folder, loaded.adapter) == ("tiny.gguf+a", base.folder, adapter)
    assert loaded.fingerprint != base.fingerprint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        ({"layer_replication": [[0, 2], [1, 4]]}, "layer_replication is not supported"),
    ],
)
def test_what_can_never_be_merged_is_refused_before_a_model_is_loaded(weights, tmp_path, config, message):
    adapter = write_adapter(tmp_path / "a", weights)
    change(adapter, **config)
    with pytest.raises(UnsupportedModelError, match=message):
        load_folder(tmp_path / "no model", adapter=adapter)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_something_new": True}, "use_something_new"),
        ({"target_modules": ["nothing_here"]}, "nothing_here.* not found in the base model"),
        ({"target_modules": ["q_proj"]}, "which the model has no place for"),
        ({"target_modules": [*LINEAR, "lm_head"]}, "its file has no .*lm_head"),
        ({"r": 5}, "adapter a cannot be used: .*size mismatch"),
        ({"target_modules": ".*_proj", "layers_to_transform": [1]}, "layers_to_transform"),
    ],
)
def test_what_peft_cannot_merge_or_warns_about_is_refused(base, weights, tmp_path, config, message):
    adapter = write_adapter(tmp_path / "a", weights)
    change(adapter, **config)
    with pytest.raises(UnsupportedModelError, match=message):
        load_folder(base, adapter=adapter)


def test_the_extra_is_named_where_peft_is_missing(base, weights, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    adapter = write_adapter(tmp_path / "a", weights)
    with pytest.raises(UsageError, match=r"need the extra `lora`: pip install '.\[lora\]'"):
        load_folder(base, adapter=adapter)


def test_tied_embeddings_are_left_alone(tmp_path):
    base, model = tmp_path / "tied", toy_model("llama", tie_word_embeddings=True).model.model
    save_checkpoint(base)
    model.save_pretrained(base)
    adapter = write_adapter(tmp_path / "a", model, targets=["lm_head"])
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings"):
        load_folder(base, adapter=adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights[f"{IN_FILE}.lora_A.weight"].fill_(float("nan")), "NaNs detected"),
        (lambda weights: weights.pop(f"{IN_FILE}.lora_B.weight"), f"no .*{Q0}.lora_B"),
        (lambda weights: weights.update({f"{IN_FILE}.weight": torch.ones(64, 64)}), "which is no LoRA weight"),
    ],
    ids=["no numbers", "half of one", "weights of the base"],
)
def test_weights_that_are_not_those_of_an_adapter_are_refused(base, weights, tmp_path, change, message):
    adapter = write_adapter(tmp_path / "a", weights)
    halves = load_file(adapter / WEIGHTS_FILE)
    change(halves)
    save_file(halves, adapter / WEIGHTS_FILE)
    with pytest.raises(UnsupportedModelError, match=message):
        load_folder(base, adapter=adapter)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights, _: weights.write_bytes(b"\x08\0\0\0\0\0\0\0garbage!"), f"{WEIGHTS_FILE} cannot be read"),
        (
            lambda weights, _: weights.rename(weights.with_name("adapter_model.bin")),
            "is a pickle, which is never loaded",
        ),
        (lambda _, config: config.write_text("{ not json"), f"{CONFIG_FILE} cannot be read"),
        (lambda _, config: config.write_text('{"peft_type": "LORA", "r": "many"}'), "no usable rank"),
        (lambda _, config: config.unlink(), f"has no {CONFIG_FILE}"),
    ],
)
def test_files_that_are_missing_or_damaged(base, weights, tmp_path, damage, message):
    adapter = write_adapter(tmp_path / "a", weights)
    damage(adapter / WEIGHTS_FILE, adapter / CONFIG_FILE)
    with pytest.raises(ModelNotFoundError, match=message):
        load_folder(base, adapter=adapter)


# --- the setting -------------------------------------------------------------------------------------------------


def test_commands_take_it_and_say_so(base, weights, tmp_path):
    adapter = write_adapter(tmp_path / "tiny", weights)
    (tmp_path / "d.txt").write_text("The mill is behind the church.", encoding="utf-8")
    ask = ["ask", "--model", base, "--docs", tmp_path / "d.txt", "--max-new-tokens", 6, "--set", "dtype=float32"]
    found = json.loads(invoke(*ask, "--set", f"adapter={adapter}", "--json", "Where?").stdout)
    plain = json.loads(invoke(*ask, "--json", "Where?").stdout)
    assert (found["model"], plain["model"]) == (f"{base}+tiny", str(base))
    assert found["answers"][0]["answer"] != plain["answers"][0]["answer"]
    told = invoke(*ask, "--set", f"adapter={adapter}", "Where?").stderr
    assert f"`chunkweave calibrate {base} --adapter {adapter}`" in told
    assert "no adapter folder at" in refusal(*ask, "--set", f"adapter={tmp_path / 'nowhere'}", "Where?", code=1)
    assert "random weights have none" in refusal("ask", "--set", "shape=demo", "--set", f"adapter={adapter}", "Where?")


def test_the_demo_answers_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("chunkweave.cli.demo.usual_model", lambda: "reader")
    adapter = write_adapter(tmp_path / "tiny", load_folder("reader", weights="plain").model.model, size=0.2)
    out = tmp_path / "demo.json"
    texts = []
    for more in ([], ["--adapter", adapter]):
        done = succeed("demo", "--out", out, *more)
        data = json.loads(out.read_text(encoding="utf-8"))
        texts.append([answer["by_method"]["full"] for answer in data["answers"]])
    assert data["model"] == data["fidelity"]["config"]["model"] == "reader+tiny"
    assert "reader+tiny, 4 questions" in done.stdout
    assert texts[0] != texts[1]


def test_the_server_takes_it_from_file_environment_and_flag(base, weights, tmp_path):
    adapter = write_adapter(tmp_path / "tiny", weights)
    file = tmp_path / "serve.toml"
    file.write_text(f'model = "{base}"\nadapter = "{adapter}"\n', encoding="utf-8")
    from_file = resolve({}, {}, file).settings
    from_variable = resolve({"model": str(base)}, {"CHUNKWEAVE_ADAPTER": str(adapter)}).settings
    from_flag = resolve({"model": str(base), "adapter": str(adapter)}, {}).settings
    assert from_file == from_variable == from_flag
    assert EngineBackend(from_flag).name == "base+tiny"
    assert EngineBackend(resolve({"served_model_name": "mine"}, {}, file).settings).name == "mine"
    with load_engine(from_flag) as engine:
        assert engine.loaded.fingerprint == Engine.load(base, adapter=adapter).loaded.fingerprint


def test_a_calibration_record_is_that_of_base_or_adapter_and_lies_beside_it(base, weights, tmp_path):
    adapters = [write_adapter(tmp_path / name, weights, seed=seed) for name, seed in (("one", 1), ("two", 2))]
    line = json.dumps({"question": "Who?", "chunks": ["The mill burnt down.", "Bo lives there."], "answers": ["Bo"]})
    (tmp_path / "data.jsonl").write_text(f"{line}\n" * 3, encoding="utf-8")
    command = ["calibrate", base, "--dataset", tmp_path / "data.jsonl", "--questions", 2, "--chunks", 2, "--dtype"]
    command += ["float32", "--new-tokens", 2, "--methods", "epic", "--recompute-ratio", "0,0.5", "--target-kl", "100"]
    succeed(*command, "--target-agreement", 0, "--fast-agreement", 0, "--fast-kl", 100, "--adapter", adapters[0])
    record = read_records(adapters[0] / CALIBRATION_FILE)[0]
    assert record.model == "base+one"
    assert not (base / CALIBRATION_FILE).exists()
    with Engine.load(base, adapter=adapters[0], dtype="float32") as engine:
        assert engine.calibration == record
        assert (
            engine.generate("Who?", ["One.", "Two."], max_new_tokens=1, quality="balanced").report.why == "calibrated"
        )
    before_vllm = {"method": None, "quality": None, "dtype": "float32"}
    assert chooser_for(str(base), adapter=read_adapter(adapters[0]), **before_vllm).record == record
    shutil.copy(adapters[0] / CALIBRATION_FILE, base)
    shutil.copy(adapters[0] / CALIBRATION_FILE, adapters[1])
    for other in (None, adapters[1]):
        with Engine.load(base, adapter=other, dtype="float32") as engine:
            assert engine.calibration is None
        lora = None if other is None else read_adapter(other)
        assert chooser_for(str(base), adapter=lora, **before_vllm).record is None
