"""The benchmark of oracles: what replacing KV by full prefill's does, and that a run goes on from its samples."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import corrections
import drafts
import oracles

from chunkweave import Engine
from chunkweave.calibration.fidelity import decode_greedily, divergence, log_probabilities, make_tasks
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.questions import Example, bundled_examples
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.planning.method import make_method
from chunkweave.prompt.parts import PartKind
from chunkweave.types import Chunk
from chunkweave_lab.fidelity import FidelityConfig

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
            for name in (oracles.READ, f"{oracles.READ}, recomputed", "`query`", f"`{oracles.CALIBRATED}`"):
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


@pytest.fixture(scope="module")
def bench():
    """Two questions whose chunks have neighbours, one of them to fit on, over chunks computed alone and otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracles.PromptOptions, "examples", lambda *_: (numbered := _numbered(), numbered[:2]))
        run = ["--model", "reader", "--dtype", "float32", "--questions", "1", "--chunks", "2", "--new-tokens", "4"]
        run += ["--warm", "alone,opening:2,neighbour", "--fit", "1"]
        with oracles.opened(oracles.arguments_of(run, "x", ("a",), fit=1), 1) as opened:
            yield opened


def _numbered() -> list[Example]:
    """The bundled examples, all of their chunks from one document, in an order of its own."""
    examples = bundled_examples(4)
    numbers = {text: place for place, text in enumerate(sorted({c.text for e in examples for c in e.chunks}))}
    return [replace(e, chunks=tuple(Chunk(c.text, f"book#{numbers[c.text]}") for c in e.chunks)) for e in examples]


def prefilled(engine: Engine, task, method: str = "full-reuse"):
    return engine.runner.prefill(task.prompt, make_method(method), capture=False)


def test_a_way_of_these_benchmarks_computes_each_chunk_behind_what_it_says(bench):
    task = bench.tasks[0]
    chunks = [part for part in task.prompt.parts if part.kind is PartKind.CHUNK]
    first = [part for part in task.prompt.parts if part.kind in (PartKind.START, PartKind.SYSTEM)]
    opening = [token for part in first for token in part.token_ids]
    for way in ("opening:2", "neighbour"):
        engine = bench.prepare(way, task)
        reused = prefilled(engine, task)
        for part, span in zip(task.prompt.parts, task.prompt.spans(), strict=True):
            if part not in chunks:
                continue
            number = int(part.source.partition("#")[2])
            neighbour = bench.passages[f"book#{number - 1 if number else 1}"]
            behind = engine.builder.chunk_part(neighbour).token_ids
            before = opening[:2] if way == "opening:2" else [*opening, *behind]
            ids = torch.tensor([*before, *part.token_ids])
            values = computed_values(engine.loaded.model, ids)[-1][len(before) :]
            found = reused.cache.view(engine.loaded.model.geometry.num_layers - 1, span.stop)[1][span.start :]
            torch.testing.assert_close(found, values, atol=1e-3, rtol=0)
        assert prefilled(bench.prepare(way, task), task).plan.segments() == reused.plan.segments()


@torch.inference_mode()
def computed_values(model: HuggingFaceModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Values of some tokens computed by themselves, by layer, as transformers does."""
    made = model.model(ids[None], use_cache=True).past_key_values
    return [layer.values[0].transpose(0, 1) for layer in made.layers]


def test_weighing_nothing_otherwise_is_the_method_and_a_scale_of_nothing_hides(bench):
    task, engine = bench.tasks[0], bench.prepare("alone", bench.tasks[0])
    model, answer = engine.loaded.model, (5, 6, 7)
    reused = prefilled(engine, task)
    woven = engine.runner.prefill(task.prompt, oracles.calibrated(0.15), capture=False)
    chosen = [position for span in woven.recomputed for position in span.positions()]
    plain = corrections.answered(model, reused, chosen, answer, corrections.PLAIN)
    torch.testing.assert_close(plain, oracles.expected_behind(model, woven, answer), atol=1e-3, rtol=0)

    chunks = {part: 10**6 for part in task.prompt.parts if part.kind is PartKind.CHUNK}
    unseen = corrections.answered(model, reused, [], answer, corrections.Weighing(hidden=max(chunks.values())))
    nearly = corrections.answered(model, reused, [], answer, corrections.Weighing(scale=1e-12))
    torch.testing.assert_close(unseen, nearly, atol=1e-3, rtol=0)
    hot = corrections.answered(model, reused, [], answer, corrections.Weighing(temperature=1.2))
    assert (hot - corrections.answered(model, reused, [], answer, corrections.PLAIN)).abs().max() > 1e-3


def test_a_map_of_low_rank_is_found_again_and_blocks_are_not_connected():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 6, generator=draw)
    weight = torch.outer(torch.arange(6.0), torch.tensor([1.0, -2.0, 0.5, 3.0]))
    moments = corrections.Moments()
    for piece in x.split(1000):
        moments.add(piece, piece @ weight + 2.0)
    one = corrections.fitted(moments, 1)
    assert torch.linalg.matrix_rank(one.weight) == 1
    torch.testing.assert_close(one(x), x @ weight + 2.0, atol=0.5, rtol=0.05)
    constant = corrections.fitted(moments, 0)
    assert not constant.weight.any()
    assert constant.bias == pytest.approx((x @ weight + 2.0).mean(0).tolist(), abs=1e-3)
    square = corrections.Moments()
    square.add(x, x.flip(1))
    apart = corrections.fitted(square, None, blocks=2).weight
    assert not apart[:3, 3:].any()
    assert not apart[3:, :3].any()


def test_correcting_by_full_prefills_own_difference_is_full_prefill(bench):
    task, engine = bench.tasks[0], bench.prepare("alone", bench.tasks[0])
    full, reused = prefilled(engine, task, "full"), prefilled(engine, task)
    model = engine.loaded.model
    positions = corrections.reused_positions(reused)
    rows, maps = corrections.Rows(model, positions), []
    for layer in range(model.geometry.num_layers):
        off = [exact - old for exact, old in zip(rows.of(full, layer), rows.of(reused, layer), strict=True)]
        maps.append(tuple(lambda _, delta=delta: delta for delta in off))
    one = corrections.Correction("exact", None)
    changed, explained = corrections.corrected(model, full, reused, one, maps)
    assert explained == pytest.approx(1.0)
    for layer in range(model.geometry.num_layers):
        caches = (one.cache.view(layer, len(task.prompt)) for one in (changed, full))
        for found, exact in zip(*caches, strict=True):
            torch.testing.assert_close(found[positions], exact[positions], atol=1e-3, rtol=0)


def test_corrections_and_drafts_have_their_rows_and_tables(bench, monkeypatch):
    monkeypatch.setattr(corrections, "CORRECTIONS", corrections.CORRECTIONS[:2])
    monkeypatch.setattr(drafts, "DRAFTS", (2,))
    monkeypatch.setattr(drafts, "MORE", (0.3,))
    asked, task = bench.arguments, bench.tasks[0]
    asked.groups = corrections.GROUPS
    fits = {"alone": corrections.fit(bench, "alone")}
    engine = bench.prepare("alone", task)
    found = corrections.Question(engine, task, asked, fits).measured("alone", engine)
    rows = oracles.summarize(["alone"], [{"alone": found}])
    by_name = {row["variant"]: row for row in rows}
    assert len(by_name) == len(rows) == 1 + 2 * len(list(corrections.weighings())) + 2
    assert by_name["nothing: T 1, S 1"]["kl"] == pytest.approx(by_name["nothing"]["kl"], rel=1e-3)
    assert by_name["constant"]["share"] < by_name["linear, by head"]["share"] < 1.0
    made = corrections.tables({"rows": rows})
    assert set(made) == {"corrections-scores", "corrections-maps"}

    found = drafts.Question(engine, task, asked).measured("alone", engine)
    rows = {row["variant"]: row for row in oracles.summarize(["alone"], [{"alone": found}])}
    for share in oracles.BUDGETS:
        assert rows[f"draft of 2@{100 * share:g}%"]["share"] == pytest.approx(share, abs=0.02)
        assert rows[f"draft of 2@{100 * share:g}%"]["seconds"] > rows["nothing"]["seconds"]
    assert "draft of 2" in drafts.tables({"rows": list(rows.values())})["drafts"]
    without = engine.runner.prefill(task.prompt, oracles.calibrated(0.15), capture=False)
    positions = [position for span in without.recomputed for position in span.positions()]
    assert drafts.chosen_with(engine, task.prompt, (), 0.15) == positions
