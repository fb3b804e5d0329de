"""The reader's adapter for SmolLM2: low-rank adapters that answer in a few words, from labelled questions.

    python training/train_reader_adapter.py runs/reader-adapter --squad xquad-first-half.json --minutes 60

Called again it goes on from its checkpoint. Half of the prompts are over generated worlds (train split), half over
paragraphs of a file in SQuAD's format; a dozen questions are packed behind each, answers are the loss. With `--blanks`
that share of the questions about paragraphs are sentences with a name or number left out. Reading is full attention:
what reuse costs this reader is to be measured, not trained away.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from reader_data import CROSSING

from chunkweave import Engine
from chunkweave.adapt.distill import AdaptConfig, Distiller
from chunkweave.adapt.prompts import Group, PromptSizes, TrainingPrompt, digest_of_groups
from chunkweave.adapt.reading import Passages, Reading
from chunkweave.eval.worlds.questions import ask_about, pick_passages
from chunkweave.eval.worlds.records import Split
from chunkweave.eval.worlds.world import generate_world
from chunkweave.types import Chunk

Paragraph = tuple[Chunk, list[tuple[str, str]]]
"""A text, and the questions about it with the answer that counts."""

_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_BLANK = re.compile(r"(?<=[a-z,;] )(?:[A-Z][\w'-]+(?: [A-Z][\w'-]+)*|\d[\d,.]*\d(?: (?:million|percent|billion))?)")
"""A name or a number inside a sentence."""
_AROUND = 7
"""Words on each side of it that are shown."""


class AnsweredPrompts:
    """Prompts with answers, by turns over worlds and over paragraphs; a function of seed and index."""

    def __init__(
        self, paragraphs: Sequence[Paragraph], split: Split, sizes: PromptSizes, *, seed: str, blanks: float = 0.0
    ) -> None:
        """`blanks` is the share of the questions about paragraphs that are blanks to fill."""
        self._blanks = blanks
        self._paragraphs = paragraphs
        self._split = split
        self._sizes = sizes
        self._seed = seed

    def prompt(self, index: int) -> TrainingPrompt:
        """The i-th prompt."""
        rng = Random(f"{self._seed} {index}")
        count = rng.randint(self._sizes.least_chunks, self._sizes.most_chunks)
        chunks, asked = self._world(rng, count) if index % 2 else self._from_text(rng, count)
        asked = rng.sample(asked, min(len(asked), self._sizes.questions))
        return TrainingPrompt(chunks, tuple(q for q, _ in asked), tuple(a for _, a in asked))

    def _world(self, rng: Random, count: int) -> tuple[tuple[Chunk, ...], list[tuple[str, str]]]:
        world = generate_world(rng.getrandbits(48), self._split)
        passages = pick_passages(world, rng, count, rng.choice(CROSSING))
        absent = [passage for passage in world.passages if passage not in passages]
        questions = ask_about(passages, rng, world.split, absent=absent)
        chunks = tuple(Chunk(passage.text, passage.source) for passage in passages)
        return chunks, [(question.text, question.answers[0]) for question in questions]

    def _from_text(self, rng: Random, count: int) -> tuple[tuple[Chunk, ...], list[tuple[str, str]]]:
        chosen = rng.sample(self._paragraphs, min(count, len(self._paragraphs)))
        chunks = tuple(chunk for chunk, _ in chosen)
        asked = [one for _, some in chosen for one in some]
        blanks = [one for chunk in chunks for one in blanks_in(chunk.text)]
        count = min(len(blanks), round(self._blanks * self._sizes.questions))
        asked = rng.sample(asked, min(len(asked), self._sizes.questions - count))
        return chunks, [*asked, *rng.sample(blanks, count)]


def blanks_in(text: str) -> list[tuple[str, str]]:
    """Pieces of the sentences of `text` with a name or number left out, and what it is."""
    found = []
    for sentence in _SENTENCE_END.split(text):
        for one in _BLANK.finditer(sentence):
            before, after = sentence[: one.start()].split(), sentence[one.end() :].split()
            found.append((" ".join((*before[-_AROUND:], "____", *after[:_AROUND])), one.group()))
    return found


def paragraphs_of(file: Path) -> list[Paragraph]:
    """The paragraphs of a SQuAD file; of the answers that people gave the shortest counts."""
    articles = json.loads(file.read_text(encoding="utf-8"))["data"]
    found = []
    for article in articles:
        for place, paragraph in enumerate(article["paragraphs"]):
            asked = [
                (one["question"].strip(), min((answer["text"] for answer in one["answers"]), key=len))
                for one in paragraph["qas"]
            ]
            found.append((Chunk(paragraph["context"], f"{article['title']}#{place}"), asked))
    return found


def main() -> None:
    """Train until the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where adapters and checkpoint go")
    parser.add_argument("--squad", type=Path, required=True, help="questions in SQuAD's format to learn from")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--check-minutes", type=float, default=10.0)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--blanks", type=float, default=0.0, help="share of questions that are blanks to fill")
    parser.add_argument("--start", type=Path, help="adapters to begin with instead of ones that do nothing")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = PromptSizes(least_chunks=3, most_chunks=7, questions=12)
    config = AdaptConfig(
        minutes=args.minutes,
        check_minutes=args.check_minutes,
        learning_rate=args.learning_rate,
        readings=(Reading.FULL,),
        looked_at=(Reading.FULL, Reading.ALONE),
        sizes=sizes,
    )
    paragraphs = paragraphs_of(args.squad)
    kept, learnt = paragraphs[-8:], paragraphs[:-8]
    engine = Engine.load(args.model, method="full")
    frame = Passages(engine.builder.opening(), (), ())
    data = digest_of_groups([Group((chunk,), tuple(q for q, _ in asked)) for chunk, asked in paragraphs])
    distiller = Distiller(engine.loaded, engine.builder, frame, config, args.folder, data=data, start=args.start)
    for now in distiller.train(
        AnsweredPrompts(learnt, Split.TRAIN, sizes, seed="learn", blanks=args.blanks),
        AnsweredPrompts(kept, Split.TRAIN, sizes, seed="held out"),
    ):
        line = {"step": now.step, "minutes": round(now.elapsed_s / 60, 1), "loss": round(now.loss, 4)}
        if now.look is not None:
            line["held_out"] = {reading: asdict(one) for reading, one in now.look.held_out.items()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
