"""Held-out questions over generated worlds, as a data set in memory."""

from random import Random

from chunkweave.eval.datasets import Example
from chunkweave.eval.worlds.questions import sample_request
from chunkweave.eval.worlds.records import QuestionKind, Request, Split
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
    """The requests of `world_requests` with the same arguments, as a data set."""
    requests = world_requests(count, passages, seed=seed, kinds=kinds, split=split, worlds=worlds)
    return [Example(request.question, request.chunks, request.answers, str(request.kind)) for request in requests]


def world_requests(
    count: int,
    passages: int,
    *,
    seed: int = 0,
    kinds: tuple[QuestionKind, ...] = (),
    split: Split = Split.TEST,
    worlds: int = 0,
) -> list[Request]:
    """`count` questions over `passages` passages each, needed ones and distractors in random order.

    A function of its arguments alone. `kinds` empty means all of them in their usual shares, else each in turn. With
    `worlds`, all questions are about that many worlds, in turn, so that passages come back; else every world is asked
    about four times and never again.

    Raises:
        ValueError: a world has too few passages for such a question.
    """
    rng = Random(f"world examples {seed} {split} {passages}" + (f" {worlds}" if worlds else ""))
    pool = [generate_world(rng.getrandbits(48), split) for _ in range(worlds)]
    requests: list[Request] = []
    while len(requests) < count:
        world = pool[len(requests) % worlds] if worlds else generate_world(rng.getrandbits(48), split)
        for _ in range(1 if worlds else min(_PER_WORLD, count - len(requests))):
            kind = kinds[len(requests) % len(kinds)] if kinds else None
            requests.append(sample_request(world, rng, passages, kind))
    return requests
