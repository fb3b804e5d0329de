"""`chunkweave chat`: a conversation over documents, one question per line."""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.cli.ask import AskedOptions, answer_dict, spoken, warn_if_unreadable
from chunkweave.cli.console import Out, Output, conversation_line, status, stderr, times, token_line
from chunkweave.cli.corpus import how_many, open_corpus
from chunkweave.cli.fitting import Room, temporary_corpus
from chunkweave.cli.options import MethodOptions, ModelOptions, Only, with_set
from chunkweave.config import StoreConfig
from chunkweave.errors import ChunkweaveError
from chunkweave.models.gguf import usual_model
from chunkweave.ordering.ordering import OrderingConfig
from chunkweave.prompt.documents import Document
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.prompt.request import Request

_PROMPT = "> "

ChunksFor = Callable[[str], Sequence[Chunk]]


@with_set("chunkweave chat --docs NOTES/")
def chat(
    *,
    about: AskedOptions,
    model: ModelOptions,
    how: MethodOptions,
    ordering: Annotated[OrderingConfig, Only("deduplicate")],
    store: StoreConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as a line of JSON on stdout.")] = False,
    out: Out = None,
) -> None:
    """Hold a conversation: every line of standard input is a question, which may refer to earlier ones.

    Earlier turns are sent again, without the oldest where they no longer fit; their KV cache is reused. With --docs,
    each question sends all documents if they fit into the context. If they do not, or with --corpus, it sends the
    nearest chunks; --no-deduplicate sends again what the context already has. The default model is `smollm2`
    if it is installed, else the bundled `reader`. Empty lines are skipped. Ctrl-D ends the conversation.
    """
    output = Output(as_json, out)
    if model.model.model is None and model.model.shape is None:
        model = replace(model, model=replace(model.model, model=usual_model()))
    engine_options = how.options(store=store, ordering=replace(ordering, continuation_threshold=None))
    documents = about.documents.docs or []
    about.check(documents)
    model.named()
    read = about.documents.read(documents)
    from chunkweave.prompt.request import Request

    with model.open(**engine_options) as engine:
        if model.random_weights:
            stderr().print(f"[yellow]{model.name} has random weights: its text means nothing.[/yellow]")
        room = Room.of(engine, Request("", (), about.answers.system, about.sampling))
        chunks_for = _chunks_for(room, about, read, model)
        turns = list(_hold(Conversation(room), chunks_for, output))
    output.save({"model": model.name, "turns": turns})


class Conversation:
    """The turns of a conversation that fit into the context, which every request sends again."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._turns: deque[tuple[str, str]] = deque()

    def request(self, question: str, chunks: Sequence[Chunk]) -> "Request":
        """The next turn; without the oldest turns where they no longer fit."""
        request = replace(self.room.base, question=question, chunks=tuple(chunks))
        while self._turns and self._tokens(request) > self.room.most_tokens:
            self._turns.popleft()
        return replace(request, history=tuple(self._turns))

    def add(self, question: str, answer: str) -> None:
        """Add an answered turn."""
        self._turns.append((question, answer))

    def _tokens(self, request: "Request") -> int:
        builder = self.room.engine.builder
        return len(builder.build(request.question, request.chunks, system=request.system, history=self._turns))


def _hold(conversation: Conversation, chunks_for: ChunksFor, output: Output) -> Iterator[dict[str, Any]]:
    """Answer line after line. At a terminal, a question that fails does not end the conversation."""
    interactive = sys.stdin.isatty()
    for question in _questions(interactive and not output.json):
        try:
            yield _answer(conversation, question, chunks_for(question), output)
        except ChunkweaveError as error:
            if not interactive:
                raise
            stderr().print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)


def _questions(prompted: bool) -> Iterator[str]:
    lines = iter(_prompted_line, None) if prompted else sys.stdin
    return (line.strip() for line in lines if line.strip())


def _prompted_line() -> str | None:
    try:
        return input(_PROMPT)
    except EOFError:
        return None


def _answer(conversation: Conversation, question: str, chunks: Sequence[Chunk], output: Output) -> dict[str, Any]:
    answer = spoken(conversation.room.engine.stream(conversation.request(question, chunks)), output)
    conversation.add(question, answer.text)
    output.show_text("\n")
    output.show(token_line(answer.report), conversation_line(answer.report), times(answer.report), "")
    summary = answer_dict(question, answer)
    if output.json:
        sys.stdout.write(json.dumps(summary, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
    return summary


def _chunks_for(room: Room, about: AskedOptions, documents: Sequence[Document], model: ModelOptions) -> ChunksFor:
    """For each question all chunks of the documents if they fit; else, or with a corpus, the nearest chunks.

    Raises:
        CorpusError: there is no corpus, or it is damaged.
    """
    top_k = about.top_k
    if about.corpus is not None:
        corpus = open_corpus(about.corpus)
        warn_if_unreadable(room.engine, model, corpus.chunks())
    else:
        with status("cutting the documents into chunks"):
            chunks = about.documents.chunks(room.engine, documents)
            all_fit = not chunks or (top_k is None and room.fits(None, chunks))
        warn_if_unreadable(room.engine, model, chunks)
        if all_fit:
            return lambda _: chunks
        corpus = temporary_corpus(room, about.documents, documents, room.why_searched(chunks, top_k))
    k = how_many(corpus, top_k)
    return lambda question: [retrieved.chunk for retrieved in room.fitting(None, corpus.search(question, k), top_k)]
