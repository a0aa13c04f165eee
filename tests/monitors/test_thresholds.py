"""Every threshold is what it was after a file, wherever and whenever it is asked."""

import json
import math

import numpy as np
import pytest
from regrasp.monitors.thresholds import KINDS, Constant, Curve, Grouped, Segmented, from_json

CURVE = Curve([0, 8, 24], [1.0, 3.0, -1.0], alpha=0.05, n=40)
NEVER = Curve([0, 8], [math.inf, math.inf], alpha=0.01, n=7)
THRESHOLDS = {
    "constant": Constant(1.5, 0.1, 30),
    "constant that never alarms": Constant(math.inf, 0.1, 3),
    "constant without a promise": Constant(-2.0),
    "constant that always alarms": Constant(-math.inf),
    "curve": CURVE,
    "curve that never alarms": NEVER,
    "curve that begins late": Curve([0, 8, 16], [math.inf, 1.0, math.inf]),
    "grouped": Grouped({"lift": CURVE, "pour": Constant(math.inf, 0.1, 3)}, Constant(4.0, 0.1, 9)),
    "grouped without groups": Grouped({}, Constant(math.inf, 0.1, 3)),
    "segmented": Segmented([CURVE, Constant(math.inf, 0.02, 9)]),
    "segments of groups": Segmented([Grouped({"lift": NEVER}, CURVE), Constant(2.0)]),
}


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_json_keeps_value_and_promise(name):
    threshold = THRESHOLDS[name]
    again = from_json(json.loads(json.dumps(threshold.to_json(), allow_nan=False)))
    assert type(again) is type(threshold)
    assert again.promise == threshold.promise
    assert again.to_json() == threshold.to_json()
    for group in (None, "lift", "pour", "never seen"):
        for segment in range(4):
            for step in (0, 3, 8, 15, 24, 900):
                value = threshold.at(step, group, segment)
                assert not math.isnan(value)
                assert again.at(step, group, segment) == value


def test_every_kind_is_read_back():
    assert {t.to_json()["kind"] for t in THRESHOLDS.values()} == set(KINDS)


def test_a_curve_is_linear_between_its_moments_and_constant_outside_them():
    assert [CURVE.at(t) for t in (0, 4, 8, 16, 24, 25, 10_000)] == [1, 2, 3, 1, -1, -1, -1]
    assert Curve([16], [2.0]).at(0) == Curve([16], [2.0]).at(99) == 2.0


def test_a_task_that_is_not_known_gets_the_fallback():
    grouped = THRESHOLDS["grouped"]
    assert grouped.at(8, "lift") == 3.0
    assert grouped.at(8, "pour") == math.inf
    assert grouped.at(8) == grouped.at(8, None) == grouped.at(8, "never seen") == 4.0


def test_no_alarm_once_the_segments_are_used_up():
    segmented = THRESHOLDS["segments of groups"]
    assert segmented.at(8, "lift") == math.inf
    assert segmented.at(8, "pour") == 3.0
    assert segmented.at(8, "lift", 1) == 2.0
    assert segmented.at(8, "lift", 2) == segmented.at(8, "lift", 50) == math.inf


def test_promises_say_alpha_and_how_many_episodes():
    assert "at most 0.05 (40 calibration episodes)" in CURVE.promise
    assert Constant(1.0).promise == "no promise"
    promise = Segmented([Constant(1.0, 0.04, 50), Constant(2.0, 0.02, 20)]).promise
    assert "over all 2 segments together" in promise
    assert "0.04 (50" in promise.split("segment 1")[0]
    assert "0.02 (20" in promise.split("segment 1")[1]


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"steps \(2,\) and values \(1,\)"):
        Curve([0, 8], [1.0])
    with pytest.raises(ValueError, match="at least one"):
        Curve([], [])
    for steps, values in (([8, 8], [1.0, 1.0]), ([0, 8], [1.0, np.nan])):
        with pytest.raises(ValueError, match="steps must increase and values must be numbers"):
            Curve(steps, values)
    with pytest.raises(ValueError, match="value is NaN"):
        Constant(math.nan)
    with pytest.raises(ValueError, match="at least the first one's"):
        Segmented([])
    with pytest.raises(KeyError, match="did you mean segmented"):
        from_json({"kind": "segment"})
