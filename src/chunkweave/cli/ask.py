"""`chunkweave ask`: questions over documents or a corpus, and with `--explain` the whole report of each answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

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
from chunkweave.cli.fitting import AskedOver, Room, over_documents, over_found
from chunkweave.cli.options import (
    DocumentOptions,
    MethodOptions,
    ModelOptions,
    Only,
    warn,
    with_set,
)
from chunkweave.config import RequestDefaults, SamplingParams, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.metrics import ChunkReport, ReuseReport, Saved, Savings, parameter_text
from chunkweave.models.gguf import READER_CANNOT_READ, READER_TOKENS_A_WORD, is_bundled_reader
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.tokenizer import tokens_a_word
from chunkweave.settings import Place, SettingsGroup, setting
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.conversation.answer import Answer, StreamEvent
    from chunkweave.engine.engine import Engine
    from chunkweave.prompt.request import Request


@dataclass(frozen=True, slots=True)
class AnswerSettings(SettingsGroup, places=frozenset({Place.COMMANDS})):
    """How answers are made."""

    max_new_tokens: int = setting(128, "Maximum tokens of an answer.")
    temperature: float = setting(0.0, "0 is greedy and deterministic.")
    system: str | None = setting(None, "Instruction instead of the template's own.")


@dataclass(frozen=True, slots=True)
class AskedOptions:
    """Documents or corpus, and sampling of answers."""

    documents: DocumentOptions
    corpus: Annotated[
        Path | None, typer.Option(help="Folder made by `chunkweave ingest`: its nearest chunks are the documents.")
    ] = None
    top_k: TopK = None
    answers: AnswerSettings = field(default_factory=AnswerSettings)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of all answers."""
        return SamplingParams(self.answers.max_new_tokens, self.answers.temperature)

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse documents beside a corpus, and a number of chunks without either.

        Raises:
            UsageError: there are both, or a number alone.
        """
        if (self.corpus is not None and paths) or (self.corpus is None and not paths and self.top_k is not None):
            raise UsageError("give either --docs or --corpus, with or without --top-k")


@with_set('chunkweave ask --docs NOTES/ "Who leads the choir?"')
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
    defaults: Annotated[RequestDefaults, Only("order")],
    ordering: Annotated[OrderingConfig, Only("ordering", "promotion_threshold")],
    store: StoreConfig,
    precompute: Annotated[
        bool,
        typer.Option("--precompute", help="Compute all chunks of the questions ahead, so that any order reuses them."),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show the whole report, with the KV source of each part."),
    ] = False,
    output: Output,
) -> None:
    """Answer questions over documents; every question after the first reuses what is stored.

    Documents that do not fit into the model's context become a temporary corpus: each question is asked over its
    nearest chunks.
    """
    model.named()
    documents = about.documents
    corpus = about.corpus
    top_k = about.top_k
    sampling = about.sampling
    ordering = replace(ordering, continuation_threshold=None)  # a command counts only its own few questions
    engine_options = how.options(store=store, ordering=ordering)
    order = ChunkOrder.parse(defaults.order or ChunkOrder.FIXED)
    paths, question_texts = _documents_first(documents.docs or [], questions)
    about.check(paths)
    retrieved_chunks = [] if corpus is None else retrieve(corpus, question_texts, top_k)
    read = documents.read(paths)
    from chunkweave.prompt.request import Request

    with model.open(**engine_options) as engine:
        if not output.json or model.random_weights:
            _hint(engine, model, how, over_nothing=corpus is None and not read)
        base = Request("", (), about.answers.system, sampling, order=order)
        room = Room.of(engine, base)
        if corpus is None:
            over = over_documents(room, documents, read, question_texts, top_k)
        else:
            over = over_found(room, question_texts, retrieved_chunks, top_k)
        every = list(dict.fromkeys(chunk for asked_over in over for chunk in asked_over.chunks))
        warn_if_unreadable(engine, model, every)
        if precompute and how.default and _same_path(over, order):
            stderr().print("every question is over the same documents in one order: the first one computes them")
        elif precompute:
            precompute_chunks(engine, every)
        answers = [
            answer_aloud(engine, replace(base, question=question, chunks=asked_over.chunks), output, explain=explain)
            for question, asked_over in zip(question_texts, over, strict=True)
        ]
    answer_dicts = [answer_dict(question, answer) for question, answer in zip(question_texts, answers, strict=True)]
    for fields, asked_over in zip(answer_dicts, over, strict=True):
        if asked_over.retrieved is not None:
            fields["retrieved"] = [chunk.as_dict() for chunk in asked_over.retrieved]
    savings = Savings()
    saved = [savings.add(answer.report) for answer in answers]
    known = [one for one in saved if one is not None]
    total = Saved(sum(one.seconds for one in known), sum(one.full_s for one in known))
    if known and len(answers) > 1:
        output.show(
            f"saved {total.seconds:.1f} s of the {total.full_s:.1f} s that full prefill takes ({total.share:.0%})"
        )
    output.finish({"model": model.name, "answers": answer_dicts, **(total.as_dict() if known else {})})


def _same_path(over: Sequence[AskedOver], order: ChunkOrder) -> bool:
    """Whether all of several questions are over the same chunks in one order, so that exact prefixes reuse all."""
    first, *others = [asked_over.chunks for asked_over in over]
    return bool(others) and order is ChunkOrder.FIXED and all(chunks == first for chunks in others)


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
    """Stream one answer to stdout, then print a summary of its report, or with `explain` all of it."""
    output.show_text(f"> {request.question}\n")
    answer = spoken(engine.stream(request), output)
    output.show_text("\n\n")
    described = explanation(answer.report) if explain else reuse_summary(answer.report)
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


def answer_dict(question: str, answer: "Answer") -> dict[str, Any]:
    """One answer, JSON-able."""
    return {
        "question": question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "report": answer.report.as_dict(),
    }


def _documents_first(docs: Sequence[Path], arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split `--docs` and positional arguments into documents and questions.

    A shell expands `--docs *.md "why?"` to one document and many positional arguments. Only leading arguments that
    exist as files are documents, so no question is lost.
    """
    paths = list(docs)
    questions = list(arguments)
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


def explanation(report: ReuseReport) -> RenderableType:
    """The whole report: totals, parts, times."""
    lines: list[RenderableType] = [token_line(report), chunk_table(report.chunks)]
    if report.parameters:
        lines.insert(1, ", ".join(f"{name} {parameter_text(value)}" for name, value in report.parameters.items()))
    if report.check_layers:
        lines.append(f"tokens chosen at layer {', '.join(map(str, report.check_layers))}")
    if report.stopped_at_layer is not None:
        lines.append(f"from layer {report.stopped_at_layer} on only chunks that the question attends to")
    lines.append(f"recomputed share of the reused chunks' work: {report.recompute_fraction:.3f}")
    lines.append(times(report))
    return Group(*lines)


def chunk_table(chunks: Sequence[ChunkReport]) -> Table:
    """One row per part that can be stored."""
    return table_of(
        chunks,
        ("part", lambda chunk: escape(chunk.source)),
        ("tokens", lambda chunk: str(chunk.tokens)),
        ("KV source", lambda chunk: chunk.kv_source),
        ("tier", lambda chunk: chunk.tier or "-"),
        ("variant", variant_text),
        ("CCI", lambda chunk: _score(chunk, "cci")),
        ("overlap", lambda chunk: _score(chunk, "overlap")),
        ("CFO", lambda chunk: _score(chunk, "cfo")),
        ("recomputed", lambda chunk: str(chunk.recomputed_tokens) if chunk.kv_source == KVSource.REUSED else "-"),
    )


def variant_text(chunk: ChunkReport) -> str:
    """The beginning of the reused segment's id, and how many contexts it is a mean over."""
    if chunk.variant is None:
        return "-"
    return f"{chunk.variant[:8]}, a mean over {chunk.contexts} contexts" if chunk.contexts else chunk.variant[:8]


def _score(chunk: ChunkReport, name: str) -> str:
    return f"{chunk.reasons[name]:.2f}" if name in chunk.reasons else "-"
