"""`chunkweave ask`: questions over documents or a corpus, and with `--explain` the plan of each answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chunkweave.cli.console import (
    Output,
    counted,
    progress,
    reuse_summary,
    stderr,
    table_of,
    times,
    token_line,
)
from chunkweave.cli.corpus import TopK, retrieve
from chunkweave.cli.fitting import Room, over_documents, over_found
from chunkweave.cli.options import (
    DocumentOptions,
    MethodOptions,
    ModelOptions,
    OrderOptions,
    warn,
    with_blocks,
)
from chunkweave.config import SamplingParams, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport, parameter_text
from chunkweave.models.gguf import READER_CANNOT_READ, READER_TOKENS_A_WORD, is_bundled_reader
from chunkweave.planning.outcome import PartExplanation, PlanExplanation
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.tokenizer import tokens_a_word
from chunkweave.types import Chunk, Span

if TYPE_CHECKING:
    from chunkweave.conversation.answer import Answer, StreamEvent
    from chunkweave.engine.engine import Engine
    from chunkweave.prompt.request import Request


@dataclass(frozen=True, slots=True)
class AskedOptions:
    """Documents or corpus, and sampling of answers."""

    documents: DocumentOptions
    corpus: Annotated[
        Path | None, typer.Option(help="Folder made by `chunkweave ingest`: its nearest chunks are the documents.")
    ] = None
    top_k: TopK = None
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy and deterministic.")] = 0.0
    system: Annotated[str | None, typer.Option(help="Instruction instead of the template's own.")] = None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of all answers."""
        return SamplingParams(self.max_new_tokens, self.temperature)

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse documents beside a corpus, and a number of chunks without either.

        Raises:
            UsageError: there are both, or a number alone.
        """
        if (self.corpus is not None and paths) or (self.corpus is None and not paths and self.top_k is not None):
            raise UsageError("give either --docs or --corpus, with or without --top-k")


@with_blocks
def ask(
    questions: Annotated[
        list[str],
        typer.Argument(
            metavar="QUESTION...",
            help="One or more questions. Leading arguments that are existing files or folders are further documents, "
            "so that --docs *.md works.",
            show_default=False,
        ),
    ],
    *,
    about: AskedOptions,
    model: ModelOptions,
    how: MethodOptions,
    stand: OrderOptions,
    store: StoreConfig,
    precompute: Annotated[
        bool,
        typer.Option("--precompute", help="Compute all chunks of the questions ahead, so that any order reuses them."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the plan: each part's KV source, and which tokens were computed.")
    ] = False,
    output: Output,
) -> None:
    """Answer questions over documents; every question after the first reuses what is stored.

    Documents that do not fit into the model's context become a temporary corpus: each question is asked over its
    nearest chunks.
    """
    model.named()
    documents, corpus, top_k, sampling = about.documents, about.corpus, about.top_k, about.sampling
    engine_options = how.options(store=store, ordering=stand.ordering)
    order = stand.said()
    paths, questions_asked = _documents_first(documents.docs or [], questions)
    about.check(paths)
    retrieved_chunks = [] if corpus is None else retrieve(corpus, questions_asked, top_k)
    read = documents.read(paths)
    from chunkweave.prompt.request import Request

    with model.open(**engine_options) as engine:
        if not output.json or model.random_weights:
            _hint(engine, model, how, over_nothing=corpus is None and not read)
        base = Request("", (), about.system, sampling, order=order)
        room = Room.of(engine, base)
        if corpus is None:
            over = over_documents(room, documents, read, questions_asked, top_k)
        else:
            over = over_found(room, questions_asked, retrieved_chunks, top_k)
        every = list(dict.fromkeys(chunk for source in over for chunk in source.chunks))
        warn_if_unreadable(engine, model, every)
        if precompute:
            precompute_chunks(engine, every)
        answers = [
            answer_aloud(engine, replace(base, question=question, chunks=source.chunks), output, explain=explain)
            for question, source in zip(questions_asked, over, strict=True)
        ]
    answer_dicts = [
        answer_dict(question, answer, explain=explain)
        for question, answer in zip(questions_asked, answers, strict=True)
    ]
    for fields, source in zip(answer_dicts, over, strict=True):
        if source.retrieved is not None:
            fields["retrieved"] = [chunk.as_dict() for chunk in source.retrieved]
    output.finish({"model": model.name, "answers": answer_dicts})


def _hint(engine: "Engine", model: ModelOptions, how: MethodOptions, *, over_nothing: bool) -> None:
    """Print warnings and hints about the answers that follow."""
    if over_nothing:
        warn("no documents: there is nothing to weave; give --docs or --corpus")
    if model.random_weights:
        stderr().print(f"[yellow]{model.name} has random weights: its text means nothing, only times do.[/yellow]")
    elif how.default and engine.calibration is None:
        hint = f"only exact prefixes are reused: `{model.how_to_calibrate}` measures which other methods are safe"
        stderr().print(escape(hint), soft_wrap=True)


def warn_if_unreadable(engine: "Engine", model: ModelOptions, chunks: Sequence[Chunk]) -> None:
    """Warn if the bundled reader is asked about text that it cannot read."""
    if not is_bundled_reader(model.model.model):
        return
    if tokens_a_word(engine.loaded.tokenizer, (chunk.text for chunk in chunks)) > READER_TOKENS_A_WORD:
        warn(READER_CANNOT_READ)


def precompute_chunks(engine: "Engine", chunks: Sequence[Chunk]) -> None:
    """Compute and store chunks, with a progress bar."""
    with progress(computing(engine, chunks)) as report:
        engine.precompute(chunks, progress=report)


def computing(engine: "Engine", chunks: Sequence[Chunk]) -> str:
    """A progress description: how many chunks and tokens are computed."""
    tokens = sum(len(engine.builder.chunk_part(chunk)) for chunk in chunks)
    return f"computing {counted(len(chunks), 'chunk')}, {counted(tokens, 'token')} in all"


def answer_aloud(engine: "Engine", request: "Request", output: Output, *, explain: bool = False) -> "Answer":
    """Stream one answer to stdout, then print its report, or with `explain` its whole plan."""
    output.show_text(f"> {request.question}\n")
    answer = spoken(engine.stream(request), output)
    output.show_text("\n\n")
    described = explanation(answer.explanation, answer.report) if explain else reuse_summary(answer.report)
    output.show(described, "")
    return answer


class _AnswerText:
    """Removes white space before an answer's first word, while the answer is shown piece by piece."""

    def __init__(self) -> None:
        self._begun = False

    def shown(self, piece: str) -> str:
        """The part of a piece that is shown."""
        text = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(text)
        return text


def spoken(events: "Iterable[StreamEvent]", output: Output) -> "Answer":
    """Print a stream's text as it arrives, without white space before its first word; return its answer."""
    answer = None
    text = _AnswerText()
    for event in events:
        output.show_text(text.shown(event.text))
        answer = event.answer
    assert answer is not None, "the last event of a stream carries the answer"
    return answer


def answer_dict(question: str, answer: "Answer", *, explain: bool = False) -> dict[str, Any]:
    """One answer, JSON-able."""
    summary = {
        "question": question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "report": answer.report.as_dict(),
    }
    return {**summary, "plan": answer.explanation.as_dict()} if explain else summary


def _documents_first(docs: Sequence[Path], arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split `--docs` and positional arguments into documents and questions.

    A shell expands `--docs *.md "why?"` to one document and many positional arguments. Only leading arguments that
    exist as files are documents, so no question is lost.
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


def explanation(plan: PlanExplanation, report: ReuseReport) -> RenderableType:
    """The whole plan: totals, parts, passes, times."""
    lines: list[RenderableType] = [token_line(report), part_table(plan.parts)]
    if report.parameters:
        lines.insert(1, ", ".join(f"{name} {parameter_text(value)}" for name, value in report.parameters.items()))
    for place, words in enumerate(plan.passes, start=1):
        lines.append(f"pass {place} of {len(plan.passes)}: {words}")
    if plan.stop is not None:
        focused = [
            part.source for part in plan.parts if Span(part.start, part.start + part.tokens) in plan.stop.focused
        ]
        names = ", ".join(focused) or "none"
        lines.append(Text(f"stopped at layer {plan.stop.layer} of {plan.num_layers}; focused: {names}"))
    lines.append(f"recomputed share of the reused chunks' work: {report.recompute_fraction:.3f}")
    lines.append(times(report))
    return Group(*lines)


def part_table(parts: Sequence[PartExplanation]) -> Table:
    """One row per part."""
    return table_of(
        parts,
        ("part", lambda part: escape(part.source)),
        ("tokens", lambda part: str(part.tokens)),
        ("KV source", lambda part: str(part.kv_source)),
        ("variant", lambda part: escape(variant_words(part))),
        ("CCI", lambda part: _score(part.cci)),
        ("overlap", lambda part: _score(part.overlap)),
        ("CFO", lambda part: _score(part.cfo)),
        ("recomputed", _recomputed),
    )


def variant_words(part: PartExplanation) -> str:
    """The segment that was reused, and the context that it was computed in.

    >>> variant_words(PartExplanation("chunk", "a", 0, 9, KVSource.REUSED, "d3f0" * 8, ("b", "c")))
    'd3f0d3f0 in context of 2 chunks (b, c)'
    >>> variant_words(PartExplanation("chunk", "a", 0, 9, KVSource.REUSED, "d3f0" * 8, ("b", "c"), contexts=2))
    'd3f0d3f0 mean over 2 contexts of 2 chunks (b, c)'
    """
    if part.variant is None:
        return "-"
    if part.context is None:
        return part.variant[:8]
    if not part.context:
        return f"{part.variant[:8]} {'alone' if part.alone else 'as first chunk'}"
    count = f"{len(part.context)} chunk{'s' if len(part.context) > 1 else ''}"
    where = f"mean over {part.contexts} contexts of" if part.contexts else "in context of"
    return f"{part.variant[:8]} {where} {count} ({', '.join(part.context)})"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _recomputed(part: PartExplanation) -> str:
    if part.kv_source is not KVSource.REUSED:
        return "all" if part.kv_source is KVSource.COMPUTED else "-"
    below = sum(len(span) for span in part.partly)
    stopped = f" + {below} below layer {part.stopped_at_layer}" if below else ""
    return f"{part.recomputed_tokens}{stopped}"
