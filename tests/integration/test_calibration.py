"""Calibration on a toy whose own full prefill is the gold: curves, resumption, records, and what is made of them."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from chunkweave import Chunk, Engine, ReuseConfig, StoreConfig
from chunkweave.cli.app import app
from chunkweave.errors import PromptTooLongError, UnknownMethodError, UsageError
from chunkweave.eval import calibration
from chunkweave.eval.calibration import CalibrationConfig, Origin, make_record, measure, settings_of
from chunkweave.eval.datasets import Example
from chunkweave.eval.quality import GreedyAnswer
from chunkweave.eval.results import Measured, Measurements
from chunkweave.eval.ttft import Warmth
from chunkweave.metrics import ReuseReport
from chunkweave.planning.calibration import CALIBRATION_FILE, PARTIAL_FILE, Quality, read_records, save_record
from chunkweave.testing import toy_model

TOKENIZER = Path(str(__import__("chunkweave").__file__)).parent / "assets" / "tokenizer"
NEW_TOKENS = 6
TEXTS = [
    "The harbour of Skerrow was founded in 1871.",
    "Pilots board ships two miles west of the lighthouse.",
    "The ferry leaves at seven, at noon and at six.",
]
CONFIG = CalibrationConfig(methods=("cacheblend", "epic"), ratios=(0.0, 0.3, 1.0), max_new_tokens=NEW_TOKENS)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return toy_model("llama")


def own_answers(engine: Engine, count: int = 3) -> list[Example]:
    """Questions whose gold is what full prefill answers, so that its F1 is 1."""
    examples = []
    for turn in range(count):
        chunks = tuple(Chunk(text, f"text {place}") for place, text in enumerate(TEXTS[turn:] + TEXTS[:turn]))
        question = f"Question {turn}: what of the sea?"
        answer = engine.generate(question, chunks, method="full", max_new_tokens=NEW_TOKENS).text.strip()
        examples.append(Example(question, chunks, (answer or "nothing",)))
    return examples


@pytest.fixture(scope="module")
def examples(model) -> list[Example]:
    return own_answers(Engine(model))


def measured(engine, examples, path, config=CONFIG, progress=None) -> Measurements[Measured]:
    measurements = Measurements(path, settings_of(engine, examples, config), Measured)
    measure(engine, examples, config, measurements, progress)
    return measurements


def test_every_point_is_measured_on_every_question_and_ratio_one_is_full(model, examples, tmp_path):
    engine = Engine(model)
    measurements = measured(engine, examples, tmp_path / PARTIAL_FILE)
    assert len(measurements) == 3 * (1 + 2 * 3)
    assert all(record.alone for record in engine.store.records())
    record = make_record(engine, examples, CONFIG, measurements, Origin("toy", "chunkweave calibrate"))
    assert record.full_f1 == 1.0
    assert [(point.method, point.value) for point in record.points] == list(CONFIG.grid())
    by = {(point.method, point.value): point for point in record.points}
    for method in CONFIG.methods:
        assert (by[method, 1.0].share, by[method, 1.0].recompute_fraction) == (1.0, 1.0)
        assert by[method, 0.0].recompute_fraction == 0.0
    assert by["cacheblend", 0.3].recompute_fraction > by["epic", 0.3].recompute_fraction  # the dense first layer
    assert record.fingerprint == engine.loaded.fingerprint
    assert (record.questions, record.dataset, record.warm, record.seed) == (3, "toy", "alone", 1)
    assert record.targets[Quality.BALANCED].share == 0.98


def test_a_points_f1_is_that_of_the_engines_own_answers(model, examples, tmp_path):
    measurements = measured(Engine(model), examples, tmp_path / PARTIAL_FILE)
    for place, example in enumerate(examples):
        engine = Engine(model)
        engine.precompute(example.chunks)
        text = engine.generate(
            example.question, example.chunks, method="epic", recompute_ratio=0.3, max_new_tokens=NEW_TOKENS
        ).text
        assert measurements.of("epic@0.3")[place].f1 == calibration.f1(text, example.answers[0])


def test_what_was_measured_is_not_measured_again(model, examples, tmp_path, monkeypatch):
    path = tmp_path / PARTIAL_FILE
    engine = Engine(model)
    first = measured(engine, examples, path)
    monkeypatch.setattr(engine.runner, "prefill", lambda *_, **__: pytest.fail("measured again"))
    again = measured(engine, examples, path)
    assert [again.of(name) for name in CONFIG.contenders()] == [first.of(name) for name in CONFIG.contenders()]


def test_an_interrupted_calibration_goes_on_with_the_next_question(model, examples, tmp_path):
    path = tmp_path / PARTIAL_FILE

    def interrupt(done, _total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(Engine(model), examples, path, progress=interrupt)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"question": 2, "conten')  # cut off in the middle of a line
    engine = Engine(model)
    asked = []
    real = engine.runner.prefill

    def counting(prompt, method, **options):
        asked.append(method.name)
        return real(prompt, method, **options)

    engine.runner.prefill = counting
    assert len(Measurements(path, settings_of(engine, examples, CONFIG), Measured)) == 2 * 7
    whole = measured(engine, examples, path)
    assert len(whole) == 3 * 7
    assert asked.count("cacheblend") == 3  # one question, three ratios
    assert len(Measurements(path, settings_of(engine, examples, CONFIG), Measured)) == 3 * 7


def test_a_grid_that_grows_measures_only_what_is_new(model, examples, tmp_path):
    path = tmp_path / PARTIAL_FILE
    measured(Engine(model), examples, path)
    wider = CalibrationConfig(methods=("epic",), ratios=(0.3, 0.6), max_new_tokens=NEW_TOKENS)
    engine = Engine(model)
    asked = []
    real = engine.runner.prefill

    def counting(prompt, method, **options):
        asked.append(method.name)
        return real(prompt, method, **options)

    engine.runner.prefill = counting
    measured(engine, examples, path, wider)
    assert asked.count("epic") == 3


def test_other_settings_start_anew(model, examples, tmp_path, caplog):
    path = tmp_path / PARTIAL_FILE
    engine = Engine(model)
    measured(engine, examples, path)
    other = CalibrationConfig(
        methods=("cacheblend",), ratios=(0.3,), reuse=ReuseConfig(check_layers=(1, 2)), max_new_tokens=NEW_TOKENS
    )
    with caplog.at_level(logging.WARNING):
        fresh = Measurements(path, settings_of(engine, examples, other), Measured)
    assert len(fresh) == 0
    assert "other settings" in caplog.text
    fresh.add(0, "full", Measured(1.0, 0.0))
    assert len(Measurements(path, settings_of(engine, examples, other), Measured)) == 1
    assert settings_of(engine, examples[:2], CONFIG) != settings_of(engine, examples, CONFIG)


def test_a_damaged_file_of_measurements_is_replaced(tmp_path, caplog):
    path = tmp_path / PARTIAL_FILE
    for damage in ("{", '{"settings": {}}\n{"question": 0}\n', "[]\n"):
        path.write_text(damage, encoding="utf-8")
        assert len(Measurements(path, {}, Measured)) == 0
        assert "damaged" in caplog.text
        caplog.clear()


def test_earlier_queries_warm_the_store_and_are_not_measured(model, examples, tmp_path):
    config = CalibrationConfig(methods=("epic",), ratios=(0.3,), warm=Warmth(1), max_new_tokens=NEW_TOKENS)
    engine = Engine(model)
    assert len(measured(engine, examples, tmp_path / PARTIAL_FILE, config).of("full")) == 2
    assert any(not record.alone for record in engine.store.records())


def test_cachecraft_is_calibrated_by_its_alpha(model, examples, tmp_path):
    config = CalibrationConfig(methods=("cachecraft",), alphas=(2.5, 0.0), warm=Warmth(1), max_new_tokens=NEW_TOKENS)
    assert config.grid() == (("cachecraft", 0.0), ("cachecraft", 2.5))
    engine = Engine(model)
    measurements = measured(engine, examples, tmp_path / PARTIAL_FILE, config)
    nothing, much = make_record(engine, examples, config, measurements, Origin("toy")).points
    assert nothing.recompute_fraction == 0.0 < much.recompute_fraction <= 1.0


REPORT = ReuseReport("x", 10, 0, 0, 0, 10, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.0, 0, 1.0, 2.0)


def test_targets_follow_from_the_curves(model, tmp_path, monkeypatch):
    """Full answers 100 of 100; epic at ratio r loses 20 - 40 r of them, cacheblend 10 at 0.1 and 1 from 0.2 on."""
    wrong = {"full": 0, "cacheblend@0.1": 10, "cacheblend@0.2": 1, "cacheblend@0.4": 1}
    wrong |= {f"epic@{ratio:g}": round(20 - 40 * ratio) for ratio in (0.1, 0.2, 0.4)}
    spent = {"cacheblend@0.1": 0.15, "cacheblend@0.2": 0.25, "cacheblend@0.4": 0.45}

    def stub(_engine, _examples, missing, *_):
        for question, contenders in enumerate(missing):
            for name in contenders:
                text = "wrong" if question < wrong[name] else "right"
                yield GreedyAnswer(
                    question,
                    name,
                    text,
                    REPORT.__class__(
                        **{
                            **{field: getattr(REPORT, field) for field in REPORT.__slots__},
                            "recompute_fraction": spent.get(name, float(name.partition("@")[2] or 0)),
                        }
                    ),
                )

    monkeypatch.setattr(calibration, "answer_questions", stub)
    engine = Engine(model)
    examples = [Example(f"{i}?", (Chunk("text"),), ("right",)) for i in range(100)]
    config = CalibrationConfig(methods=("cacheblend", "epic"), ratios=(0.1, 0.2, 0.4))
    measurements = measured(engine, examples, tmp_path / PARTIAL_FILE, config)
    record = make_record(engine, examples, config, measurements, Origin("stub"))
    assert record.config(Quality.BALANCED) == ("cacheblend", ReuseConfig(0.2))
    assert record.config(Quality.FAST) == ("cacheblend", ReuseConfig(0.2))  # epic reaches 0.95 at 0.4, which is more
    assert record.targets[Quality.FAST].least == {"cacheblend": 0.2, "epic": 0.4}
    assert record.targets[Quality.BALANCED].least == {"cacheblend": 0.2, "epic": None}
    point = record.point(Quality.BALANCED)
    assert point.share == pytest.approx(0.99)
    assert 0.96 < point.share_low < 0.99 < point.share_high <= 1.0


def test_a_model_that_answers_nothing_cannot_be_calibrated(model, tmp_path):
    engine = Engine(model)
    hopeless = [Example("What?", (Chunk(TEXTS[0]),), ("quite another matter altogether",))]
    measurements = measured(engine, hopeless, tmp_path / PARTIAL_FILE)
    with pytest.raises(UsageError, match="answers none of these questions right"):
        make_record(engine, hopeless, CONFIG, measurements, Origin("toy"))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"methods": ()}, UsageError, "no method"),
        ({"methods": ("prefix",)}, UsageError, "prefix has no parameter"),
        ({"methods": ("magic",)}, UnknownMethodError, "magic"),
        ({"ratios": (1.5,)}, UsageError, "between 0 and 1"),
        ({"shares": {Quality.BALANCED: 1.2, Quality.FAST: 0.9}}, UsageError, "at most 1"),
        ({"shares": {Quality.BALANCED: 0.9, Quality.FAST: 0.95}}, UsageError, "fast must not be above"),
    ],
)
def test_bad_configurations_are_refused_before_anything_runs(changes, error, said):
    with pytest.raises(error, match=said):
        CalibrationConfig(**{"methods": ("epic",), **changes})


def test_prompts_that_do_not_fit_are_found_before_anything_is_measured(model):
    with pytest.raises(PromptTooLongError):
        calibration.check_prompts(Engine(model), [Example("?", (Chunk("word " * 600),), ("x",))])


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(model, examples, tmp_path) -> tuple[Path, Path]:
    """A folder with the toy, and a data set that it answers right."""
    folder = tmp_path / "reader"
    model.model.model.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    data = tmp_path / "data.jsonl"
    lines = [
        {"question": one.question, "chunks": [chunk.text for chunk in one.chunks], "answers": list(one.answers)}
        for one in examples
    ]
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder, data


def calibrate_arguments(folder, data, *more) -> tuple[object, ...]:
    settings = ("--questions", 3, "--max-new-tokens", NEW_TOKENS, "--methods", "epic", "--recompute-ratio", "0,1")
    return ("calibrate", folder, "--dataset", data, "--dtype", "float32", *settings, *more)


def test_calibrate_writes_the_record_beside_the_model_and_answers_follow_it(checkpoint, tmp_path):
    folder, data = checkpoint
    hinted = invoke("ask", "--model", folder, "--max-new-tokens", 1, "Why?")
    assert f"`chunkweave calibrate {folder}`" in hinted.stderr.replace("\n", "")
    done = invoke(*calibrate_arguments(folder, data, "--json", "--out", tmp_path / "copy.json"))
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown == json.loads((tmp_path / "copy.json").read_text(encoding="utf-8"))
    (record,) = read_records(folder / CALIBRATION_FILE)
    assert shown["file"] == str(folder / CALIBRATION_FILE)
    assert shown["targets"]["balanced"]["least"] == {"epic": record.targets[Quality.BALANCED].least["epic"]}
    assert record.targets[Quality.BALANCED].method == "epic"
    assert record.commit == shown["commit"]
    assert not (folder / PARTIAL_FILE).exists()

    document = tmp_path / "d.md"
    document.write_text(" ".join(TEXTS), encoding="utf-8")
    ask = ("ask", "--model", folder, "--dtype", "float32", "--docs", document, "--max-new-tokens", 2, "--json")
    for more, why, method in (
        ((), "calibrated", "epic"),
        (("--quality", "fast"), "calibrated", "epic"),
        (("--quality", "exact"), "exact", "prefix"),
        (("--method", "cacheblend", "--recompute-ratio", 0.5), "asked for", "cacheblend"),
    ):
        asked = invoke(*ask, *more, "Why?")
        assert asked.exit_code == 0, asked.output
        report = json.loads(asked.stdout)["answers"][0]["report"]
        assert (report["why"], report["method"]) == (why, method)
    assert report["parameters"] == {"recompute_ratio": 0.5}


def test_calibrate_shows_the_curve_and_what_the_targets_mean(checkpoint):
    folder, data = checkpoint
    done = invoke(*calibrate_arguments(folder, data))
    assert done.exit_code == 0, done.output
    assert "recompute_ratio 1" in done.stdout
    assert "balanced (98% of full's F1): epic with recompute_ratio" in done.stdout
    assert "3 questions, warm alone" in done.stdout


def test_a_dry_run_checks_everything_and_writes_nothing(checkpoint, tmp_path):
    folder, data = checkpoint
    before = sorted(folder.iterdir())
    done = invoke(*calibrate_arguments(folder, data, "--dry-run", "--json"))
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert (shown["answers"], shown["answers_there"]) == (9, 0)
    assert [(point["method"], point["value"]) for point in shown["points"]] == [("epic", 0.0), ("epic", 1.0)]
    text = invoke(*calibrate_arguments(folder, data, "--dry-run", "--cache-dir", tmp_path / "cache")).stdout
    assert "9 answers, of which 0 are there" in text
    assert sorted(folder.iterdir()) == before
    assert not (tmp_path / "cache").exists()


def test_calibrate_interrupted_goes_on_when_called_again(checkpoint, monkeypatch):
    folder, data = checkpoint
    real = calibration.answer_questions

    def interrupted(*arguments):
        for place, answer in enumerate(real(*arguments)):
            if place == 4:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(calibration, "answer_questions", interrupted)
    first = invoke(*calibrate_arguments(folder, data))
    assert first.exit_code == 130
    assert "goes on from here" in first.stderr
    assert not (folder / CALIBRATION_FILE).exists()
    monkeypatch.setattr(calibration, "answer_questions", real)
    again = invoke(*calibrate_arguments(folder, data))
    assert again.exit_code == 0, again.output
    assert "going on: 4 answers" in again.stderr
    assert not (folder / PARTIAL_FILE).exists()


def test_a_cache_folders_own_record_counts_there(checkpoint, tmp_path):
    folder, data = checkpoint
    cache = tmp_path / "cache"
    done = invoke(*calibrate_arguments(folder, data, "--cache-dir", cache, "--json"))
    assert done.exit_code == 0, done.output
    place = Path(json.loads(done.stdout)["file"])
    assert place == cache / read_records(place)[0].fingerprint / CALIBRATION_FILE
    assert not (folder / CALIBRATION_FILE).exists()
    with Engine.load(folder, dtype="float32", store=StoreConfig(cache_dir=cache)) as engine:
        assert engine.calibration == read_records(place)[0]
        assert engine.generate("Why?", TEXTS, max_new_tokens=1).report.why == "calibrated"
    assert invoke("cache", "check", cache).exit_code == 0
    with Engine.load(folder, dtype="float32") as engine:
        assert engine.calibration is None


def test_a_record_of_another_dtype_is_not_used(checkpoint, caplog):
    folder, data = checkpoint
    assert invoke(*calibrate_arguments(folder, data)).exit_code == 0
    with caplog.at_level(logging.WARNING):
        engine = Engine.load(folder, dtype="bfloat16")
    assert engine.calibration is None
    assert "reader in float32" in caplog.text
    assert engine.generate("Why?", TEXTS, max_new_tokens=1).report.why == "exact"


def test_an_explicit_record_must_be_this_models(model, examples, tmp_path):
    engine = Engine(model)
    record = make_record(engine, examples, CONFIG, measured(engine, examples, tmp_path / PARTIAL_FILE), Origin("toy"))
    assert Engine(model, calibration=record).generate("Why?", TEXTS, max_new_tokens=1).report.why == "calibrated"
    with pytest.raises(UsageError, match="not of toy-llama"):
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
        (("--shape", "demo", "--target", 2), 2, "at most 1"),
        (("--shape", "demo", "--alpha", "x"), 2, "--alpha takes numbers"),
        (("--shape", "demo", "--check-layers", "0.5"), 2, "whole numbers"),
        (("--shape", "demo", "--dataset", "nowhere.jsonl"), 1, "nowhere.jsonl"),
        (("--shape", "demo", "--warm", "hot"), 2, "queries:N"),
    ],
)
def test_calibrate_refuses_what_it_cannot_do(more, code, said):
    done = invoke("calibrate", "--questions", 1, "--methods", "epic", *more)
    assert done.exit_code == code, done.output
    assert said in " ".join(done.stderr.split())
