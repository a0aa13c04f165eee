"""How good a reward is: order, separation, and whether failures are kept from looking done.

Every figure is a mean over rollouts or over pairs of rollouts, with a bootstrap over rollouts
(10,000 or 2,000 resamples), since the frames of one rollout are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.results import Figure, bootstrap
from regrasp.relabel.rollouts import Kind, Rollout
from scipy import stats

#: A failure whose value comes this high looks done.
LOOKS_DONE = 0.9


@dataclass(frozen=True)
class Valued:
    """A rollout and the values that something gives its steps.

    Attributes:
        value: given, ``[T]``.
        target: true, ``[T]``.
        kind: ``nominal``, ``failure`` or ``recovered``.
        back: first step of the recovery, if there is one.
    """

    value: np.ndarray
    target: np.ndarray
    kind: Kind
    back: int | None = None

    @property
    def succeeds(self) -> bool:
        """Whether the task is done in the end."""
        return self.kind != "failure"


def valued(rollout: Rollout, value: np.ndarray) -> Valued:
    """A rollout with values of its steps ``[T]``."""
    if len(value) != len(rollout):
        raise ValueError(f"valued: {len(value)} values for a rollout of {len(rollout)} steps")
    return Valued(np.asarray(value, np.float64), rollout.target, rollout.kind, rollout.back)


def time_linear(rollout: Rollout, length: float) -> np.ndarray:
    """The baseline that only counts: t over the usual ``length`` of a success, at most 1."""
    return np.minimum(1.0, np.arange(1, len(rollout) + 1) / length)


def usual_length(rollouts: Sequence[Rollout]) -> float:
    """Mean steps to the first success of the nominal rollouts."""
    steps = [1 + int(r.success.argmax()) for r in rollouts if r.kind == "nominal"]
    if not steps:
        raise ValueError("usual_length: no nominal rollouts")
    return float(np.mean(steps))


def figures(rollouts: Sequence[Valued], prefix: str) -> dict[str, Figure]:
    """Every figure that these rollouts allow, each named ``<prefix><name>``.

    Names: ``rank_correlation`` (Spearman of value and truth over all steps of all rollouts),
    ``rank_correlation_within`` (mean over rollouts), ``voc`` (value-order correlation of successes
    that nothing disturbed), ``voc_failures``, ``auroc`` (of the last value, success against
    failure), ``auroc_length_matched`` (the failure is read at the step at which the success ends),
    ``failures_look_done``, ``recovery_rise``, ``error`` (mean absolute).
    """
    nominal = [r for r in rollouts if r.kind == "nominal"]
    good = [r for r in rollouts if r.succeeds]
    bad = [r for r in rollouts if not r.succeeds]
    found: dict[str, Figure] = {}
    if rollouts:
        found["rank_correlation"] = rank_correlation(rollouts)
        within = [spearman(r.value, r.target) for r in rollouts if np.ptp(r.target) > 0]
        if within:
            found["rank_correlation_within"] = _mean(within, "Spearman's rho")
        found["error"] = _mean([float(np.abs(r.value - r.target).mean()) for r in rollouts])
    for name, some in (("voc", nominal), ("voc_failures", bad)):
        if some:
            found[name] = _mean([value_order(r.value) for r in some], "Spearman's rho")
    if good and bad:
        found["auroc"] = auroc(good, bad)
        found |= {f"auroc_{k}": v for k, v in _matched(good, bad).items()}
    if bad:
        done = sum(bool(r.value.max() >= LOOKS_DONE) for r in bad)
        found["failures_look_done"] = Figure.rate(done, len(bad), "of failures")
    back = [r for r in rollouts if r.back is not None and r.back < len(r.value)]
    if back:
        found["recovery_rise"] = _mean([float(r.value[-1] - r.value[r.back]) for r in back])
    return {prefix + name: figure for name, figure in found.items()}


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation, ties by their mean rank; 0 where either is constant: it orders nothing."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(stats.spearmanr(a, b).statistic)


def value_order(value: np.ndarray) -> float:
    """VOC (Ma et al. 2024, GVL): rank correlation of the values with time, -1 to 1."""
    return spearman(value, np.arange(len(value)))


def rank_correlation(rollouts: Sequence[Valued], resamples: int = 10_000, seed: int = 0) -> Figure:
    """Spearman over all steps of all rollouts; ranks are taken once, before the bootstrap."""
    x = stats.rankdata(np.concatenate([r.value for r in rollouts]))
    y = stats.rankdata(np.concatenate([r.target for r in rollouts]))
    x, y = x / len(x) - 0.5, y / len(y) - 0.5
    starts = np.cumsum([0, *(len(r.value) for r in rollouts[:-1])])
    moments = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y])
    sums = np.add.reduceat(moments, starts, axis=1).T  # [rollouts, 6]
    rng = np.random.default_rng(seed)
    drawn = [
        _pearson(sums[rng.integers(len(sums), size=len(sums))].sum(axis=0))
        for _ in range(resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Figure(_pearson(sums.sum(axis=0)), float(low), float(high), len(sums), "Spearman's rho")


def auroc(
    good: Sequence[Valued], bad: Sequence[Valued], *, resamples: int = 2000, seed: int = 0
) -> Figure:
    """Chance that a success ends with a higher value than a failure; ties count one half."""
    ends = np.array([r.value[-1] for r in good]), np.array([r.value[-1] for r in bad])
    return _pairs(_wins(ends[0][:, None], ends[1][None]), resamples, seed)


def auroc_length_matched(
    good: Sequence[Valued], bad: Sequence[Valued], *, resamples: int = 2000, seed: int = 0
) -> Figure | None:
    """The same over pairs of equal length: each failure is cut where the success ends.

    Pairs whose failure is shorter are left out; None if that is all of them.
    """
    cut = np.full((len(good), len(bad)), np.nan)
    for i, success in enumerate(good):
        for j, failure in enumerate(bad):
            if len(failure.value) >= len(success.value):
                cut[i, j] = failure.value[len(success.value) - 1]
    if np.isnan(cut).all():
        return None
    ends = np.array([r.value[-1] for r in good])
    wins = np.where(np.isnan(cut), np.nan, _wins(ends[:, None], cut))
    return _pairs(wins, resamples, seed)


def _matched(good: Sequence[Valued], bad: Sequence[Valued]) -> dict[str, Figure]:
    figure = auroc_length_matched(good, bad)
    return {} if figure is None else {"length_matched": figure}


def _wins(good: np.ndarray, bad: np.ndarray) -> np.ndarray:
    return (good > bad) + 0.5 * (good == bad)


def _pairs(wins: np.ndarray, resamples: int, seed: int) -> Figure:
    """Mean over pairs ``[successes, failures]`` (NaN: no pair), both sides resampled."""
    rng = np.random.default_rng(seed)
    there = ~np.isnan(wins)
    known = np.where(there, wins, 0.0)
    drawn = []
    for _ in range(resamples):
        # How often each side's rollout is drawn, rather than a copy of the matrix.
        a, b = (np.bincount(rng.integers(n, size=n), minlength=n) for n in wins.shape)
        count = a @ there @ b
        if count:
            drawn.append((a @ known @ b) / count)
    low, high = np.percentile(drawn, [2.5, 97.5])
    value = float(known.sum() / there.sum())
    return Figure(value, float(low), float(high), sum(wins.shape), "AUROC")


def _pearson(sums: np.ndarray) -> float:
    """Correlation from n, and the sums of x, y, x², y², xy."""
    n, x, y, xx, yy, xy = sums
    spread = (xx - x * x / n) * (yy - y * y / n)
    return float((xy - x * y / n) / np.sqrt(spread)) if spread > 1e-12 else 0.0


def _mean(samples: Sequence[float], unit: str = "value") -> Figure:
    low, high = bootstrap(samples)
    return Figure(float(np.mean(samples)), low, high, len(samples), unit)
