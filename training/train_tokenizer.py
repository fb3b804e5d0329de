"""Train the bundled tokenizer: byte-level BPE with 4096 tokens, in Hugging Face format.

    python training/train_tokenizer.py [--out FOLDER] [--vocab-size 4096] [--seed 0]

The training text is nothing that has to be downloaded:

- prose in the docstrings of the Python standard library, and the language reference that `pydoc` carries
  (PSF licence; only counts of letter sequences end up in the tokenizer);
- sentences drawn from `tokenizer_words.txt`, a list of common English words by falling frequency. BPE never
  merges across words, so how often a word occurs is all that matters; the grammar of the sentences is not.

The result is a function of the arguments, the word list and the standard library: another Python version
gives slightly other merges. The committed files were made with Python 3.11. No evaluation data is read.
"""

import argparse
import ast
import inspect
import json
import math
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# One alternative per kind of run; a run takes one space before it along. Digits stand alone.
APOSTROPHES = "['\N{RIGHT SINGLE QUOTATION MARK}]"
WORD_SPLIT = r" ?\p{N}|" + APOSTROPHES + r"(?:s|t|d|m|re|ve|ll)\b| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "src" / "chunkweave" / "assets" / "tokenizer"
WORDS_FILE = Path(__file__).resolve().parent / "tokenizer_words.txt"

_MARKUP = re.compile(r":\w+:`~?([^`]*)`|``?([^`]*)``?|\*\*?(\w[^*]*)\*\*?")
_SENTENCE_LIKE = re.compile(r"[A-Za-z][a-z]*(?:[ ,;:.'-]+[A-Za-z0-9]+){3,}")


def main() -> None:
    """Train and write `tokenizer.json` and `tokenizer_config.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--sentences", type=int, default=60_000, help="sentences drawn from the word list")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    tokenizer = train(arguments.vocab_size, arguments.sentences, random.Random(arguments.seed))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", "utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens -> {arguments.out}")


def train(vocab_size: int, sentences: int, rng: random.Random) -> Tokenizer:
    """A byte-level BPE tokenizer whose alphabet holds all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(sentences, rng), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """What Hugging Face's `from_pretrained` needs beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }


def _training_text(sentences: int, rng: random.Random) -> Iterator[str]:
    yield from _standard_library_prose()
    yield from _drawn_sentences(sentences, rng)


def _standard_library_prose() -> Iterator[str]:
    """Lines of docstrings that read as sentences, without their markup; sorted by file for determinism."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for text in _long_strings(tree):
            for line in inspect.cleandoc(text).splitlines():
                plain = _MARKUP.sub(lambda m: m[1] or m[2] or m[3] or "", line).strip()
                if _reads_as_prose(plain):
                    yield plain + "\n"


def _long_strings(tree: ast.AST) -> Iterator[str]:
    """Docstrings, and other string constants long enough to be text (the topics of `pydoc`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 60:
            yield node.value


def _reads_as_prose(line: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in line)
    code_like = ">>>" in line or "_" in line or "(" in line or "=" in line or "\\" in line
    return not code_like and letters >= 0.9 * len(line) and _SENTENCE_LIKE.search(line) is not None


def _drawn_sentences(count: int, rng: random.Random) -> Iterator[str]:
    """Sentences of 6 to 24 words whose frequencies follow Zipf's law over the list."""
    words = [w for line in WORDS_FILE.read_text("utf-8").splitlines() if line[:1] != "#" for w in line.split()]
    weights = [1.0 / math.pow(rank + 3, 0.85) for rank in range(len(words))]
    for _ in range(count):
        drawn = rng.choices(words, weights, k=rng.randint(6, 24))
        drawn = [word.capitalize() if place == 0 or rng.random() < 0.06 else word for place, word in enumerate(drawn)]
        if rng.random() < 0.3:
            drawn.insert(rng.randrange(1, len(drawn)), str(rng.randint(1000, 2030)))
        if rng.random() < 0.6:
            drawn[rng.randrange(len(drawn) - 1)] += ","
        yield " ".join(drawn) + rng.choice([".", ".", ".", ".", "?"]) + "\n"


if __name__ == "__main__":
    main()
