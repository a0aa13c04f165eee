"""A threshold for each moment: a functional conformal band from two disjoint sets of successes.

    mu_t, sigma_t   mean and width of the scores at moment t over set A
    D_j = max_t (s_j,t - mu_t) / sigma_t   for each success j of set B
    h = the k-th smallest D_j, k = ceil((|B| + 1)(1 - alpha)); +inf where k > |B|
    alarm:  s_t > mu_t + h sigma_t

Given A, the D of a new success is exchangeable with those of B, whatever mu and sigma are: so
P(it ever alarms | it succeeds) <= alpha. The shape decides only how early failures show. It assumes
that a moment means the same in every episode; where retries shift it, a constant serves better.

Two forms of this in public code break the promise, and are measured beside it in the coverage
study: the deviation with its sign flipped, (mu - s) / sigma, and a quantile at each moment apart,
which bounds false alarms at that moment and not over the episode. FAIL-Detect (arXiv 2503.08558)
takes the band from Diquigiovanni et al., "The importance of being a band" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.monitors.conformal import conformal_rank, conformal_threshold
from regrasp.monitors.thresholds import Curve

#: A moment at which fewer episodes of set A still run takes the last moment's mean and width.
LEAST = 5
#: Widths below this share of the typical one are raised to it: a moment at which all episodes of a
#: small set agree would alarm at the slightest difference.
NARROWEST = 0.25
#: Relative error of a band's values: a handful of roundings.
ROUNDING = 16 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Shape:
    """Centre and width of a band.

    Attributes:
        steps: int ``[G]``, the control steps at which set A was looked at.
        centre: float ``[G]``, mu.
        width: float ``[G]``, sigma, positive.
    """

    steps: np.ndarray
    centre: np.ndarray
    width: np.ndarray

    def deviation(self, scores: np.ndarray, steps: np.ndarray) -> float:
        """max_t (s_t - mu_t) / sigma_t of one episode."""
        centre = np.interp(steps, self.steps, self.centre)
        width = np.interp(steps, self.steps, self.width)
        return float(np.max((np.asarray(scores) - centre) / width))


def fit_shape(
    scores: Sequence[np.ndarray], steps: Sequence[np.ndarray], trim: float | None = None
) -> Shape:
    """Mean and width at each moment of set A.

    The width is the standard deviation over the episodes that still run. With ``trim`` it is the
    largest |s_t - mu_t| among those left when the share ``trim`` of the episodes that stray
    farthest from mu at any moment is set aside (all are kept where they are too few for it), as
    FAIL-Detect does at trim = alpha.

    Args:
        scores: float ``[C_i]`` an episode.
        steps: int ``[C_i]``, the control steps of those scores.
        trim: share set aside, strictly between 0 and 1; None for the standard deviation.

    Raises:
        ValueError: for fewer than :data:`LEAST` episodes, or lengths that differ.
    """
    if len(scores) < LEAST or len(scores) != len(steps):
        raise ValueError(
            f"fit_shape: {len(scores)} episodes with {len(steps)} step arrays; give the same of "
            f"both, at least {LEAST}"
        )
    grid = np.unique(np.concatenate([np.asarray(s, dtype=np.int64) for s in steps]))
    table: np.ndarray = np.full((len(scores), len(grid)), np.nan)
    for row, score, step in zip(table, scores, steps, strict=True):
        row[np.searchsorted(grid, step)] = score
    enough = np.sum(~np.isnan(table), axis=0) >= LEAST
    if not enough.any():
        raise ValueError(f"fit_shape: no moment has {LEAST} episodes; are the steps on one grid?")
    grid, table = grid[enough], table[:, enough]
    centre = np.nanmean(table, axis=0)
    width = np.nanstd(table, axis=0, ddof=1) if trim is None else _trimmed(table - centre, trim)
    floor = max(NARROWEST * float(np.median(width)), 1e-9)
    return Shape(grid, centre, np.maximum(width, floor))


def _trimmed(differences: np.ndarray, trim: float) -> np.ndarray:
    """Largest absolute difference ``[G]`` of those episodes ``[n, G]`` that stray least."""
    sizes = np.abs(differences)
    farthest = np.fmax.reduce(sizes, axis=1)
    rank = min(conformal_rank(len(farthest), trim), len(farthest))
    kept = sizes[farthest <= np.sort(farthest)[rank - 1]]
    return np.fmax.reduce(kept, axis=0, initial=0.0)  # 0 where none of them runs: the floor then


def calibrate_band(
    shape: Shape, scores: Sequence[np.ndarray], steps: Sequence[np.ndarray], alpha: float
) -> Curve:
    """The band of a shape from set B, disjoint from what the shape was fitted to.

    Late moments, which few episodes reached, keep the last reliable centre and width.
    """
    deviations = np.array(
        [shape.deviation(score, step) for score, step in zip(scores, steps, strict=True)]
    )
    height = conformal_threshold(deviations, alpha)
    # Scores that tie with the k-th deviation must stay silent, however mu + h sigma is rounded.
    slack = ROUNDING * (np.abs(shape.centre) + np.abs(height) * shape.width)
    values = shape.centre + height * shape.width + slack
    return Curve(shape.steps, values, alpha, len(deviations))
