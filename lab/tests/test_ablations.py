"""The papers' baselines and ablations as contenders: which specifications make them, and which are refused."""

import pytest

from chunkweave.calibration.contenders import make_contenders
from chunkweave.errors import UnknownMethodError, UsageError
from chunkweave_lab.baselines import CacheCraftAblation, bench_contenders


def test_settings_follow_a_colon():
    made = bench_contenders(("cachecraft:no-focus:no-cci", "cachecraft:no-focus"))
    assert made["cachecraft:no-focus:no-cci@1"]._config.focus is False
    assert made["cachecraft:no-focus:no-cci@1"].ablation == CacheCraftAblation(use_cci=False)
    assert made["cachecraft:no-focus@1"]._config.focus is False


def test_baselines_and_ablations_are_the_laboratorys_alone():
    specs = ("random", "set-cache")
    assert list(bench_contenders(specs)) == ["random@0.15", "set-cache"]
    for name in specs:
        with pytest.raises(UnknownMethodError, match=f"'{name}'; there are: cacheblend, cachecraft, epic, full"):
            make_contenders((name,))
    assert bench_contenders(("cachecraft:no-cci",))
    with pytest.raises(UsageError, match="unknown setting"):
        make_contenders(("cachecraft:no-cci",))


@pytest.mark.parametrize("spec", ["query:no-cci", "random:printed"])
def test_an_ablation_of_another_method_is_refused(spec):
    with pytest.raises(UsageError, match="does not take"):
        bench_contenders((spec,))
