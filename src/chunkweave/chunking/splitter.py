"""Documents into chunks: cut at paragraphs and sentences, bounded in tokens."""

from dataclasses import dataclass

from semantic_text_splitter import TextSplitter

from chunkweave.chunking.tokenizer import TextTokenizer
from chunkweave.errors import UsageError
from chunkweave.types import Chunk

_LEAST_TOKENS = 16
"""One character can take several tokens (bytes of an emoji); below this bound some could not be placed."""

_CHARACTERS_PER_TOKEN = 8
"""Enough that so many characters per allowed token nearly always exceed the bound; only speed depends on it."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Bounds of the chunks. `overlap_tokens` of the end of a chunk may come again at the start of the next.

    Raises:
        UsageError: a bound is out of range.
    """

    max_tokens: int = 512
    overlap_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < _LEAST_TOKENS:
            raise UsageError(f"max_tokens must be at least {_LEAST_TOKENS}, not {self.max_tokens}")
        if not 0 <= self.overlap_tokens < self.max_tokens:
            raise UsageError(f"overlap_tokens must be in [0, max_tokens={self.max_tokens}), not {self.overlap_tokens}")


def split_text(
    text: str, tokenizer: TextTokenizer, config: SplitConfig | None = None, *, source: str = ""
) -> list[Chunk]:
    """Cut `text` into chunks of at most `config.max_tokens` tokens each.

    Cuts fall between paragraphs where that fits, else between sentences, words, characters. Nothing but white
    space at the cuts is lost; a text of white space alone has no chunks. Chunk i of several is called
    `source#i`, counted from 0.
    """
    config = config or SplitConfig()
    bound = config.max_tokens

    def count_tokens(piece: str) -> int:
        # The splitter also asks for whole paragraphs and documents. Their heads are enough to refuse them,
        # and keep the time linear in the text.
        head = _CHARACTERS_PER_TOKEN * bound
        if len(piece) > head and (count := len(tokenizer.encode(piece[:head]))) > bound + 1:
            return count
        return len(tokenizer.encode(piece))

    splitter = TextSplitter.from_callback(count_tokens, bound, overlap=config.overlap_tokens)
    pieces = [fitting for piece in splitter.chunks(text) for fitting in _fitting(piece, tokenizer, bound)]
    if len(pieces) == 1:
        return [Chunk(pieces[0], source)]
    return [Chunk(piece, f"{source}#{i}" if source else "") for i, piece in enumerate(pieces)]


def _fitting(piece: str, tokenizer: TextTokenizer, bound: int) -> list[str]:
    """`piece`, halved until every part fits.

    The splitter searches as if more text always meant more tokens, which no BPE promises; this holds the bound.
    """
    piece = piece.strip()
    if not piece:
        return []
    if len(piece) == 1 or len(tokenizer.encode(piece)) <= bound:
        return [piece]
    middle = piece.rfind(" ", 1, len(piece) // 2 + 1)
    middle = middle if middle > 0 else len(piece) // 2
    return [*_fitting(piece[:middle], tokenizer, bound), *_fitting(piece[middle:], tokenizer, bound)]
