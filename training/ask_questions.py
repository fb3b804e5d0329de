"""Questions about unlabelled text: SmolLM2 learns to ask for an answer from labelled questions, then asks for others.

    python training/ask_questions.py learn runs/asker --squad xquad-first-half.json --minutes 15
    python training/ask_questions.py write asked.json --asker runs/asker --squad xquad-first-half.json \
        --dataset musique-odd.json

`learn` trains an adapter that is given a paragraph, an answer and the words around it, and says the question. `write`
has it ask for names and numbers of paragraphs, and writes both in SQuAD's format, to train the reader's adapter on.
Questions are thrown away that give their answer away, that the asker is not sure of, or that cannot be right by their
words.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from paragraphs import Asked, Paragraph, names_and_numbers, read_paragraphs, squad_of, with_a_blank

from chunkweave import Engine
from chunkweave.prompt.documents import SplitConfig, split_text
from chunkweave.types import Chunk
from chunkweave_lab.adapt.distill import AdaptConfig, Distiller
from chunkweave_lab.adapt.prompts import Group, PromptSizes, TrainingPrompt, digest_of_groups
from chunkweave_lab.adapt.reading import PassageReader, Passages, Reading
from chunkweave_lab.datasets import load_dataset

_PIECE_TOKENS = 192
"""Most tokens of a paragraph that long passages are cut into."""
_LEAST_WORDS = 4
"""Of a question."""
_NEAR = 160
"""Characters on each side of an answer where a question's words are looked for."""
_ASKS_NUMBER = re.compile(r"How (?:many|much|old|long|large|far)|When |(?:In|During|On) wh|What (?:year|percent|date)")
_WORD = re.compile(r"[\w'-]+")


class AskedPrompts:
    """One paragraph each, and for some of its answers: ask for it. A function of seed and index."""

    def __init__(self, paragraphs: Sequence[Paragraph], questions: int, *, seed: str) -> None:
        self._paragraphs, self._questions, self._seed = paragraphs, questions, seed

    def prompt(self, index: int) -> TrainingPrompt:
        """The i-th prompt."""
        rng = Random(f"{self._seed} {index}")
        paragraph = rng.choice(self._paragraphs)
        asked = rng.sample(paragraph.asked, min(len(paragraph.asked), self._questions))
        tasks = tuple(task(paragraph.chunk.text, one.answer, one.start) for one in asked)
        return TrainingPrompt((paragraph.chunk,), tasks, tuple(one.question for one in asked))


def task(text: str, answer: str, start: int) -> str:
    """What the asker is asked."""
    return f'Write a question that is answered by "{answer}", the blank in: {with_a_blank(text, answer, start)}'


def learn(args: argparse.Namespace) -> None:
    """Train the asker until the minutes are over."""
    paragraphs = read_paragraphs(args.squad[0])
    sizes = PromptSizes(least_chunks=1, most_chunks=1, questions=8)
    config = AdaptConfig(
        minutes=args.minutes,
        check_minutes=args.check_minutes,
        readings=(Reading.FULL,),
        looked_at=(Reading.FULL,),
        sizes=sizes,
        prompts_a_step=4,
    )
    engine = Engine.load(args.model, method="full")
    data = digest_of_groups([Group((one.chunk,), tuple(asked.question for asked in one.asked)) for one in paragraphs])
    frame = Passages(engine.builder.opening(), (), ())
    distiller = Distiller(engine.loaded, engine.builder, frame, config, args.file, data=data)
    for now in distiller.train(
        AskedPrompts(paragraphs[:-8], sizes.questions, seed="learn"),
        AskedPrompts(paragraphs[-8:], sizes.questions, seed="held out"),
    ):
        line = {"step": now.step, "minutes": round(now.elapsed_s / 60, 1), "loss": round(now.loss, 4)}
        if now.look is not None:
            line["held_out"] = {reading: asdict(one) for reading, one in now.look.held_out.items()}
        print(json.dumps(line), flush=True)


def write(args: argparse.Namespace) -> None:
    """Ask about paragraphs, and write what came of it; all written so far is in the file at any time."""
    engine = Engine.load(args.model, adapter=str(args.asker), method="full")
    rng = Random("paragraphs")
    chunks = [one.chunk for file in args.squad for one in read_paragraphs(file)]
    pieces = list({piece.text: piece for file in args.dataset for piece in _pieces(engine, file)}.values())
    chunks += rng.sample(pieces, min(len(pieces), args.paragraphs))
    written: list[Paragraph] = []
    asked = 0
    for done, chunk in enumerate(chunks, start=1):
        found = names_and_numbers(chunk.text)
        chosen = rng.sample(found, min(len(found), args.questions))
        asked += len(chosen)
        own = _ask(engine, chunk, chosen, args.most_nats)
        if own:
            written.append(Paragraph(chunk, tuple(own)))
        if done % 20 == 0 or done == len(chunks):
            partial = args.file.with_suffix(".partial")
            partial.write_text(json.dumps(squad_of(written), indent=1), encoding="utf-8")
            partial.replace(args.file)
            kept = sum(len(one.asked) for one in written)
            print(f"{done} of {len(chunks)} paragraphs, {kept} of {asked} questions kept", flush=True)


def plausible(text: str, asked: Sequence[Asked]) -> list[Asked]:
    """Those of the questions about `text` that can be right by their words.

    A number is asked for as one, most of the question's longer words are near the answer, and no other answer has the
    same question.
    """
    counts = Counter(one.question for one in asked)
    found = []
    for one in asked:
        number = _ASKS_NUMBER.match(one.question)
        about = one.question[number.end() :] if number else one.question.partition(" ")[2]
        words = {word.lower() for word in _WORD.findall(about) if len(word) > 3}
        near = text[max(0, one.start - _NEAR) : one.start + len(one.answer) + _NEAR].lower()
        close = [word for word in words if word[:5] in near]
        if (
            (number is not None) == any(character.isdigit() for character in one.answer)
            and counts[one.question] == 1
            and len(close) >= max(2, 0.7 * len(words))
        ):
            found.append(one)
    return found


def _pieces(engine: Engine, file: Path) -> Iterator[Chunk]:
    cut = SplitConfig(_PIECE_TOKENS)
    for example in load_dataset(file):
        for chunk in example.chunks:
            yield from split_text(chunk.text, engine.loaded.tokenizer, cut, source=chunk.source)


def _ask(engine: Engine, chunk: Chunk, answers: Sequence[tuple[str, int]], most_nats: float) -> list[Asked]:
    """Questions for the `answers` in `chunk`; those with more than `most_nats` a token are left out."""
    if not answers:
        return []
    builder = engine.builder
    reader = PassageReader(engine.loaded.model, engine.loaded.model.device)
    passages = Passages(builder.opening(), (), builder.chunk_parts((chunk,)))
    tasks = [builder.question_part(task(chunk.text, answer, start)).token_ids for answer, start in answers]
    stop_ids = engine.loaded.tokenizer.stop_ids
    said = reader.answer(passages, tasks, stop_ids=stop_ids, max_new_tokens=32)
    found = []
    for (answer, start), (token_ids, expected) in zip(answers, said, strict=True):
        nats = -expected.gather(1, torch.tensor(token_ids, device=expected.device)[:, None]).mean().item()
        question = engine.loaded.tokenizer.decode([one for one in token_ids if one not in stop_ids]).strip()
        whole = token_ids[-1] in stop_ids and question.endswith("?") and len(question.split()) >= _LEAST_WORDS
        if whole and nats <= most_nats and answer.lower() not in question.lower():
            found.append(Asked(question, answer, start))
    return plausible(chunk.text, found)


def main() -> None:
    """Learn to ask, or ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("learn", "write"))
    parser.add_argument("file", type=Path, help="learn: folder that the asker goes to; write: file of questions")
    parser.add_argument("--squad", type=Path, action="append", default=[], help="paragraphs in SQuAD's format")
    parser.add_argument("--dataset", type=Path, action="append", default=[], help="write: more passages to ask about")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--check-minutes", type=float, default=5.0)
    parser.add_argument("--asker", type=Path)
    parser.add_argument("--paragraphs", type=int, default=400, help="how many of the further passages' pieces")
    parser.add_argument("--questions", type=int, default=6, help="most questions about a paragraph")
    parser.add_argument("--most-nats", type=float, default=0.7, help="a question's mean per token, as the asker has it")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.step == "write" and args.asker is None:
        parser.error("give the folder that learn wrote: --asker")
    torch.set_num_threads(args.threads)
    (learn if args.step == "learn" else write)(args)


if __name__ == "__main__":
    main()
