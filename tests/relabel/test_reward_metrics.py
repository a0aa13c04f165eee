import numpy as np
import pytest
from bars import make_store
from regrasp.relabel.reward_metrics import (
    Valued,
    auroc,
    auroc_length_matched,
    figures,
    rank_correlation,
    spearman,
    time_linear,
    usual_length,
    value_order,
    valued,
)
from regrasp.relabel.rollouts import read_rollouts
from scipy import stats


def rated(value, kind="nominal", target=None, back=None):
    value = np.asarray(value, float)
    return Valued(value, value if target is None else np.asarray(target, float), kind, back)


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    rollouts = [rated(rng.normal(size=n), target=rng.integers(0, 5, n)) for n in (30, 50, 7)]
    x = np.concatenate([r.value for r in rollouts])
    y = np.concatenate([r.target for r in rollouts])
    figure = rank_correlation(rollouts, resamples=200)
    assert figure.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert figure.low <= figure.value <= figure.high
    assert figure.n == 3


def test_a_constant_orders_nothing():
    assert spearman(np.ones(10), np.arange(10)) == 0
    assert value_order(np.ones(10)) == 0
    assert value_order(np.arange(10) ** 2) == pytest.approx(1)
    assert value_order(-np.arange(10.0)) == pytest.approx(-1)


def test_auroc_counts_pairs():
    good = [rated([0, 0.9]), rated([0, 0.4])]
    bad = [rated([0, 0.4], "failure"), rated([0, 0.1], "failure")]
    figure = auroc(good, bad, resamples=200)
    assert figure.value == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert 0 <= figure.low <= figure.value <= figure.high <= 1


def test_length_is_no_skill():
    """A score that only counts separates by length, and not once the lengths are equal."""
    good = [rated(1 - np.arange(1, n + 1) / 200) for n in (50, 60, 55)]
    bad = [rated(1 - np.arange(1, n + 1) / 200, "failure") for n in (90, 80, 100)]
    assert auroc(good, bad, resamples=100).value == 1
    assert auroc_length_matched(good, bad, resamples=100).value == 0.5
    assert auroc_length_matched(bad, good, resamples=100) is None


def test_baselines_and_the_truth(tmp_path):
    rollouts = read_rollouts(make_store(tmp_path / "store", tasks=2, states=2))
    length = usual_length(rollouts)
    assert length == 53
    truth = figures([valued(r, r.target) for r in rollouts], "")
    clock = figures([valued(r, time_linear(r, length)) for r in rollouts], "")
    assert truth["rank_correlation"].value == pytest.approx(1)
    assert truth["auroc"].value == truth["auroc_length_matched"].value == 1
    assert truth["failures_look_done"].value == 0
    assert truth["error"].value == 0
    assert clock["failures_look_done"].value == 1
    assert clock["auroc_length_matched"].value == 0.5
    assert clock["voc_failures"].value > 0.9 > truth["voc_failures"].value
    for figure in truth.values():
        assert figure.low <= figure.value + 1e-9
        assert figure.value <= figure.high + 1e-9


def test_values_must_fit_the_rollout(tmp_path):
    rollout = read_rollouts(make_store(tmp_path / "store", tasks=1, states=1))[0]
    with pytest.raises(ValueError, match="3 values"):
        valued(rollout, np.zeros(3))
