"""Pieces of prompts without marks: where they are cut, what they are, and what is known of them."""

import random
import time

import numpy as np
import pytest

from chunkweave.config import FindConfig, PieceKind
from chunkweave.errors import UsageError
from chunkweave.prompt.find_chunks import LEAST, MEAN, MOST, ChunkFinder, Sketch, TokenTable
from chunkweave.prompt.parts import PartKind, neutral_passages
from chunkweave.types import ChunkId
from tests.unit.chunking_tokenizers import bundled, chatml, llama, mistral, sentencepiece, without_template

USUAL = FindConfig().exact_kinds
PASSAGES = [text for text in neutral_passages() if len(bundled().encode(text)) >= LEAST]


def finder(tokenizer=None, exact=USUAL):
    return ChunkFinder(TokenTable.of(tokenizer or bundled()), exact)


def found(tokenizer, text, exact=USUAL):
    """The texts and kinds of the pieces of a text."""
    ids = tokenizer.encode(text, control_tokens=True)
    pieces = finder(tokenizer, exact).pieces(ids)
    return [(tokenizer.decode(ids[piece.span.start : piece.span.stop]), piece.kind) for piece in pieces]


def texts_of(tokenizer, text):
    return [piece for piece, _ in found(tokenizer, text)]


def noise(count, seed=0):
    """Token ids without any structure."""
    rng = random.Random(seed)
    return [rng.randrange(10, 50_000) for _ in range(count)]


def starts(ids, table=None):
    return {piece.span.start for piece in ChunkFinder(table, USUAL).pieces(ids)}


def test_each_paragraph_is_a_piece_wherever_it_is():
    first, second, third = PASSAGES[:3]
    assert texts_of(bundled(), "\n\n".join((first, second, third))) == [first, f"\n\n{second}", f"\n\n{third}"]
    moved = texts_of(bundled(), "\n\n".join(("Here is prose.", third, first, second, "Who?")))
    assert moved == ["Here is prose.", f"\n\n{third}", f"\n\n{first}", f"\n\n{second}", "\n\nWho?"]


def test_paragraphs_are_pieces_with_line_breaks_that_are_bytes():
    """SentencePiece has tokens for bytes, two of which are a blank line."""
    ids = [sentencepiece().encode("\n\n".join(order)) for order in (PASSAGES[:4], PASSAGES[3::-1])]
    own = finder(sentencepiece())
    cut = [{tuple(one[piece.span.start : piece.span.stop]) for piece in own.pieces(one)} for one in ids]
    assert len(cut[0]) == 4
    assert len(cut[0] & cut[1]) == 2  # the first and the last one have line breaks on one side only


def test_a_long_text_is_cut_by_its_tokens_alone():
    ids = noise(20_000)
    pieces = ChunkFinder(None, USUAL).pieces(ids)
    lengths = [len(piece.span) for piece in pieces]
    assert max(lengths) <= MOST
    assert min(lengths[:-1]) >= LEAST
    assert 0.8 * MEAN < sum(lengths) / len(lengths) < 1.2 * MEAN


def test_text_before_and_within_changes_only_cuts_nearby():
    ids = noise(8_000)
    before = starts(ids)
    for added in (1, 7, 300):
        after = {start - added for start in starts([*noise(added, seed=1), *ids])}
        assert {one for one in before if one > 2 * MOST} <= after
    changed = [*ids[:4_000], 9, *ids[4_000:]]
    after = starts(changed)
    assert {one for one in before if one <= 4_000} <= after
    assert {one + 1 for one in before if one > 4_000 + 2 * MOST} <= after


def test_short_paragraphs_are_joined_with_each_other_only():
    short = [f"Point {name} is short and says little." for name in "abcdefgh"]
    text = "\n\n".join((PASSAGES[0], *short, PASSAGES[1]))
    pieces = texts_of(bundled(), text)
    assert pieces[0] == PASSAGES[0]
    assert pieces[-1] == f"\n\n{PASSAGES[1]}"
    assert 1 < len(pieces) - 2 < len(short)


@pytest.mark.parametrize("tokenizer", [chatml(), llama(), bundled(), mistral()])
@pytest.mark.parametrize("tag", ['<file id="{}" name="notes.md">', '<file rank="{}">\n'])
def test_a_text_behind_a_tag_with_a_number_is_a_piece_of_its_own(tokenizer, tag):
    """As Open WebUI writes sources: their numbers are ranks, which change. `file` is a token here, `source` is not."""

    def pieces(texts, tag):
        sources = (f"{tag.format(n)}{text}</file>" for n, text in enumerate(texts, start=1))
        whole = texts_of(tokenizer, "\n".join(("<context>", *sources, "</context>")))
        return {text.partition("</")[0].strip() for text in whole}

    for order in (1, -1):
        assert set(PASSAGES[:3]) <= pieces(PASSAGES[:3][::order], tag)
    whole = '<file name="notes.md">'
    assert {f"{whole}{text}" for text in PASSAGES[:3]} <= pieces(PASSAGES[:3], whole)


@pytest.mark.parametrize("tokenizer", [chatml(), llama(), bundled(), mistral(), sentencepiece()])
def test_pieces_cross_no_control_token_and_roles_are_known(tokenizer):
    chat = [{"role": "user", "content": PASSAGES[0]}, {"role": "assistant", "content": PASSAGES[1]}]
    chat.append({"role": "user", "content": f"{PASSAGES[2]}\n\nWho is it?"})
    if tokenizer is not mistral():
        chat.insert(0, {"role": "system", "content": f"{PASSAGES[3]}\n\n{PASSAGES[4]}"})
    ids = tokenizer.encode(tokenizer.render_chat(chat), control_tokens=True)
    pieces = finder(tokenizer).pieces(ids)
    kinds = {}
    for piece in pieces:
        inside = ids[piece.span.start : piece.span.stop]
        assert piece.kind is PieceKind.CONTROL or not tokenizer.control_ids & set(inside)
        kinds[tokenizer.decode(inside).strip()] = piece.kind
    assert [kinds[text] for text in PASSAGES[:3]] == [PieceKind.PASSAGE] * 3
    assert kinds["Who is it?"] is PieceKind.QUESTION
    if tokenizer is not mistral():
        assert [kinds[text] for text in PASSAGES[3:5]] == [PieceKind.SYSTEM] * 2


@pytest.mark.parametrize("tokenizer", [chatml(), llama(), sentencepiece()])
@pytest.mark.parametrize("plain", [False, True])
def test_results_of_tools_are_a_kind_and_no_question(tokenizer, plain):
    """A template may have a role for them; without tools in a template they are text of the user."""
    asked = {"role": "user", "content": f"{PASSAGES[0]}\n\nWho is it?"}
    text = "\n\n".join(PASSAGES[1:4])
    result = {"role": "user", "content": f"<tool_response>{text}</tool_response>"}
    if not plain:
        result = {"role": "tool", "tool_call_id": "1", "content": text}
    chat = [asked, {"role": "assistant", "content": "I search."}, result]
    ids = tokenizer.encode(tokenizer.render_chat(chat), control_tokens=True)
    kinds = {
        tokenizer.decode(ids[one.span.start : one.span.stop]).strip(): one.kind for one in finder(tokenizer).pieces(ids)
    }
    assert kinds[PASSAGES[0]] is PieceKind.PASSAGE
    assert kinds["Who is it?"] is PieceKind.QUESTION
    assert kinds[PASSAGES[2]] is PieceKind.RESULTS
    woven = FindConfig(exact_pieces=("short",)).exact_kinds
    for exact, most in ((USUAL, 0), (woven, 3)):
        parts = prompt_of(ids, own=finder(tokenizer, exact)).parts
        found = [part for part in parts if part.id is not None and not part.exact_only]
        assert (len(found) > 1) == (most > 0)
        assert PASSAGES[1] not in tokenizer.decode(parts[-1].token_ids)


def test_the_kind_of_a_text_follows_from_its_characters():
    code = "\n".join(f"    if (rows[{n}] != null) {{ total += rows[{n}].value(); }}" for n in range(12))
    table = "\n".join(f"| {n} | {n * 17.5} | {n * n * 12345} |" for n in range(20))
    calls = str([{"name": "search", "arguments": {"query": "a b", "limit": n}} for n in range(8)])
    for text, kind in ((code, PieceKind.CODE), (calls, PieceKind.CODE), (table, PieceKind.NUMBERS)):
        assert {one for piece, one in found(bundled(), text)} <= {kind, PieceKind.SHORT}
    assert {kind for text in PASSAGES for _, kind in found(bundled(), text)} == {PieceKind.PASSAGE}


def prompt_of(ids, *, exact=USUAL, start=(), own=None, salt=""):
    own = own or finder(exact=exact)
    return own.prompt(ids, start, fingerprint="model", salt=salt)


def test_a_prompt_of_pieces_has_the_same_tokens():
    chat = [{"role": "system", "content": "Be kind."}]
    chat.append({"role": "user", "content": "\n\n".join((PASSAGES[0], "A title", PASSAGES[1], "Who is it?"))})
    ids = bundled().encode(bundled().render_chat(chat), control_tokens=True)
    prompt = prompt_of(ids, start=bundled().start_ids)
    assert prompt.token_ids == tuple(ids)
    kinds = [(part.kind, part.exact_only) for part in prompt.parts]
    system, chunk = (PartKind.SYSTEM, True), (PartKind.CHUNK, False)
    assert kinds == [(PartKind.START, False), system, chunk, (PartKind.CHUNK, True), chunk, (PartKind.QUESTION, False)]
    assert "Who is it?" in bundled().decode(prompt.parts[-1].token_ids)
    assert prompt_of([]).parts == ()
    assert [part.kind for part in prompt_of(bundled().encode("Who?")).parts] == [PartKind.QUESTION]


def test_the_beginning_of_an_answer_belongs_to_its_question():
    def asked(begun):
        chat = [{"role": "user", "content": f"{PASSAGES[0]}\n\nWho is it?"}]
        ids = chatml().encode(chatml().render_chat(chat), control_tokens=True)
        prompt = prompt_of([*ids, *chatml().encode(begun)], own=finder(chatml()))
        return chatml().decode(prompt.parts[-1].token_ids).strip()

    assert asked("").startswith("Who is it?")
    assert asked("It is").startswith("Who is it?")
    assert asked(f"{PASSAGES[1]}\n\nIt is") == "It is"


def test_what_is_woven_is_a_setting():
    text = "\n\n".join(("Short.", PASSAGES[0], "1 2 3 4 5 6 7 8 9 " * 10, "Who?"))
    ids = bundled().encode(text)
    some, everything = (
        prompt_of(ids, exact=FindConfig(exact_pieces=one).exact_kinds) for one in (("short",), ("none",))
    )
    assert [part.exact_only for part in some.parts[:-1]] == [True, False, False]
    assert [part.exact_only for part in everything.parts[:-1]] == [False] * 3
    with pytest.raises(UsageError, match="exact_pieces takes"):
        FindConfig(exact_pieces=("prose",))


def test_without_a_table_or_roles_nothing_is_woven():
    ids = [3, *noise(2_000)]
    prompt = prompt_of(ids, start=(3,), own=ChunkFinder(None, frozenset(), control={3}))
    assert prompt.token_ids == tuple(ids)
    assert all(part.exact_only for part in prompt.parts if part.id is not None)
    assert TokenTable.of(without_template()).headers == {}


def test_a_piece_is_novel_at_its_first_sighting_under_its_salt():
    ids, own = bundled().encode("\n\n".join((*PASSAGES[:3], "Who?"))), finder()
    first, second = (prompt_of(ids, own=own) for _ in range(2))
    assert [part.novel for part in first.parts[:-1]] == [True] * 3
    assert [part.novel for part in second.parts[:-1]] == [False] * 3
    other = prompt_of(ids, own=own, salt="another tenant")
    assert [part.novel for part in other.parts[:-1]] == [True] * 3


def test_the_sketch_keeps_hot_pieces_and_forgets_old_ones():
    sketch, hot = Sketch(), [ChunkId(f"hot-{n}") for n in range(100)]
    for _ in range(4):
        sketch.see(hot)
    mistaken = sketch.see(ChunkId(f"novel-{n}") for n in range(40_000))
    assert len(mistaken) < 1000
    assert sketch.see(hot) == set(hot)
    for n in range(40_000, 200_000):
        sketch.see([ChunkId(f"novel-{n}")])
    assert len(sketch.see(ChunkId(f"novel-{n}") for n in range(1000))) < 300


@pytest.mark.timed
def test_finding_takes_less_than_a_millisecond_for_8000_tokens():
    words = " ".join(PASSAGES).split()
    rng = random.Random(1)
    paragraphs = (" ".join(rng.choices(words, k=rng.randrange(60, 300))) for _ in range(60))
    ids = bundled().encode("\n\n".join(paragraphs))[:8_000]
    assert len(ids) == 8_000
    own = finder()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        own.pieces(ids)
        times.append(time.perf_counter() - began)
    assert np.median(times) < 0.003  # about 0.6 ms; the machine may be busy
