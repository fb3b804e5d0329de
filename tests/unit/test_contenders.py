import pytest

from chunkweave.calibration.contenders import make_contenders
from chunkweave.config import ReuseConfig
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.planning.methods.query import QueryAware


def test_each_method_comes_at_each_value_of_its_own_parameter():
    specs = ("full", "full-reuse", "prefix", "cacheblend", "cachecraft", "full")
    assert list(make_contenders(specs, ratios=(0.1, 0.2), alphas=(0.5, 1.0))) == [
        "full",
        "full-reuse",
        "prefix",
        "cacheblend@0.1",
        "cacheblend@0.2",
        "cachecraft@0.5",
        "cachecraft@1",
    ]


def test_a_value_after_an_at_is_the_only_one():
    made = make_contenders(("cacheblend@0.05", "cachecraft:no-focus@2", "epic"), ratios=(0.1, 0.2), alphas=(0.5,))
    assert list(made) == ["cacheblend@0.05", "cachecraft:no-focus@2", "epic@0.1", "epic@0.2"]
    assert made["cacheblend@0.05"]._ratio == 0.05
    assert made["cachecraft:no-focus@2"]._config.alpha == 2.0


def test_the_name_of_a_row_stands_for_that_row_alone():
    rows = list(make_contenders(("full", "cachecraft:no-focus", "query:last"), ratios=(0.1, 0.2), alphas=(0.5, 1.0)))
    assert list(make_contenders(rows)) == rows


def test_a_setting_wins_over_what_all_are_told():
    reuse = ReuseConfig(check_layers=(3,), seed=7)
    made = make_contenders(("cacheblend", "cacheblend:layers=2", "cachecraft"), reuse=reuse)
    assert made["cacheblend@0.15"]._check_layers == (3,)
    assert made["cacheblend:layers=2@0.15"]._check_layers == (2,)
    assert made["cachecraft@1"]._config.seed == 7


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        ("cachecraft:loud", UsageError, "no-focus"),
        ("magic:no-focus", UnknownMethodError, "cacheblend"),
        ("prefix@0.1", UsageError, "write prefix instead"),
        ("cacheblend@much", UsageError, "not a number"),
        ("cacheblend@", UsageError, "not a number"),
        ("cacheblend@1.5", UsageError, "recompute_ratio"),
        ("cachecraft@nan", UsageError, "alpha"),
        ("cacheblend:no-focus", UsageError, "of cacheblend; there are: ratio=VALUE, layers=VALUE"),
        ("full-reuse:late", UsageError, "unknown setting 'late' of full-reuse; there are: none"),
        ("query:whole:late:last", UsageError, "'query:whole:late:last' sets twice what 'last' sets"),
        ("query:tail=", UsageError, "unknown setting 'tail='"),
        ("query:tail=many", UsageError, "'tail=many' needs a number"),
    ],
)
def test_what_stands_for_no_contender_is_refused(spec, error, said):
    with pytest.raises(error, match=said):
        make_contenders((spec,))


@pytest.mark.parametrize("name", sorted(name for name in QueryAware.settings if not name.endswith("=")))
def test_every_setting_of_query_is_one(name):
    made = make_contenders((f"query:{name}",))
    assert list(made) == [f"query:{name}@0.15"]
    told, meant = made[f"query:{name}@0.15"]._query, QueryAware.settings[name]["query"]
    assert {field: getattr(told, field) for field in meant} == meant
