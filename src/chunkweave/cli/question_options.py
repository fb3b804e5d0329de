"""Which questions a measurement of quality asks, and where they come from."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from chunkweave.cli import options
from chunkweave.errors import UsageError
from chunkweave.eval.datasets import Example, load_dataset

WORLDS = "worlds"
"""The data set that is generated instead of read."""


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """Questions of a data set that can be scored, and how long their answers may be."""

    dataset: Annotated[
        str, typer.Option(help="`worlds` (generated, held out), or a MuSiQue, SQuAD 1.1 or JSONL file.")
    ] = WORLDS
    questions: Annotated[int, typer.Option(min=1, help="Questions that are measured.")] = 200
    chunks: Annotated[int, typer.Option(min=1, help="Passages of a question, with `worlds`.")] = 6
    kinds: Annotated[str, typer.Option(help="Only these kinds of question, separated by commas; all if empty.")] = ""
    warm: options.Warm = "alone"
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 24

    def draw(self, seed: int, *, earlier: int = 0, worlds: int = 0) -> list[Example]:
        """The questions and `earlier` ones that warm the store, drawn with `seed`.

        `worlds` of the generated data set are asked about, ever new ones if 0.

        Raises:
            DocumentError: the file cannot be read as a data set.
            UsageError: it has too few questions with answers, or no such kind of them.
        """
        count, kinds = self.questions + earlier, options.names(self.kinds)
        if self.dataset == WORLDS:
            return self._generated(count, kinds, seed, worlds)
        examples = load_dataset(Path(self.dataset), seed=seed)
        _refuse_unknown(kinds, {example.kind for example in examples})
        scored = [one for one in examples if one.answers and (not kinds or one.kind in kinds)]
        if len(scored) < count:
            raise UsageError(
                f"{self.dataset} has {len(scored)} fitting questions with answers, but {count} are asked for"
            )
        return Random(seed).sample(scored, count)

    def _generated(self, count: int, kinds: tuple[str, ...], seed: int, worlds: int) -> list[Example]:
        from chunkweave.eval.worlds.examples import world_examples
        from chunkweave.eval.worlds.records import QuestionKind

        known = {str(kind): kind for kind in QuestionKind}
        _refuse_unknown(kinds, known)
        wanted = tuple(known[kind] for kind in kinds)
        try:
            return world_examples(count, self.chunks, seed=seed, kinds=wanted, worlds=worlds)
        except ValueError as error:
            raise UsageError(f"no such questions over {self.chunks} passages: {error}") from error


def _refuse_unknown(kinds: tuple[str, ...], known: Collection[str]) -> None:
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise UsageError(f"unknown kind of question {unknown[0]!r}; there are: {', '.join(sorted(known)) or 'none'}")
