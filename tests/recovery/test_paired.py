"""Paired comparison against published values and its own coverage."""

import numpy as np
import pytest
from regrasp.recovery.paired import Paired


def test_newcombe_published_example():
    """Newcombe (1998), Statist. Med. 17:2635, table II, method 10: 36/12/2/0."""
    low, high = Paired(36, 12, 2, 0).interval()
    assert low == pytest.approx(0.0569, abs=1e-4)
    assert high == pytest.approx(0.3404, abs=1e-4)


def test_count_and_p_value():
    paired = Paired.count([1, 0, 0, 1, 0], [1, 1, 1, 0, 0])
    assert paired == Paired(1, 2, 1, 1)
    assert paired.difference == pytest.approx(0.2)
    assert Paired(5, 0, 0, 5).p_value() == 1.0  # no discordant pair: no evidence, not p = 0
    assert Paired(0, 6, 0, 0).p_value() == pytest.approx(2 / 2**6)
    with pytest.raises(ValueError, match="same n"):
        Paired.count([1], [1, 0])


def test_interval_covers():
    rng = np.random.default_rng(0)
    probabilities, n, inside = [0.3, 0.25, 0.05, 0.4], 50, 0
    for _ in range(2000):
        low, high = Paired(*rng.multinomial(n, probabilities)).interval()
        inside += low <= 0.2 <= high
    assert 0.94 <= inside / 2000 <= 0.99
