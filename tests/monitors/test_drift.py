"""Known drift is weighed, unknown drift is followed."""

import math
import warnings

import numpy as np
import pytest
from regrasp.monitors.conformal import conformal_threshold
from regrasp.monitors.drift import Adaptive, weighted_threshold


def test_equal_weights_are_split_conformal():
    rng = np.random.default_rng(0)
    for n in (9, 10, 57, 200):
        maxima = rng.normal(size=n)
        for alpha in (0.02, 0.1, 0.35):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = conformal_threshold(maxima, alpha)
            assert weighted_threshold(maxima, np.full(n, 3.0), 3.0, alpha) == expected


def test_the_new_episodes_share_lies_at_infinity():
    maxima, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 1.0])
    # Shares .4, .2, .2 in order of the maxima, and .2 for the new episode.
    assert weighted_threshold(maxima, weights, 1.0, 0.6) == 1.0
    assert weighted_threshold(maxima, weights, 1.0, 0.4) == 2.0
    assert weighted_threshold(maxima, weights, 1.0, 0.2) == 3.0
    assert weighted_threshold(maxima, weights, 1.0, 0.19) == math.inf
    assert weighted_threshold(maxima, weights, 100.0, 0.5) == math.inf
    assert weighted_threshold(maxima, np.zeros(3), 0.0, 0.5) == math.inf
    with pytest.raises(ValueError, match="one weight an episode"):
        weighted_threshold(maxima, weights[:2], 1.0, 0.5)
    with pytest.raises(ValueError, match="1 NaN"):
        weighted_threshold(np.array([1.0, np.nan, 2.0]), weights, 1.0, 0.5)
    with pytest.raises(ValueError, match="at least 0"):
        weighted_threshold(maxima, -weights, 1.0, 0.5)
    with pytest.raises(ValueError, match=r"alpha is 1\.0"):
        weighted_threshold(maxima, weights, 1.0, 1.0)


def test_weights_keep_alpha_under_a_shift_that_breaks_it():
    rng = np.random.default_rng(1)
    n, alpha, repetitions = 60, 0.1, 3000
    weighed, plain = 0, 0
    for _ in range(repetitions):
        place = rng.random(n)
        new = math.sqrt(rng.random())  # density 2x
        maxima, score = 2 * place + rng.normal(size=n), 2 * new + rng.normal()
        weighed += score > weighted_threshold(maxima, 2 * place, 2 * new, alpha)
        plain += score > conformal_threshold(maxima, alpha)
    error = math.sqrt(alpha * (1 - alpha) / repetitions)
    assert weighed / repetitions < alpha + 4 * error
    assert weighed / repetitions > alpha / 2  # not by silence
    assert plain / repetitions > alpha + 5 * error


def test_alpha_moves_by_what_happened():
    start = Adaptive(0.1, gamma=0.5)
    assert start.current == 0.1
    assert start.after(False).current == pytest.approx(0.15)
    silenced = start.after(True)
    assert silenced.current == pytest.approx(-0.35)
    assert silenced.threshold(np.arange(9.0)) == math.inf
    eager = Adaptive(0.1, current=1.2)
    assert eager.threshold(np.arange(9.0)) == -math.inf
    assert Adaptive(0.1).threshold(np.arange(9.0)) == 8.0
    for kwargs in ({"alpha": 1.0}, {"alpha": 0.1, "gamma": 0.0}):
        with pytest.raises(ValueError, match="alpha must lie between 0 and 1, gamma above 0"):
            Adaptive(**kwargs)


@pytest.mark.parametrize("episodes", ["rising", "jumping", "adversary"])
def test_the_long_run_rate_comes_to_alpha_whatever_happens(episodes):
    """The bound of Gibbs and Candes holds for each sequence, not only on average."""
    rng = np.random.default_rng(2)
    count, calibration = 1500, rng.normal(size=100)
    adaptive = Adaptive(0.1)
    alarms = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(count):
            threshold = adaptive.threshold(calibration)
            score = {
                "rising": 3 * t / count + rng.normal(),
                "jumping": 2.0 * (t > count / 2) + rng.normal(),
                "adversary": math.nextafter(threshold, math.inf) if t % 3 else -9.0,
            }[episodes]
            alarmed = bool(score > threshold)
            alarms += alarmed
            adaptive = adaptive.after(alarmed)
    assert abs(alarms / count - 0.1) <= (0.9 + adaptive.gamma) / (adaptive.gamma * count)
