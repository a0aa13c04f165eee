"""The promise: at most alpha false alarms an episode, simulated and by rank arithmetic."""

import json
import math

import numpy as np
import pytest
from regrasp.monitors.conformal import (
    COMBINATIONS,
    Calibration,
    TooFewEpisodesWarning,
    calibrate,
    conformal_rank,
    conformal_threshold,
    false_alarm_band,
)


@pytest.mark.parametrize(
    ("n", "alpha", "rank"),
    [(9, 0.1, 9), (19, 0.05, 19), (99, 0.01, 99), (8, 0.1, 9), (100, 0.1, 91), (50, 0.2, 41)],
)
def test_rank(n, alpha, rank):
    assert conformal_rank(n, alpha) == rank


def test_too_few_episodes_never_alarm_and_say_so():
    with pytest.warns(TooFewEpisodesWarning, match="At least 19 are needed"):
        assert conformal_threshold(np.arange(18.0), 0.05) == math.inf
    assert conformal_threshold(np.arange(19.0), 0.05) == 18.0
    with pytest.raises(ValueError, match="1 NaN"):
        conformal_threshold(np.array([1.0, np.nan]), 0.5)


def walks(rng, episodes, steps=40):
    """Correlated pairs of scores over time, of random lengths, as successes that stop early."""
    base = rng.normal(0, 1, (episodes, steps)).cumsum(axis=1)
    other = 0.5 * base + rng.normal(0, 1, (episodes, steps)).cumsum(axis=1)
    alive = np.arange(steps) < rng.integers(10, steps + 1, (episodes, 1))
    return {
        "a": np.where(alive, base, -np.inf).max(axis=1),
        "b": np.where(alive, np.exp(other / 10), -np.inf).max(axis=1),
    }


@pytest.mark.parametrize("combine", sorted(COMBINATIONS))
@pytest.mark.parametrize(("n", "alpha"), [(40, 0.1), (99, 0.05), (60, 0.2)])
def test_coverage_of_the_or(combine, n, alpha):
    """Mean false-alarm rate over many calibrations; tolerance: 4 standard errors of that mean."""
    rng = np.random.default_rng(0)
    repeats, n_test = 300, 100
    rates = []
    for _ in range(repeats):
        calibration = calibrate(walks(rng, n), alpha, combine=combine, scales={"a": 5.0, "b": 2.0})
        test = walks(rng, n_test)
        fired = np.any([test[k] > t for k, t in calibration.thresholds.items()], axis=0)
        rates.append(fired.mean())
    error = np.std(rates) / math.sqrt(repeats)
    assert np.mean(rates) <= alpha + 4 * error
    if combine == "max":  # exact: alpha' = 1 - k / (n + 1)
        exact = 1 - conformal_rank(n, alpha) / (n + 1)
        assert abs(np.mean(rates) - exact) <= 4 * error


def test_quantile_shortcut_would_break_the_promise():
    """The test above can fail: np.quantile(1 - alpha) covers less than promised."""
    rng = np.random.default_rng(1)
    n, alpha, rates = 20, 0.1, []
    for _ in range(2000):
        threshold = np.quantile(rng.normal(0, 1, n), 1 - alpha)
        rates.append((rng.normal(0, 1, 50) > threshold).mean())
    assert np.mean(rates) > alpha + 4 * np.std(rates) / math.sqrt(2000)


def test_per_step_quantiles_would_break_the_promise():
    """Why max over time: a valid quantile at each step alarms on far more than alpha episodes."""
    rng = np.random.default_rng(2)
    alpha, fired = 0.1, []
    for _ in range(50):
        calibration, test = rng.normal(0, 1, (99, 30)), rng.normal(0, 1, (100, 30))
        per_step = np.sort(calibration, axis=0)[conformal_rank(99, alpha) - 1]
        fired.append((test > per_step).any(axis=1).mean())
    assert np.mean(fired) > 0.9


def test_segments_split_alpha():
    maxima = {"a": np.arange(99.0)}
    assert calibrate(maxima, 0.1).thresholds["a"] == 89.0
    assert calibrate(maxima, 0.1, segments=2).thresholds["a"] == 94.0
    with pytest.raises(ValueError, match="positive scale"):
        calibrate(maxima, 0.1, combine="max")
    with pytest.raises(KeyError, match="did you mean bonferroni"):
        calibrate(maxima, 0.1, combine="bonferoni")
    with pytest.raises(ValueError, match="same episodes"):
        calibrate({"a": np.arange(9.0), "b": np.arange(8.0)}, 0.1)


def test_calibration_json_keeps_infinity():
    with pytest.warns(TooFewEpisodesWarning):
        calibration = calibrate({"a": np.arange(3.0)}, 0.1)
    text = json.dumps(calibration.to_json(), allow_nan=False)
    assert Calibration.from_json(json.loads(text)) == calibration


def test_false_alarm_band():
    low, high = false_alarm_band(100, 0.1)
    assert (low, high) == (0.05, 0.16)  # binomial(100, .1) central 95 %
    wide_low, wide_high = false_alarm_band(100, 0.1, n_calibration=50)
    assert wide_low < low
    assert wide_high > high
    # The band holds 95 % of simulated calibration-and-test pairs.
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(1000):
        threshold = conformal_threshold(rng.normal(0, 1, 50), 0.1)
        inside += wide_low <= (rng.normal(0, 1, 100) > threshold).mean() <= wide_high
    assert inside >= 930


def test_scores_that_tie_with_the_threshold_stay_silent():
    """(m / scale) * scale can lie just below m; every episode that ties would then alarm."""
    for scale in (1.9, 3.3, 3.7, 49.0, *np.random.default_rng(4).uniform(0.1, 50, 500)):
        for m in (1.0, 7.0, 0.9):
            ties = {"a": np.full(39, m), "b": np.zeros(39)}
            found = calibrate(ties, 0.1, combine="max", scales={"a": scale, "b": 1.0})
            assert m <= found.thresholds["a"] <= m * (1 + 1e-15)


def test_a_count_keeps_the_promise_of_the_or():
    """A score of four values: at scale 3.3 a product rounded down alarmed in a quarter of them."""
    rng, n, alpha, repetitions, alarms = np.random.default_rng(5), 39, 0.1, 1500, 0
    for _ in range(repetitions):
        a, b = 7.0 * rng.integers(1, 5, n + 1), rng.normal(0, 0.01, n + 1)
        found = calibrate(
            {"a": a[:n], "b": b[:n]}, alpha, combine="max", scales={"a": 3.3, "b": 1.0}
        )
        alarms += a[n] > found.thresholds["a"] or b[n] > found.thresholds["b"]
    assert alarms / repetitions <= alpha + 4 * math.sqrt(alpha * (1 - alpha) / repetitions)
