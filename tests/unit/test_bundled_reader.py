"""What the bundled reader can read is told from other text by its tokenizer."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from chunkweave.calibration.questions import HARBOUR, VALLEY, bundled_corpus, bundled_documents
from chunkweave.models.gguf import READER_TOKENS_A_WORD, checkpoint_folder, is_bundled_reader
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer, tokens_a_word


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(checkpoint_folder("reader"), local_files_only=True))


def test_its_own_worlds_are_read(tokenizer):
    passages = [chunk.text for question in bundled_corpus().questions for chunk in question.chunks]
    assert len(passages) > 20
    assert all(0 < tokens_a_word(tokenizer, [passage]) < READER_TOKENS_A_WORD for passage in passages)


def test_other_text_is_not(tokenizer):
    texts = [text for which in (HARBOUR, VALLEY) for _, text in bundled_documents(which)[0]]
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert all(
        tokens_a_word(tokenizer, [text]) > READER_TOKENS_A_WORD for text in [*texts, readme, "港口在早上九点开放。"]
    )


def test_nothing_is_nothing_to_warn_of(tokenizer):
    assert tokens_a_word(tokenizer, []) == 0
    assert tokens_a_word(tokenizer, ["", "  "]) == 0


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_bundled_reader("reader")
    assert not is_bundled_reader("smollm2")
    assert not is_bundled_reader(None)
    (tmp_path / "reader").mkdir()
    assert not is_bundled_reader("reader")
