"""What ``regrasp monitors coverage`` simulates, and each way to calibrate on it.

The episodes are autocorrelated, skewed, of random lengths and of levels of their own, and the
longer the higher; tasks differ, and so does a drifted deployment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from regrasp.monitors.bands import Shape, calibrate_band, fit_shape
from regrasp.monitors.conformal import calibrate, conformal_rank, conformal_threshold
from regrasp.monitors.drift import weighted_threshold
from regrasp.monitors.misses import miss_bound, miss_threshold, tolerance_rank
from regrasp.monitors.mondrian import calibrate_groups
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.combined import Combined
from regrasp.monitors.scores.tide import Tide
from regrasp.monitors.spending import calibrate_segments
from regrasp.monitors.thresholds import Threshold

#: Inferences of the longest episode, and control steps between two.
MOMENTS, PERIOD = 30, 8
#: Correlation of a score with itself an inference later.
MEMORY = 0.7
#: Levels of three tasks: the higher, the larger the scores.
TASKS = {"calm": -0.5, "usual": 0.0, "lively": 0.7}
#: Segments of an episode with two recoveries.
SEGMENTS = 3
#: Allowed chance that a bound on misses "given the failures" does not hold.
DELTA = 0.1
#: Largest score of a failed episode, as a log-normal whose median is 1; misses are known exactly.
FAILURES = NormalDist(0.0, 1.0)
#: Threshold of the monitor whose misses are bounded: it misses 16 %.
FIXED = math.exp(-1.0)


def walk(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Stationary standard normal noise with memory, ``[*shape, MOMENTS]``."""
    noise = rng.normal(size=(*shape, MOMENTS))
    for t in range(1, MOMENTS):
        noise[..., t] = MEMORY * noise[..., t - 1] + math.sqrt(1 - MEMORY**2) * noise[..., t]
    return noise


def streams(
    rng: np.random.Generator, shape: tuple[int, ...], level: np.ndarray | float = 0.0
) -> np.ndarray:
    """Scores of successes, ``[*shape, MOMENTS]``; nan once an episode has ended."""
    own = 0.5 * rng.normal(size=shape) + level
    share = np.arange(MOMENTS) / MOMENTS
    centre, width = 1.0 + np.sin(2 * np.pi * share), 0.3 + share
    scores = centre + width * np.exp(0.6 * (own[..., None] + walk(rng, shape)))
    length = np.clip(np.rint(18 + 4 * own + 5 * rng.normal(size=shape)), 6, MOMENTS)
    scores[np.arange(MOMENTS) >= length[..., None]] = np.nan
    return scores


def two_legs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Two correlated scores of the same successes, ``[*shape, MOMENTS, 2]``."""
    first = streams(rng, shape)
    return np.stack([first, np.sqrt(first) * np.exp(0.4 * walk(rng, shape))], axis=-1)


def largest(scores: np.ndarray) -> np.ndarray:
    """Over time, the last axis, without the nan after an end."""
    result: np.ndarray = np.fmax.reduce(scores, axis=-1)
    return result


@dataclass(frozen=True)
class Fixed:
    """What no calibration episode has a part in.

    Attributes:
        units: float ``[2]``, what the legs' largest values rarely exceed.
        weights: float ``[2]``, learned from labelled episodes.
    """

    units: np.ndarray
    weights: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, episodes: int = 100) -> Fixed:
        """From episodes of their own; from half-time on one leg rises in every other failure."""
        good = two_legs(rng, (episodes,))
        units = np.quantile(largest(np.moveaxis(good, -1, -2)), 0.95, axis=0)
        rise = np.maximum(0, np.arange(MOMENTS) - MOMENTS // 2)[:, None]
        seen_by = np.arange(episodes)[:, None, None] % 2 == np.arange(2)
        bad = two_legs(rng, (episodes,)) + 0.5 * rise * seen_by
        values = [episode[~np.isnan(episode[:, 0])] for episode in (*good, *bad)]
        begun = [np.arange(len(v)) > MOMENTS // 2 for v in values]
        begun[:episodes] = [np.zeros(len(v), bool) for v in values[:episodes]]
        learned = Combined.learn([Tide(), Clock()], units, values, begun)
        return cls(units, np.array(learned.config()["weights"]))


@dataclass(frozen=True)
class Repetition:
    """Calibration episodes, and a new one of each kind after them.

    Attributes:
        legs: float ``[n + SEGMENTS, MOMENTS, 2]``; a second and third segment come last.
        tasks: float ``[3, n + 1]``, largest scores.
        drifted: float ``[n + 1]``, largest scores where the level depends on a place; places of
            the new episode have another distribution.
        places: float ``[n + 1]``, in 0 .. 1.
        failures: float ``[n + 1]``, largest scores of failures.
        fixed: see there.
    """

    legs: np.ndarray
    tasks: np.ndarray
    drifted: np.ndarray
    places: np.ndarray
    failures: np.ndarray
    fixed: Fixed

    @property
    def n(self) -> int:
        """Calibration episodes."""
        return len(self.failures) - 1

    @property
    def half(self) -> int:
        """Those of them that a band's shape is fitted to."""
        return self.n // 2

    @cached_property
    def maxima(self) -> np.ndarray:
        """Of both legs, ``[2, n + SEGMENTS]``."""
        return np.stack([largest(self.legs[..., k]) for k in range(2)])

    @cached_property
    def series(self) -> list[np.ndarray]:
        """The first leg of each episode."""
        return [s[~np.isnan(s)] for s in self.legs[: self.n + 1, :, 0]]

    @cached_property
    def steps(self) -> list[np.ndarray]:
        """The control steps of :attr:`series`."""
        return [PERIOD * np.arange(len(s)) for s in self.series]

    @cached_property
    def shape(self) -> Shape:
        """Of a band, from the first half."""
        return fit_shape(self.series[: self.half], self.steps[: self.half])

    @cached_property
    def both(self) -> np.ndarray:
        """Largest value of the smaller leg, ``[n + SEGMENTS]``."""
        return largest((self.legs / self.fixed.units).min(axis=-1))

    @cached_property
    def learned(self) -> np.ndarray:
        """Largest value of the learned sum, ``[n + SEGMENTS]``."""
        return largest(self.legs / self.fixed.units @ self.fixed.weights)


def draw(rng: np.random.Generator, n: int, count: int, fixed: Fixed) -> list[Repetition]:
    """Some repetitions at once. Places of deployment have density 2x, those before it density 1."""
    legs = two_legs(rng, (count, n + SEGMENTS))
    levels = np.array(list(TASKS.values()))[:, None]
    tasks = largest(streams(rng, (count, len(TASKS), n + 1), levels))
    places = rng.random((count, n + 1))
    places[:, -1] = np.sqrt(places[:, -1])
    drifted = largest(streams(rng, (count, n + 1), 2.0 * places))
    failures = np.exp(rng.normal(FAILURES.mean, FAILURES.stdev, (count, n + 1)))
    return [
        Repetition(legs[i], tasks[i], drifted[i], places[i], failures[i], fixed)
        for i in range(count)
    ]


def _simple(maxima: np.ndarray, n: int, alpha: float) -> list[float]:
    """Split conformal: the first n calibrate, the next is new."""
    return [float(maxima[n] > conformal_threshold(maxima[:n], alpha))]


def _above(threshold: Threshold, scores: np.ndarray, steps: np.ndarray) -> float:
    """Whether a band alarms in an episode."""
    return float(any(s > threshold.at(int(t)) for s, t in zip(scores, steps, strict=True)))


def _constant(r: Repetition, alpha: float) -> list[float]:
    return _simple(r.maxima[0], r.n, alpha)


def _band(r: Repetition, alpha: float, shape: Shape | None = None) -> list[float]:
    rest = slice(r.half, r.n)
    curve = calibrate_band(shape or r.shape, r.series[rest], r.steps[rest], alpha)
    return [_above(curve, r.series[r.n], r.steps[r.n])]


def _trimmed_band(r: Repetition, alpha: float) -> list[float]:
    shape = fit_shape(r.series[: r.half], r.steps[: r.half], trim=alpha)
    return _band(r, alpha, shape)


def _mondrian(r: Repetition, alpha: float) -> list[float]:
    """A cell a task; nan where all are too small for a threshold of their own."""
    maxima = {name: values[: r.n] for name, values in zip(TASKS, r.tasks, strict=True)}
    grouped = calibrate_groups(maxima, alpha)
    return [
        float(values[r.n] > grouped.at(0, name)) if name in grouped.groups else math.nan
        for name, values in zip(TASKS, r.tasks, strict=True)
    ]


def _weighted(r: Repetition, alpha: float) -> list[float]:
    w = 2.0 * r.places
    return [float(r.drifted[r.n] > weighted_threshold(r.drifted[: r.n], w[: r.n], w[r.n], alpha))]


def _segments(r: Repetition, alpha: float, decay: float) -> list[float]:
    limit = calibrate_segments([r.maxima[0, : r.n]] * SEGMENTS, alpha, decay)
    new = r.maxima[0, r.n :]
    return [float(any(new[s] > limit.at(0, segment=s) for s in range(SEGMENTS)))]


def _any_leg(r: Repetition, alpha: float, combine: str) -> list[float]:
    maxima = {"a": r.maxima[0, : r.n], "b": r.maxima[1, : r.n]}
    scales = dict(zip("ab", r.fixed.units, strict=True))
    limits = calibrate(maxima, alpha, combine=combine, scales=scales).thresholds
    return [float(r.maxima[0, r.n] > limits["a"] or r.maxima[1, r.n] > limits["b"])]


def _each_leg(r: Repetition, alpha: float) -> list[float]:
    """AND of two alarms at the same inference, each leg with a threshold of its own."""
    limits = [conformal_threshold(m[: r.n], alpha) for m in r.maxima]
    return [float((r.legs[r.n] > limits).all(axis=-1).any())]


def _miss_average(r: Repetition, beta: float) -> list[float]:
    return [float(r.failures[r.n] <= miss_threshold(r.failures[: r.n], beta))]


def _miss_confident(r: Repetition, beta: float) -> list[float]:
    """Whether the threshold misses more than it was to, given these failures."""
    limit = miss_threshold(r.failures[: r.n], beta, DELTA)
    return [float(limit > 0 and FAILURES.cdf(math.log(limit)) > beta)]


def _miss_bound(r: Repetition, delta: float) -> list[float]:
    """Whether the bound lies below the truth."""
    bound = miss_bound(r.failures[: r.n] > FIXED, delta)
    return [float(bound < FAILURES.cdf(math.log(FIXED)))]


def _flipped_band(r: Repetition, alpha: float) -> list[float]:
    """The deviation of calibration with its sign turned, (mu - s) / sigma."""
    flipped = Shape(r.shape.steps, -r.shape.centre, r.shape.width)
    rest = zip(r.series[r.half : r.n], r.steps[r.half : r.n], strict=True)
    height = conformal_threshold(np.array([flipped.deviation(-s, t) for s, t in rest]), alpha)
    return [float(r.shape.deviation(r.series[r.n], r.steps[r.n]) > height)]


def _clipped_rank(r: Repetition, alpha: float) -> list[float]:
    """The largest score where the rank would lie above it."""
    maxima = np.sort(r.maxima[0, : r.n])
    return [float(r.maxima[0, r.n] > maxima[min(conformal_rank(r.n, alpha), r.n) - 1])]


def _interpolated(r: Repetition, alpha: float) -> list[float]:
    """The empirical quantile instead of the rank."""
    return [float(r.maxima[0, r.n] > np.quantile(r.maxima[0, : r.n], 1 - alpha))]


def _per_step(r: Repetition, alpha: float) -> list[float]:
    """A conformal threshold at each moment apart, from the episodes that still run."""
    table, new = r.legs[: r.n, :, 0], r.series[r.n]
    columns = [column[~np.isnan(column)] for column in table.T[: len(new)]]
    limits = [conformal_threshold(c, alpha) if len(c) else math.inf for c in columns]
    return [float((new > limits).any())]


def _unspent(r: Repetition, alpha: float) -> list[float]:
    """All of alpha in each segment."""
    return [float((r.maxima[0, r.n :] > conformal_threshold(r.maxima[0, : r.n], alpha)).any())]


def _pooled(r: Repetition, alpha: float) -> list[float]:
    """One threshold for all tasks, in the liveliest."""
    return [float(r.tasks[-1, r.n] > conformal_threshold(r.tasks[:, : r.n].ravel(), alpha))]


def _split_rate(n: int, alpha: float) -> float:
    """The rate of split conformal for continuous scores; 0 where it is silent."""
    return max(0.0, 1.0 - conformal_rank(n, alpha) / (n + 1))


def _miss_rate(n: int, beta: float) -> float:
    return math.floor((n + 1) * beta + 1e-9) / (n + 1)


def _confident_rate(n: int, beta: float) -> float:
    """P(Binomial(n, beta) < k), the chance that k failures below the threshold are too many."""
    k = tolerance_rank(n, beta, DELTA)
    return sum(math.comb(n, i) * beta**i * (1 - beta) ** (n - i) for i in range(k))


@dataclass(frozen=True)
class Item:
    """One way to calibrate.

    Attributes:
        alarms: of a repetition at an alpha: 1 or 0 a cell, nan where nothing is promised.
        exact: n and alpha -> the rate, where it is known.
        delta: what is promised instead of alpha, where it is.
    """

    alarms: Callable[[Repetition, float], list[float]]
    exact: Callable[[int, float], float] | None = None
    delta: float | None = None


CALIBRATIONS: dict[str, Item] = {
    "constant": Item(_constant, _split_rate),
    "band": Item(_band, lambda n, alpha: _split_rate(n - n // 2, alpha)),
    "trimmed_band": Item(_trimmed_band, lambda n, alpha: _split_rate(n - n // 2, alpha)),
    "mondrian": Item(_mondrian, _split_rate),
    "weighted": Item(_weighted),
    "spending_equal": Item(lambda r, alpha: _segments(r, alpha, 1.0)),
    "spending_halves": Item(lambda r, alpha: _segments(r, alpha, 0.5)),
    "or_bonferroni": Item(lambda r, alpha: _any_leg(r, alpha, "bonferroni")),
    "or": Item(lambda r, alpha: _any_leg(r, alpha, "max"), _split_rate),
    "and_each_leg": Item(_each_leg),
    "and": Item(lambda r, alpha: _simple(r.both, r.n, alpha), _split_rate),
    "learned_sum": Item(lambda r, alpha: _simple(r.learned, r.n, alpha), _split_rate),
    "miss_average": Item(_miss_average, _miss_rate),
    "miss_confident": Item(_miss_confident, _confident_rate, DELTA),
    "miss_bound": Item(_miss_bound),
}

#: What public code does, and what a method promises only elsewhere.
BROKEN: dict[str, Item] = {
    "broken.flipped_band": Item(_flipped_band),
    "broken.clipped_rank": Item(_clipped_rank),
    "broken.interpolated_quantile": Item(_interpolated),
    "broken.per_step": Item(_per_step),
    "broken.unspent_segments": Item(_unspent),
    "broken.unweighted_drift": Item(lambda r, alpha: _simple(r.drifted, r.n, alpha)),
    "broken.pooled_tasks": Item(_pooled),
}
