"""Thresholds when deployment is not quite what the calibration episodes were.

Known drift: episodes of deployment are distributed like the calibration's but for a likelihood
ratio w(x) of something seen before they start (the task, the object's place). The weighted
conformal threshold keeps alpha exactly (Tibshirani et al., "Conformal prediction under covariate
shift", 2019).

Unknown drift: after each episode that succeeded one learns whether it had alarmed. Adaptive
conformal inference (Gibbs and Candes, 2021) then moves alpha so that the long-run share of false
alarms comes to alpha whatever happens, without any promise for a single episode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from regrasp.monitors.conformal import conformal_threshold


def weighted_threshold(
    maxima: np.ndarray, weights: np.ndarray, weight: float, alpha: float
) -> float:
    """The alarm threshold of a new episode of known weight.

    The smallest q with  sum_i p_i 1{M_i <= q} >= 1 - alpha,  p_i = w_i / (sum_j w_j + w); the new
    episode's own share p of the mass lies at +inf, and where the rest falls short of 1 - alpha the
    threshold is +inf.

    Args:
        maxima: float ``[n]``, largest score of each successful calibration episode.
        weights: float ``[n]``, likelihood ratio of deployment to calibration at each; only their
            proportions count.
        weight: that of the new episode.
        alpha: bound on P(any alarm | success) in deployment.
    """
    maxima, weights = np.asarray(maxima, np.float64), np.asarray(weights, np.float64)
    if maxima.shape != weights.shape or maxima.ndim != 1 or not len(maxima):
        raise ValueError(
            f"weighted_threshold: maxima {maxima.shape} and weights {weights.shape}; give one "
            "weight an episode"
        )
    if np.isnan(maxima).any():
        raise ValueError(
            f"weighted_threshold: maxima hold {int(np.isnan(maxima).sum())} NaN; give one number "
            "an episode"
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weight >= 0):
        raise ValueError("weighted_threshold: weights must be finite and at least 0")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"weighted_threshold: alpha is {alpha}; it must lie between 0 and 1")
    total = weights.sum() + weight
    if total <= 0:
        return math.inf
    order = np.argsort(maxima, kind="stable")
    reached = np.cumsum(weights[order]) / total
    enough = np.flatnonzero(reached >= 1.0 - alpha - 1e-12)
    return float(maxima[order[enough[0]]]) if len(enough) else math.inf


@dataclass(frozen=True)
class Adaptive:
    """Alpha, moved after each successful episode.

        alpha_{t+1} = alpha_t + gamma (alpha - alarm_t)

    Over T episodes the share of false alarms differs from alpha by at most
    (max(alpha_1, 1 - alpha_1) + gamma) / (gamma T), whatever the episodes do.

    Attributes:
        alpha: the share of false alarms aimed at.
        gamma: how fast it moves; large follows drift, small is steady.
        current: alpha_t; below 0 the monitor is silent, above 1 it always alarms.
    """

    alpha: float
    gamma: float = 0.02
    current: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0 or not self.gamma > 0:
            raise ValueError(
                f"Adaptive: alpha is {self.alpha} and gamma {self.gamma}; alpha must lie between 0 "
                "and 1, gamma above 0"
            )
        if self.current is None:
            object.__setattr__(self, "current", self.alpha)

    def threshold(self, maxima: np.ndarray) -> float:
        """The threshold now, from the calibration's largest scores ``[n]``."""
        assert self.current is not None
        if self.current <= 0.0:
            return math.inf
        if self.current >= 1.0:
            return -math.inf
        return conformal_threshold(maxima, self.current)

    def after(self, alarmed: bool) -> Adaptive:
        """Alpha after an episode that succeeded and did, or did not, alarm."""
        assert self.current is not None
        moved = self.current + self.gamma * (self.alpha - float(alarmed))
        return replace(self, current=moved)
