"""What targets resolve to, given curves; the record's file and where it is found; what a request is answered by."""

import json
import logging
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.errors import DocumentError, UsageError
from chunkweave.planning import calibration
from chunkweave.planning.calibration import (
    BOUNDS,
    CALIBRATION_FILE,
    Bounds,
    CalibrationRecord,
    CurvePoint,
    OtherFormatError,
    Quality,
    Target,
    choose_target,
    read_records,
    record_path,
    rising_fit,
    save_record,
    stored_calibration,
)
from chunkweave.planning.method import parameter_of
from chunkweave.planning.method_choice import Kept, MethodChooser, MethodRequest, Why

FINGERPRINT = "f" * 32


def point(
    method: str, value: float, agreement: float, kl: float = 0.01, fraction: float | None = None, warm: str = "alone"
) -> CurvePoint:
    """A point whose ends that speak against it are `agreement` and `kl`."""
    spent = value if fraction is None else fraction
    return CurvePoint(
        method, value, warm, kl / 2, kl / 4, kl, agreement + 0.01, agreement, agreement + 0.02, 2.0, 1.9, 2.1, spent
    )


BLEND = [
    point("cacheblend", 0.05, 0.80, 0.2, 0.1),
    point("cacheblend", 0.15, 0.91, 0.09, 0.2),
    point("cacheblend", 0.3, 0.96, 0.04),
]
CRAFT = [
    point("cachecraft", 0.5, 0.88, 0.15, 0.08),
    point("cachecraft", 1.0, 0.92, 0.08, 0.15),
    point("cachecraft", 2.0, 0.97, 0.06),
]
BALANCED, FAST = BOUNDS[Quality.BALANCED], BOUNDS[Quality.FAST]
REACHED = [point("cachecraft", 2.0, 0.99)]


def make_record(points=(*CRAFT, *BLEND), fingerprint=FINGERPRINT, **changes) -> CalibrationRecord:
    record = CalibrationRecord(
        fingerprint=fingerprint,
        model="reader",
        dtype="bfloat16",
        dataset="worlds",
        dataset_digest="d" * 32,
        questions=100,
        chunks=6,
        prompt_tokens=400.0,
        new_tokens=16,
        seed=1,
        references=(point("full-in-slices", 0.0, 0.99, 0.001, 0.0), point("full-reuse", 0.0, 0.7, 0.3, 0.0)),
        points=tuple(points),
        targets={quality: choose_target(points, bounds) for quality, bounds in BOUNDS.items()},
        device="cpu",
        threads=1,
        machine={"cpu": "a cpu"},
        versions={"chunkweave": "0"},
        commits=("c" * 40,),
        created="2026-01-01T00:00:00+00:00",
        command="chunkweave calibrate",
    )
    return replace(record, **changes)


def test_a_target_takes_each_methods_cheapest_point_and_of_these_the_one_that_recomputes_least():
    balanced, fast = (choose_target([*CRAFT, *BLEND], bounds) for bounds in (BALANCED, FAST))
    assert (Bounds(0.95, 0.05), Bounds(0.9, 0.1)) == (BALANCED, FAST)
    assert balanced == Target(BALANCED, {"cachecraft": None, "cacheblend": 0.3}, "cacheblend"), "0.06 is above 0.05"
    assert fast == Target(FAST, {"cachecraft": 1.0, "cacheblend": 0.15}, "cachecraft")  # 0.15 < 0.2 of the work
    assert choose_target([*CRAFT, *BLEND], Bounds(0.99, None)).method is None


def test_a_target_may_demand_agreement_or_divergence_alone():
    assert choose_target([*CRAFT, *BLEND], Bounds(0.95, None)).least == {"cachecraft": 2.0, "cacheblend": 0.3}
    assert choose_target([*CRAFT, *BLEND], Bounds(None, 0.1)).least == {"cachecraft": 1.0, "cacheblend": 0.15}


def test_the_ends_of_the_intervals_that_speak_against_a_point_decide():
    sure = [replace(BLEND[2], agreement=0.99, agreement_low=0.94), replace(BLEND[2], kl=0.01, kl_high=0.06)]
    assert [choose_target([one], BALANCED).method for one in (*sure, BLEND[2])] == [None, None, "cacheblend"]


def test_a_value_has_to_do_however_the_chunks_were_warmed():
    contexts = [replace(one, warm="contexts:2", agreement_low=one.agreement_low - 0.03) for one in CRAFT]
    assert choose_target([*CRAFT, *contexts], FAST).least == {"cachecraft": 2.0}
    assert choose_target([*CRAFT, *contexts], Bounds(0.95, None)).least == {"cachecraft": None}
    more = [replace(one, recompute_fraction=0.9) for one in contexts]
    assert choose_target([*BLEND, *CRAFT, *more], FAST).method == "cacheblend", "what it recomputes most counts"


def test_of_methods_that_recompute_as_much_the_one_that_strays_least_is_named():
    last = point("query", 0.3, 0.96, 0.04, 0.3)
    whole = point("query:whole", 0.3, 0.96, 0.02, 0.301)
    for points in ([last, whole], [whole, last]):
        assert choose_target(points, BALANCED).method == "query:whole"


def test_the_order_of_points_does_not_matter_but_equals_go_to_the_first_method():
    assert choose_target(BLEND[::-1], FAST).least == {"cacheblend": 0.15}
    twin = [replace(one, method="epic") for one in BLEND]
    assert choose_target([*twin, *BLEND], FAST).method == "epic"
    assert choose_target([], FAST) == Target(FAST, {}, None)


def test_one_lucky_point_is_not_taken_and_one_unlucky_dear_one_does_no_harm():
    lucky = [point("epic", value, share) for value, share in ((0.0, 0.951), (0.1, 0.8), (0.2, 0.9), (0.3, 0.97))]
    assert choose_target(lucky, BALANCED).least == {"epic": 0.3}
    unlucky = [point("epic", value, share) for value, share in ((0.1, 0.9), (0.2, 0.97), (0.3, 0.975), (0.5, 0.94))]
    assert choose_target(unlucky, BALANCED).least == {"epic": 0.2}
    lucky = [point("epic", value, 0.97, kl) for value, kl in ((0.0, 0.049), (0.1, 0.3), (0.2, 0.2), (0.3, 0.02))]
    assert choose_target(lucky, BALANCED).least == {"epic": 0.3}


def test_bounds_say_what_they_demand_and_how_far_beyond_a_point_is():
    assert str(BALANCED) == "top-1 agreement at least 95.0%, KL at most 0.05"
    assert str(Bounds(None, 0.1)) == "KL at most 0.1"
    assert BALANCED.excess(BLEND[0]) == pytest.approx(4.0)
    assert BALANCED.excess(BLEND[2]) == pytest.approx(0.8)
    assert make_record().nearest(Quality.BALANCED) == BLEND[2]
    for wrong in ((1.5, None), (None, 0.0), (None, float("inf")), (float("nan"), None), (None, None)):
        with pytest.raises(UsageError, match="a target"):
            Bounds(*wrong)


def test_the_fit_is_isotonic_regression():
    """Against pooling of adjacent violators, the other classic way to compute it."""
    rng = Random(0)
    for _ in range(100):
        values = [rng.random() for _ in range(rng.randint(1, 9))]
        fitted = rising_fit(values)
        assert fitted == pytest.approx(pooled(values))
        assert all(low <= high + 1e-12 for low, high in pairwise(fitted))


def pooled(values):
    blocks = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [fmean(block) for block in blocks for _ in block]


def test_a_target_cannot_name_a_method_that_misses_it():
    with pytest.raises(ValueError, match="does not reach"):
        Target(FAST, {"epic": None}, "epic")


def test_parameters_by_method():
    assert parameter_of("cachecraft") == "alpha"
    assert parameter_of("query") == parameter_of("epic") == "recompute_ratio"
    assert parameter_of("full") is parameter_of("prefix") is parameter_of("full-reuse") is None


def test_a_record_gives_the_settings_that_were_calibrated():
    record = make_record()
    assert record.spec(Quality.BALANCED) == "cacheblend:ratio=0.3"
    assert record.spec(Quality.FAST) == "cachecraft:alpha=1.0"
    assert record.spec(Quality.EXACT) is None
    assert record.chosen(Quality.FAST) == (CRAFT[1],)


def test_a_method_may_have_settings_of_its_own():
    record = make_record([replace(one, method="cacheblend:layers=2") for one in BLEND])
    choice = MethodChooser(record=record).choose(MethodRequest())
    assert (choice.spec, choice.reuse) == ("cacheblend:layers=2:ratio=0.3", ReuseConfig(0.3, (2,)))


def test_a_file_keeps_everything_and_holds_one_record_for_each_dtype(tmp_path):
    path = tmp_path / CALIBRATION_FILE
    first, other = make_record(), make_record(fingerprint="e" * 32, dtype="float32")
    save_record(path, first)
    save_record(path, other)
    assert read_records(path) == (first, other)
    newer = replace(first, fingerprint="a" * 32, created="2027-01-01T00:00:00+00:00")
    save_record(path, newer)  # other weights in the same dtype
    assert read_records(path) == (other, newer)
    assert [child.name for child in tmp_path.iterdir()] == [CALIBRATION_FILE]
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["format"] == 3
    assert data["records"][1]["targets"]["balanced"] == {
        "bounds": {"agreement": 0.95, "kl": 0.05},
        "least": {"cachecraft": None, "cacheblend": 0.3},
        "method": "cacheblend",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no calibration record"),
        ("[]", "no calibration record"),
        ("{}", "no calibration record"),
        ('{"format": 3, "records": [{"fingerprint": "f"}]}', "no calibration record"),
        ('{"format": 3, "records": 7}', "no calibration record"),
        ('{"format": 4, "records": []}', "format 4; this version reads 3"),
        ('{"format": 2, "records": []}', "format 2; this version reads 3"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_reason(tmp_path, text, said):
    path = tmp_path / CALIBRATION_FILE
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError, match=said) as caught:
        read_records(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", ["much", 2.0, -1])
def test_settings_that_no_method_can_take_are_refused_when_they_are_read(tmp_path, value):
    path = tmp_path / CALIBRATION_FILE
    save_record(path, make_record())
    data = json.loads(path.read_text(encoding="utf-8"))
    data["records"][0]["targets"]["balanced"]["least"]["cacheblend"] = value
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(DocumentError, match="no calibration record"):
        read_records(path)


def test_a_missing_file_and_a_folder_are_told_apart_from_damage(tmp_path):
    with pytest.raises(DocumentError, match="cannot read"):
        read_records(tmp_path / "gone.json")
    with pytest.raises(DocumentError, match="cannot read"):
        read_records(tmp_path)


def test_saving_replaces_a_damaged_file_but_never_one_of_another_format(tmp_path, caplog):
    path = tmp_path / CALIBRATION_FILE
    path.write_text("half a rec", encoding="utf-8")
    save_record(path, make_record())
    assert read_records(path) == (make_record(),)
    assert "it is replaced" in caplog.text
    for text in ('{"format": 1, "records": []}', '{"format": 4}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(OtherFormatError):
            save_record(path, make_record())
        assert path.read_text(encoding="utf-8") == text


def test_a_record_that_cannot_be_written_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot write"):
        save_record(tmp_path / "no" / CALIBRATION_FILE, make_record())


def test_it_goes_into_the_cache_folder_if_there_is_one_else_beside_the_model(tmp_path):
    assert record_path(tmp_path, None, FINGERPRINT) == tmp_path / FINGERPRINT / CALIBRATION_FILE
    assert record_path(None, tmp_path, FINGERPRINT) == tmp_path / CALIBRATION_FILE
    with pytest.raises(UsageError, match="give --cache-dir"):
        record_path(None, None, FINGERPRINT)


def test_a_folder_that_cannot_be_written_to_asks_for_a_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("chunkweave.planning.calibration.os.access", lambda *_: False)
    with pytest.raises(UsageError, match="give --cache-dir"):
        record_path(None, tmp_path, FINGERPRINT)


@pytest.fixture
def folders(tmp_path):
    """The folder of a model, and a cache folder with one for its weights."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    for folder in (model, cache / FINGERPRINT):
        folder.mkdir(parents=True)
    return model, cache


def test_the_cache_folders_record_counts_before_the_one_beside_the_model(folders):
    model, cache = folders
    assert stored_calibration(cache, model, FINGERPRINT) is None
    save_record(model / CALIBRATION_FILE, make_record(dataset="shipped"))
    assert stored_calibration(cache, model, FINGERPRINT).dataset == "shipped"
    save_record(cache / FINGERPRINT / CALIBRATION_FILE, make_record(dataset="own"))
    assert stored_calibration(cache, model, FINGERPRINT).dataset == "own"
    assert stored_calibration(None, model, FINGERPRINT).dataset == "shipped"


def test_other_models_records_and_damaged_files_are_logged_and_passed_over(folders, caplog):
    model, cache = folders
    (cache / FINGERPRINT / CALIBRATION_FILE).write_text("{", encoding="utf-8")
    save_record(model / CALIBRATION_FILE, make_record())
    with caplog.at_level(logging.WARNING):
        assert stored_calibration(cache, model, FINGERPRINT) == make_record()
        assert "it is not used" in caplog.text
        caplog.clear()
        assert stored_calibration(None, model, "0" * 32) is None
    assert "other weights or another dtype (reader in bfloat16)" in caplog.text


def test_a_record_that_names_a_method_of_the_future_is_passed_over(tmp_path, caplog):
    future = [replace(one, method="wizardry") for one in BLEND]
    save_record(tmp_path / CALIBRATION_FILE, make_record(future))
    assert stored_calibration(None, tmp_path, FINGERPRINT) is None
    assert "wizardry" in caplog.text


def test_a_record_may_be_shipped_for_weights_that_come_from_elsewhere(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(calibration, "shipped_records", lambda: (make_record(dataset="shipped"),))
    assert stored_calibration(tmp_path, None, FINGERPRINT).dataset == "shipped"
    assert stored_calibration(tmp_path, None, "0" * 32) is None
    assert not caplog.text
    save_record(tmp_path / CALIBRATION_FILE, make_record(dataset="own"))
    assert stored_calibration(None, tmp_path, FINGERPRINT).dataset == "own"


def test_what_comes_with_the_package_is_of_this_format_and_keeps_what_it_promises():
    bundled = read_records(Path(str(files("chunkweave") / "assets" / "reader" / CALIBRATION_FILE)))
    assert {one.dtype for one in bundled} == {"bfloat16", "float32"}
    shipped = calibration.shipped_records()
    assert {one.model.partition("-270m")[0] for one in shipped} == {"gemma-3", "reader", "smollm2"}
    assert all(one in shipped for one in bundled)
    for record in shipped:
        assert record.targets == {quality: choose_target(record.points, bounds) for quality, bounds in BOUNDS.items()}
        for quality, target in record.targets.items():
            assert all(target.bounds.excess(one) <= 1.0 for one in record.chosen(quality))


RECORD = make_record()
OWN = ReuseConfig(0.4, alpha=2.5)
BLEND_AT_3 = {"recompute_ratio": 0.3, "check_layers": [1]}
BLEND_AT_4 = {"recompute_ratio": 0.4, "check_layers": [2, 3]}
CRAFT_AT_1 = {"alpha": 1.0, "focus": True}
CRAFT_AT_HALF, CRAFT_OWN = ({"alpha": alpha, "focus": True} for alpha in (0.5, 2.5))
NO_FOCUS = {"alpha": 0.5, "focus": False}
QUERY_WHOLE = {"recompute_ratio": 0.4, "query": {"tail": None, "layers": "late", "factor": "stored"}}


@pytest.mark.parametrize(
    ("usual", "request_", "record", "method", "why", "parameters"),
    [
        ({}, {}, None, "prefix", Why.EXACT, {}),
        ({}, {}, RECORD, "cacheblend", Why.CALIBRATED, BLEND_AT_3),
        ({}, {"quality": "fast"}, RECORD, "cachecraft", Why.CALIBRATED, CRAFT_AT_1),
        ({}, {"quality": "exact"}, RECORD, "prefix", Why.EXACT, {}),
        ({}, {"quality": "exact"}, None, "prefix", Why.EXACT, {}),
        ({}, {"method": "epic"}, RECORD, "epic", Why.ASKED_FOR, {"recompute_ratio": 0.4}),
        ({}, {"method": "cachecraft"}, RECORD, "cachecraft", Why.ASKED_FOR, CRAFT_OWN),
        ({}, {"method": "epic:ratio=0.1"}, RECORD, "epic", Why.ASKED_FOR, {"recompute_ratio": 0.1}),
        ({"method": "epic"}, {}, RECORD, "epic", Why.ASKED_FOR, {"recompute_ratio": 0.4}),
        ({"method": "epic"}, {"quality": "exact"}, RECORD, "prefix", Why.EXACT, {}),
        ({"method": "epic"}, {"quality": "fast"}, RECORD, "cachecraft", Why.CALIBRATED, CRAFT_AT_1),
        ({"quality": "fast"}, {}, RECORD, "cachecraft", Why.CALIBRATED, CRAFT_AT_1),
        ({"quality": "fast"}, {"method": "epic"}, RECORD, "epic", Why.ASKED_FOR, {"recompute_ratio": 0.4}),
        ({}, {"method": "cachecraft:alpha=0.5"}, RECORD, "cachecraft", Why.ASKED_FOR, CRAFT_AT_HALF),
        ({}, {"method": "cachecraft:no-focus:alpha=0.5"}, None, "cachecraft", Why.ASKED_FOR, NO_FOCUS),
        ({"method": "cachecraft:no-focus:alpha=0.5"}, {}, None, "cachecraft", Why.ASKED_FOR, NO_FOCUS),
        ({}, {"method": "query:whole:late:stored"}, RECORD, "query", Why.ASKED_FOR, QUERY_WHOLE),
        ({}, {"method": "query-whole"}, None, "query-whole", Why.ASKED_FOR, {"recompute_ratio": 0.4}),
        ({}, {"method": "cacheblend:layers=2+3"}, None, "cacheblend", Why.ASKED_FOR, BLEND_AT_4),
    ],
)
def test_a_method_or_a_target_then_the_record_then_exactness(usual, request_, record, method, why, parameters):
    choice = MethodChooser(MethodRequest.of(**usual), OWN, record).choose(MethodRequest.of(**request_))
    assert (choice.method, choice.why, dict(choice.parameters)) == (method, why, parameters)


def test_a_target_that_no_method_reaches_is_answered_exactly_and_says_so(caplog):
    out_of_reach = choose_target(BLEND, Bounds(1.0, None))
    record = make_record(targets={Quality.BALANCED: out_of_reach, Quality.FAST: choose_target(BLEND, FAST)})
    chooser = MethodChooser(record=record)
    for method_request in (MethodRequest(), MethodRequest.of(None, "balanced")):
        choice = chooser.choose(method_request)
        assert (choice.method, choice.why) == ("prefix", Why.OUT_OF_REACH)
    assert not caplog.text
    assert chooser.choose_usual().why is Why.OUT_OF_REACH
    assert "no method met the bounds of balanced (top-1 agreement at least 100.0%)" in caplog.text
    caplog.clear()
    assert chooser.choose(MethodRequest.of(None, "fast")).method == "cacheblend"
    assert MethodChooser(MethodRequest.of(None, "fast"), record=record).choose_usual().why is Why.CALIBRATED
    assert not caplog.text


def test_what_sets_how_much_is_recomputed_is_known_to_be_given():
    assert MethodRequest("cacheblend:ratio=0").sets_budget
    assert MethodRequest("cachecraft:no-focus:alpha=0").sets_budget
    assert not MethodRequest("cacheblend:layers=1").sets_budget
    assert not MethodRequest("prefix").sets_budget


@pytest.mark.parametrize(
    ("request_", "record", "said"),
    [
        ({"quality": "balanced"}, None, "calibration record.*make one with `chunkweave calibrate here`"),
        (
            {"method": "cacheblend", "quality": "exact"},
            RECORD,
            "'exact' and method 'cacheblend' are both given",
        ),
        ({"method": "query-whole:layers=2"}, None, "unknown setting 'layers=2' of query-whole; there are: ratio=VALUE"),
        ({"method": "cachecraft:no-focus:focus"}, None, "sets twice what 'focus' sets"),
        ({"method": "epic:ratio=1.5"}, RECORD, "between 0 and 1"),
    ],
)
def test_what_cannot_be_fulfilled_is_a_usage_error(request_, record, said):
    with pytest.raises(UsageError, match=said):
        MethodChooser(MethodRequest(), OWN, record, "chunkweave calibrate here").choose(MethodRequest.of(**request_))


@pytest.mark.parametrize(
    ("usual", "record", "own", "kept"),
    [
        ("full", None, "full", Kept(kv=False)),
        ("full", None, "cacheblend", Kept()),
        ("full", None, "cachecraft", Kept(profiles=True)),
        (None, None, "full", Kept()),
        (None, None, "prefix", Kept()),
        (None, None, "cachecraft", Kept(profiles=True)),
        ("cachecraft", None, "prefix", Kept(profiles=True)),
        (None, REACHED, "prefix", Kept(profiles=True)),
        (None, BLEND, "prefix", Kept()),
        ("prefix", REACHED, "prefix", Kept()),
    ],
)
def test_what_is_kept_is_what_the_usual_method_or_the_requests_own_can_read(usual, record, own, kept):
    chooser = MethodChooser(MethodRequest(usual), record=record and make_record(record))
    assert chooser.kept(chooser.choose(MethodRequest(own))) == kept


@pytest.mark.parametrize(
    ("profiles", "own", "kept"),
    [(True, "full", Kept(profiles=True)), (False, "full", Kept(kv=False)), (False, "cachecraft", Kept())],
)
def test_what_is_set_of_profiles_wins(profiles, own, kept):
    configured = MethodChooser(MethodRequest("full"), ReuseConfig(capture=CaptureConfig(profile=profiles)))
    choice = configured.choose(MethodRequest(own))
    assert configured.kept(choice) == kept
    assert configured.kept(choice, not profiles).profiles is not profiles
