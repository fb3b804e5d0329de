"""When shadow checks are made, what their figures are, and when they switch weaving off."""

import logging
from concurrent.futures import ThreadPoolExecutor
from math import inf, nan

import pytest

from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.planning.method_choice import MethodChoice, Why
from chunkweave.scheduling.shadow import Divergence, ShadowConfig, ShadowMonitor, ShadowStats

WOVEN = MethodChoice("cacheblend", ReuseConfig(), Why.ASKED_FOR)
NEAR, FAR = Divergence(0.01, True), Divergence(2.0, False)


def test_every_nth_woven_answer_is_sampled():
    monitor = ShadowMonitor(ShadowConfig(every=3))
    assert [monitor.wants() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert (monitor.stats.woven, monitor.stats.sampled) == (7, 2)


def test_figures_are_those_of_the_checks():
    monitor = ShadowMonitor(ShadowConfig())
    assert monitor.stats == ShadowStats()
    for hundredths in range(100):
        monitor.take(Divergence(hundredths / 100, hundredths % 4 != 0, same_tokens=3, compared_tokens=4))
    monitor.drop()
    monitor.fail()
    stats = monitor.stats
    assert (stats.checked, stats.agreed, stats.dropped, stats.failed) == (100, 75, 1, 1)
    assert (stats.same_tokens, stats.compared_tokens) == (300, 400)
    assert stats.mean_kl == pytest.approx(0.495)
    assert stats.p99_kl == pytest.approx(0.98)
    assert stats.window_kl == pytest.approx(0.895)
    assert stats.window_agreement == pytest.approx(0.75)


def test_rounding_below_zero_is_zero_and_no_number_is_infinite():
    monitor = ShadowMonitor(ShadowConfig())
    monitor.take(Divergence(-1e-9, True))
    assert monitor.stats.mean_kl == 0.0
    monitor.take(Divergence(nan, False))
    assert monitor.stats.mean_kl == inf


@pytest.mark.parametrize("limits", [{"max_divergence": 0.5}, {"min_agreement": 0.9}])
def test_a_full_window_of_bad_checks_switches_off_and_a_reason_is_logged(limits, caplog):
    monitor = ShadowMonitor(ShadowConfig(window=4, **limits))
    for _ in range(3):
        monitor.take(FAR)
    assert monitor.weaving
    assert monitor.allowed(WOVEN) == WOVEN
    with caplog.at_level(logging.ERROR):
        monitor.take(FAR)
    assert not monitor.weaving
    assert "last 4 shadow checks" in caplog.text
    assert monitor.stats.reason in caplog.text
    assert monitor.stats.switched_off == 1
    assert (monitor.allowed(WOVEN).method, monitor.allowed(WOVEN).why) == ("prefix", Why.SWITCHED_OFF)
    full = MethodChoice("full", ReuseConfig(), Why.ASKED_FOR)
    assert monitor.allowed(full) == full


def test_a_window_forgets_what_was_before_it():
    monitor = ShadowMonitor(ShadowConfig(window=4, max_divergence=1.1, min_agreement=0.5))
    for found in (FAR, FAR, NEAR, NEAR, NEAR, FAR, FAR, NEAR):
        monitor.take(found)
        assert monitor.weaving
    for _ in range(2):
        monitor.take(FAR)
    assert not monitor.weaving


def test_only_an_operator_switches_on_again_and_then_new_checks_count():
    monitor = ShadowMonitor(ShadowConfig(window=2, max_divergence=0.5))
    for found in (FAR, FAR, NEAR, NEAR, NEAR):
        monitor.take(found)
    assert not monitor.weaving
    monitor.switch_on()
    monitor.switch_on()
    assert monitor.weaving
    assert monitor.stats.reason == ""
    monitor.take(FAR)
    assert monitor.weaving
    monitor.take(FAR)
    assert monitor.stats.switched_off == 2


def test_without_limits_it_only_measures():
    monitor = ShadowMonitor(ShadowConfig(window=1))
    monitor.take(Divergence(inf, False))
    assert monitor.weaving


def test_many_threads_lose_no_count():
    monitor = ShadowMonitor(ShadowConfig(every=2))

    def work():
        for _ in range(500):
            if monitor.wants():
                monitor.take(NEAR)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    assert (monitor.stats.woven, monitor.stats.sampled, monitor.stats.checked) == (2000, 1000, 1000)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"min_agreement": 1.5}])
def test_odd_configurations_are_refused(wrong):
    with pytest.raises(UsageError):
        ShadowConfig(**wrong)
