"""`chunkweave ask --corpus --speculate`: answers that are computed while their search goes on."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkweave.cli.console import Output
from chunkweave.cli.corpus_options import open_corpus
from chunkweave.cli.explain import explanation
from chunkweave.cli.tables import reuse_summary
from chunkweave.config import SamplingParams

if TYPE_CHECKING:
    from chunkweave.engine.answer import Request
    from chunkweave.engine.engine import Engine
    from chunkweave.retrieval.async_pipeline import AsyncRagPipeline
    from chunkweave.retrieval.pipeline import RagAnswer


def answers_ahead(
    engine: "Engine",
    folder: Path,
    questions: Sequence[str],
    output: Output,
    *,
    base: "Request",
    top_k: int | None,
    explain: bool,
) -> list[dict[str, Any]]:
    """Answer one question after the other from the corpus in `folder`, each as JSON; show them as they come.

    `base` is how all are asked: instruction, sampling and order.

    Raises:
        CorpusError: there is no corpus, or it is damaged.
        TopKError: there are fewer chunks than asked for.
    """
    from chunkweave.engine.async_engine import AsyncEngine
    from chunkweave.retrieval.async_pipeline import AsyncRagPipeline
    from chunkweave.retrieval.stages import usual_top_k

    corpus = open_corpus(folder)
    k = max(1, usual_top_k(len(corpus))) if top_k is None else top_k

    async def ask() -> list[dict[str, Any]]:
        async with AsyncEngine(engine) as batching:
            pipeline = AsyncRagPipeline(batching, corpus, top_k=k, order=base.order or "free", system=base.system)
            return [await _aloud(pipeline, question, output, base.sampling, explain=explain) for question in questions]

    return asyncio.run(ask())


async def _aloud(
    pipeline: "AsyncRagPipeline", question: str, output: Output, sampling: SamplingParams, *, explain: bool
) -> dict[str, Any]:
    output.show_text(f"> {question}\n")
    found = None
    async for event in pipeline.stream(question, sampling=sampling):
        output.show_text(event.text)
        found = event.answer
    assert found is not None, "the last event of a stream carries the answer"
    output.show_text("\n\n")
    shown = explanation(found.answer.explanation, found.report) if explain else reuse_summary(found.report)
    output.show(shown, _search_line(found), "")
    told = {"question": question, **found.as_dict()}
    return {**told, "plan": found.answer.explanation.as_dict()} if explain else told


def _search_line(found: "RagAnswer") -> str:
    """How long the search took, and how much of it was hidden."""
    told = found.pipelining
    assert told is not None, "it was asked to speculate"
    ended = "the last one was right" if told.matched else "none was right"
    return (
        f"search {found.search_s * 1e3:.1f} ms, {told.overlap_s * 1e3:.1f} ms of it behind prefill "
        f"({told.started} speculations{f', {ended}' if told.started else ''}); first token after {found.ttft_s:.3f} s"
    )
