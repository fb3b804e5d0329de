"""Held-out questions over generated worlds, as a data set in memory."""

from random import Random

from chunkweave.eval.datasets import Example
from chunkweave.eval.worlds.records import QuestionKind, Split
from chunkweave.eval.worlds.requests import sample_request
from chunkweave.eval.worlds.world import generate_world

_PER_WORLD = 4


def world_examples(
    count: int,
    passages: int,
    *,
    seed: int = 0,
    kinds: tuple[QuestionKind, ...] = (),
    split: Split = Split.TEST,
    worlds: int = 0,
) -> list[Example]:
    """`count` questions over `passages` passages each, needed ones and distractors in random order.

    A function of its arguments alone. `kinds` empty means all of them in their usual shares, else each in turn. With
    `worlds`, all questions are about that many worlds, in turn, so that passages come back; else every world is asked
    about four times and never again.

    Raises:
        ValueError: a world has too few passages for such a question.
    """
    rng = Random(f"world examples {seed} {split} {passages}" + (f" {worlds}" if worlds else ""))
    pool = [generate_world(rng.getrandbits(48), split) for _ in range(worlds)]
    examples: list[Example] = []
    while len(examples) < count:
        world = pool[len(examples) % worlds] if worlds else generate_world(rng.getrandbits(48), split)
        for _ in range(1 if worlds else min(_PER_WORLD, count - len(examples))):
            kind = kinds[len(examples) % len(kinds)] if kinds else None
            request = sample_request(world, rng, passages, kind)
            examples.append(Example(request.question, request.chunks, request.answers, str(request.kind)))
    return examples
