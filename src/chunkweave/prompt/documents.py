"""Text files into documents, and documents into chunks: cut at paragraphs and sentences, bounded in tokens."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from semantic_text_splitter import TextSplitter

from chunkweave.errors import DocumentError, UsageError
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.types import Chunk

logger = logging.getLogger(__name__)


TEXT_SUFFIXES = (".txt", ".md", ".rst")
"""What is read from a folder. A file that is named itself is read whatever its suffix."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and what to call it in reports."""

    name: str
    text: str


def read_documents(paths: Sequence[Path], *, on_error: Literal["raise", "skip"] = "raise") -> list[Document]:
    """Read files and folders (recursively, sorted, hidden ones left out) of UTF-8 text.

    A document is named by its path inside its folder, or by its file name; where that is not unique, by the whole
    path. A file reached twice is read once. Line ends become line feeds. Empty files are left out with a logged
    warning. With `on_error="skip"` so are files that cannot be read or are not UTF-8.

    Raises:
        DocumentError: a path does not exist, a folder has no text file, or (with `on_error="raise"`) a file
            cannot be read or is not UTF-8; the message names the file and the offset of the first bad byte.
    """
    found = list({path.resolve(): (path, name) for given in paths for path, name in _text_files(Path(given))}.values())
    uses = Counter(name for _, name in found)
    documents: list[Document] = []
    for path, name in found:
        try:
            text = _read_text(path)
        except DocumentError as error:
            if on_error == "raise":
                raise
            logger.warning("document left out: %s", error)
            continue
        if not text.strip():
            logger.warning("document left out: %s is empty", path)
            continue
        documents.append(Document(name if uses[name] == 1 else path.as_posix(), text))
    return documents


def _text_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Files under `path` with the names of their documents."""
    if path.is_file():
        yield path, path.name
        return
    if not path.is_dir():
        raise DocumentError(f"no such file or folder: {path}")
    inside = sorted(
        (file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file()),
        key=lambda relative: relative.as_posix(),
    )
    visible = [relative for relative in inside if not any(part.startswith(".") for part in relative.parts)]
    if not visible:
        raise DocumentError(f"no {', '.join(TEXT_SUFFIXES)} file in folder: {path}")
    for relative in visible:
        yield path / relative, relative.as_posix()


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}") from error
    return decoded_text(raw, str(path))


def decoded_text(raw: bytes, name: str) -> str:
    """UTF-8 bytes as text without a byte order mark, line ends as line feeds.

    Raises:
        DocumentError: not UTF-8; the message has the file's `name` and the offset of the first bad byte.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{name} is not UTF-8: bad byte at offset {error.start}") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


_LEAST_TOKENS = 16
"""One character can take several tokens (bytes of an emoji); below this bound some could not be placed."""

_BLOCK_CHARACTERS = 1 << 16
"""A longer text is cut block by block, so that its chunks can be counted, and no more be made, while it is cut."""

_CHARACTERS_PER_TOKEN = 8
"""Enough that so many characters per allowed token nearly always exceed the bound; only speed depends on it."""


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Bounds of the chunks. `overlap_tokens` of the end of a chunk may come again at the start of the next.

    They are at most half of a chunk: with more, a text would become many times as many chunks.

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

    @classmethod
    def stored(cls, max_tokens: int, overlap_tokens: int) -> Self:
        """Bounds of a corpus that exists, unchecked: earlier versions took more overlap."""
        config = object.__new__(cls)
        object.__setattr__(config, "max_tokens", max_tokens)
        object.__setattr__(config, "overlap_tokens", overlap_tokens)
        return config


def split_text(
    text: str, tokenizer: TextTokenizer, config: SplitConfig | None = None, *, source: str = ""
) -> list[Chunk]:
    """Cut `text` into chunks of at most `config.max_tokens` tokens each.

    Cuts fall between paragraphs where that fits, else between sentences, words, characters. Nothing but white
    space at the cuts is lost; a text of white space alone has no chunks. Chunk i of several is called
    `source#i`, counted from 0.
    """
    pieces = list(split_pieces(text, tokenizer, config or SplitConfig()))
    if len(pieces) == 1:
        return [Chunk(pieces[0], source)]
    return [Chunk(piece, f"{source}#{i}" if source else "") for i, piece in enumerate(pieces)]


def split_pieces(text: str, tokenizer: TextTokenizer, config: SplitConfig) -> Iterator[str]:
    """The texts of the chunks of `split_text`, as they are found: a caller that has enough stops there."""
    bound = config.max_tokens

    def count_tokens(piece: str) -> int:
        # The splitter also asks for whole paragraphs and documents. Their heads are enough to refuse them,
        # and keep the time linear in the text.
        head = _CHARACTERS_PER_TOKEN * bound
        if len(piece) > head and (count := len(tokenizer.encode(piece[:head]))) > bound + 1:
            return count
        return len(tokenizer.encode(piece))

    splitter = TextSplitter.from_callback(count_tokens, bound, overlap=config.overlap_tokens)
    start, size = 0, _BLOCK_CHARACTERS
    while True:
        found = splitter.chunk_indices(text[start : start + size])
        last = start + size >= len(text)
        if not last and (len(found) < 2 or not found[-1][0]):
            size *= 2
            continue
        # The last piece of a block may have been cut short by the block's end: the next block begins with it.
        for _, piece in found if last else found[:-1]:
            yield from _fitting(piece, tokenizer, bound)
        if last:
            return
        start, size = start + found[-1][0], _BLOCK_CHARACTERS


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
