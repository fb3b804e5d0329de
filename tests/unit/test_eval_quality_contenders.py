import pytest

from chunkweave.config import Combine
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave.eval.quality import QUERY_SETTINGS

pytest.importorskip("torch")
from chunkweave.eval.quality import QualityConfig


def test_each_method_comes_at_each_value_of_its_own_parameter():
    config = QualityConfig(("prefix", "cacheblend", "cachecraft"), ratios=(0.1, 0.2), alphas=(0.5, 1.0))
    assert list(config.contenders()) == [
        "full",
        "full-reuse",
        "prefix",
        "cacheblend@0.1",
        "cacheblend@0.2",
        "cachecraft@0.5",
        "cachecraft@1",
    ]


def test_settings_follow_a_colon():
    made = QualityConfig(("cachecraft:no-focus:no-cci",)).contenders()
    assert made["cachecraft:no-focus:no-cci@1"]._config.focus is False
    assert made["cachecraft:no-focus:no-cci@1"]._config.use_cci is False


def test_a_setting_wins_over_what_all_are_told():
    made = QualityConfig(("cacheblend", "cacheblend:layer-2"), check_layers=(3,)).contenders()
    assert made["cacheblend@0.15"]._check_layers == (3,)
    assert made["cacheblend:layer-2@0.15"]._check_layers == (2,)


@pytest.mark.parametrize(
    ("methods", "error"), [(("cachecraft:loud",), UsageError), (("magic:no-focus",), UnknownMethodError)]
)
def test_unknown_names_are_refused(methods, error):
    with pytest.raises(error):
        QualityConfig(methods).contenders()


def test_settings_of_query_add_up():
    made = QualityConfig(("query:last:layers=1+2:head-max:tail=3",)).contenders()
    query = made["query:last:layers=1+2:head-max:tail=3@0.15"]._query
    assert (query.tail, query.layers, query.over_heads) == (3, (1, 2), Combine.MAX)


@pytest.mark.parametrize("name", sorted(QUERY_SETTINGS))
def test_every_setting_of_query_is_one(name):
    made = QualityConfig((f"query:{name}",)).contenders()
    assert list(made) == ["full", "full-reuse", f"query:{name}@0.15"]
    told = made[f"query:{name}@0.15"]._query
    assert {field: getattr(told, field) for field in QUERY_SETTINGS[name]} == QUERY_SETTINGS[name]


@pytest.mark.parametrize("setting", ["layers=", "layers=a", "layers=2+1", "tail=0", "tail=x"])
def test_settings_with_odd_numbers_are_refused(setting):
    with pytest.raises(UsageError):
        QualityConfig((f"query:{setting}",)).contenders()
