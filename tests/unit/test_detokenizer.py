"""Text that is shown as it comes: nothing half, nothing twice, nothing of a stop text."""

from hypothesis import given
from hypothesis import strategies as st

from chunkweave.engine.decode import Detokenizer


def stream(text: bytes, stop=()) -> tuple[list[str], Detokenizer]:
    """Feed one byte a token, as a byte-level tokenizer may."""
    detokenizer = Detokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace"), stop)
    pieces = []
    for length in range(1, len(text) + 1):
        pieces.append(detokenizer.add(list(text[:length])))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer


@given(st.text(max_size=30))
def test_pieces_join_to_the_text(text):
    pieces, detokenizer = stream(text.encode())
    assert "".join(pieces) == text == detokenizer.text


def test_half_characters_wait():
    pieces, _ = stream("aé".encode())
    assert pieces == ["a", "", "é", ""]


@given(text=st.text("abc", max_size=30), stop=st.text("abc", min_size=1, max_size=3))
def test_nothing_of_a_stop_text_is_shown(text, stop):
    pieces, detokenizer = stream(text.encode(), (stop,))
    assert "".join(pieces) == text.partition(stop)[0]
    assert detokenizer.stopped == (stop in text)


def test_what_may_become_a_stop_text_waits():
    pieces, _ = stream(b"x\nQ:", ("\nQ",))
    assert pieces == ["x", "", "", ""]
