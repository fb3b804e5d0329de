"""Neutral passages: text that is about nobody's documents, which chunks are computed behind before anybody asks.

A chunk that is computed with nothing before it reads as the beginning of a prompt: its first tokens become attention
sinks, and its other tokens spend on each other what in a prompt goes to the passages before. Behind an instruction and
a few passages of no concern to it, it comes out nearly as it does among others (docs/methods.md).
"""

from functools import cache
from importlib.resources import files
from pathlib import Path

from chunkweave.errors import UsageError
from chunkweave.types import ChunkId

BESIDE_MODEL = "neutral.txt"
_MARK = b"neut".hex()


def neutral_id(chunk: ChunkId) -> ChunkId:
    """The id of a chunk as a neutral passage: marked as one, so that what was computed behind it is known as such."""
    return ChunkId(_MARK + chunk[len(_MARK) :])


def is_neutral(chunk: ChunkId) -> bool:
    """Whether an id is one of `neutral_id`'s. An ordinary chunk's id is taken for one once in four billion times.

    >>> is_neutral(neutral_id(ChunkId("0" * 32))), is_neutral(ChunkId("0" * 32))
    (True, False)
    """
    return chunk.startswith(_MARK)


def neutral_passages(path: Path | None = None, folder: Path | None = None) -> tuple[str, ...]:
    """Neutral passages, of the kind of text that the model was made for.

    Those of the file at `path`; without, those of a file `neutral.txt` in the model's `folder`; without that, the
    bundled ones: 16 of some 90 tokens each, on as many subjects. Passages are separated by empty lines.

    Raises:
        UsageError: the file cannot be read, or has no text.
    """
    if path is None and folder is not None and (folder / BESIDE_MODEL).is_file():
        path = folder / BESIDE_MODEL
    return _bundled() if path is None else _read(path)


def _read(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot read the neutral passages: {error}") from error
    passages = _split(text)
    if not passages:
        raise UsageError(f"no text in {path}: write neutral passages, separated by empty lines")
    return passages


@cache
def _bundled() -> tuple[str, ...]:
    return _split((files("chunkweave") / "assets" / "neutral" / "passages.txt").read_text(encoding="utf-8"))


def _split(text: str) -> tuple[str, ...]:
    return tuple(" ".join(one.split()) for one in text.split("\n\n") if one.strip())
