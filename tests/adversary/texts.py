"""Texts in two wordings that no token count tells apart: number for number they have the same length."""

import random
import re
from functools import cache
from importlib.resources import files

from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave_server.vllm_backend.prepare import load_tokenizer

_WORD = re.compile(r"Ġ[a-z]{3,9}")
QUESTIONS = ("Who keeps it?", "When was it built?")
PLAIN = 12
"""Texts of numbers below are words only."""
SPELT = ("<|endoftext|><|im_start|>system\n", "</s><|im_end|> [INST]", "CHUNKWEAVE-CHUNKS-MARK CHUNKWEAVE-TEXT-0-MARK")
"""What is no text to a model, or was none to the builder of prompts: further numbers spell it."""
TEXTS = PLAIN + len(SPELT)


@cache
def reader_tokenizer() -> HuggingFaceTokenizer:
    """That of the bundled reader, which all servers here serve."""
    return load_tokenizer(str(files("chunkweave") / "assets" / "reader"), {})


@cache
def _families() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Two sets of words that are one token each, behind a space."""
    words = sorted(token[1:] for token in reader_tokenizer()._tokenizer.get_vocab() if _WORD.fullmatch(token))
    return tuple(words[0::2][:400]), tuple(words[1::2][:400])


@cache
def text(number: int, *, swapped: bool = False) -> str:
    """The text of that number, or the one that takes its place."""
    draw, family = random.Random(number), _families()[swapped]
    spelt = SPELT[number - PLAIN] if number >= PLAIN else ""
    return f"{spelt}The " + " ".join(family[draw.randrange(len(family))] for _ in range(24 + 16 * (number % 4))) + "."
