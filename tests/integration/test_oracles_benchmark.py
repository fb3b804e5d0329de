"""The benchmark of oracles: what replacing KV by full prefill's does, and that a run goes on from its samples."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import oracles

from chunkweave import Engine
from chunkweave.eval.datasets import bundled_examples
from chunkweave.eval.decoding import decode_greedily
from chunkweave.eval.fidelity import FidelityConfig, divergence, log_probabilities, make_tasks
from chunkweave.eval.warming import Warmth
from chunkweave.planning.method import make_method

pytestmark = pytest.mark.usefixtures("one_thread")


def test_replacing_nothing_is_full_reuse_and_replacing_everything_full_prefill():
    with Engine.load("reader", dtype="float32") as engine:
        examples = bundled_examples(8)
        for task in make_tasks(engine, examples, examples[:2], FidelityConfig((), chunks=4)):
            Warmth().prepare(engine, task.prompt)
            full = engine.runner.prefill(task.prompt, make_method("full"), new_tokens=8, capture=False)
            reused = engine.runner.prefill(task.prompt, make_method("full-reuse"), capture=False)
            answer = decode_greedily(engine, [full], 8)[0].token_ids
            model, tokens = engine.loaded.model, len(task.prompt)
            exact, woven = (log_probabilities(model, one, answer)[0] for one in (full, reused))
            assert max(divergence(exact, woven)[0]) > 1e-3
            masks = {yes: torch.full((model.geometry.num_layers, tokens), yes) for yes in (False, True)}
            for wanted, keys, values in ((woven, False, False), (exact, True, True)):
                mixed = oracles.replaced(full, reused, masks[keys], masks[values])
                found = oracles.expected_behind(model, mixed, answer)
                torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)
                assert max(divergence(wanted, found)[0]) < 1e-6
            keys_only = oracles.replaced(full, reused, masks[True], masks[False])
            for layer in range(model.geometry.num_layers):
                keys, values = keys_only.cache.view(layer, tokens)
                assert torch.equal(keys, full.cache.view(layer, tokens)[0])
                assert torch.equal(values, reused.cache.view(layer, tokens)[1])


def test_a_run_has_every_variant_over_every_way_and_goes_on_from_its_samples(tmp_path):
    out, samples = tmp_path / "oracles.json", tmp_path / "samples.jsonl"
    run = ["--model", "reader", "--dtype", "float32", "--questions", "2", "--chunks", "4", "--new-tokens", "4"]
    run += ["--warm", "alone,instruction", "--samples", str(samples), "--out", str(out)]
    oracles.main(run)
    lines = samples.read_text(encoding="utf-8").splitlines()
    result = json.loads(out.read_text(encoding="utf-8"))
    rows = {(row["chunks"], row["variant"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]), "rows are named by way and variant"
    for way in ("alone", "instruction"):
        nothing, everything = rows[way, "nothing"], rows[way, "everything"]
        assert (nothing["share"], everything["share"], nothing["of_own"]) == (0.0, 1.0, 1.0)
        assert everything["kl"] < 1e-6 < nothing["kl"]
        assert everything["agreement"] == 1.0
        for share in oracles.BUDGETS:
            for name in (oracles.READ, f"{oracles.READ}, recomputed", "`query`"):
                assert rows[way, oracles.at_budget(name, share)]["share"] == pytest.approx(share, abs=0.02)
        parts = ("separators and punctuation", "names and numbers", "all other tokens", "first 4 tokens of a chunk")
        assert sum(rows[way, part]["share"] for part in parts) == pytest.approx(1.0)
        assert sum(rows[way, part]["share"] for part in ("keys", "values")) == pytest.approx(1.0)
        heads = [row["share"] for (of, name), row in rows.items() if of == way and name.startswith("head ")]
        assert sum(heads) == pytest.approx(1.0)
        for most in ("10%", "33%"):
            apart = (f"{most} of all heads, most deviating", f"all but these {most}")
            assert sum(rows[way, part]["share"] for part in apart) == pytest.approx(1.0)
    assert all(
        name.startswith("oracle-") and "| nothing |" in table
        for name, table in list(oracles.tables(result).items())[:1]
    )

    samples.write_text("\n".join(lines[:2]) + "\n", encoding="utf-8")
    oracles.main(run)
    again = json.loads(out.read_text(encoding="utf-8"))
    assert again["rows"] == result["rows"]
