"""The evidence file and its intervals."""

import json

import numpy as np
import pytest
from regrasp.episodes.results import (
    Figure,
    bootstrap,
    git_commit,
    paired_difference,
    protocol_hash,
    read_result,
    wilson,
    write_result,
)


def test_wilson_known_values():
    # Newcombe 1998, table I, method 3: 81/263 and 1/29.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson(0, 20)[0] == 0.0
    assert wilson(20, 20)[1] == 1.0
    with pytest.raises(ValueError, match="successes=3, n=2"):
        wilson(3, 2)


def test_wilson_covers():
    rng = np.random.default_rng(0)
    p, n = 0.85, 40
    hits = [low <= p <= high for low, high in (wilson(k, n) for k in rng.binomial(n, p, 4000))]
    assert 0.93 < np.mean(hits) < 0.975


def test_paired_difference_sees_pairing():
    rng = np.random.default_rng(1)
    base = rng.random(400) < 0.5
    better = base | (rng.random(400) < 0.1)
    value, low, high = paired_difference(better, base)
    assert 0 < low < value < high < 0.15
    assert (low, high) == bootstrap(better.astype(float) - base)
    with pytest.raises(ValueError, match="same episodes"):
        paired_difference([1, 0], [1])


def test_hash_ignores_order_and_numpy_types():
    a = protocol_hash({"suite": "libero_object", "sizes": (128, 128), "seed": np.int64(7)})
    b = protocol_hash({"seed": 7, "sizes": [128, 128], "suite": "libero_object"})
    assert a == b
    assert a != protocol_hash({"seed": 8, "sizes": [128, 128], "suite": "libero_object"})


def test_write_and_read(tmp_path):
    figures = {"success": Figure.rate(17, 20), "ratio": Figure(11.5, n=3, unit="ratio")}
    path = write_result("x", "regrasp x", {"suite": "s"}, range(2), figures, tmp_path)
    record = json.loads(path.read_text())
    assert record["protocol_hash"] == protocol_hash({"suite": "s"})
    assert record["seeds"] == [0, 1]
    assert record["machine"]["cores"] >= 1
    assert record["figures"]["ratio"] == {
        "value": 11.5,
        "low": None,
        "high": None,
        "n": 3,
        "unit": "ratio",
    }
    assert read_result("x", tmp_path)["figures"] == figures
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="must be finite"):
        write_result("x", "c", {}, [0], {"a": Figure(float("nan"))}, tmp_path)


def test_no_git_is_none(tmp_path):
    assert git_commit(tmp_path) is None


def test_mean_figure():
    figure = Figure.mean([1.0, 2.0, 3.0], "s")
    assert figure.value == 2.0
    assert figure.high - figure.value == pytest.approx(1.96 / 3**0.5, abs=1e-3)
    assert Figure.mean([4.0]).low is None
