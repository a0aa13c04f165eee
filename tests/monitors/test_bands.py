"""A band is right by hand, holds its promise, and says what it cannot do."""

import json
import math

import numpy as np
import pytest
from regrasp.monitors.bands import LEAST, NARROWEST, Shape, calibrate_band, fit_shape
from regrasp.monitors.conformal import (
    TooFewEpisodesWarning,
    conformal_rank,
    conformal_threshold,
)
from regrasp.monitors.thresholds import from_json

PERIOD = 8


def skewed(rng, episodes, moments=20):
    """Scores of random lengths and own levels, the wider the later."""
    own = rng.normal(0, 0.5, (episodes, 1))
    noise = np.exp(0.5 * (own + rng.normal(0, 1, (episodes, moments))))
    table = 1 + np.linspace(0.3, 2, moments) * noise
    lengths = rng.integers(6, moments + 1, episodes)
    scores = [row[:n] for row, n in zip(table, lengths, strict=True)]
    return scores, [PERIOD * np.arange(n) for n in lengths]


def test_centre_and_width_by_hand():
    scores = [np.array([float(i), 10.0 * i]) for i in range(5)]
    shape = fit_shape(scores, [np.array([0, 8])] * 5)
    np.testing.assert_array_equal(shape.steps, [0, 8])
    np.testing.assert_allclose(shape.centre, [2.0, 20.0])
    sd = np.std(range(5), ddof=1)
    np.testing.assert_allclose(shape.width, [max(sd, NARROWEST * 5.5 * sd), 10 * sd])
    # Halfway between two looks both are interpolated: mu is 11 there.
    middle = shape.deviation(np.array([11.0 + shape.width.mean()]), np.array([4]))
    assert middle == pytest.approx(1.0)


def test_a_moment_without_enough_episodes_keeps_the_last_reliable_one():
    long = [np.arange(4.0) + i for i in range(LEAST - 1)]
    short = [np.arange(2.0) + i for i in range(4)]
    scores = long + short
    shape = fit_shape(scores, [PERIOD * np.arange(len(s)) for s in scores])
    assert shape.steps.tolist() == [0, 8]
    at_end = shape.deviation(np.array([5.0]), np.array([800]))
    assert at_end == (5.0 - shape.centre[-1]) / shape.width[-1]


def test_a_moment_at_which_all_agree_is_no_hair_trigger():
    rng = np.random.default_rng(0)
    scores = [np.array([1.0, *rng.normal(0, 1, 4)]) for _ in range(20)]
    shape = fit_shape(scores, [np.arange(5)] * 20)
    assert shape.width[0] == pytest.approx(NARROWEST * np.median(np.std(scores, axis=0, ddof=1)))
    flat = fit_shape([np.zeros(3)] * 5, [np.arange(3)] * 5)
    assert (flat.width > 0).all()


def test_trimmed_width_is_the_largest_difference_of_those_that_stray_least():
    rows = np.array([[0.0, 0.0], [1.0, -1.0], [-1.0, 1.0], [2.0, -2.0], [-2.0, 2.0], [0.0, 9.0]])
    rows[-1, 1], rows[0, 1] = 9.0, -9.0  # both columns have mean 0
    shape = fit_shape(list(rows), [np.array([0, 8])] * 6, trim=0.3)
    # Rank ceil(7 * 0.7) = 5 of 2, 2, 1, 1, 9, 9 keeps everything; 0.5 keeps four.
    np.testing.assert_allclose(shape.width, [max(2.0, NARROWEST * 5.5), 9.0])
    shape = fit_shape(list(rows), [np.array([0, 8])] * 6, trim=0.5)
    np.testing.assert_allclose(shape.width, [2.0, 2.0])
    with pytest.raises(ValueError, match="alpha is 0"):
        fit_shape(list(rows), [np.array([0, 8])] * 6, trim=0.0)


def test_height_is_the_rank_of_the_largest_deviations():
    shape = Shape(np.array([0, 8]), np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    scores = [np.array([1.0, 2.0 + 2.0 * d]) for d in range(19)]  # deviation d, at the second look
    curve = calibrate_band(shape, scores, [np.array([0, 8])] * 19, 0.05)
    assert (curve.at(0), curve.at(8)) == pytest.approx((1.0 + 18.0, 2.0 + 2.0 * 18.0), rel=1e-13)
    assert curve.at(4) == pytest.approx((curve.at(0) + curve.at(8)) / 2)
    assert curve.at(900) == curve.at(8)
    assert "at most 0.05 (19 calibration" in curve.promise
    assert from_json(json.loads(json.dumps(curve.to_json()))).to_json() == curve.to_json()


def test_too_few_to_promise_never_alarm():
    scores, steps = skewed(np.random.default_rng(0), 18)
    shape = fit_shape(scores, steps)
    with pytest.warns(TooFewEpisodesWarning, match="At least 19"):
        curve = calibrate_band(shape, scores, steps, 0.05)
    assert curve.at(0) == curve.at(3) == curve.at(1000) == math.inf  # 3: between two infinities
    again = from_json(json.loads(json.dumps(curve.to_json(), allow_nan=False)))
    assert again.at(3) == math.inf


@pytest.mark.parametrize(("centre", "width"), [(0.0, 1.0), (1.5, 0.25), (-3.0, 4.0)])
def test_a_constant_shape_is_split_conformal(centre, width):
    scores, steps = skewed(np.random.default_rng(3), 60)
    shape = Shape(np.array([0, 80]), np.full(2, centre), np.full(2, width))
    for alpha in (0.05, 0.1, 0.3):
        curve = calibrate_band(shape, scores, steps, alpha)
        expected = conformal_threshold(np.array([s.max() for s in scores]), alpha)
        for step in (0, 17, 80, 400):
            assert curve.at(step) == pytest.approx(expected, rel=1e-12)


def test_errors_say_what_is_wrong():
    scores, steps = skewed(np.random.default_rng(0), LEAST - 1)
    with pytest.raises(ValueError, match=f"{LEAST - 1} episodes with .* at least {LEAST}"):
        fit_shape(scores, steps)
    with pytest.raises(ValueError, match="on one grid"):
        fit_shape([np.zeros(1)] * 5, [np.array([i]) for i in range(5)])


def flipped(shape):
    """(mu - s) / sigma is the deviation of -s from a mirrored shape."""
    return Shape(shape.steps, -shape.centre, shape.width)


@pytest.mark.parametrize("trim", [None, 0.1])
def test_it_alarms_as_often_as_promised_and_flipped_more(trim):
    """The exact rate is 1 - k / (n + 1); 4 binomial standard errors of the repetitions."""
    rng = np.random.default_rng(1)
    n, alpha, repetitions = 39, 0.1, 1500
    alarms, wrong = 0, 0
    for _ in range(repetitions):
        scores, steps = skewed(rng, 20 + n + 1)
        shape = fit_shape(scores[:20], steps[:20], trim)
        set_b = slice(20, 20 + n)
        curve = calibrate_band(shape, scores[set_b], steps[set_b], alpha)
        limits = np.array([curve.at(int(t)) for t in steps[-1]])
        alarms += bool((scores[-1] > limits).any())
        turned = [flipped(shape).deviation(-s, t) for s, t in zip(scores[20:-1], steps[20:-1],
                                                                  strict=True)]  # fmt: skip
        height = np.sort(turned)[conformal_rank(n, alpha) - 1]
        wrong += shape.deviation(scores[-1], steps[-1]) > height
    exact = 1 - conformal_rank(n, alpha) / (n + 1)
    error = math.sqrt(exact * (1 - exact) / repetitions)
    assert abs(alarms / repetitions - exact) < 4 * error
    assert wrong / repetitions > alpha + 10 * error


def test_scores_that_tie_with_the_band_stay_silent():
    """mu + ((s - mu) / sigma) sigma can lie just below s; a score that saturates would alarm."""
    rng = np.random.default_rng(6)
    for _ in range(1000):
        centre, width, top = rng.uniform(0.1, 1, 2), rng.uniform(0.05, 1, 2), rng.uniform(0.5, 2)
        shape = Shape(np.array([0, 8]), centre, width)
        curve = calibrate_band(shape, [np.array([top])] * 39, [np.array([0])] * 39, 0.1)
        assert top <= curve.at(0) <= top + 1e-13
