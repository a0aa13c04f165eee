"""Bounds on misses: exact where they are exact, and the same as their textbook definitions."""

import math
import warnings

import numpy as np
import pytest
from regrasp.episodes.results import clopper_pearson
from regrasp.monitors.misses import (
    TooFewFailuresWarning,
    miss_bound,
    miss_threshold,
    tolerance_rank,
)


def test_clopper_pearson_known_values():
    # Without failures it is 1 - delta^(1/n): 299, 59 and 29 trials for 1, 5 and 10 %.
    for n, bound in ((299, 0.01), (59, 0.05), (29, 0.1)):
        assert clopper_pearson(0, n, 0.05) == pytest.approx(1 - 0.05 ** (1 / n), abs=1e-12)
        assert clopper_pearson(0, n, 0.05) <= bound < clopper_pearson(0, n - 1, 0.05)
    assert clopper_pearson(7, 7, 0.05) == 1.0
    with pytest.raises(ValueError, match="failures=3, n=2"):
        clopper_pearson(3, 2, 0.05)
    with pytest.raises(ValueError, match=r"delta=1\.0"):
        clopper_pearson(0, 2, 1.0)


def test_clopper_pearson_is_the_beta_quantile():
    beta = pytest.importorskip("scipy.stats").beta
    for k, n in ((0, 1), (5, 50), (5, 100), (99, 100), (37, 400), (1500, 5000)):
        for delta in (0.01, 0.05, 0.5):
            expected = beta.ppf(1 - delta, k + 1, n - k)
            assert clopper_pearson(k, n, delta) == pytest.approx(expected, abs=1e-9)


def test_a_bound_for_a_monitor_that_is_fixed():
    alarmed = np.array([True] * 47 + [False] * 3)
    assert miss_bound(alarmed, 0.05) == clopper_pearson(3, 50, 0.05)
    assert miss_bound(np.zeros(4, bool), 0.05) == 1.0
    for bad in (np.array([], bool), np.array([1.0, 0.0]), np.zeros((2, 2), bool)):
        with pytest.raises(ValueError, match="one truth value an episode"):
            miss_bound(bad, 0.05)


def test_threshold_by_hand():
    maxima = np.array([5.0, 3.0, 1.0, 4.0, 2.0, 9.0, 8.0, 7.0, 6.0])
    limit = miss_threshold(maxima, 0.2)  # floor(10 * 0.2) = 2: just below the second smallest
    assert limit < 2.0
    assert math.nextafter(limit, 9.0) == 2.0
    assert (maxima <= limit).sum() == 1
    with pytest.warns(TooFewFailuresWarning, match="9 failures cannot promise .* 0.05 are missed"):
        assert miss_threshold(maxima, 0.05) == -math.inf
    with pytest.raises(ValueError, match=r"beta is 0\.0"):
        miss_threshold(maxima, 0.0)
    with pytest.raises(ValueError, match=r"delta is 1\.0"):
        miss_threshold(maxima, 0.1, 1.0)
    with pytest.raises(ValueError, match="one an episode"):
        miss_threshold(np.array([1.0, np.nan]), 0.1)


def fixed_sequence(n, beta, delta):
    """From the most sensitive threshold on, up while the next one is still certified."""
    k = 0
    while k < n and clopper_pearson(k, n, delta) <= beta:  # just below M_(k + 1), k are missed
        k += 1
    return k


@pytest.mark.parametrize("beta", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_the_rank_is_that_of_fixed_sequence_testing(beta, delta):
    for n in (1, 10, 44, 45, 100, 299, 500):
        assert tolerance_rank(n, beta, delta) == fixed_sequence(n, beta, delta)


def test_the_rank_is_what_mapie_certifies():
    """Its fixed-sequence test, on binomial p-values of the same thresholds."""
    control = pytest.importorskip("mapie.risk_control").control_fwer
    binom = pytest.importorskip("scipy.stats").binom
    for n, beta, delta in ((60, 0.1, 0.1), (200, 0.05, 0.05), (500, 0.2, 0.01)):
        p_values = binom.cdf(np.arange(n), n, beta)
        certified = control(p_values, delta, "fixed_sequence")
        assert len(certified) == tolerance_rank(n, beta, delta)


def test_the_rank_is_the_largest_whose_beta_tail_is_allowed():
    """Wilks: the risk just below M_(k) is Beta(k, n + 1 - k); its tail is binomial."""
    stats = pytest.importorskip("scipy.stats")
    for n in (10, 45, 100, 500):
        ranks = np.arange(1, n + 1)
        for beta in (0.01, 0.1, 0.3):
            tails = stats.beta.sf(beta, ranks, n + 1 - ranks)
            np.testing.assert_allclose(tails, stats.binom.cdf(ranks - 1, n, beta), atol=1e-12)
            for delta in (0.01, 0.1):
                assert tolerance_rank(n, beta, delta) == (tails <= delta).sum()


def test_the_promises_hold():
    """On average exactly k / (n + 1); given the failures, too many in at most delta of draws."""
    rng = np.random.default_rng(0)
    n, beta, delta, repetitions = 59, 0.1, 0.1, 3000
    missed, broken = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(repetitions):
            maxima = rng.random(n + 1)
            missed += maxima[n] <= miss_threshold(maxima[:n], beta)
            broken += miss_threshold(maxima[:n], beta, delta) > beta  # uniform: its own risk
    assert abs(missed / repetitions - 6 / 60) < 4 * math.sqrt(0.1 * 0.9 / repetitions)
    k = tolerance_rank(n, beta, delta)
    exact = sum(math.comb(n, i) * beta**i * (1 - beta) ** (n - i) for i in range(k))
    assert exact <= delta
    assert abs(broken / repetitions - exact) < 4 * math.sqrt(exact * (1 - exact) / repetitions)


def test_ties_are_on_the_safe_side():
    limit = miss_threshold(np.array([0.0] * 5 + [1.0] * 5), 0.3)
    assert limit < 0.0  # k = 3 falls among the ties: all of them must alarm
