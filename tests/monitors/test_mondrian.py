"""Thresholds for tasks: each keeps alpha in its own, which a pooled one does not."""

import json
import math
import warnings

import numpy as np
import pytest
from regrasp.monitors.conformal import conformal_rank, conformal_threshold
from regrasp.monitors.mondrian import PooledGroupsWarning, calibrate_groups
from regrasp.monitors.thresholds import from_json


def test_each_task_has_its_own_rank():
    maxima = {"easy": np.arange(19.0), "hard": 100 + np.arange(39.0)}
    grouped = calibrate_groups(maxima, 0.05)
    assert grouped.at(0, "easy") == 18.0  # rank 19 of 19
    assert grouped.at(0, "hard") == 137.0  # rank 38 of 39
    pooled = conformal_threshold(np.concatenate(list(maxima.values())), 0.05)
    assert grouped.at(0, "never seen") == grouped.at(0) == pooled


def test_a_task_with_too_few_episodes_gets_the_pooled_threshold_and_it_is_said():
    maxima = {"many": np.arange(50.0), "few": np.arange(18.0), "none": np.array([])}
    with pytest.warns(PooledGroupsWarning, match=r"0\.05 in few \(18\), none \(0\)"):
        grouped = calibrate_groups(maxima, 0.05)
    assert set(grouped.groups) == {"many"}
    assert grouped.at(0, "few") == grouped.at(0, "none") == grouped.fallback.at(0)
    assert "in each of 1 tasks by itself" in grouped.promise
    assert "over the calibration's mixture of tasks alone" in grouped.promise
    assert "68 calibration episodes" in grouped.promise


def test_all_too_few_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grouped = calibrate_groups({"a": np.arange(3.0), "b": np.arange(4.0)}, 0.1)
    assert grouped.at(0, "a") == math.inf
    assert from_json(json.loads(json.dumps(grouped.to_json(), allow_nan=False))).at(0) == math.inf


def test_json_and_errors():
    grouped = calibrate_groups({"a": np.arange(30.0), "b": np.arange(40.0)}, 0.1)
    again = from_json(json.loads(json.dumps(grouped.to_json())))
    for name in ("a", "b", None):
        assert again.at(5, name) == grouped.at(5, name)
    assert again.promise == grouped.promise
    with pytest.raises(ValueError, match="no groups"):
        calibrate_groups({}, 0.1)


def test_alpha_holds_in_each_task_where_pooled_breaks_it():
    rng = np.random.default_rng(0)
    n, alpha, repetitions, levels = 29, 0.1, 2000, {"calm": 0.0, "lively": 1.0}
    alarms = dict.fromkeys(levels, 0)
    pooled = 0
    for _ in range(repetitions):
        drawn = {name: rng.normal(level, 1, n + 1) for name, level in levels.items()}
        grouped = calibrate_groups({name: x[:n] for name, x in drawn.items()}, alpha)
        for name, x in drawn.items():
            alarms[name] += x[n] > grouped.at(0, name)
        pooled += drawn["lively"][n] > grouped.fallback.at(0)
    exact = 1 - conformal_rank(n, alpha) / (n + 1)
    error = math.sqrt(exact * (1 - exact) / repetitions)
    for name in levels:
        assert abs(alarms[name] / repetitions - exact) < 4 * error
    assert pooled / repetitions > alpha + 5 * error
