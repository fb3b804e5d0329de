"""Training rows for the reader: worlds packed as one context and many questions, and copying rows.

A row is `[BOS][system?][chunk]*` followed by questions with their answers. Every part is tokenized apart, as the
product does it. A question sees the context and itself only, and its positions start where the context ends: so a row
teaches what as many separate prompts would, for a fraction of the tokens. Rows are a function of (seed, step).

A small model soon finds a way to answer "What do two passages share?" from the question alone: average all cities, and
the one that is there twice stands out. Large models do not read like that; their later passages take up what earlier
ones said. So of some questions that take two passages the earlier one is hidden: what it said can then only be known
from what the later passage's tokens made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from reader_tokenizer import SYSTEM_PROMPTS
from tokenizers import Tokenizer
from worlds.questions import ask_about, pick_passages
from worlds.records import Passage, Question, QuestionKind, Split, World
from worlds.world import WorldSize, generate_world

from chunkweave.prompt.template import INSTRUCTION, plain_template

CROSSING = (
    QuestionKind.COMMON,
    QuestionKind.WHICH_TWO,
    QuestionKind.BRIDGE,
    QuestionKind.ALIAS,
    QuestionKind.CORRECTION,
)

_COPY = "copy"
_TEMPLATE = plain_template()


@dataclass(slots=True)
class Row:
    """Token ids and, for each, its position, the question it belongs to (0: context) and its chunk (0: none).

    `hidden` names, by question, the chunk that it does not see.

    `weights[i]` is 1 where predicting token i + 1 from token i counts; `answers` are the spans of answers (with their
    EOS) and what each is an answer to.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    answers: list[tuple[int, int, str]] = field(default_factory=list)
    hidden: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> int:
        """Tokens before the first question."""
        return self.owners.count(0)

    def add(self, ids: Sequence[int], *, start: int, owner: int = 0, chunk: int = 0) -> None:
        """Append tokens at positions from `start` on, with no weight."""
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.owners += [owner] * len(ids)
        self.chunks += [chunk] * len(ids)
        self.weights += [0] * len(ids)


@dataclass(frozen=True, slots=True)
class Stage:
    """What rows look like up to a step of training: over how many passages (over none, all rows are for copying).

    `step_share` is a step's size as a share of the whole size.
    """

    until_step: int
    passages: tuple[int, ...]
    copy_share: float
    step_share: float
    size: WorldSize
    kinds: tuple[QuestionKind, ...]


_SHORT = WorldSize(8, 6, 2, 2, values=8, max_fillers=0, min_words=0)
_MIXED = WorldSize(8, 6, 2, 2, values=9, max_fillers=1, min_words=0)
_EASY = (QuestionKind.SINGLE, QuestionKind.COMMON, QuestionKind.NOT_STATED)
STAGES = (
    Stage(60, (), 1.0, 0.5, _SHORT, _EASY),
    Stage(500, (1, 2, 3), 0.2, 0.5, _SHORT, _EASY),
    Stage(1000, (2, 3, 4), 0.1, 0.5, _SHORT, tuple(QuestionKind)),
    Stage(1700, (3, 4, 5, 6), 0.05, 0.75, _MIXED, tuple(QuestionKind)),
    Stage(10**9, (1, 2, 3, 4, 5, 6, 6, 6, 6, 7, 8, 10, 12), 0.03, 1.0, WorldSize(), tuple(QuestionKind)),
)
"""Copying alone, then few short passages, then up to twelve whole ones."""


def stage_at(step: int) -> Stage:
    """The stage that `step` is in."""
    return next(stage for stage in STAGES if step < stage.until_step)


class RowMaker:
    """Makes rows from a tokenizer. Stateless but for that: every row comes from the generator it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bos, self._eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
        self._vocab_size = tokenizer.get_vocab_size()

    def batch(self, seed: int, step: int, tokens: int) -> list[Row]:
        """The rows of a training step: about `tokens` tokens together, padding included."""
        rng = Random(f"rows {seed} {step}")
        stage = stage_at(step)
        if not stage.passages:
            longest = 64
            return [self.copy_row(rng, longest) for _ in range(int(tokens * stage.step_share) // longest)]
        passages = rng.choice(stage.passages)
        rows: list[Row] = []
        longest = 0
        while not rows or (len(rows) + 1) * longest <= tokens * stage.step_share:
            if rows and rng.random() < stage.copy_share:
                rows.append(self.copy_row(rng, longest))
                continue
            world = generate_world(rng.getrandbits(48), Split.TRAIN, stage.size)
            rows += [self.world_row(world, rng, passages, stage.kinds) for _ in range(2)]
            longest = max(map(len, rows))
        return rows

    def copy_row(self, rng: Random, longest: int) -> Row:
        """At most `longest` tokens: random ones of the whole vocabulary, then the same again, which is what counts."""
        row = Row()
        length = rng.randint(8, max(8, min(longest // 2 - 1, 128)))
        span = [rng.randrange(3, self._vocab_size) for _ in range(length)]
        row.add([self._bos, *span, *span], start=0)
        for place in range(length, 2 * length):
            row.weights[place] = 1
        row.answers.append((length + 1, 2 * length + 1, _COPY))
        return row

    def world_row(self, world: World, rng: Random, passages: int, kinds: Sequence[QuestionKind]) -> Row:
        """A prompt over `passages` passages of a world, with up to about sixteen questions."""
        chosen = pick_passages(world, rng, passages, rng.choice(CROSSING) if passages > 1 else QuestionKind.SINGLE)
        absent = [passage for passage in world.passages if passage not in chosen]
        row = self.context(chosen, self._system(rng, absent, world))
        questions = ask_about(chosen, rng, world.split, absent=absent)
        places = {passage.id: place for place, passage in enumerate(chosen, start=1)}
        self.add_questions(row, _mix([q for q in questions if q.kind in kinds], rng), rng, places)
        return row

    def context(self, passages: Sequence[Passage], system: str = "") -> Row:
        """BOS, the system part if there is one, and the chunks."""
        row = Row()
        row.add([self._bos], start=0)
        if system:
            row.add(self._encode(system), start=len(row))
        for place, passage in enumerate(passages, start=1):
            row.add(self._encode(_TEMPLATE.chunk_text(passage.text)), start=len(row), chunk=place)
        return row

    def add_questions(
        self,
        row: Row,
        questions: Sequence[Question],
        rng: Random | None = None,
        places: Mapping[str, int] | None = None,
        answer_room: int = 0,
    ) -> None:
        """Append questions with answers.

        With an `rng`, one in six continues the conversation before it, and to some the earlier of the passages that
        they take is hidden; `places` are chunks by passage id.
        """
        context = start = len(row)
        owner = 0
        for question in questions:
            hidden = _hidden_chunk(question, places or {}, rng) if rng else None
            goes_on = rng is not None and owner not in row.hidden and hidden is None and rng.random() < 1 / 6
            if owner == 0 or not goes_on or start > context + 100:
                owner += 1
                start = context
            if hidden is not None:
                row.hidden[owner] = hidden
            ids = self._encode(_TEMPLATE.question_text(question.text))
            answer = [*self._encode(" " + question.answers[0]), self._eos]
            answer += [self._eos] * (answer_room - len(answer))
            first = len(row) + len(ids)
            row.add([*ids, *answer], start=start, owner=owner)
            start += len(ids) + len(answer)
            for place in range(first - 1, len(row) - 1):
                row.weights[place] = 1
            row.answers.append((first, len(row), str(question.kind)))

    def _system(self, rng: Random, absent: Sequence[Passage], world: World) -> str:
        """No system part, an instruction, or an instruction and an earlier turn about other passages."""
        if rng.random() < 0.3 or not absent:
            return ""
        system = _TEMPLATE.instruction_text(INSTRUCTION if rng.random() < 0.7 else rng.choice(SYSTEM_PROMPTS))
        if rng.random() < 0.1:
            earlier = rng.choice(ask_about(rng.sample(absent, 1), rng, world.split, absent=absent))
            system += _TEMPLATE.question_text(earlier.text) + f" {earlier.answers[0]}\n\n"
        return system

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _hidden_chunk(question: Question, places: Mapping[str, int], rng: Random) -> int | None:
    """The chunk to hide from a question, if any: the first of the two that it takes, where that comes first."""
    if question.kind not in _HIDEABLE or rng.random() > _HIDDEN_SHARE:
        return None
    first, second = (places[passage] for passage in question.needed)
    return first if first < second else None


_HIDEABLE = (QuestionKind.COMMON, QuestionKind.BRIDGE, QuestionKind.ALIAS)
_HIDDEN_SHARE = 0.5

_AT_MOST = {
    QuestionKind.SINGLE: 5,
    QuestionKind.COMMON: 4,
    QuestionKind.WHICH_TWO: 1,
    QuestionKind.BRIDGE: 2,
    QuestionKind.COMPARISON: 2,
    QuestionKind.ALIAS: 2,
    QuestionKind.CORRECTION: 2,
    QuestionKind.NOT_STATED: 1,
}
"""How many questions of a kind a row has at most."""


def _mix(questions: list[Question], rng: Random) -> list[Question]:
    rng.shuffle(questions)
    chosen = []
    left = dict(_AT_MOST)
    for question in questions:
        if left[question.kind]:
            left[question.kind] -= 1
            chosen.append(question)
    return chosen


def held_out_rows(maker: RowMaker, count: int, passages: int, seed: int, answer_room: int = 0) -> list[Row]:
    """Rows over test worlds, with the default instruction and one conversation turn to a question.

    With `answer_room`, every answer is padded to that many tokens, so that decoding may give a longer one than gold.
    """
    rng = Random(f"held out {seed}")
    rows = []
    for _ in range(count):
        world = generate_world(rng.getrandbits(48), Split.TEST)
        chosen = pick_passages(world, rng, passages, rng.choice(CROSSING))
        absent = [passage for passage in world.passages if passage not in chosen]
        row = maker.context(chosen, _TEMPLATE.instruction_text(INSTRUCTION))
        questions = _mix(ask_about(chosen, rng, world.split, absent=absent), rng)
        maker.add_questions(row, questions, answer_room=answer_room)
        rows.append(row)
    return rows
