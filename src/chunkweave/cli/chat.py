"""`chunkweave chat`: a conversation over documents, a question a line."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.cli.ask import AskedOptions, answer_dict, spoken
from chunkweave.cli.console import Out, Output, conversation_line, stderr, times, token_line
from chunkweave.cli.corpus import how_many, open_corpus
from chunkweave.cli.options import MethodOptions, ModelOptions, with_blocks
from chunkweave.config import ConversationConfig, SamplingParams, StoreConfig
from chunkweave.errors import ChunkweaveError
from chunkweave.models.gguf import BUNDLED_READER
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Conversation

_PROMPT = "> "

ChunksFor = Callable[[str], Sequence[Chunk]]


@with_blocks
def chat(
    *,
    about: AskedOptions,
    model: ModelOptions,
    how: MethodOptions,
    limits: ConversationConfig,
    store: StoreConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as a line of JSON on stdout.")] = False,
    out: Out = None,
) -> None:
    """Hold a conversation: every line of standard input is a question, which may go on from those before.

    What was said stays in the context with its KV cache. With --docs all documents are sent with each question, with
    --corpus the nearest chunks to it; with --deduplicate only those that are not in the context already. The model is
    the bundled reader unless another is named. An empty line is passed over, the end of the input (Ctrl-D) ends it.
    """
    output = Output(as_json, out)
    if model.model.model is None and model.model.shape is None:
        model = replace(model, model=replace(model.model, model=BUNDLED_READER))
    engine_options = how.options(store=store, conversations=limits)
    documents = about.documents.docs or []
    about.check(documents)
    read = about.documents.read(documents)
    with model.open(**engine_options) as engine:
        if model.random_weights:
            stderr().print(f"[yellow]{model.name} has random weights: its text means nothing.[/yellow]")
        if about.corpus is not None:
            chunks_for = _nearest(about.corpus, about.top_k)
        else:
            fixed = about.documents.chunks(engine, read)
            chunks_for = lambda _: fixed  # noqa: E731
        conversation = engine.conversation(system=about.system)
        turns = list(_hold(conversation, chunks_for, about.sampling, output))
    output.save({"model": model.name, "turns": turns})


def _hold(
    conversation: "Conversation", chunks_for: ChunksFor, sampling: SamplingParams, output: Output
) -> Iterator[dict[str, Any]]:
    """Answer line after line. At a terminal a question that cannot be answered is not the end."""
    interactive = sys.stdin.isatty()
    for question in _questions(interactive and not output.json):
        try:
            yield _answer(conversation, question, chunks_for(question), sampling, output)
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


def _answer(
    conversation: "Conversation",
    question: str,
    chunks: Sequence[Chunk],
    sampling: SamplingParams,
    output: Output,
) -> dict[str, Any]:
    answer = spoken(conversation.stream(question, chunks, sampling=sampling), output)
    output.show_text("\n")
    output.show(token_line(answer.report), conversation_line(answer.report), times(answer.report), "")
    summary = answer_dict(question, answer)
    if output.json:
        sys.stdout.write(json.dumps(summary, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
    return summary


def _nearest(folder: Path, top_k: int | None) -> ChunksFor:
    corpus = open_corpus(folder)
    k = how_many(corpus, top_k)
    return lambda question: [one.chunk for one in corpus.search(question, k)]
