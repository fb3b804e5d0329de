"""benchmarks/served_papers.py: who is asked what."""

import argparse
import json
from itertools import islice
from pathlib import Path

import served_papers as papers

from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from tests.unit.chunking_tokenizers import bundled


def options(tmp_path: Path, **given: object) -> argparse.Namespace:
    dataset = tmp_path / "asked.jsonl"
    entries = [
        {"question": f"Question {n}?", "answers": ["a"], "chunks": [f"Passage {n} {i}." for i in range(3)]}
        for n in range(5)
    ]
    dataset.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    usual = {"backends": papers.BACKENDS, "mechanisms": None, "flags": [], "dataset": dataset, "chunks": 2, "zipf": 1.0}
    server = {"seed": 0, "new_tokens": 3, "memory_gib": 1.0, "running": 4, "dtype": "bfloat16", "port": 8071}
    return argparse.Namespace(**{**usual, **server, "python": "other-python", "max_model_len": 512, **given})


def builder() -> PromptBuilder:
    tokenizer = bundled()
    return PromptBuilder(tokenizer, template_for(tokenizer), "benchmark")


def run_of(args: argparse.Namespace, backend: str, name: str) -> papers.Run:
    return next(one for one in papers.runs_of(args) if (one.backend, one.mechanism.name) == (backend, name))


def test_all_are_asked_the_same_and_vllm_alone_gets_the_ids_of_the_documents(tmp_path):
    args = options(tmp_path)
    runs = [run_of(args, papers.SERVE, papers.FULL), run_of(args, papers.VLLM_SERVE, papers.PREFIX)]
    texts, ids = ([*islice(papers.asked(run, args, builder()), 20)] for run in runs)
    assert len({body["prompt"] for body, _ in texts}) > 2, "questions come again, but not one alone"
    for (body, tokens), (alone, same) in zip(texts, ids, strict=True):
        assert len(body["documents"]) == 2
        assert tokens == same == len(alone["prompt"])
        assert "documents" not in alone
        assert "chunkweave" not in body
        assert "chunkweave" not in alone
    woven = run_of(args, papers.VLLM_SERVE, "CacheBlend")
    assert [*islice(papers.asked(woven, args, builder()), 20)] == texts
    searched, tokens = next(papers.asked(run_of(args, papers.SERVE, "speculation"), args, builder()))
    assert searched["chunkweave"] == {"corpus": "load", "top_k": 2}
    assert tokens == 0
