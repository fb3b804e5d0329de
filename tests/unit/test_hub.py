"""Models by their hub name: the hub's cache first, then a download, with a fake cache and no network."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from chunkweave.config import ModelConfig, is_hub_name
from chunkweave.errors import ModelNotFoundError
from chunkweave.models.hub import cached_folder, hub_folder
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from chunkweave_server.vllm_backend.process import VllmFlags

NAME = "maker/tiny-model"
COMMIT = "c" * 40
FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache of the hub, and no hub: a download fails as it does without a network."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


def snapshot(cache: Path, *files: str, name: str = NAME) -> Path:
    """A snapshot of such files in the cache, as huggingface_hub lays it out."""
    repo = cache / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for file in files:
        (folder / file).write_text("{}", encoding="utf-8")
    return folder


def test_what_is_a_hub_name(tmp_path):
    assert is_hub_name("Qwen/Qwen2.5-0.5B-Instruct")
    (tmp_path / "maker" / "here").mkdir(parents=True)
    for other in ("reader", "smollm2", "./a/b", "../b", "a/b/c", "/a/b", "maker/here", "models/x.gguf", "a/", "~/m"):
        assert not is_hub_name(other), other


def test_clients_call_it_by_its_whole_name():
    assert ModelConfig(NAME).name == NAME
    assert VllmFlags(NAME).name == VllmFlags(NAME).source == NAME


def test_what_is_in_the_cache_is_taken_without_asking_the_hub(cache):
    folder = snapshot(cache, *FILES)
    assert cached_folder(NAME) == hub_folder(NAME) == folder


@pytest.mark.parametrize("missing", FILES)
def test_half_a_snapshot_is_none(cache, missing):
    snapshot(cache, *(file for file in FILES if file != missing))
    assert cached_folder(NAME) is None


def test_all_shards_have_to_be_there(cache):
    folder = snapshot(cache, "config.json", "tokenizer.json", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert cached_folder(NAME) is None
    (folder / "model-00002-of-00002.safetensors").write_text("{}", encoding="utf-8")
    assert cached_folder(NAME) == folder


def test_a_download_fetches_what_is_loaded_and_nothing_twice(cache, monkeypatch):
    on_the_hub = (
        *FILES,
        "model.safetensors.index.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/model.safetensors",
        "onnx/model.onnx",
        "model.gguf",
        "consolidated.00.pth",
        "README.md",
    )
    asked = []

    def download(repo_id, *, revision=None, local_files_only=False, allow_patterns, ignore_patterns):
        asked.append((repo_id, revision, local_files_only))
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        chosen = huggingface_hub.utils.filter_repo_objects(
            on_the_hub, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        return str(snapshot(cache, *chosen))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetched = {path.name for path in hub_folder(NAME, revision="v2").iterdir()}
    assert asked == [(NAME, "v2", True), (NAME, "v2", False)]
    assert fetched == set(on_the_hub[:7])


def test_without_a_network_the_error_says_what_to_do(cache):
    with pytest.raises(ModelNotFoundError) as error:
        hub_folder(NAME)
    said = str(error.value)
    assert said.count("\n") == 0
    for words in (f"no folder {NAME}", str(cache), "HF_HUB_OFFLINE is set", "HF_HOME", "--model FOLDER"):
        assert words in said


@pytest.mark.parametrize(
    ("kind", "words"),
    [("RepositoryNotFoundError", "no model of that name"), ("GatedRepoError", f"https://huggingface.co/{NAME}")],
)
def test_what_the_hub_refuses_is_said(monkeypatch, kind, words):
    def refuse(*_, local_files_only=False, **__):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
        error = getattr(huggingface_hub.errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=words):
        hub_folder(NAME)


def test_a_model_without_safetensors_is_refused(cache, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot(cache, "config.json", "tokenizer.json"))
    )
    with pytest.raises(ModelNotFoundError, match=r"no safetensors weights"):
        hub_folder(NAME)


def test_vllms_tokenizer_comes_from_the_cache_without_weights(cache):
    bundled = Path(str(__import__("chunkweave").__file__)).parent / "assets" / "tokenizer"
    folder = snapshot(cache)
    for file in bundled.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert load_tokenizer(NAME, {}).encode("a harbour")
    with pytest.raises(ModelNotFoundError, match="no folder maker/other"):
        load_tokenizer("maker/other", {})
