"""The reader's adapter for SmolLM2: low-rank adapters that answer in a few words, from labelled questions.

    python training/train_reader_adapter.py runs/reader-adapter --squad xquad-first-half.json --squad asked.json

Called again it goes on from its checkpoint. Prompts are over generated worlds (train split) or over paragraphs of files
in SQuAD's format; two dozen questions are packed behind each, answers are the loss. Reading is full attention: what
reuse costs this reader is to be measured, not trained away.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from paragraphs import Paragraph, read_paragraphs
from reader_data import CROSSING

from chunkweave import Engine
from chunkweave.types import Chunk
from chunkweave_lab.adapt.distill import AdaptConfig, Distiller
from chunkweave_lab.adapt.prompts import Group, PromptSizes, TrainingPrompt, digest_of_groups
from chunkweave_lab.adapt.reading import Passages, Reading
from chunkweave_lab.worlds.questions import ask_about, pick_passages
from chunkweave_lab.worlds.records import Passage, Question, QuestionKind, Split, World
from chunkweave_lab.worlds.wording import KIND_SHARES
from chunkweave_lab.worlds.world import generate_world

_WORDINGS = 4
"""How often all questions about a world's passages are worded, to choose among."""


class AnsweredPrompts:
    """Prompts with answers over worlds and over paragraphs; a function of seed and index.

    Paragraphs come from each of the `files` alike, however many it has. `worlds` is the share of prompts over worlds.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Paragraph]],
        split: Split,
        sizes: PromptSizes,
        *,
        seed: str,
        worlds: float = 0.5,
    ) -> None:
        self._files = files
        self._split = split
        self._sizes = sizes
        self._seed = seed
        self._worlds = worlds

    def prompt(self, index: int) -> TrainingPrompt:
        """The i-th prompt."""
        rng = Random(f"{self._seed} {index}")
        count = rng.randint(self._sizes.least_chunks, self._sizes.most_chunks)
        over_world = int((index + 1) * self._worlds) > int(index * self._worlds)
        chunks, asked = self._world(rng, count) if over_world else self._from_text(rng, count)
        return TrainingPrompt(chunks, tuple(q for q, _ in asked), tuple(a for _, a in asked))

    def _world(self, rng: Random, count: int) -> tuple[tuple[Chunk, ...], list[tuple[str, str]]]:
        world = generate_world(rng.getrandbits(48), self._split)
        passages = _crossing(world, rng, count)
        absent = [passage for passage in world.passages if passage not in passages]
        worded = [one for _ in range(_WORDINGS) for one in ask_about(passages, rng, world.split, absent=absent)]
        chunks = tuple(Chunk(passage.text, passage.source) for passage in passages)
        return chunks, [(one.text, one.answers[0]) for one in as_asked(worded, rng, self._sizes.questions)]

    def _from_text(self, rng: Random, count: int) -> tuple[tuple[Chunk, ...], list[tuple[str, str]]]:
        paragraphs = rng.choice(self._files)
        chosen = rng.sample(paragraphs, min(count, len(paragraphs)))
        asked = [(asked.question, asked.answer) for one in chosen for asked in one.asked]
        chunks = tuple(one.chunk for one in chosen)
        return chunks, rng.sample(asked, min(len(asked), self._sizes.questions))


def _crossing(world: World, rng: Random, count: int) -> list[Passage]:
    """About `count` passages in random order, as many as can be in pairs that a question crosses."""
    pairs = [pick_passages(world, rng, 2, kind) for kind in rng.sample(CROSSING, count // 2)]
    chosen = {passage.id: passage for pair in pairs for passage in pair}
    rest = [passage for passage in pick_passages(world, rng, count) if passage.id not in chosen]
    passages = [*chosen.values(), *rest[: count - len(chosen)]]
    return rng.sample(passages, len(passages))


def as_asked(questions: Sequence[Question], rng: Random, count: int) -> list[Question]:
    """At most `count` different ones, of each kind as often as requests ask it, as far as there are any.

    What is not stated could be asked without end: it is, as often as requests do, until nothing else is left.
    """
    by_kind: dict[QuestionKind, list[Question]] = {}
    for question in {one.text: one for one in questions}.values():
        by_kind.setdefault(question.kind, []).append(question)
    for some in by_kind.values():
        rng.shuffle(some)
    chosen: list[Question] = []
    while by_kind.keys() - {QuestionKind.NOT_STATED} and len(chosen) < count:
        kind = rng.choices(list(by_kind), [KIND_SHARES[one] for one in by_kind])[0]
        chosen.append(by_kind[kind].pop())
        if not by_kind[kind]:
            del by_kind[kind]
    return chosen


def main() -> None:
    """Train until the minutes are over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where adapters and checkpoint go")
    parser.add_argument(
        "--squad",
        type=Path,
        action="append",
        required=True,
        help="questions in SQuAD's format to learn from, once for each file; some of the first are held out",
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--check-minutes", type=float, default=10.0)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--worlds", type=float, default=0.5, help="share of prompts over generated worlds")
    parser.add_argument("--questions", type=int, default=24, help="most questions a prompt")
    parser.add_argument("--start", type=Path, help="adapters to begin with instead of ones that do nothing")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = PromptSizes(least_chunks=3, most_chunks=7, questions=args.questions)
    config = AdaptConfig(
        minutes=args.minutes,
        check_minutes=args.check_minutes,
        learning_rate=args.learning_rate,
        readings=(Reading.FULL,),
        looked_at=(Reading.FULL, Reading.ALONE),
        sizes=sizes,
    )
    first, *others = [read_paragraphs(file) for file in args.squad]
    kept, texts = first[-8:], {one.chunk.text for one in first[-8:]}
    learnt = [first[:-8], *([one for one in some if one.chunk.text not in texts] for some in others)]
    engine = Engine.load(args.model, method="full")
    frame = Passages(engine.builder.opening(), (), ())
    data = digest_of_groups(
        [Group((one.chunk,), tuple(asked.question for asked in one.asked)) for some in (*learnt, kept) for one in some]
    )
    distiller = Distiller(engine.loaded, engine.builder, frame, config, args.folder, data=data, start=args.start)
    for now in distiller.train(
        AnsweredPrompts(learnt, Split.TRAIN, sizes, seed="learn", worlds=args.worlds),
        AnsweredPrompts([kept], Split.TRAIN, sizes, seed="held out"),
    ):
        line = {"step": now.step, "minutes": round(now.elapsed_s / 60, 1), "loss": round(now.loss, 4)}
        if now.look is not None:
            line["held_out"] = {reading: asdict(one) for reading, one in now.look.held_out.items()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
