"""The examples and the README's snippet run as they are written, on a toy checkpoint."""

import json
import runpy
import sys
from importlib.resources import files
from pathlib import Path
from shutil import copytree

import pytest
import torch

from chunkweave.models.gguf import SMOLLM2_PIP, smollm2_file
from chunkweave.models.loading import random_model
from tests.integration.command_line import invoke, succeed
from tests.toys import toy_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    copytree(Path(str(files("chunkweave") / "assets" / "tokenizer")), folder)
    random_model(toy_config("llama"), dtype=torch.float32, device="cpu", seed=0).save_pretrained(folder)
    return folder


def run_example(name: str, monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.mark.skipif(smollm2_file() is None, reason=f"SmolLM2 is not installed: {SMOLLM2_PIP}")
def test_ten_lines(monkeypatch, capsys):
    run_example("ten_lines.py", monkeypatch)
    answer, last = capsys.readouterr().out.splitlines()
    assert "Otto Gunmark" in answer
    assert "tokens reused, first token after" in last
    assert not last.startswith("0 tokens")


def test_conversation(monkeypatch, capsys):
    run_example("conversation.py", monkeypatch)
    first, second, last = capsys.readouterr().out.splitlines()
    assert (first.strip(), second.strip()) == ("Otto Gunmark", "230")
    assert last.endswith(" tokens of history")
    assert int(last.split()[0]) > 0


def test_the_readme_shows_the_example_that_is_tested():
    body = (ROOT / "examples" / "ten_lines.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert f"```python\n{body}```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_streaming(checkpoint, monkeypatch, capsys, tmp_path):
    document = tmp_path / "note.md"
    document.write_text("The harbour is deep.", encoding="utf-8")
    run_example("streaming.py", monkeypatch, checkpoint, document, "How deep?")
    assert f"{document}: reused" in capsys.readouterr().out


def test_corpus(monkeypatch, capsys, tmp_path):
    for _ in range(2):  # makes the corpus, then opens it
        run_example("corpus.py", monkeypatch, tmp_path / "corpus")
        shown = capsys.readouterr().out
        assert shown.count("1. Greta Wisley (passage-") == 2
        assert "0 of" not in shown.splitlines()[-1]


def test_ask_without_documents_says_that_nothing_is_woven():
    shown = invoke("ask", "--set", "shape=demo", "--max-new-tokens", 2, "Why?")
    assert "no documents: there is nothing to weave; give --docs or --corpus" in shown.stderr


def test_ask_takes_a_checkpoint_folder_and_says_nothing_else(checkpoint):
    result = succeed("ask", "--model", checkpoint, "--json", "--max-new-tokens", 2, "Why?")
    assert json.loads(result.stdout)["model"] == str(checkpoint)
    assert result.stderr == ""
