"""Training prompts: the user's passages in random order, number and length, and questions about them."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from chunkweave.calibration.questions import Example, sentence_questions
from chunkweave.errors import UsageError
from chunkweave.prompt.documents import Document, SplitConfig, split_text
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import Chunk

PIECE_TOKENS = (64, 128, 256)
"""Maximum tokens of a chunk; one of them is drawn per document, so that chunk lengths vary."""

_LEAST_GROUPS = 8
_ABOUT_NAMES = ("What do the passages say about {}?", "Who or what is {}?", "Tell me about {} in one sentence.")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][\w'-]+(?: [A-Z][\w'-]+)*")
"""A name inside a sentence, not its first word."""


@dataclass(frozen=True, slots=True)
class Group:
    """Passages that belong together, and questions about them, if any."""

    chunks: tuple[Chunk, ...]
    questions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """Bounds of a training prompt. `most_tokens` limits the tokens of its chunks."""

    least_chunks: int = 2
    most_chunks: int = 8
    most_tokens: int = 1024
    questions: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.least_chunks <= self.most_chunks:
            raise UsageError(f"{self.least_chunks} to {self.most_chunks} chunks per prompt is not a range")
        if self.questions < 1:
            raise UsageError(f"a prompt needs at least one question, not {self.questions}")


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """Chunks in prompt order, and independent questions about them.

    With `answers`, one per question, these are learnt instead of the model's own answers.
    """

    chunks: tuple[Chunk, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...] = ()


class TrainingPrompts(Protocol):
    """A source of training prompts."""

    def prompt(self, index: int) -> TrainingPrompt:
        """The prompt with this index; deterministic."""


def groups_of_documents(documents: Sequence[Document], tokenizer: TextTokenizer, rng: Random) -> list[Group]:
    """One group per document, split into chunks of at most one of `PIECE_TOKENS` tokens."""
    return [_cut(one.text, one.name, tokenizer, rng) for one in documents]


def groups_of_examples(examples: Sequence[Example], tokenizer: TextTokenizer, rng: Random) -> list[Group]:
    """One group per question of a data set: its passages, split likewise if they are long, and the question."""
    groups = []
    for example in examples:
        pieces = [_cut(chunk.text, chunk.source, tokenizer, rng).chunks for chunk in example.chunks]
        groups.append(Group(tuple(chunk for some in pieces for chunk in some), (example.question,)))
    return groups


def _cut(text: str, source: str, tokenizer: TextTokenizer, rng: Random) -> Group:
    return Group(tuple(split_text(text, tokenizer, SplitConfig(rng.choice(PIECE_TOKENS)), source=source)))


def held_out(groups: Sequence[Group], share: float, rng: Random) -> tuple[list[Group], list[Group]]:
    """Groups for training and for evaluation; no passage is in both.

    Raises:
        UsageError: there are too few groups.
    """
    if len(groups) < _LEAST_GROUPS:
        raise UsageError(f"there are {len(groups)} documents or questions to train on; give at least {_LEAST_GROUPS}")
    mixed = rng.sample(list(groups), len(groups))
    count = max(_LEAST_GROUPS // 2, round(share * len(groups)))
    kept = mixed[:count]
    texts = {chunk.text for group in kept for chunk in group.chunks}
    rest = [group for group in mixed[count:] if not any(chunk.text in texts for chunk in group.chunks)]
    if not rest:
        raise UsageError("every document shares passages with the held-out documents; give more documents")
    return rest, kept


def digest_of_groups(groups: Sequence[Group]) -> str:
    """BLAKE2b-128 of all passages and questions in order: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for group in groups:
        for text in (*(chunk.text for chunk in group.chunks), "", *group.questions):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class PromptSource:
    """Draws training prompts; prompt i depends only on the groups, the sizes, the seed and i."""

    def __init__(
        self, groups: Sequence[Group], count_tokens: Callable[[str], int], sizes: PromptSizes, *, seed: str
    ) -> None:
        self._groups = groups
        self._all = list({chunk.text: chunk for group in groups for chunk in group.chunks}.values())
        self._count_tokens = count_tokens
        self._sizes = sizes
        self._seed = seed

    def prompt(self, index: int) -> TrainingPrompt:
        """Passages of one group and of others, shuffled; the group's questions, then generated ones."""
        rng = Random(f"{self._seed} {index}")
        group = rng.choice(self._groups)
        wanted = rng.randint(self._sizes.least_chunks, self._sizes.most_chunks)
        own = rng.sample(group.chunks, min(len(group.chunks), max(1, wanted // 2)))
        others = rng.sample(self._all, min(len(self._all), wanted))
        chunks = self._fitting({chunk.text: chunk for chunk in (*own, *others)}.values(), wanted)
        rng.shuffle(chunks)
        asked = list(group.questions[: self._sizes.questions])
        asked += _made_up(chunks, rng, self._sizes.questions - len(asked))
        return TrainingPrompt(tuple(chunks), tuple(asked) or (_ABOUT_NAMES[0].format("this"),))

    def _fitting(self, chunks: Iterable[Chunk], wanted: int) -> list[Chunk]:
        taken: list[Chunk] = []
        left = self._sizes.most_tokens
        for chunk in chunks:
            tokens = self._count_tokens(chunk.text)
            if len(taken) < wanted and (tokens <= left or not taken):
                taken.append(chunk)
                left -= tokens
        return taken


def _made_up(chunks: Sequence[Chunk], rng: Random, count: int) -> list[str]:
    """Generated questions, alternately about names in the text and about the rest of its sentences."""
    names = [name for chunk in chunks for name in dict.fromkeys(_NAME.findall(chunk.text))]
    sentences = [question for chunk in chunks for question, _ in sentence_questions(chunk.text)]
    about = [rng.choice(_ABOUT_NAMES).format(name) for name in rng.sample(names, min(count, len(names)))]
    onward = rng.sample(sentences, min(count, len(sentences)))
    mixed = [question for pair in zip(about, onward, strict=False) for question in pair]
    rest = (about if len(about) > len(onward) else onward)[len(mixed) // 2 :]
    return [*mixed, *rest][:count]
