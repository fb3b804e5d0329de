"""Splits documents into chunks at paragraphs and sentences, bounded in tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from semantic_text_splitter import TextSplitter

from chunkweave.errors import UsageError
from chunkweave.prompt.tables import Table, header_at
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import Chunk


@dataclass(frozen=True, slots=True)
class Document:
    """A text, its name for reports, and its tables, whose chunks begin with the header row."""

    name: str
    text: str
    tables: tuple[Table, ...] = ()


_LEAST_TOKENS = 16
"""One character can take several tokens (bytes of an emoji); with a lower bound some would not fit into a chunk."""

_BLOCK_CHARACTERS = 1 << 16
"""A longer text is split block by block, so that a caller can count its chunks and stop early."""

_HEADER_SHARE = 4
"""A table's header row is repeated if it takes at most one in so many tokens of a chunk."""

_CHARACTERS_PER_TOKEN = 8
"""Text with this many characters per allowed token nearly always exceeds the bound; affects only speed."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Bounds of chunks in tokens. Up to `overlap_tokens` of a chunk's end are repeated at the start of the next.

    The overlap is at most half a chunk: with more, the number of chunks would multiply.

    Raises:
        UsageError: a bound is out of range.
    """

    max_tokens: int = 512
    overlap_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < _LEAST_TOKENS:
            raise UsageError(f"max_tokens must be at least {_LEAST_TOKENS}, not {self.max_tokens}")
        if not 0 <= 2 * self.overlap_tokens <= self.max_tokens:
            raise UsageError(
                f"overlap_tokens must be from 0 to {self.max_tokens // 2}, half of the {self.max_tokens} tokens of a "
                f"chunk, not {self.overlap_tokens}"
            )


def split_text(
    text: str,
    tokenizer: TextTokenizer,
    config: SplitConfig | None = None,
    *,
    source: str = "",
    tables: Sequence[Table] = (),
) -> list[Chunk]:
    """Split `text` into chunks of at most `config.max_tokens` tokens each.

    Splits are between paragraphs if possible, else between sentences, words or characters. Only white space at the
    splits is lost; a text of white space has no chunks. Chunk i of several is named `source#i`, from 0. A chunk of
    `tables` begins with the table's header row, unless that takes more than a quarter of a chunk.
    """
    pieces = [piece for _, piece in split_located(text, tokenizer, config or SplitConfig(), tables)]
    if len(pieces) == 1:
        return [Chunk(pieces[0], source)]
    return [Chunk(piece, f"{source}#{i}" if source else "") for i, piece in enumerate(pieces)]


def split_located(
    text: str, tokenizer: TextTokenizer, config: SplitConfig, tables: Sequence[Table] = ()
) -> Iterator[tuple[int, str]]:
    """Yield chunks as `split_text` does, each with the number of the character of `text` that it begins with.

    They are yielded one by one, so that a caller can stop early.
    """
    repeated: list[Table] = []
    header_tokens = 0
    for table in tables:
        tokens = len(tokenizer.encode(text[table.start : table.rows]))
        if tokens <= config.max_tokens // _HEADER_SHARE:
            repeated.append(table)
            header_tokens = max(header_tokens, tokens)
    for start, piece in _split_located(text, tokenizer, config.max_tokens - header_tokens, config.overlap_tokens):
        yield start, header_at(text, repeated, start) + piece


def _split_located(text: str, tokenizer: TextTokenizer, bound: int, overlap_tokens: int) -> Iterator[tuple[int, str]]:
    def count_tokens(piece: str) -> int:
        # The splitter also asks for whole paragraphs and documents. Counting only their heads is enough to refuse
        # them, and keeps the time linear in the text.
        head = _CHARACTERS_PER_TOKEN * bound
        if len(piece) > head and (count := len(tokenizer.encode(piece[:head]))) > bound + 1:
            return count
        return len(tokenizer.encode(piece))

    splitter = TextSplitter.from_callback(count_tokens, bound, overlap=overlap_tokens)
    start = 0
    size = _BLOCK_CHARACTERS
    while True:
        pieces = splitter.chunk_indices(text[start : start + size])
        last = start + size >= len(text)
        if not last and (len(pieces) < 2 or not pieces[-1][0]):
            size *= 2
            continue
        # The block's end may have cut its last piece short: the next block begins with that piece.
        for begins, piece in pieces if last else pieces[:-1]:
            yield from _fitting(start + begins, piece, tokenizer, bound)
        if last:
            return
        start = start + pieces[-1][0]
        size = _BLOCK_CHARACTERS


def _fitting(start: int, piece: str, tokenizer: TextTokenizer, bound: int) -> list[tuple[int, str]]:
    """Split `piece`, which begins at character `start`, in halves until every part fits.

    The splitter assumes that more text has more tokens, which BPE does not guarantee; this enforces the bound.
    """
    start += len(piece) - len(piece.lstrip())
    piece = piece.strip()
    if not piece:
        return []
    if len(piece) == 1 or len(tokenizer.encode(piece)) <= bound:
        return [(start, piece)]
    middle = piece.rfind(" ", 1, len(piece) // 2 + 1)
    middle = middle if middle > 0 else len(piece) // 2
    return [
        *_fitting(start, piece[:middle], tokenizer, bound),
        *_fitting(start + middle, piece[middle:], tokenizer, bound),
    ]
