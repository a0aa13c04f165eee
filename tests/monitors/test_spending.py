"""Alpha over the segments between recoveries, and thresholds that know the segment."""

import json
import math
import warnings

import numpy as np
import pytest
from regrasp.monitors.conformal import conformal_threshold
from regrasp.monitors.spending import calibrate_segments, spend
from regrasp.monitors.thresholds import Constant, Curve, Segmented, from_json


def test_shares_add_up():
    np.testing.assert_allclose(spend(0.1, 4), 0.025)
    np.testing.assert_allclose(spend(0.07, 3, decay=0.5), [0.04, 0.02, 0.01])
    for decay in (1.0, 0.5, 0.01):
        assert spend(0.1, 5, decay).sum() == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"alpha is 0\.0"):
        spend(0.0, 2)
    with pytest.raises(ValueError, match="segments is 0"):
        spend(0.1, 0)
    with pytest.raises(ValueError, match=r"decay 1\.5"):
        spend(0.1, 2, 1.5)


def test_each_segment_has_its_threshold_and_none_is_left_after_the_last():
    maxima = np.arange(99.0)
    limit = calibrate_segments([maxima, maxima + 1000], 0.1)
    assert limit.at(0) == conformal_threshold(maxima, 0.05)
    assert limit.at(0, segment=1) == conformal_threshold(maxima + 1000, 0.05)
    assert limit.at(0, segment=2) == math.inf
    again = from_json(json.loads(json.dumps(limit.to_json(), allow_nan=False)))
    assert [again.at(3, "task", s) for s in range(3)] == [limit.at(3, "task", s) for s in range(3)]
    assert "union bound" in again.promise
    assert again.promise.count("at most 0.05") == 2
    with pytest.raises(ValueError, match="no segments"):
        Segmented([])


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_alpha_holds_over_all_segments(decay):
    """Independent segments, where the union bound is nearly tight; and each at alpha breaks it."""
    rng = np.random.default_rng(0)
    n, alpha, repetitions, segments = 99, 0.1, 2000, 3
    spent, unspent = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(repetitions):
            maxima, new = rng.normal(size=n), rng.normal(size=segments)
            limit = calibrate_segments([maxima] * segments, alpha, decay)
            spent += any(new[s] > limit.at(0, segment=s) for s in range(segments))
            unspent += bool((new > conformal_threshold(maxima, alpha)).any())
    error = math.sqrt(alpha * (1 - alpha) / repetitions)
    assert spent / repetitions < alpha + 4 * error
    assert spent / repetitions > alpha / 2
    assert unspent / repetitions > alpha + 10 * error


def test_thresholds_refuse_what_they_cannot_be():
    with pytest.raises(ValueError, match="value is NaN"):
        Constant(math.nan)
    with pytest.raises(ValueError, match="as many of each"):
        Curve([0, 8], [1.0])
    with pytest.raises(ValueError, match="must increase"):
        Curve([8, 0], [1.0, 2.0])
    with pytest.raises(KeyError, match="did you mean constant"):
        from_json({"kind": "constnat"})
    assert Constant(1.0).promise == "no promise"
    assert from_json(Constant(math.inf, 0.1, 5).to_json()).at(0) == math.inf
