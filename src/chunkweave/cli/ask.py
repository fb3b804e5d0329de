"""`chunkweave ask`: questions over documents."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.cli.console import Output, stderr
from chunkweave.cli.corpus_options import AskedCorpus, TopK, retrieve
from chunkweave.cli.explain import explanation
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.option_blocks import (
    DocumentOptions,
    MethodOptions,
    ModelOptions,
    OrderOptions,
    StoreOptions,
    with_blocks,
)
from chunkweave.cli.tables import reuse_summary
from chunkweave.config import SamplingParams
from chunkweave.errors import UsageError
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.answer import Answer, Request
    from chunkweave.engine.engine import Engine


@with_blocks
def ask(
    questions: Annotated[
        list[str],
        typer.Argument(
            metavar="QUESTION...",
            help="One or more questions. Leading arguments that name existing files or folders are taken as "
            "further documents, so that --docs *.md works.",
            show_default=False,
        ),
    ],
    *,
    corpus: AskedCorpus = None,
    top_k: TopK = None,
    documents: DocumentOptions,
    model: ModelOptions,
    how: MethodOptions,
    stand: OrderOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy and deterministic.")] = 0.0,
    system: Annotated[str | None, typer.Option(help="Instruction instead of the template's own.")] = None,
    store: StoreOptions,
    precompute: Annotated[
        bool, typer.Option("--precompute", help="Compute every chunk by itself first, so that any order can reuse it.")
    ] = False,
    speculate: Annotated[
        bool,
        typer.Option("--speculate", help="With --corpus: compute for the best chunks so far while the search goes on."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the plan: what was taken for each part, and which tokens computed.")
    ] = False,
    output: Output,
) -> None:
    """Answer questions over documents; every question after the first reuses what is stored."""
    choice = model.choice()
    sampling = SamplingParams(max_new_tokens, temperature)
    reuse, config = how.reuse(), store.config()
    order, ordering = stand.said(retrieved=corpus is not None), stand.config()
    paths, asked = _documents_first(documents.docs or [], questions)
    if (corpus is not None and paths) or (corpus is None and top_k is not None):
        raise UsageError("give either --docs, or --corpus with or without --top-k")
    if speculate and (corpus is None or precompute):
        raise UsageError("--speculate needs --corpus, and cannot be had with --precompute")
    found = [] if corpus is None or speculate else retrieve(corpus, asked, top_k)
    read = documents.read(paths)
    from chunkweave.engine.answer import Request

    with choice.open(store=config, method=how.method, quality=how.quality, reuse=reuse, ordering=ordering) as engine:
        chunks = documents.chunks(engine, read)
        if not output.json or choice.random_weights:
            _hint(engine, choice, how)
        base = Request("", (), system, sampling, order=order)
        given = [tuple(one.chunk for one in own) for own in found] or [tuple(chunks)] * len(asked)
        if corpus is not None and speculate:
            from chunkweave.cli.ask_ahead import answers_ahead

            told = answers_ahead(engine, corpus, asked, output, base=base, top_k=top_k, explain=explain)
            output.finish({"model": choice.name, "answers": told})
            return
        if precompute:
            precompute_chunks(engine, list(dict.fromkeys(chunk for own in given for chunk in own)))
        answers = [
            answer_aloud(engine, replace(base, question=question, chunks=own), output, explain=explain)
            for question, own in zip(asked, given, strict=True)
        ]
    shown = [answer_dict(question, answer, explain=explain) for question, answer in zip(asked, answers, strict=True)]
    for number, retrieved in enumerate(found):
        shown[number]["retrieved"] = [chunk.as_dict() for chunk in retrieved]
    output.finish({"model": choice.name, "answers": shown})


def _hint(engine: "Engine", choice: ModelChoice, how: MethodOptions) -> None:
    """What to know about the answers that follow."""
    if choice.random_weights:
        stderr().print(f"[yellow]{choice.name} has random weights: its text means nothing, only times do.[/yellow]")
    elif how.default and engine.calibration is None:
        hint = f"exact prefixes only: `chunkweave calibrate {choice.name}` finds out what more is safe"
        stderr().print(escape(hint), soft_wrap=True)


def precompute_chunks(engine: "Engine", chunks: Sequence[Chunk]) -> None:
    """Warm the store behind a progress bar."""
    from chunkweave.cli.console import progress

    with progress("computing chunks") as report:
        engine.precompute(chunks, progress=report)


def answer_aloud(engine: "Engine", request: "Request", output: Output, *, explain: bool = False) -> "Answer":
    """Stream one answer to the screen, then show what was reused for it, in full with `explain`."""
    output.show_text(f"> {request.question}\n")
    answer = None
    for event in engine.stream(request):
        output.show_text(event.text)
        answer = event.answer
    assert answer is not None, "the last event of a stream carries the answer"
    output.show_text("\n\n")
    shown = explanation(answer.explanation, answer.report) if explain else reuse_summary(answer.report)
    output.show(shown, "")
    return answer


def answer_dict(question: str, answer: "Answer", *, explain: bool = False) -> dict[str, Any]:
    """One answer as JSON."""
    told = {
        "question": question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "report": answer.report.as_dict(),
    }
    return {**told, "plan": answer.explanation.as_dict()} if explain else told


def _documents_first(docs: Sequence[Path], arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """`--docs` and positional arguments -> documents and questions.

    A shell turns `--docs *.md "why?"` into one document and many positional arguments; only leading ones that exist
    are moved, so a question is never lost.
    """
    paths, questions = list(docs), list(arguments)
    while docs and questions and _exists(questions[0]):
        paths.append(Path(questions.pop(0)))
    if not questions:
        raise UsageError("no question: give at least one after the documents")
    if not all(question.strip() for question in questions):
        raise UsageError("a question is empty")
    return paths, questions


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # a question can be longer than any file name
        return False
