"""Calibration against a model's own full prefill: curves, resumption, records, and what is made of them."""

import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from chunkweave import Chunk, Engine, StoreConfig
from chunkweave.calibration import measurement
from chunkweave.calibration.fidelity import make_tasks
from chunkweave.calibration.measurement import CalibrationConfig, Origin, make_record, measure
from chunkweave.calibration.prompts import Warmth
from chunkweave.calibration.questions import Example, dataset_examples
from chunkweave.calibration.summaries import FidelitySample
from chunkweave.cli import calibrate as calibrate_module
from chunkweave.errors import DocumentError, UnknownMethodError, UsageError
from chunkweave.planning.calibration import (
    BOUNDS,
    CALIBRATION_FILE,
    PARTIAL_FILE,
    Bounds,
    Quality,
    read_records,
    save_record,
)
from tests.integration.command_line import invoke, json_of, refusal, succeed
from tests.toys import toy_model

TOKENIZER = Path(str(__import__("chunkweave").__file__)).parent / "assets" / "tokenizer"
TEXTS = [
    "The harbour of Skerrow was founded in 1871.",
    "Pilots board ships two miles west of the lighthouse.",
    "The ferry leaves at seven, at noon and at six.",
]
EXAMPLES = [
    Example(f"Question {turn}: what of the sea?", tuple(Chunk(text) for text in TEXTS[turn:] + TEXTS[:turn]), ())
    for turn in range(3)
]
CONFIG = CalibrationConfig(methods=("cacheblend", "epic"), ratios=(0.3, 1.0), warm=(Warmth(),), chunks=3, new_tokens=4)


pytestmark = pytest.mark.usefixtures("own_cache_folder", "one_thread")


def tasks_of(engine, config=CONFIG, examples=EXAMPLES):
    return make_tasks(engine, examples, EXAMPLES, next(iter(config.groups().values())))


def measured(engine, config=CONFIG, examples=EXAMPLES):
    return list(measure(engine, tasks_of(engine, config, examples), config, StoreConfig()))


@pytest.fixture(scope="module")
def record(model):
    engine = Engine(model)
    return make_record(engine, EXAMPLES, CONFIG, measured(engine), Origin("toy", "chunkweave calibrate", ("c",)))


def test_every_point_is_held_against_full_prefill_of_the_same_model(record):
    assert [(one.method, one.value, one.warm) for one in record.points] == [
        (method, value, "alone") for method in ("cacheblend", "epic") for value in (0.3, 1.0)
    ]
    for one in record.points:
        assert one.kl_low <= one.kl <= one.kl_high
        assert one.agreement_low <= one.agreement <= one.agreement_high
        assert one.speedup_low <= one.speedup <= one.speedup_high
    assert [one.kl < 1e-5 for one in record.points] == [False, True, False, True], "all recomputed is full prefill"
    sliced, reused = record.references
    assert (sliced.method, reused.method) == ("full-in-slices", "full-reuse")
    assert sliced.kl < 1e-5 < reused.kl
    assert record.targets[Quality.BALANCED].bounds == BOUNDS[Quality.BALANCED]
    assert (record.questions, record.dataset, record.commits) == (3, "toy", ("c",))
    assert record.threads == 1


def test_alpha_is_fitted_over_chunks_in_contexts_too_each_way_in_a_store_of_its_own(model):
    config = CalibrationConfig(
        methods=("cachecraft", "epic"),
        alphas=(3.0, 0.5),
        ratios=(0.3,),
        warm=(Warmth(),),
        chunks=3,
        new_tokens=3,
    )
    assert {warm: group.methods for warm, group in config.groups().items()} == {
        "alone": ("cachecraft", "epic"),
        "contexts:2": ("cachecraft",),
    }
    assert config.grid() == (("cachecraft", 0.5), ("cachecraft", 3.0), ("epic", 0.3))
    engine = Engine(model)
    record = make_record(engine, EXAMPLES, config, measured(engine, config), Origin("toy"))
    ways = {one.warm: one.recompute_fraction for one in record.points if (one.method, one.value) == ("cachecraft", 0.5)}
    assert list(ways) == ["alone", "contexts:2"]
    assert ways["alone"] != ways["contexts:2"]
    assert {one.warm for one in record.points if one.method == "epic"} == {"alone"}
    assert all(stored.alone for stored in engine.store.records()), "chunks in contexts are in another store"
    assert [one.warm for one in record.references] == ["alone", "alone", "contexts:2", "contexts:2"]


def test_chunks_are_computed_as_precompute_does_unless_it_is_said_otherwise(model):
    config = CalibrationConfig(methods=("cacheblend",), ratios=(0.0,), chunks=3, new_tokens=3)
    engine = Engine(model)
    others = Example("And of the land?", tuple(Chunk(f"The mill has {number} sails.") for number in range(3)), ())
    samples = measured(engine, config, [*EXAMPLES, others])  # chunks of the same question are no contexts
    record = make_record(engine, EXAMPLES, config, samples, Origin("toy"))
    assert any(stored.contexts for stored in engine.store.records())
    [nothing] = record.points
    reused = record.references[1]
    assert (nothing.warm, nothing.recompute_fraction) == ("corpus", 0.0)
    assert (reused.kl, reused.agreement) == (nothing.kl, nothing.agreement), "ratio 0 is full reuse"


def test_earlier_queries_warm_the_store_and_are_not_measured(model):
    earlier = (Warmth.parse("queries:1"),)
    config = CalibrationConfig(methods=("epic",), ratios=(0.3,), warm=earlier, chunks=3, new_tokens=3)
    engine = Engine(model)
    assert config.earlier == 1
    assert len(measured(engine, config)) == 2
    assert any(not stored.alone for stored in engine.store.records())


def test_a_method_may_be_calibrated_with_settings(model):
    config = CalibrationConfig(methods=("cacheblend:layers=2", "query@0.2"), ratios=(0.3,), chunks=3, new_tokens=3)
    assert config.grid() == (("cacheblend:layers=2", 0.3), ("query", 0.2))
    engine = Engine(model)
    record = make_record(engine, EXAMPLES, config, measured(engine, config), Origin("toy"))
    assert {(point.method, point.value) for point in record.points} == set(config.grid())


def sample(right: int, kl: float, ttft_s: float, fraction: float) -> FidelitySample:
    return FidelitySample(
        (kl,) * 10, (True,) * right + (False,) * (10 - right), None, None, None, ttft_s, 2.0, fraction, 9
    )


def test_targets_follow_from_the_curves_and_from_how_sure_they_are(model):
    """`cacheblend` at 0.2 is close on each question; `epic` at 0.4 is as close on average, but not on each."""
    config = CalibrationConfig(methods=("cacheblend", "epic"), ratios=(0.2, 0.4), chunks=3)

    def question(number: int) -> dict[str, FidelitySample]:
        unlike = number % 10 == 0
        return {
            "full": sample(10, 0.0, 1.0, 0.0),
            "full-in-slices": sample(10, 0.001, 1.1, 0.0),
            "full-reuse": sample(5, 1.0, 0.1, 0.0),
            "cacheblend@0.2": sample(10, 0.04, 0.25, 0.3),
            "cacheblend@0.4": sample(10, 0.02, 0.5, 0.5),
            "epic@0.2": sample(8, 0.2, 0.2, 0.2),
            "epic@0.4": sample(10, 0.4 if unlike else 0.0, 0.4, 0.25),
        }

    engine = Engine(model)
    found = [{"corpus": question(number)} for number in range(40)]
    record = make_record(engine, EXAMPLES, config, found, Origin("stub"))
    assert record.spec(Quality.BALANCED) == "cacheblend:ratio=0.2"
    assert record.targets[Quality.BALANCED].least == {"cacheblend": 0.2, "epic": None}
    (chosen,) = record.chosen(Quality.BALANCED)
    assert (chosen.kl, chosen.agreement, chosen.speedup) == (pytest.approx(0.04), 1.0, 4.0)
    (epic,) = (one for one in record.points if (one.method, one.value) == ("epic", 0.4))
    assert epic.kl == pytest.approx(0.04)
    assert epic.kl_high > 0.05


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"methods": ()}, UsageError, "at least one method"),
        ({"warm": ()}, UsageError, "one way to warm"),
        ({"methods": ("prefix",)}, UsageError, "prefix has no parameter"),
        ({"methods": ("magic",)}, UnknownMethodError, "magic"),
        ({"methods": ("epic:magic",)}, UsageError, "unknown setting 'magic'"),
        ({"ratios": (1.5,)}, UsageError, "between 0 and 1"),
        ({"bounds": {**BOUNDS, Quality.FAST: Bounds(0.99, 0.1)}}, UsageError, "fast must not require more"),
        ({"bounds": {**BOUNDS, Quality.FAST: Bounds(0.5, 0.01)}}, UsageError, "fast must not require more"),
        ({"bounds": {**BOUNDS, Quality.BALANCED: Bounds(None, 0.05)}}, UsageError, "fast must not require more"),
    ],
)
def test_bad_configurations_are_refused_before_anything_runs(changes, error, said):
    with pytest.raises(error, match=said):
        CalibrationConfig(**{"methods": ("epic",), **changes})


@pytest.fixture
def checkpoint(model, tmp_path) -> tuple[Path, Path]:
    """A folder with the toy, and a data set without answers."""
    folder = tmp_path / "reader"
    model.model.model.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    data = tmp_path / "data.jsonl"
    lines = [{"question": one.question, "chunks": [chunk.text for chunk in one.chunks]} for one in EXAMPLES]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder, data


def calibrate_arguments(folder, data, *more) -> tuple[object, ...]:
    settings = ("--questions", 3, "--chunks", 3, "--new-tokens", 3, "--methods", "epic", "--recompute-ratio", "0.5,1")
    return ("calibrate", folder, "--dataset", data, "--dtype", "float32", *settings, *more)


def test_calibrate_writes_the_record_beside_the_model_and_answers_follow_it(checkpoint, tmp_path):
    folder, data = checkpoint
    hinted = invoke("ask", "--model", folder, "--max-new-tokens", 1, "Why?")
    assert f"`chunkweave calibrate {folder}`" in hinted.stderr.replace("\n", "")
    shown = json_of(*calibrate_arguments(folder, data, "--out", tmp_path / "copy.json"))
    assert shown == json.loads((tmp_path / "copy.json").read_text(encoding="utf-8"))
    (record,) = read_records(folder / CALIBRATION_FILE)
    assert shown["file"] == str(folder / CALIBRATION_FILE)
    assert shown["targets"]["balanced"] == {"bounds": {"agreement": 0.95, "kl": 0.05}, "least": {"epic": 1.0}} | {
        "method": "epic"
    }
    assert record.targets[Quality.BALANCED].method == "epic"
    assert list(record.commits) == shown["commits"]
    assert not (folder / PARTIAL_FILE).exists()

    document = tmp_path / "d.md"
    document.write_text(" ".join(TEXTS), encoding="utf-8")
    ask = ("ask", "--model", folder, "--set", "dtype=float32", "--docs", document, "--max-new-tokens", 2)
    for more, why, method in (
        ((), "calibrated", "epic"),
        (("--quality", "fast"), "calibrated", "epic"),
        (("--quality", "exact"), "exact", "prefix"),
        (("--method", "cacheblend:ratio=0.5"), "asked for", "cacheblend"),
    ):
        report = json_of(*ask, *more, "Why?")["answers"][0]["report"]
        assert (report["why"], report["method"]) == (why, method)
    assert report["parameters"] == {"recompute_ratio": 0.5, "check_layers": [1]}


def test_calibrate_shows_the_curve_and_what_the_targets_mean(checkpoint):
    folder, data = checkpoint
    done = succeed(*calibrate_arguments(folder, data, "--target-agreement", 0.9, "--fast-agreement", 0))
    text = " ".join(done.stdout.split())
    assert "recompute_ratio 1" in text
    assert "balanced (top-1 agreement at least 90.0%, KL at most 0.05): epic with recompute_ratio 1 over chunks" in text
    assert "fast (KL at most 0.1): epic" in text
    assert "3 questions, " in text


def test_a_target_that_nothing_reaches_is_said_aloud_and_answered_exactly(checkpoint, tmp_path, caplog):
    folder, data = checkpoint
    kept = tmp_path / "samples.jsonl"
    narrow = ("--recompute-ratio", "0.01", "--target-agreement", 1, "--target-kl", 1e-7, "--fast-kl", 1e-6)
    done = succeed(*calibrate_arguments(folder, data, *narrow, "--samples", kept))
    text = " ".join(done.stdout.split())
    assert "NO METHOD REACHES IT" in text
    assert "Nearest comes epic with recompute_ratio 0.01" in text
    lines = kept.read_text().splitlines()
    with caplog.at_level(logging.WARNING), Engine.load(folder, dtype="float32") as engine:
        report = engine.generate("Why?", TEXTS, max_new_tokens=1).report
        assert (report.method, report.why) == ("prefix", "target not reached")
        assert "no method met the bounds of balanced" in caplog.text
        assert engine.generate("Why?", TEXTS, max_new_tokens=1, quality="exact").report.why == "exact"
    succeed(*calibrate_arguments(folder, data, "--recompute-ratio", "0.01", "--samples", kept, "--json"))
    assert kept.read_text().splitlines() == lines, "other targets are read off what was measured"


def test_a_dry_run_checks_everything_and_writes_nothing(checkpoint, tmp_path):
    folder, data = checkpoint
    before = sorted(folder.iterdir())
    shown = json_of(*calibrate_arguments(folder, data, "--dry-run"))
    assert (shown["questions"], shown["questions_there"]) == (3, 0)
    assert shown["groups"] == {"corpus": ["full-in-slices", "full", "full-reuse", "epic@0.5", "epic@1"]}
    assert [(point["method"], point["value"]) for point in shown["points"]] == [("epic", 0.5), ("epic", 1.0)]
    text = invoke(*calibrate_arguments(folder, data, "--dry-run", "--cache-dir", tmp_path / "cache")).stdout
    assert "3 questions, 15 prefills; already measured: 0 questions" in text
    assert sorted(folder.iterdir()) == before
    assert not (tmp_path / "cache").exists()


def test_calibrate_interrupted_goes_on_when_called_again(checkpoint, monkeypatch):
    folder, data = checkpoint
    real = measurement.measure

    def interrupted(*arguments, **options):
        for place, groups in enumerate(real(*arguments, **options)):
            if place == 2:
                raise KeyboardInterrupt
            yield groups

    monkeypatch.setattr(measurement, "measure", interrupted)
    assert "continues from here" in refusal(*calibrate_arguments(folder, data), code=130)
    assert not (folder / CALIBRATION_FILE).exists()
    monkeypatch.setattr(measurement, "measure", real)
    assert "other settings (groups); delete it, or name another file" in refusal(
        *calibrate_arguments(folder, data, "--recompute-ratio", "0.5")
    )
    lines = (folder / PARTIAL_FILE).read_text().splitlines()
    assert len(lines) == 3
    again = succeed(*calibrate_arguments(folder, data))
    assert "measured before: 2 questions" in again.stderr
    assert read_records(folder / CALIBRATION_FILE)[0].questions == 3
    assert not (folder / PARTIAL_FILE).exists()


def test_a_cache_folders_own_record_counts_there(checkpoint, tmp_path):
    folder, data = checkpoint
    cache = tmp_path / "cache"
    place = Path(json_of(*calibrate_arguments(folder, data, "--cache-dir", cache))["file"])
    assert place == cache / read_records(place)[0].fingerprint / CALIBRATION_FILE
    assert not (folder / CALIBRATION_FILE).exists()
    with Engine.load(folder, dtype="float32", store=StoreConfig(cache_dir=cache)) as engine:
        assert engine.calibration == read_records(place)[0]
        assert engine.generate("Why?", TEXTS, max_new_tokens=1).report.why == "calibrated"
    assert invoke("cache", "verify", cache).exit_code == 0
    with Engine.load(folder, dtype="float32") as engine:
        assert engine.calibration is None


def test_a_record_of_another_dtype_is_not_used(checkpoint, record, caplog):
    folder, _ = checkpoint
    save_record(folder / CALIBRATION_FILE, record)
    with caplog.at_level(logging.WARNING):
        engine = Engine.load(folder, dtype="bfloat16")
    assert engine.calibration is None
    assert "in float32" in caplog.text
    assert engine.generate("Why?", TEXTS, max_new_tokens=1).report.why == "exact"


def test_an_explicit_record_must_be_this_models(model, record, tmp_path):
    assert Engine(model, calibration=record).generate("Why?", TEXTS, max_new_tokens=1).report.why == "calibrated"
    with pytest.raises(UsageError, match="not for toy-llama"):
        Engine(toy_model("llama", seed=1), calibration=record)
    save_record(tmp_path / CALIBRATION_FILE, record)
    assert read_records(tmp_path / CALIBRATION_FILE) == (record,)


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ((), 2, "give either MODEL"),
        (("/some/model", "--shape", "demo"), 2, "give either MODEL"),
        (("--shape", "demo"), 2, "give --cache-dir"),
        (("/no/such/model",), 1, "/no/such/model"),
        (("--shape", "demo", "--methods", "full"), 2, "full has no parameter"),
        (("--shape", "demo", "--target-agreement", 2), 2, "at most 1"),
        (("--shape", "demo", "--target-kl", 0), 2, "KL must be above 0"),
        (("--shape", "demo", "--fast-agreement", 0, "--fast-kl", "inf"), 2, "needs an agreement, a KL, or both"),
        (("--shape", "demo", "--alpha", "x"), 2, "--alpha takes numbers"),
        (("--shape", "demo", "--cache-dir", "cache", "--dataset", "nowhere.jsonl"), 1, "nowhere.jsonl"),
        (("--shape", "demo", "--warm", "hot"), 2, "queries:N"),
        (("--shape", "demo", "--alpha-warm", "hot"), 2, "queries:N"),
    ],
)
def test_calibrate_refuses_what_it_cannot_do(more, code, said):
    assert said in refusal("calibrate", "--questions", 1, "--methods", "epic", *more, code=code)


APART = """
import sys
from chunkweave.cli.app import app
try:
    app(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in sys.modules if name.startswith(("chunkweave_server", "chunkweave_lab"))])
"""


@pytest.mark.parametrize("documents", [False, True], ids=["measuring", "a dry run over documents"])
def test_calibrate_loads_neither_the_server_nor_the_laboratory(checkpoint, tmp_path, documents):
    folder, data = checkpoint
    arguments = list(map(str, calibrate_arguments(folder, data)))
    if documents:
        document = tmp_path / "d.md"
        document.write_text(
            " ".join(
                f"Harbour number {year} was founded by whalers in the spring of {year}." for year in range(1700, 1900)
            )
        )
        at = arguments.index("--dataset")
        arguments[at : at + 2] = ["--dry-run", "--docs", str(document), "--chunk-tokens", "64"]
    environment = {**os.environ, "PYTHONPATH": str(Path(str(__import__("chunkweave").__file__)).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", APART, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert (folder / CALIBRATION_FILE).exists() != documents


def test_a_data_set_that_the_library_cannot_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("chunkweave.calibration.questions.entry_points", lambda **_: ())
    with pytest.raises(UsageError, match="are read without chunkweave-lab"):
        dataset_examples(Path("musique.json"), count=1, chunks=2, seed=0)


@pytest.mark.parametrize(
    "entry", [{"question": "Why?"}, {"question": "Why?", "ctxs": [{"text": "So."}], "answers": []}]
)
def test_any_line_of_another_format_makes_the_file_another_readers(tmp_path, entry):
    file = tmp_path / "mixed.jsonl"
    own = {"question": "Why?", "chunks": ["So."]}
    file.write_text(json.dumps(own) + "\n" + json.dumps(entry), encoding="utf-8")
    if "ctxs" in entry:
        assert len(dataset_examples(file, count=1, chunks=1, seed=0)) == 2
    else:
        with pytest.raises(DocumentError, match=r"mixed.jsonl:2: no 'chunks'"):
            dataset_examples(file, count=1, chunks=1, seed=0)


def test_it_says_what_it_will_do_and_counts_every_prefill(checkpoint, tmp_path, monkeypatch):
    folder, data = checkpoint
    reports: list[tuple[int, int]] = []

    @contextmanager
    def progress(_):
        yield lambda *report: reports.append(report)

    monkeypatch.setattr(calibrate_module, "progress", progress)
    done = succeed(*calibrate_arguments(folder, data, "--cache-dir", tmp_path / "cache"))
    assert "measuring 3 questions in 15 prefills of about" in " ".join(done.stderr.split())
    assert {total for _, total in reports} == {15}
    counted = [so_far for so_far, _ in reports]
    assert counted == sorted(counted)
    assert set(counted) == set(range(1, 16))
