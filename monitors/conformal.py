"""Split-conformal alarm thresholds: at most alpha false alarms an episode, in finite samples.

The unit is the episode, never the pooled step. For each of n calibration episodes that
succeeded, take the largest score over its time, M_i = max_t s_t. The threshold is the
k-th smallest of them, k = ceil((n + 1)(1 - alpha)), and the alarm is s_t > threshold. If a new
episode that succeeds is exchangeable with the calibration ones, its own maximum is as likely to
take any rank among the n + 1, so

    P(it ever alarms | it succeeds) <= alpha.

What this promises and what it does not:

- It bounds false alarms on successes. It says nothing about misses.
- k > n means that n episodes cannot promise alpha at all: the threshold is +inf and a warning
  says how many are needed. It is never clipped to the largest one, which would drop the promise.
- Success ends a simulated episode, so maxima of successes run over fewer steps than the horizon.
  That is fair only if deployment stops at success too. Where a robot runs on after it (no success
  signal), calibrate on rollouts that ran on as well, or a time-dependent score gets a threshold
  that is too low.
- The scores must not be trained, nor windows and dimensions chosen, on the calibration episodes.
- A rewind changes the process: a segment after one starts elsewhere than calibration did. An
  episode that would have succeeded alone can only alarm falsely in its first segment first, so its
  chance of any false alarm stays alpha. To hold alpha over all of at most R segments, were each
  exchangeable, ask for ``segments=R``: each then gets alpha / R.

Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World" (2005).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from regrasp.monitors.base import lookup


class TooFewEpisodesWarning(UserWarning):
    """The calibration set is too small for the alpha asked for; the threshold is +inf."""


@dataclass(frozen=True)
class Calibration:
    """Thresholds and what they promise.

    Attributes:
        thresholds: score name -> alarm above this; +inf where n was too small.
        alpha: bound on P(any alarm in a segment | success), over all scores together.
        n: calibration episodes.
        rank: the order statistic used (of each score, or of their combined maximum).
        combine: how the scores share alpha, a key of :data:`COMBINATIONS`.
        segments: segments that alpha was divided over.
    """

    thresholds: dict[str, float]
    alpha: float
    n: int
    rank: int
    combine: str
    segments: int = 1

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; +inf becomes null, which JSON can hold."""
        data = asdict(self)
        data["thresholds"] = {
            k: v if math.isfinite(v) else None for k, v in self.thresholds.items()
        }
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Invert :meth:`to_json`."""
        thresholds = {k: math.inf if v is None else float(v) for k, v in data["thresholds"].items()}
        return cls(**{**data, "thresholds": thresholds})


def conformal_rank(n: int, alpha: float) -> int:
    """k = ceil((n + 1)(1 - alpha)), robust to alpha's rounding (n = 9, alpha = .1 gives 9)."""
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"conformal_rank: alpha is {alpha}; it must lie strictly between 0 and 1")
    if n < 1:
        raise ValueError(f"conformal_rank: n is {n}; at least one calibration episode is needed")
    return math.ceil((n + 1) * (1.0 - alpha) - 1e-9)


def conformal_threshold(maxima: np.ndarray, alpha: float) -> float:
    """The k-th smallest of ``maxima`` ``[n]``; +inf with a warning where k > n."""
    maxima = np.asarray(maxima, dtype=np.float64)
    if maxima.ndim != 1 or np.isnan(maxima).any():
        raise ValueError(
            f"conformal_threshold: maxima of shape {maxima.shape} with "
            f"{int(np.isnan(maxima).sum())} NaN; give one number an episode"
        )
    rank = conformal_rank(len(maxima), alpha)
    if rank > len(maxima):
        needed = math.ceil(1.0 / alpha - 1.0 - 1e-9)
        warnings.warn(
            f"{len(maxima)} successful calibration episodes cannot promise alpha = {alpha:g}: the "
            f"threshold is +inf and this score will never alarm. At least {needed} are needed.",
            TooFewEpisodesWarning,
            stacklevel=2,
        )
        return math.inf
    return float(np.sort(maxima)[rank - 1])


def _bonferroni(
    maxima: Mapping[str, np.ndarray], alpha: float, scales: Mapping[str, float]
) -> tuple[dict[str, float], int]:
    """Each score alone at alpha / K; the union bound holds whatever their dependence."""
    share = alpha / len(maxima)
    n = len(next(iter(maxima.values())))
    thresholds = {name: conformal_threshold(m, share) for name, m in maxima.items()}
    return thresholds, conformal_rank(n, share)


def _maximum(
    maxima: Mapping[str, np.ndarray], alpha: float, scales: Mapping[str, float]
) -> tuple[dict[str, float], int]:
    """One conformal test on max_k s_k / scale_k at the whole alpha: threshold_k = q scale_k."""
    missing = set(maxima) - set(scales)
    if missing or any(not scales[name] > 0 for name in maxima):
        raise ValueError(
            f"calibrate(combine='max'): needs a positive scale for each of {sorted(maxima)}, got "
            f"{dict(scales)}; take them from rollouts that do not calibrate"
        )
    joint = np.max([np.asarray(m) / scales[name] for name, m in maxima.items()], axis=0)
    q = conformal_threshold(joint, alpha)
    # q s is rounded twice and may fall just below the very maxima that were to stay silent; where
    # episodes tie with them (a score that saturates, a count) all of those would alarm.
    thresholds = {
        name: float(np.max(m, initial=q * scales[name], where=np.asarray(m) / scales[name] <= q))
        for name, m in maxima.items()
    }
    return thresholds, conformal_rank(len(joint), alpha)


#: How several scores share one alpha; each keeps P(any of them alarms | success) <= alpha.
COMBINATIONS = {"bonferroni": _bonferroni, "max": _maximum}


def calibrate(
    maxima: Mapping[str, np.ndarray],
    alpha: float,
    *,
    combine: str = "bonferroni",
    scales: Mapping[str, float] | None = None,
    segments: int = 1,
) -> Calibration:
    """Thresholds for the OR of several scores.

    Args:
        maxima: score name -> float ``[n]``, max over time of each successful calibration
            episode, the same episodes in the same order for every score.
        alpha: bound on the chance that a successful episode alarms at all.
        combine: a key of :data:`COMBINATIONS`.
        scales: for ``"max"``: score name -> a typical size, fixed before the calibration
            episodes were seen.
        segments: divide alpha over this many segments (tries + 1).
    """
    lengths = {name: len(m) for name, m in maxima.items()}
    if not lengths or len(set(lengths.values())) > 1:
        raise ValueError(f"calibrate: give the same episodes for every score, got {lengths}")
    if segments < 1:
        raise ValueError(f"calibrate: segments is {segments}; it must be at least 1")
    rule = lookup(COMBINATIONS, combine, "calibrate: combine")
    thresholds, rank = rule(maxima, alpha / segments, scales or {})
    n = next(iter(lengths.values()))
    return Calibration(thresholds, alpha, n, rank, combine, segments)


def false_alarm_band(
    n_test: int, alpha: float, n_calibration: int | None = None, level: float = 0.95
) -> tuple[float, float]:
    """Where the false-alarm rate of ``n_test`` successes should fall, as (low, high) rates.

    Without ``n_calibration``: central binomial quantiles at alpha. With it: beta-binomial, since
    given its calibration set a threshold's true rate is itself Beta(n + 1 - k, k) distributed
    (for continuous scores).
    """
    counts = np.arange(n_test + 1)
    log_choose = np.array([_log_choose(n_test, int(c)) for c in counts])
    if n_calibration is None:
        log_pmf = log_choose + counts * math.log(alpha) + (n_test - counts) * math.log1p(-alpha)
    else:
        k = conformal_rank(n_calibration, alpha)
        if k > n_calibration:
            return 0.0, 0.0
        a, b = n_calibration + 1 - k, k
        log_pmf = log_choose + np.array(
            [_log_beta(int(c) + a, n_test - int(c) + b) - _log_beta(a, b) for c in counts]
        )
    cdf = np.cumsum(np.exp(log_pmf))
    tail = (1.0 - level) / 2.0
    low = int(np.searchsorted(cdf, tail))
    high = int(np.searchsorted(cdf, 1.0 - tail))
    return low / n_test, min(high, n_test) / n_test


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
