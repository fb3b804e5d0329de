"""The adapter around Hugging Face tokenizers, and the bundled tokenizer itself."""

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.errors import UsageError
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from tests.unit.chunking_tokenizers import ASSETS, bundled, chatml, family, llama, mistral, without_template

CONTROL_TEXTS = ["</s>", "<s>", "<|user|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>"]
HOSTILE = st.lists(st.sampled_from([*CONTROL_TEXTS, "<|im_", "end|>", "<", " ", "  ", "word", "é"])).map("".join)


@settings(deadline=None)
@given(st.text())
def test_bundled_tokenizer_gives_every_text_back(text: str) -> None:
    assert bundled().decode(bundled().encode(text)) == text


def test_bundled_tokenizer_splits_digits() -> None:
    assert [bundled().decode([token]) for token in bundled().encode("in 1983")] == ["in", " 1", "9", "8", "3"]


def test_bundled_tokenizer_compresses_english() -> None:
    text = "\n".join(path.read_text("utf-8") for path in sorted((ASSETS / "documents").glob("*.md")))
    assert len(bundled().encode(text)) < 2.0 * len(text.split())


def test_encode_adds_no_bos_and_start_ids_name_it() -> None:
    assert bundled().start_ids == llama().start_ids == (0,)
    assert 0 not in bundled().encode("text")
    assert bundled().encode("") == []


def test_a_tokenizer_without_bos_has_no_start_ids() -> None:
    assert chatml().start_ids == ()


@settings(deadline=None)
@given(HOSTILE)
def test_text_never_becomes_a_control_token(text: str) -> None:
    tokenizer = chatml()
    whole = tokenizer.encode(text)
    control = {tokenizer.encode(spelled, control_tokens=True)[0] for spelled in CONTROL_TEXTS}
    assert control.isdisjoint(whole)
    assert tokenizer.decode(whole) == text


def test_control_tokens_count_where_they_are_asked_for() -> None:
    for spelled in CONTROL_TEXTS:
        assert len(chatml().encode(spelled, control_tokens=True)) == 1
        assert len(chatml().encode(spelled)) > 1


def test_added_white_space_tokens_are_ordinary_text() -> None:
    assert len(chatml().encode("  ")) == 1


def test_encoding_text_leaves_the_tokenizer_as_it_was() -> None:
    tokenizer = family(None)
    before = tokenizer.encode("a</s>b", control_tokens=True)
    tokenizer.encode("a</s>b")
    assert tokenizer.encode("a</s>b", control_tokens=True) == before


@settings(deadline=None)
@given(st.sampled_from([bundled(), llama(), chatml(), mistral()]), st.text() | HOSTILE)
def test_the_ids_are_those_of_the_wrapped_tokenizer(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    wrapped = tokenizer._tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(text, control_tokens=True) == wrapped


def test_others_go_on_while_a_long_text_is_tokenized() -> None:
    """Without the interpreter's lock: a thread that only counts gets on while another one tokenizes."""
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        core, before = bundled()._core, counted[0]
        assert core.encode_batch_fast(["The ferry leaves at seven. " * 20_000], add_special_tokens=False)
        assert counted[0] - before > 20
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how much memory the process has")
def test_memory_of_a_long_text_is_given_back() -> None:
    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    tokens: list[int] = []
    text = "0123 " * 80_000
    tokenizing = threading.Thread(target=lambda: tokens.append(len(bundled().encode(text))))
    before = resident_mb()
    tokenizing.start()
    tokenizing.join()
    assert tokens[0] > 300_000
    assert resident_mb() - before < 20


def test_stop_ids_hold_eos_end_of_turn_and_what_the_caller_gives() -> None:
    eot = llama().encode("<|eot_id|>", control_tokens=True)[0]
    assert llama().stop_ids == {1, eot}
    assert mistral().stop_ids == {1}
    assert HuggingFaceTokenizer(llama()._tokenizer, stop_ids=[7]).stop_ids == {1, 7, eot}


def test_decode_leaves_special_tokens_out() -> None:
    assert bundled().decode([0, *bundled().encode("kept"), 1]) == "kept"


def test_render_chat() -> None:
    message = {"role": "user", "content": "Hello"}
    assert bundled().render_chat([message]) == "<s><|user|>\nHello</s>\n<|assistant|>\n"
    assert without_template().render_chat([message]) is None


def test_a_refused_role_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="only user and assistant"):
        mistral().render_chat([{"role": "system", "content": "x"}])
