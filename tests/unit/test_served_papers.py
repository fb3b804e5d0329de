"""benchmarks/served_papers.py: who is asked what, what a row says, and that flags are those of the command line."""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from chunkweave.errors import ChunkweaveError
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.template import template_for
from tests.unit.chunking_tokenizers import bundled

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import served_papers as papers  # noqa: E402
from load_generator import LoadedRequest, LoadResult, Usage  # noqa: E402
from peers import Model  # noqa: E402


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


def test_flags_of_the_command_line_are_added_for_both_backends_or_for_one(tmp_path):
    args = options(tmp_path, flags=["Cache-Craft: --alpha 0.5", "vllm-serve Cache-Craft: --max-variants 2"])
    own, over = (run_of(args, backend, "Cache-Craft").flags for backend in papers.BACKENDS)
    assert own.endswith("--policy reuse-frequency --alpha 0.5")
    assert over == f"{own} --max-variants 2"
    assert run_of(args, papers.VLLM_SERVE, papers.FULL).flags == "--no-enable-prefix-caching"
    some = options(tmp_path, mechanisms=["PGDSF"], backends=["serve"])
    assert [(one.backend, one.mechanism.name) for one in papers.runs_of(some)] == [("serve", "PGDSF")]


def test_memory_is_halved_where_segments_are_kept_beside_what_runs(tmp_path):
    args, model = options(tmp_path), Model(Path("weights"), 1024, bundled(), builder())
    half, whole = str(1 << 29), str(1 << 30)
    own = run_of(args, papers.SERVE, "PGDSF").command(args, model).split()
    assert own[own.index("--host-budget") + 1] == half
    assert own[own.index("--kv-tokens") + 1] == str((1 << 29) // 1024)
    assert own[-4:] == ["--method", "prefix", "--policy", "pgdsf"]
    alone, woven = (
        run_of(args, papers.VLLM_SERVE, name).command(args, model).split() for name in (papers.PREFIX, "PGDSF")
    )
    assert alone[0] == "other-python"
    assert alone[alone.index("--kv-cache-memory-bytes") + 1] == whole
    assert woven[woven.index("--kv-cache-memory-bytes") + 1] == half


def result(*cached: int | None, prompt: int = 100) -> LoadResult:
    requests = tuple(LoadedRequest(1.0, 0.1, 0.4, 4) for _ in cached)
    return LoadResult(requests, 4.0, tuple(Usage(prompt, one) for one in cached if one is not None))


def test_computed_tokens_are_those_that_were_not_cached():
    assert papers.computed_tokens([result(40, 60)], 200) == 50.0
    assert papers.computed_tokens([result(40, None)], 200) == 80.0, "vLLM says nothing of what it had nothing of"
    assert papers.computed_tokens([result(40, 60), result(80, 80)], 0) == 35.0, "the server retrieved"
    with pytest.raises(ChunkweaveError, match="200 tokens became prompts of 180"):
        papers.computed_tokens([result(0, 0, prompt=90)], 200)


def row(name: str, sustained: float, ttfts: list[float | None], answers: list[str]) -> dict[str, object]:
    run = {"ttft_s_each": ttfts, "ttft_p50_s": ttfts[0], "ttft_p99_s": 9.0}
    return {
        "backend": "serve",
        "mechanism": name,
        "flags": "",
        "sustained_per_s": sustained,
        "trials": [{"rate_per_s": 3.0}],
        "computed_tokens_mean": 50.0,
        "unloaded": run,
        "runs": [run],
        "answers": answers,
        "server": {},
    }


def test_rows_are_compared_with_full_and_with_what_their_paper_compares_with():
    rows = [
        row(papers.FULL, 2.0, [2.0, 4.0], ["a b", "c d"]),
        row(papers.PREFIX, 3.0, [1.0, 3.0], ["a b", "c d"]),
        row("CacheBlend", 6.0, [0.5, 0.5], ["a b", "c x"]),
        row("Cache-Craft", 0.0, [1.0, 1.0], ["a b", "x d"]),
        row("PGDSF", 3.0, [1.0, None], ["a b", "c d"]),
    ]
    made = {one["mechanism"]: one for one in papers.with_comparisons(rows, str.split)}
    blend, craft = made["CacheBlend"], made["Cache-Craft"]
    assert blend["sooner"]["mean"] == 6.0, "3 s of full, on average, over 0.5 s"
    assert (blend["over_full"], blend["over_prefix"]) == (3.0, 2.0)
    assert blend["answer_agreement"] == 0.75
    assert craft["sooner"]["mean"] == 2.0, "2 s of prefix caching over 1 s"
    assert craft["answer_agreement"] == 0.5
    assert made["PGDSF"]["sooner"] is None, "a request failed"
    cells = papers.cells_of(blend)
    assert cells[1] == "6.00/s, 3.00x full, 2.00x prefix"
    assert cells[4] == "75% full's"
    assert cells[5].startswith("6.00x sooner than full (")
    assert cells[5].endswith("paper: 2.2 to 3.3x sooner (its Figure 12)")
    searched = {**craft, "server": {"speculations_started": 7, "speculations_matched": 5, "speculations_late": 2}}
    assert papers.cells_of(searched)[5].endswith("; 7 started, 5 matched, 2 late")
    assert papers.cells_of(craft)[1] == "below 3.00/s"
    assert list(papers.tables({"command": "python benchmarks/served_papers.py", "rows": rows})) == [
        *("served-papers", "served-papers-serve")
    ]
    why = {"backend": "vllm-serve", "mechanism": "PGDSF", "why": "it ended"}
    made_of = papers.tables({"command": "python benchmarks/served_papers.py", "rows": [*made.values(), why]})
    assert made_of["served-papers-serve"].count("\n") == 6
    assert made_of["served-papers-vllm-serve"].endswith("- PGDSF: not measured; it ended")
