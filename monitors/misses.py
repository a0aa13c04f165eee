"""The other side: thresholds from labelled failures that bound how many are missed.

Thresholds from successes bound false alarms and say nothing about misses. Where failures of the
kind to be caught are at hand, the same rank arithmetic bounds misses. With M_(1) <= ... <= M_(n)
the sorted largest scores of n failures, and an alarm at s_t > q, a failure is missed when its
M <= q. At q just below M_(k), the chance of missing a new failure exchangeable with them is

    on average k / (n + 1) at most                  (split conformal),
    Beta(k, n + 1 - k) distributed, given them      (Wilks' tolerance limit).

The second is fixed-sequence testing (Learn then Test, arXiv 2110.01052) from the most sensitive
threshold on: go up to M_(k) while the exact binomial test of "more than beta are missed" rejects at
delta; the chance of a miss only grows with the threshold, so no correction is needed. A monitor
fixed beforehand, whatever its thresholds, gets a bound from failures by :func:`miss_bound`.

Both sides rarely can be had at once: the least false alarms that a bound on misses allows is read
off the successes' maxima at that threshold. Failures of another kind than the calibration's are
outside any promise.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from regrasp.episodes.results import clopper_pearson


class TooFewFailuresWarning(UserWarning):
    """The failures cannot promise the bound on misses asked for; the threshold is -inf."""


def miss_bound(alarmed: np.ndarray, delta: float) -> float:
    """Upper bound on P(no alarm | failure) of a monitor that was fixed before these failures.

    Clopper-Pearson: the bound is too low with probability at most ``delta`` over the failures.

    Args:
        alarmed: bool ``[n]``, whether the monitor alarmed in each failed episode (in time, if that
            is what counts).
        delta: allowed chance that the bound does not hold.
    """
    alarmed = np.asarray(alarmed)
    if alarmed.ndim != 1 or not len(alarmed) or alarmed.dtype != bool:
        raise ValueError(
            f"miss_bound: alarmed is {alarmed.dtype} of shape {alarmed.shape}; give one truth "
            "value an episode, at least one"
        )
    return clopper_pearson(int((~alarmed).sum()), len(alarmed), delta)


def miss_threshold(maxima: np.ndarray, beta: float, delta: float | None = None) -> float:
    """The largest threshold at which at most ``beta`` of the failures are missed.

    Args:
        maxima: float ``[n]``, largest score of each failed episode (before it was too late, if that
            is what counts).
        beta: bound on P(no alarm | failure).
        delta: the bound then holds with probability 1 - delta over the failures given; None: on
            average over them.

    Returns:
        The threshold, to be used as ``score > threshold``; -inf, which always alarms, with a
        warning where n failures are too few.
    """
    maxima = np.sort(np.asarray(maxima, dtype=np.float64))
    if maxima.ndim != 1 or np.isnan(maxima).any():
        raise ValueError(f"miss_threshold: maxima of shape {maxima.shape}; give one an episode")
    for name, value in (("beta", beta), ("delta", delta)):
        if value is not None and not 0.0 < value < 1.0:
            raise ValueError(f"miss_threshold: {name} is {value}; it must lie between 0 and 1")
    n = len(maxima)
    k = math.floor((n + 1) * beta + 1e-9) if delta is None else tolerance_rank(n, beta, delta)
    if k < 1:
        warnings.warn(
            f"{n} failures cannot promise that at most {beta:g} are missed: the threshold is -inf "
            "and this score always alarms",
            TooFewFailuresWarning,
            stacklevel=2,
        )
        return -math.inf
    return float(np.nextafter(maxima[min(k, n) - 1], -np.inf))


def tolerance_rank(n: int, beta: float, delta: float) -> int:
    """The largest k with P(Beta(k, n + 1 - k) > beta) <= delta; 0 where there is none.

    The upper tail of that Beta at beta is P(Binomial(n, beta) <= k - 1).
    """
    cumulative, log_choose, k = 0.0, 0.0, 0
    for i in range(n):
        if i:
            log_choose += math.log(n - i + 1) - math.log(i)
        cumulative += math.exp(log_choose + i * math.log(beta) + (n - i) * math.log1p(-beta))
        if cumulative > delta * (1 + 1e-12):
            break
        k = i + 1
    return k
