"""The reader's tokenizer: byte-level BPE whose tokens are English words, syllables of names, and whole numbers.

    python training/reader_tokenizer.py --out FOLDER

It differs from the bundled general tokenizer in three ways that make a small model learn sooner: a number of a world is
one token, a name is one token for each syllable (the trainer never sees a name whole, so no merge crosses syllables),
and every text is tokenized as if a space stood before it, so that a name at the start of a passage has the tokens that
it has elsewhere. Any text can be encoded: all 256 bytes are in the alphabet. Reads no test world.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from worlds import wording
from worlds.questions import ask_about
from worlds.records import Split
from worlds.world import generate_world

from chunkweave.prompt.template import INSTRUCTION

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SYSTEM_PROMPTS = (
    "Answer the question from the passages below.",
    "You answer questions in a few words, from the passages that follow.",
    "Use only these passages. If they do not hold the answer, say that it is not stated.",
    "You are a helpful assistant.",
)
"""Instructions that prompts with a system part are trained on; "\\n\\n" follows in a prompt."""

_WORDS_FILE = Path(__file__).resolve().parent / "tokenizer_words.txt"
_NAME = re.compile(
    rf"\b({'|'.join(wording.CITY_STARTS + wording.INSTITUTION_STARTS + wording.SURNAME_STARTS)})"
    rf"({'|'.join(wording.CITY_ENDS + wording.INSTITUTION_ENDS + wording.SURNAME_ENDS)})\b"
)


def train_tokenizer(vocab_size: int = 2048, worlds: int = 150) -> Tokenizer:
    """The tokenizer; a function of its arguments, the generator and the word list."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(worlds), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, as Hugging Face's `from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _text(worlds: int) -> Iterator[str]:
    rng = Random("reader tokenizer")
    for seed in range(worlds):
        world = generate_world(seed, Split.TRAIN)
        for passage in world.passages:
            yield _NAME.sub(r"\1-\2", passage.text) + "\n\n"
        for question in ask_about(rng.sample(world.passages, 6), rng, Split.TRAIN, absent=world.passages[:2]):
            yield _NAME.sub(r"\1-\2", f"Question: {question.text}\nAnswer: {question.answers[0]}")
    starts = wording.CITY_STARTS + wording.INSTITUTION_STARTS + wording.SURNAME_STARTS
    ends = wording.CITY_ENDS + wording.INSTITUTION_ENDS + wording.SURNAME_ENDS
    whole = [*starts, *wording.WOMEN, *wording.MEN, *wording.ALIAS_FIRST, *wording.ALIAS_LAST]
    for _ in range(150):
        yield from (f"the {word}" for word in whole)
        yield from (f"the {number}" for number in (*wording.YEARS, *wording.NUMBERS))
        yield from (f"-{end}" for end in ends)
        yield from (INSTRUCTION, *SYSTEM_PROMPTS)
    words = [
        w for line in _WORDS_FILE.read_text("utf-8").splitlines() if not line.startswith("#") for w in line.split()
    ]
    for rank, word in enumerate(words):
        for _ in range(1 + 20_000 // (rank + 150)):
            yield f"the {word}"


def main() -> None:
    """Train and write the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=2048)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(arguments.vocab_size)
    write_tokenizer(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {arguments.out}")


if __name__ == "__main__":
    main()
