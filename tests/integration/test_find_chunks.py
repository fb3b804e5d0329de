"""Chunks in plain prompts with SmolLM2's tokenizer and others: the usual formats, and ids that never change."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chunkweave.config import FindConfig, PieceKind
from chunkweave.models.gguf import SMOLLM2, SMOLLM2_PIP, checkpoint_folder, smollm2_file
from chunkweave.prompt.find_chunks import MOST, ChunkFinder, TokenTable
from chunkweave.prompt.parts import neutral_passages
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from tests.unit.chunking_tokenizers import bundled, chatml, llama, mistral, qwen, sentencepiece, without_template

PASSAGES = neutral_passages()
needs_smollm2 = pytest.mark.skipif(smollm2_file() is None, reason=f"SmolLM2 is not installed: {SMOLLM2_PIP}")


@cache
def smollm2():
    return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(checkpoint_folder(SMOLLM2)))


@cache
def finder(tokenizer):
    return ChunkFinder(TokenTable.of(tokenizer), FindConfig().exact_kinds)


def texts_of(text):
    ids = smollm2().encode(text)
    return [smollm2().decode(ids[one.span.start : one.span.stop]) for one in finder(smollm2()).pieces(ids)]


@needs_smollm2
@pytest.mark.parametrize(
    ("separator", "lead"),
    [
        ("\n", ""),
        ("\n\n", "## A heading\n"),
        ("\n---------------------\n", ""),
        ("</source>\n", '<source id="1" name="a">'),
        ("</document>", "\n<document>\n"),
        ('"},\n  {"text": "', ""),
        ('"}, {"text": "', ""),
        ("\n\n", "[Document(page_content='"),
    ],
)
def test_documents_in_usual_formats_are_cut_at_their_own_ends(separator, lead):
    """Each document is in one piece, the same in another order."""
    documents = [f"{lead}{text}{separator}" for text in PASSAGES[:8]]
    pieces, moved = (texts_of("Context:\n\n" + "".join(order)) for order in (documents, documents[::-1]))
    inside = [text for text in PASSAGES[:8] if any(text in piece for piece in {*pieces} & {*moved})]
    assert len(inside) >= 6  # the first one may begin, and the last one end, in another way


_SIGNS = [
    "\n",
    "\n\n",
    " ",
    "</document>\n",
    '<source id="1">',
    "---\n",
    "# ",
    "}, {",
    '"}',
    ",",
    "  \n",
    "1 2 3",
    "\u00e9",
    "\U0001f600",
]
_TEXTS = st.lists(st.sampled_from([*_SIGNS, *PASSAGES[:6]]) | st.text(max_size=20), max_size=40).map("".join)
_ROLES = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), _TEXTS), min_size=1, max_size=5)
TOKENIZERS = {
    "bundled": bundled,
    "chatml": chatml,
    "llama": llama,
    "mistral": mistral,
    "qwen": qwen,
    "sentencepiece": sentencepiece,
    "plain": without_template,
}


@pytest.mark.parametrize("name", [*TOKENIZERS, pytest.param("smollm2", marks=needs_smollm2)])
@settings(max_examples=40, deadline=None)
@given(messages=_ROLES, system=_TEXTS)
def test_pieces_are_the_plain_tokenization(name, messages, system):
    tokenizer = smollm2() if name == "smollm2" else TOKENIZERS[name]()
    chat = [{"role": role, "content": text} for role, text in messages]
    if name != "mistral":
        chat.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.render_chat(chat)
    ids = tokenizer.encode(
        system.join(text for _, text in messages) if rendered is None else rendered, control_tokens=True
    )
    own = finder(tokenizer)
    pieces = own.pieces(ids)
    assert [token for one in pieces for token in ids[one.span.start : one.span.stop]] == ids
    assert all(0 < len(one.span) <= MOST for one in pieces if one.kind is not PieceKind.CONTROL)
    control = [bool(tokenizer.control_ids & {*ids[one.span.start : one.span.stop]}) for one in pieces]
    assert all(one.kind is PieceKind.CONTROL for one, crossed in zip(pieces, control, strict=True) if crossed)
    prompt = own.prompt(ids, tokenizer.start_ids, fingerprint="model", salt="")
    assert list(prompt.token_ids) == ids
    woven = [part.token_ids for part in prompt.parts if part.id is not None and not part.exact_only]
    assert not any(tokenizer.control_ids & {*part} for part in woven)
