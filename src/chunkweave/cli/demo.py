"""`chunkweave demo`: woven answers of the bundled reader, and a TTFT table, without any argument."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from chunkweave.cli.ask import answer_aloud, answer_dict, precompute_chunks
from chunkweave.cli.bench import measure_ttft, ttft_run
from chunkweave.cli.console import Output, table_of
from chunkweave.cli.options import ModelOptions, Only, with_blocks
from chunkweave.config import ModelConfig, SamplingParams, StoreConfig
from chunkweave.eval.datasets import Example, bundled_examples
from chunkweave.eval.summaries import TtftSample
from chunkweave.eval.worlds.world import bundled_corpus

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine

READER = "reader"
METHOD = "cacheblend"
_COMPARED = ("full", METHOD, "full-reuse")
QUESTIONS = (0, 5, 10)
"""Which of the corpus's questions are asked: such that take two passages that share something."""
_ANSWER_TOKENS = 24

TIMED_SHAPE = "demo"
"""What the TTFT table is measured on: the reader is too small for reuse to save time. Takes seconds on two cores."""
_TIMED_QUESTIONS = 3
_TIMED_CHUNKS = 6
_TIMED_CHUNK_TOKENS = 512


@with_blocks
def demo(*, store: Annotated[StoreConfig, Only("cache_dir")], output: Output) -> None:
    """Ask three questions over bundled passages, then compare times by reuse method. Under a minute on two cores."""
    corpus = bundled_corpus()
    reader = ModelOptions(ModelConfig(READER))
    with reader.open(store=store, method=METHOD) as engine:
        output.show(
            f"Model: the bundled {reader.name}. {len(corpus.passages)} passages about invented places; the KV cache of "
            "each is computed once, by itself.\nEach question gets six of them in an order of its own.\n"
        )
        precompute_chunks(engine, corpus.passages)
        answers = [_ask(engine, corpus.questions[which], output) for which in QUESTIONS]
    output.show(_answers_table(answers), "")
    ttft = _time_methods(output)
    output.finish({"model": reader.name, "answers": answers, "ttft": ttft})


def _ask(engine: "Engine", example: Example, output: Output) -> dict[str, Any]:
    """The woven answer, aloud, and what the ends of the scale answer: full prefill and full KV reuse."""
    from chunkweave.engine.request import Request

    request = Request(example.question, example.chunks, sampling=SamplingParams(max_new_tokens=_ANSWER_TOKENS))
    woven = answer_aloud(engine, request, output)
    texts = {name: engine.generate_batch([request], method=name)[0].text for name in _COMPARED if name != METHOD}
    texts[METHOD] = woven.text
    return {
        **answer_dict(example.question, woven),
        "expected": list(example.answers),
        "by_method": {name: texts[name].strip() for name in _COMPARED},
    }


def _answers_table(answers: Sequence[dict[str, Any]]) -> Table:
    return table_of(
        answers,
        ("question", lambda answer: answer["question"]),
        ("right answer", lambda answer: answer["expected"][0]),
        *((name, partial(_answer_by, name)) for name in _COMPARED),
        title="The same questions by reuse method",
        left=2 + len(_COMPARED),
    )


def _answer_by(method: str, answer: dict[str, Any]) -> str:
    return str(answer["by_method"][method])


def _time_methods(output: Output) -> dict[str, Any]:
    from chunkweave.eval.ttft import TtftConfig, make_workload

    choice = ModelOptions(ModelConfig(shape=TIMED_SHAPE))
    output.show(
        f"Times, on a larger model ({choice.name} geometry, random weights: only its times mean something), over other "
        "bundled documents:\n"
    )
    with choice.open(method=METHOD) as engine:
        config = TtftConfig(
            chunks=_TIMED_CHUNKS, chunk_tokens=_TIMED_CHUNK_TOKENS, questions=_TIMED_QUESTIONS, hf_reference=False
        )
        samples: list[TtftSample] = []
        measure_ttft(engine, make_workload(bundled_examples(_TIMED_QUESTIONS), engine, config), config, samples)
        origin = {"model": choice.name, "dataset": "bundled documents"}
        return ttft_run(engine, config, origin, samples).show(output)
