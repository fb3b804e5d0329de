"""Chunks computed among their own kind by real vLLM servers, over HTTP, and what is left of them after deletions."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from chunkweave import Engine, Request
from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.planning.method_choice import MethodRequest
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.segment_header import parse_header
from chunkweave.types import Chunk, ChunkId
from tests.server.conftest import wait_until
from tests.vllm.fronts import PASSAGES, QUESTION, FrontProcess, ask, told

TOLERANCE = 2e-3
"""Of log-probabilities: two engines' sums are rounded otherwise."""

CONTEXTS = {"context_count": 2, "context_tokens": 40}
"""Of the front that most tests share."""
MORE = [
    "The Halvik Ferry leaves at seven and at noon. It is steered by Ada Lindqvist.",
    "The Lune Bridge was opened in 1874. Its toll keeper is Per Sandahl.",
    "The Ostby Bakery sells rye bread. It belongs to Ingrid Falk, who bakes at night.",
]
SIX = (*PASSAGES, *MORE)
REUSE = {"method": "full-reuse", "order": "fixed"}


@pytest.fixture(scope="module")
def engine():
    reuse = ReuseConfig(capture=CaptureConfig(**CONTEXTS))
    with Engine.load("reader", dtype="float32", reuse=reuse) as library:
        yield library


def warm(front: FrontProcess, texts: Sequence[str], timeout_s: float = 300) -> dict:
    return front.post("/v1/cache/warm", {"documents": list(texts)}, timeout_s)


def ids_of(engine: Engine, texts: Sequence[str]) -> list[ChunkId]:
    return [engine.builder.chunk_part(Chunk(text)).id for text in texts]


def on_disk(folder: Path) -> list[SegmentRecord]:
    """What was written of all segments that are there."""
    records = []
    for path in (folder / "kv").rglob("*.safetensors"):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue  # it was just removed
        records.append(parse_header(data, len(data)).record)
    return records


def written(folder: Path, chunks: Sequence[ChunkId]) -> list[SegmentRecord]:
    """Of these chunks, once nothing more is written."""
    states: list[list[SegmentRecord]] = []

    def nothing_is_written() -> bool:
        time.sleep(0.5)
        states.append(sorted(on_disk(folder), key=lambda record: record.id))
        return states[-1:] == states[-2:-1]

    wait_until(nothing_is_written, 30)
    return [record for record in states[-1] if record.chunk_id in chunks]


def own_log_probs(engine: Engine, texts: Sequence[str]) -> torch.Tensor:
    """The library's first token, over the same documents in the same order."""
    prepared = engine.preparer.prepare(Request(QUESTION, tuple(map(Chunk, texts))), MethodRequest.of("full-reuse"))
    prefilled = engine.runner.prefill(prepared.prompt, prepared.reuse_method, capture=False, counts_as_request=False)
    return torch.log_softmax(prefilled.logits.float(), -1)


def test_what_is_warmed_and_asked_for_in_another_order_is_as_by_the_library(front, engine, front_folder):
    texts = told("in May", SIX)
    assert warm(front, texts) == {"chunks": len(texts), "computed": len(texts)}
    assert engine.precompute(texts) == len(texts)
    order = [texts[number] for number in (4, 1, 5, 0)]
    answer = ask(front.client, order, reuse=REUSE, logprobs=True, top_logprobs=20, max_tokens=1)
    report = answer.model_extra["chunkweave"]
    assert [chunk["kv_source"] for chunk in report["chunks"]] == ["reused"] * len(order)
    assert report["reused_tokens"] == sum(chunk["tokens"] for chunk in report["chunks"])
    library = engine.generate(QUESTION, order, method="full-reuse", max_new_tokens=1, order="fixed").report
    for said in (report["chunks"], [asdict(chunk) for chunk in library.chunks if chunk.rank is not None]):
        assert [chunk["contexts"] for chunk in said] == [CONTEXTS["context_count"]] * len(order)
    own = own_log_probs(engine, order)
    likeliest = torch.tensor([one.logprob for one in answer.choices[0].logprobs.content[0].top_logprobs])
    assert (likeliest - own.topk(len(likeliest)).values).abs().max().item() <= TOLERANCE
    bundled = CaptureConfig(**CONTEXTS, contexts="bundled")
    with Engine.load("reader", dtype="float32", reuse=ReuseConfig(capture=bundled)) as other:
        other.precompute(texts)
        apart = (own_log_probs(other, order) - own).abs().max().item()
    assert apart > 10 * TOLERANCE, "behind neutral passages it is another one"


def test_one_mean_is_left_of_each_chunk_as_in_the_librarys_store(front, engine, front_folder):
    texts = told("in June", SIX)
    chunks = ids_of(engine, texts)
    warm(front, texts)
    engine.precompute(texts)
    own = {record.chunk_id: record for record in engine.store.records() if record.chunk_id in chunks}
    found = written(front_folder, chunks)
    assert Counter(record.chunk_id for record in found) == Counter(chunks), "first passes are removed at the end"
    for record in found:
        assert (record.exact, len(record.contexts)) == (False, CONTEXTS["context_count"])
        assert (record.contexts, record.read) == (own[record.chunk_id].contexts, own[record.chunk_id].read)
    before = front.get("/metrics")
    assert warm(front, texts) == {"chunks": len(texts), "computed": 0}
    assert warm(front, texts[:3]) == {"chunks": 3, "computed": 0}
    assert prompts(front.get("/metrics")) - prompts(before) == 2, "a question about each call's chunks is all"
    assert written(front_folder, chunks) == found


def prompts(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_new_document_is_computed_behind_those_that_are_there(front, engine, front_folder):
    texts = told("in July", SIX)
    warm(front, texts[:-1])
    assert warm(front, texts) == {"chunks": len(texts), "computed": 1}
    (new,) = written(front_folder, ids_of(engine, texts[-1:]))
    assert new.contexts
    answer = ask(front.client, texts[::-1], reuse=REUSE)
    assert {chunk["kv_source"] for chunk in answer.model_extra["chunkweave"]["chunks"]} == {"reused"}
