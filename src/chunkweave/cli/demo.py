"""`chunkweave demo`: woven answers and a TTFT table over bundled documents, without any argument."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from chunkweave.cli import options
from chunkweave.cli.ask import answer_aloud, answer_dict, precompute_chunks, split_documents
from chunkweave.cli.bench import TtftRun
from chunkweave.cli.console import Output
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.config import SamplingParams
from chunkweave.eval.bundled import BundledQuestion, bundled_documents
from chunkweave.eval.datasets import Example
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine

STAND_IN_SHAPE = "demo"
"""Random weights, for as long as no trained reader is bundled. Small, so that busy machines stay under a minute too."""

METHOD = "cacheblend"
_QUESTIONS = 3
_CHUNKS = 6
_ANSWER_TOKENS = 24


def demo(cache_dir: options.CacheDir = None, json: options.Json = False, out: options.Out = None) -> None:
    """Ask three questions over bundled documents, then compare reuse methods. Takes under a minute on two cores."""
    output = Output(json, out)
    choice = demo_model()
    documents, questions = bundled_documents()
    with choice.open(store=options.store_config(cache_dir=cache_dir), method=METHOD) as engine:
        chunks = split_documents(engine, documents)
        output.show(_introduction(choice, len(documents), len(chunks)))
        precompute_chunks(engine, chunks)
        rng = Random(0)
        examples = [Example(q.text, retrieved(q, chunks, rng), q.answers) for q in questions[:_QUESTIONS]]
        answers = [_ask(engine, example, output) for example in examples]
        ttft = _compare(engine, examples, choice, output)
    output.finish({"model": choice.name, "random_weights": choice.random_weights, "answers": answers, "ttft": ttft})


def demo_model() -> ModelChoice:
    """The bundled reader if this package has one, else random weights."""
    reader = files("chunkweave") / "assets" / "reader"
    if reader.is_dir():
        return ModelChoice(Path(str(reader)), None)
    return ModelChoice(None, STAND_IN_SHAPE)


def retrieved(question: BundledQuestion, chunks: Sequence[Chunk], rng: Random) -> tuple[Chunk, ...]:
    """Six chunks in no order, as retrieval might bring them: those of the question's documents, and others."""
    needed = [chunk for chunk in chunks if chunk.source.partition("#")[0] in question.sources]
    others = [chunk for chunk in chunks if chunk not in needed]
    chosen = (needed + rng.sample(others, len(others)))[:_CHUNKS]
    return tuple(rng.sample(chosen, len(chosen)))


def _introduction(choice: ModelChoice, documents: int, chunks: int) -> str:
    model = f"Model: {choice.name}"
    if choice.random_weights:
        model += (
            " geometry with random weights, because no trained reader comes with this version yet.\n"
            "[yellow]So the text of the answers means nothing. The times are those of a small model.[/yellow]"
        )
    return (
        f"{model}\n{documents} documents in {chunks} chunks; the KV cache of every chunk is computed once, by itself. "
        f"Each question gets {_CHUNKS} of them in an order of its own.\n"
    )


def _ask(engine: "Engine", example: Example, output: Output) -> dict[str, Any]:
    from chunkweave.engine.answer import Request

    request = Request(example.question, example.chunks, sampling=SamplingParams(max_new_tokens=_ANSWER_TOKENS))
    answer = answer_aloud(engine, request, output)
    return {**answer_dict(example.question, answer), "expected": list(example.answers)}


def _compare(engine: "Engine", examples: list[Example], choice: ModelChoice, output: Output) -> dict[str, Any]:
    from chunkweave.eval.ttft import TtftConfig, make_workload

    config = TtftConfig(chunks=_CHUNKS, chunk_tokens=0, questions=len(examples), hf_reference=False)
    run = TtftRun(engine, config, {"model": choice.name, "dataset": "bundled documents"})
    run.measure(make_workload(examples, engine, config))
    result = run.result()
    output.show(run.table(result))
    return result
