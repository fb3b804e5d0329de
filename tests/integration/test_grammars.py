"""Grammars with the tokenizers that models have: those that add a space, and those that normalize their text."""

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chunkweave.engine.grammar import GrammarCompiler, Matching, json_rule
from chunkweave.errors import AnswerFormError
from chunkweave.models.loading import bundled_tokenizer
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer

NORMALIZERS = [{"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")]
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}


def made_tokenizer(normalizer: dict[str, Any] | None, *, first_space: bool) -> HuggingFaceTokenizer:
    """The bundled tokenizer with this normalizer, which adds a space before a text or not."""
    tokenizer = json.loads(bundled_tokenizer().serialized)
    tokenizer["normalizer"] = normalizer
    tokenizer["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = first_space
    core = Tokenizer.from_str(json.dumps(tokenizer))
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"))


normalizers = st.none() | st.sampled_from([*NORMALIZERS, STRIP])
normalizers |= st.lists(st.sampled_from([*NORMALIZERS, STRIP]), max_size=3).map(
    lambda steps: {"type": "Sequence", "normalizers": steps}
)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
texts |= st.text(st.sampled_from(" \t eéE\u0301\u0308K\u212aﬁ灯塔ก้"), min_size=1, max_size=12)


def written(matching: Matching, tokenizer: HuggingFaceTokenizer, seed: int) -> str:
    """An answer of tokens drawn from those that are allowed."""
    draw = random.Random(seed)
    token_ids: list[int] = []
    logits = torch.zeros(len(tokenizer.token_texts()))
    while not matching.ended:
        allowed = matching.masked(logits).isfinite().nonzero().flatten().tolist()
        token = draw.choice(allowed)
        matching.take(token)
        token_ids.append(token)
    return tokenizer.decode(token_ids)


@settings(max_examples=40, deadline=None)
@given(
    normalizer=normalizers,
    first_space=st.booleans(),
    values=st.lists(texts, min_size=1, max_size=4, unique=True),
    bare=st.booleans(),
    seed=st.integers(0, 99),
)
def test_answers_match_their_grammar_whatever_the_tokenizer_does_to_a_text(
    normalizer: dict[str, Any] | None, first_space: bool, values: list[str], bare: bool, seed: int
):
    tokenizer = made_tokenizer(normalizer, first_space=first_space)
    key = values[0]
    schema: dict[str, Any] = {"enum": values}
    if not bare:
        schema = {"type": "object", "properties": {key: schema}, "required": [key], "additionalProperties": False}
    compiled = GrammarCompiler(tokenizer).compile(f"%llguidance {{}}\nstart: {json_rule(schema)}\n")
    answer = json.loads(written(compiled.begin(), tokenizer, seed))
    assert (answer if bare else answer[key]) in values


def test_a_token_that_the_grammar_refuses_is_an_error_and_no_end():
    tokenizer = made_tokenizer(None, first_space=True)
    compiled = GrammarCompiler(tokenizer).compile(f"%llguidance {{}}\nstart: {json_rule({'enum': ['Lune']})}\n")
    logits = torch.zeros(len(tokenizer.token_texts()))
    refused = compiled.begin().masked(logits).isinf().nonzero().flatten().tolist()
    for token in random.Random(6).sample(refused, 40):
        with pytest.raises(AnswerFormError, match=f"token {token} was refused"):
            compiled.begin().take(token)
