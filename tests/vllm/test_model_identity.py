"""What the plug-in takes a checkpoint for, beside what our own engine does."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from chunkweave.models.fingerprint import fingerprint_folder
from chunkweave.models.loading import load_folder
from chunkweave.vllm.model_check import model_fingerprint, rank_fingerprint, usual_start
from tests.vllm.checkpoints import BOS, add_tokenizer, make_checkpoint


def model_of(folder) -> SimpleNamespace:
    config = AutoConfig.from_pretrained(folder)
    return SimpleNamespace(
        hf_config=config,
        hf_text_config=config,
        model=str(folder),
        tokenizer=str(folder),
        tokenizer_revision=None,
        trust_remote_code=False,
    )


def test_kv_of_another_dtype_is_another_models(tmp_path):
    """fp8 is vLLM's name for e4m3."""
    model = model_of(make_checkpoint(tmp_path, "llama"))
    model.dtype, model.revision, load = "torch.float32", None, SimpleNamespace(load_format="auto")

    def of(kept: str) -> str:
        cache = SimpleNamespace(cache_dtype=kept)
        return model_fingerprint(SimpleNamespace(model_config=model, load_config=load, cache_config=cache))

    own = fingerprint_folder(tmp_path, model.hf_config, "float32")
    assert of("auto") == of("float32") == own
    assert of("fp8") == of("fp8_e4m3")
    assert len({own, of("bfloat16"), of("fp8_e4m3"), of("fp8_e5m2")}) == 4


@pytest.mark.parametrize("adds_bos", [True, False])
def test_start_is_what_our_own_engine_begins_with(tmp_path, adds_bos):
    folder = make_checkpoint(tmp_path, "qwen2", vocab_size=4096)
    add_tokenizer(folder, adds_bos=adds_bos)
    start = usual_start(model_of(folder))
    assert start == ((BOS,) if adds_bos else ())
    assert start == load_folder(folder, dtype="float32").tokenizer.start_ids


def test_without_a_tokenizer_the_config_is_read(tmp_path):
    model = model_of(make_checkpoint(tmp_path, "llama"))
    assert usual_start(model) == (BOS,)
    model.hf_text_config.bos_token_id = None
    assert usual_start(model) == ()


def test_a_tokenizer_that_cannot_be_read_is_none(tmp_path, caplog):
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{")
    assert usual_start(model_of(folder)) == (BOS,)
    assert "cannot be read" in caplog.text


def test_a_rank_of_several_keeps_to_itself():
    names = {rank_fingerprint("f", 0, 1), rank_fingerprint("f", 0, 2), rank_fingerprint("f", 1, 2)}
    assert names == {"f", "f-tp0of2", "f-tp1of2"}
