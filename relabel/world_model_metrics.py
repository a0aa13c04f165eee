"""Does a world model believe in failure? Optimism, and whether it tells failure from success.

A model that calls everything a failure is not optimistic either, so optimism is never given alone
(CureWM): beside it stand the share of successes believed in, the gap between both kinds, and the
area under the ROC curve, over all pairs and over pairs that share their beginning. Intervals come
from resampling beginnings, since executions of one are alike; both models get the same resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.results import Figure

#: Statistic -> its unit.
UNITS = {
    "optimism": "of executed failures imagined to succeed",
    "success_believed": "of executed successes imagined to succeed",
    "gap": "mean probability of success, successes minus failures",
    "auroc": "area under the ROC curve",
    "auroc_within": "area under the ROC curve within beginnings",
}


@dataclass(frozen=True)
class Outcomes:
    """Scores of executions, beside what came of them.

    Attributes:
        score: the higher, the surer of success ``[n]``.
        success: what came ``[n]``, bool.
        context: which beginning ``[n]``.
    """

    score: np.ndarray
    success: np.ndarray
    context: Sequence[str]

    def __post_init__(self) -> None:
        if not len(self.score) == len(self.success) == len(self.context):
            raise ValueError("Outcomes: score, success and context differ in length")
        if self.success.all() or not self.success.any():
            raise ValueError("Outcomes: all executions end alike; nothing can be told apart")


def nearness(
    imagined: np.ndarray, ends: np.ndarray, success: np.ndarray, context: Sequence[str]
) -> np.ndarray:
    """Whether an imagined end lies nearer to real successes than to real failures, ``[n]``.

    CureWM's diagnostic by latent distance. It asks no head, which may itself be what a model
    without failures has not learned.

    Args:
        imagined: latents at the end of each execution, imagined ``[n, L]``.
        ends: the same, encoded from the real pictures ``[n, L]``.
        success: what came ``[n]``, bool.
        context: which beginning ``[n]``; only ends of the same one are compared.

    Returns:
        The distance to the nearest failure's share of both distances: above 0.5, success is nearer;
        NaN where a beginning lacks one kind of outcome.
    """
    names, won = np.asarray(context), np.asarray(success, bool)
    apart = np.linalg.norm(imagined[:, None] - ends[None], axis=-1)
    same = names[:, None] == names[None]
    to_win = np.where(same & won, apart, np.inf).min(axis=1)
    to_loss = np.where(same & ~won, apart, np.inf).min(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = to_loss / (to_win + to_loss)
    return np.where(np.isfinite(to_win) & np.isfinite(to_loss), share, np.nan)


def statistics(outcomes: Outcomes, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Every statistic under weights of the beginnings.

    Args:
        outcomes: of one model.
        weights: ``[R, C]``, one row a resample, beginnings in the order of their names.

    Returns:
        Statistic of :data:`UNITS` -> ``[R]``; NaN where a resample lacks one kind of outcome.
    """
    names, group = np.unique(np.asarray(outcomes.context), return_inverse=True)
    score, won = np.asarray(outcomes.score, float), np.asarray(outcomes.success, bool)

    def summed(values: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Sum over each beginning's executions, weighted ``[R]``."""
        return weights @ np.bincount(group[of], values[of], minlength=len(names))

    with np.errstate(invalid="ignore", divide="ignore"):
        ones = np.ones_like(score)
        wins, losses = summed(ones, won), summed(ones, ~won)
        believed = (score > 0.5).astype(float)
        better, pairs = _pairs(score, won, group, len(names))
        return {
            "optimism": summed(believed, ~won) / losses,
            "success_believed": summed(believed, won) / wins,
            "gap": summed(score, won) / wins - summed(score, ~won) / losses,
            "auroc": _quadratic(weights, better) / _quadratic(weights, pairs),
            "auroc_within": weights @ np.diag(better) / (weights @ np.diag(pairs)),
        }


def _pairs(
    score: np.ndarray, won: np.ndarray, group: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a success in beginning c and a failure in d, ``[C, C]``: ranked right, and all."""
    right = np.sign(score[won][:, None] - score[~won][None]) / 2 + 0.5
    first, second = np.eye(count)[group[won]], np.eye(count)[group[~won]]
    return first.T @ right @ second, np.outer(first.sum(0), second.sum(0))


def _quadratic(weights: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    return ((weights @ matrix) * weights).sum(axis=1)


def compare(
    models: dict[str, Outcomes], *, resamples: int = 2000, seed: int = 0
) -> dict[str, Figure]:
    """Figures ``<statistic>.<model>``, and ``<statistic>.difference``, the last minus the first.

    Args:
        models: name -> outcomes over the same executions.
        resamples: of the beginnings.
        seed: of the resampling.

    Raises:
        ValueError: the models were not asked about the same executions.
    """
    first = next(iter(models.values()))
    for outcomes in models.values():
        same = np.array_equal(outcomes.success, first.success)
        if not same or list(outcomes.context) != list(first.context):
            raise ValueError("compare: the models were asked about different executions")
    count = len(set(first.context))
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)
    # The first row is the measured one.
    weights = np.concatenate([np.ones((1, count)), weights])
    found = {name: statistics(outcomes, weights) for name, outcomes in models.items()}
    figures = {
        f"{key}.{name}": _figure(values[key], count, unit)
        for name, values in found.items()
        for key, unit in UNITS.items()
    }
    if len(found) > 1:
        before, *_, after = found.values()
        for key in UNITS:
            figures[f"{key}.difference"] = _figure(after[key] - before[key], count, "difference")
    return figures


def _figure(values: np.ndarray, count: int, unit: str) -> Figure:
    """The measured value with the interval of its resamples."""
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return Figure(float(values[0]), float(low), float(high), count, unit)
