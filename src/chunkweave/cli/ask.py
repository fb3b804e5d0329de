"""`chunkweave ask`: questions over documents."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from chunkweave.chunking.documents import read_documents
from chunkweave.cli import options
from chunkweave.cli.console import Output, stderr
from chunkweave.cli.explain import explanation
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.tables import reuse_summary
from chunkweave.config import SamplingParams
from chunkweave.errors import UsageError
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.answer import Answer, Request
    from chunkweave.engine.engine import Engine


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
    docs: Annotated[list[Path] | None, typer.Option("--docs", help="Text file or folder of them; repeatable.")] = None,
    model: options.Model = None,
    shape: options.Shape = None,
    method: Annotated[
        str | None,
        typer.Option(help="Reuse method; `prefix` is exact.", show_default="`balanced` if calibrated, else prefix"),
    ] = None,
    quality: options.Quality = None,
    recompute_ratio: options.AskedRatio = None,
    alpha: options.AskedAlpha = None,
    chunk_tokens: Annotated[int, typer.Option(help="Most tokens of a chunk.")] = 512,
    overlap_tokens: Annotated[int, typer.Option(help="Tokens that neighbouring chunks share at most.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy and deterministic.")] = 0.0,
    system: Annotated[str | None, typer.Option(help="Instruction instead of the template's own.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    store_budget: options.StoreBudget = options.DEFAULT_STORE_BUDGET,
    cache_dir: options.CacheDir = None,
    disk_budget: options.DiskBudget = options.DEFAULT_DISK_BUDGET,
    remote_url: options.RemoteUrl = None,
    codec: options.Codec = "raw",
    ttl: options.Ttl = None,
    skip_bad_docs: Annotated[bool, typer.Option("--skip-bad-docs", help="Leave out unreadable documents.")] = False,
    precompute: Annotated[
        bool, typer.Option("--precompute", help="Compute every chunk by itself first, so that any order can reuse it.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the plan: what was taken for each part, and which tokens computed.")
    ] = False,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Answer questions over documents; every question after the first reuses what is stored."""
    from chunkweave.chunking.splitter import SplitConfig

    output = Output(json, out)
    choice = ModelChoice(model, shape, device, dtype)
    sampling = SamplingParams(max_new_tokens, temperature)
    reuse = options.reuse_config(method, recompute_ratio, alpha)
    split = SplitConfig(chunk_tokens, overlap_tokens)
    store = options.store_config(
        store_budget=store_budget,
        cache_dir=cache_dir,
        disk_budget=disk_budget,
        remote_url=remote_url,
        codec=codec,
        ttl=ttl,
    )
    paths, asked = _documents_first(docs or [], questions)
    documents = read_documents(paths, on_error="skip" if skip_bad_docs else "raise")
    from chunkweave.engine.answer import Request

    with choice.open(store=store, method=method, quality=quality, reuse=reuse) as engine:
        chunks = split_documents(engine, [(document.name, document.text) for document in documents], split)
        if choice.random_weights:
            stderr().print(f"[yellow]{choice.name} has random weights: its text means nothing, only times do.[/yellow]")
        elif not json and method is None and quality is None and engine.calibration is None:
            hint = f"exact prefixes only: `chunkweave calibrate {choice.name}` finds out what more is safe"
            stderr().print(escape(hint), soft_wrap=True)
        if precompute:
            precompute_chunks(engine, chunks)
        base = Request("", tuple(chunks), system, sampling)
        answers = [
            answer_aloud(engine, replace(base, question=question), output, explain=explain) for question in asked
        ]
    shown = [answer_dict(question, answer, explain=explain) for question, answer in zip(asked, answers, strict=True)]
    output.finish({"model": choice.name, "answers": shown})


def split_documents(engine: "Engine", documents: Sequence[tuple[str, str]], split: Any = None) -> list[Chunk]:
    """(name, text) of documents -> their chunks in order, bounded in the engine's own tokens."""
    from chunkweave.chunking.splitter import split_text

    tokenizer = engine.loaded.tokenizer
    return [chunk for name, text in documents for chunk in split_text(text, tokenizer, split, source=name)]


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
