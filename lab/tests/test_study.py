"""`study`: methods at equal work, over chunks computed in several ways, and against a base model."""

import json

import pytest
import torch
from tests.integration.adapter_files import write_adapter
from tests.integration.command_line import invoke
from tests.integration.test_fidelity import EXAMPLES, _expected, _fully_reused
from tests.integration.test_loading import save_checkpoint
from tests.toys import toy_model
from transformers import DynamicCache

from chunkweave import Engine
from chunkweave.calibration.fidelity import decode_greedily, make_tasks
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.summaries import summarize_fidelity
from chunkweave.errors import UsageError
from chunkweave.planning.method import make_method
from chunkweave_lab.fidelity import Base, FidelityConfig, fitted_values, judges_of, measure_fidelity, solved


def _config(*methods: str, **changes: object) -> FidelityConfig:
    return FidelityConfig(methods=methods, chunks=4, new_tokens=5, **changes)  # type: ignore[arg-type]


def test_methods_come_once_more_over_chunks_computed_in_another_way():
    engine = Engine(toy_model())
    config = _config("cacheblend", also_warm=(Warmth.parse("neutral"),))
    tasks = make_tasks(engine, EXAMPLES, EXAMPLES[:2], config)
    found = list(measure_fidelity(engine, tasks, config.contenders({}), config))
    rows = ["full", "full-in-slices", "full-reuse", "cacheblend@0.15"]
    assert list(found[0]) == [*rows, "full-reuse neutral", "cacheblend neutral@0.15"]
    for one in found:
        assert one["full-reuse neutral"].kl != one["full-reuse"].kl
    assert not any(record.neutral for record in engine.store.records()), "each way has a store of its own"
    with pytest.raises(UsageError, match="alpha can be fitted over only one way"):
        _config("cachecraft", fractions=(0.05,), also_warm=(Warmth.parse("neutral"),))


def test_a_value_is_found_for_each_recompute_fraction_or_none_where_a_method_cannot():
    engine = Engine(toy_model())
    config = _config("epic", "cacheblend", "cachecraft", "prefix", fractions=(0.02, 0.5), free=0)
    tasks = make_tasks(engine, EXAMPLES, EXAMPLES, config)
    values = fitted_values(engine, tasks, config)
    assert set(values) == {f"{name}@{share}%" for name in ("epic", "cacheblend", "cachecraft") for share in (2, 50)}
    assert values["cacheblend@2%"] is None, "its first layers are dense"
    samples = list(measure_fidelity(engine, tasks, config.contenders(values), config))
    rows = {row.method: row for row in summarize_fidelity(samples, values)}
    assert rows["cacheblend@2%"].questions == 0
    assert rows["cacheblend@2%"].kl is None
    for name in ("epic", "cacheblend"):
        assert rows[f"{name}@50%"].recompute_fraction == pytest.approx(0.5, rel=0.25)
        assert rows[f"{name}@50%"].value == values[f"{name}@50%"]


@pytest.mark.parametrize(("wanted", "found"), [(0.3, 0.3), (0.05, None), (0.95, None)])
def test_the_solver_stays_inside_what_a_method_can_do(wanted, found):
    x = solved(lambda x: 0.0 if x == 0 else 0.1 + 0.4 * x, wanted, most=1.0)
    assert (x is None) == (found is None)
    if x is not None:
        assert 0.1 + 0.4 * x == pytest.approx(wanted, rel=0.03)


@pytest.fixture
def adapted_and_base(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "tiny", toy_model().model.model, size=0.02)
    return [Engine.load(folder, adapter=one, dtype="float32") for one in (adapter, None)]


def test_an_adapted_model_is_held_against_the_base(adapted_and_base):
    engine, unadapted = adapted_and_base
    config = _config("cacheblend@1", "prefix", free=1, also_warm=(Warmth.parse("instruction"),))
    tasks, theirs = (make_tasks(one, EXAMPLES, EXAMPLES[:2], config) for one in adapted_and_base)
    found = list(measure_fidelity(engine, tasks, config.contenders({}), config, base=Base(unadapted, theirs)))
    of_base = ["full of base", "full-in-slices of base", "full-reuse of base", "full-reuse instruction of base"]
    own = ["full", "full-reuse", "cacheblend@1", "prefix"]
    assert list(found[0]) == [*of_base, *own, "full-reuse instruction", "cacheblend instruction@1"]
    assert "full-in-slices of base" not in found[1], "where nothing is decoded there is no need for it"
    rows = {row.method: row for row in summarize_fidelity(found, **judges_of(base=True))}
    assert (rows["full of base"].kl, rows["full of base"].speedup) == (0.0, 1.0)
    assert rows["full-reuse of base"].kl_of_full_reuse == 1.0
    assert rows["full-in-slices of base"].kl < 1e-5
    assert rows["full"].kl > 1e-4, "the adapter moves full prefill itself"
    for exact in ("cacheblend@1", "prefix"):
        assert found[0][exact].kl == pytest.approx(found[0]["full"].kl, rel=1e-2)
    assert rows["full"].answer_nll_minus_full not in (None, 0.0)
    before, after = unadapted.loaded.model.model, engine.loaded.model.model
    for task, one in zip(theirs, found, strict=True):
        full = unadapted.runner.prefill(task.prompt, make_method("full"), new_tokens=6, capture=False)
        behind = decode_greedily(unadapted, [full], 5)[0].token_ids
        expected = _expected(before, task.prompt, DynamicCache(), behind)
        for label, model, cache in (
            ("full", after, DynamicCache()),
            ("full-reuse", after, _fully_reused(after, task.prompt)),
            ("full-reuse of base", before, _fully_reused(before, task.prompt)),
        ):
            kl = (expected.exp() * (expected - _expected(model, task.prompt, cache, behind))).sum(-1)
            torch.testing.assert_close(torch.tensor(one[label].kl, dtype=kl.dtype), kl, atol=1e-4, rtol=0)


def test_the_command_holds_an_adapted_model_against_the_base(adapted_and_base, tmp_path):
    samples = tmp_path / "samples.jsonl"
    command = ["study", "--model", tmp_path / "base", "--questions", 2, "--chunks", 2, "--chunk-tokens", 24]
    command += ["--methods", "epic", "--recompute-fraction", 0.2, "--new-tokens", 2, "--free", 1, "--dtype", "float32"]
    refused = invoke(*command, "--reference", "base")
    assert refused.exit_code == 2
    assert "--reference base is for a model with --adapter" in " ".join(refused.stderr.split())
    command += ["--adapter", tmp_path / "tiny", "--samples", samples]
    found = json.loads(invoke(*command, "--reference", "base", "--json").stdout)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows)[:3] == ["full of base", "full-in-slices of base", "full-reuse of base"]
    assert list(rows)[3:] == ["full", "full-reuse", "epic@20%"]
    assert found["config"]["model"].endswith("base+tiny")
    assert found["config"]["reference"].endswith("base")
    assert found["config"]["fingerprint"] == adapted_and_base[0].loaded.fingerprint
    assert rows["full"]["kl"] > 0.0 == rows["full of base"]["kl"]
    refused = invoke(*command)
    assert "other settings (reference)" in " ".join(refused.stderr.split())
    own = json.loads(invoke(*command[:-2], "--json").stdout)
    assert [row["method"] for row in own["rows"]] == ["full", "full-in-slices", "full-reuse", "epic@20%"]
