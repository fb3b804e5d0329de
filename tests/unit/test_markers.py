"""Documents between tags inside a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.config import RequestDefaults
from chunkweave.errors import UsageError
from chunkweave_server.markers import cut_out, marks_documents

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1, max_size=20).filter(str.strip)


@given(pieces=st.lists(PLAIN, min_size=2, max_size=5), documents=st.lists(PLAIN, min_size=4, max_size=4))
def test_what_was_marked_comes_out_and_the_rest_stays(pieces, documents):
    marked = [f"<doc>{one}</doc>" for one in documents[: len(pieces) - 1]]
    text = "".join(piece + mark for piece, mark in zip(pieces, [*marked, ""], strict=True))
    rest, found = cut_out(text, "doc")
    assert [one.text for one in found] == [one.strip() for one in documents[: len(pieces) - 1]]
    assert rest == "\n\n".join(piece.strip() for piece in pieces)


def test_attributes_say_title_and_id():
    text = """<d title="A &amp; B" id='7' page="3">one</d><d source="s">two</d ><D>no</D>"""
    rest, (one, two) = cut_out(text, "d")
    assert (one.title, one.id, one.text) == ("A & B", "7", "one")
    assert (two.title, two.id) == ("", "s")
    assert rest == "<D>no</D>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<doc>never closed", "<doc> is not closed"),
        ("closed</doc> only", "</doc> without <doc>"),
        ("<doc>one <doc>two</doc></doc>", "<doc> inside <doc>"),
    ],
)
def test_tags_that_do_not_match_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        cut_out(text, "doc")


def test_other_tags_are_text():
    text = "<docs>a</docs> <doc-x>b</doc-x> 1 <doc"
    assert not marks_documents([text], "doc")
    assert cut_out(text, "doc") == (text, [])


@pytest.mark.parametrize("tag", ["<doc>", "a b", "1"])
def test_a_tag_is_a_name(tag):
    with pytest.raises(UsageError, match="without brackets"):
        RequestDefaults(document_tag=tag)
