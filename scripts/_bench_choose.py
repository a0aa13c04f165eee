"""Which monitor: windows, threshold styles and combinations, chosen on a fold kept for that.

A *candidate* is one number an inference and a way to set its threshold. Candidates are compared by
length-matched TWA on the ``select`` fold, their thresholds set on that fold's own unperturbed
successes; the ``calibrate`` and ``test`` folds play no part. What is chosen is then calibrated on
``calibrate`` and measured on ``test``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.monitors.bands import LEAST, calibrate_band, fit_shape
from regrasp.monitors.conformal import conformal_threshold
from regrasp.monitors.metrics import Outcomes, length_matched
from regrasp.monitors.thresholds import Constant, Threshold
from regrasp.scripts._bench_data import Rollout, of_fold, successes
from regrasp.scripts._bench_scores import UNTEACHABLE, windowed

WINDOWS = (1, 2, 3, 5, 8)
#: Combined legs are in units of what their largest value exceeds in one success of twenty.
USUAL = 0.95
#: Of several legs, the number that counts; legs are in units of what they rarely exceed.
RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "single": lambda legs: legs[0],
    "or": lambda legs: legs.max(axis=0),
    "and": lambda legs: legs.min(axis=0),
    "sum": lambda legs: legs.sum(axis=0),
}

#: Readings of each score: score -> rollout's job -> ``[C]``, nan where there was nothing to say.
Readings = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Candidate:
    """A score, or several as one.

    Attributes:
        legs: names of scores.
        windows: inferences that each one is averaged over.
        rule: a key of :data:`RULES`.
        style: "constant" is one threshold for the whole episode, "band" one for every moment.
    """

    legs: tuple[str, ...]
    windows: tuple[int, ...]
    rule: str = "single"
    style: str = "constant"

    @property
    def name(self) -> str:
        """How tables call it."""
        parts = [f"{leg}/{w}" for leg, w in zip(self.legs, self.windows, strict=True)]
        return f" {self.rule} ".join(parts) + ("" if self.style == "constant" else ", band")


def job(rollout: Rollout) -> str:
    """What a rollout's readings are kept under."""
    return str(rollout.episode.header.extra["job"])


def usual_sizes(
    candidate: Candidate, readings: Readings, reference: Sequence[Rollout]
) -> np.ndarray:
    """What each leg's largest value in an episode stays below in most of ``reference``."""
    sizes = []
    for leg, window in zip(candidate.legs, candidate.windows, strict=True):
        maxima = [windowed(readings[leg][job(r)], window).max() for r in reference]
        sizes.append(max(float(np.quantile(maxima, USUAL)), 1e-12))
    return np.array(sizes)


def series(
    candidate: Candidate, readings: Readings, rollouts: Sequence[Rollout], sizes: np.ndarray
) -> list[np.ndarray]:
    """The candidate's value after every inference of each rollout."""
    rule = RULES[candidate.rule]
    if candidate.rule == "single":
        sizes = np.ones(1)
    values = []
    for rollout in rollouts:
        legs = [
            windowed(readings[leg][job(rollout)], window) / size
            for leg, window, size in zip(candidate.legs, candidate.windows, sizes, strict=True)
        ]
        values.append(rule(np.stack(legs)))
    return values


def outcomes(
    rollouts: Sequence[Rollout], values: Sequence[np.ndarray], limits: Sequence[np.ndarray]
) -> Outcomes:
    """What values ``[C]`` and their thresholds ``[C]`` made of each rollout."""
    alarms = []
    for rollout, value, limit in zip(rollouts, values, limits, strict=True):
        above = np.flatnonzero(value > limit)
        alarms.append(float(rollout.starts[above[0]]) if len(above) else float("nan"))
    return Outcomes(
        values,
        [r.starts for r in rollouts],
        np.array([r.failed for r in rollouts]),
        np.array([r.length for r in rollouts]),
        np.array([r.horizon for r in rollouts]),
        np.array([r.onset for r in rollouts]),
        np.array(alarms),
        [r.group for r in rollouts],
    )


@dataclass(frozen=True)
class Folds:
    """The rollouts of each purpose; ``instruction`` episodes are in none but their own.

    Attributes:
        select: to choose on.
        calibrate: unperturbed successes that set the final thresholds.
        seen: to measure on, tasks that monitors were trained on.
        unseen: to measure on, the other tasks.
        told: wrong instructions, in all test tasks, with the test's unperturbed episodes.
    """

    select: Sequence[Rollout]
    calibrate: Sequence[Rollout]
    seen: Sequence[Rollout]
    unseen: Sequence[Rollout]
    told: Sequence[Rollout]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Folds:
        """Sort a benchmark's rollouts."""
        told = [r for r in rollouts if r.family == UNTEACHABLE]
        rest = [r for r in rollouts if r.family != UNTEACHABLE]
        test = of_fold(rest, "test")
        return cls(
            select=of_fold(rest, "select"),
            calibrate=successes(of_fold(rest, "calibrate")),
            seen=[r for r in test if not r.unseen],
            unseen=[r for r in test if r.unseen],
            told=[*of_fold(told, "test"), *(r for r in test if r.plain)],
        )


class Chooser:
    """Scores candidates on the select fold.

    Args:
        folds: the rollouts.
        readings: of every score.
        alpha: false alarms promised.
    """

    def __init__(self, folds: Folds, readings: Readings, alpha: float) -> None:
        self.folds, self.readings, self.alpha = folds, readings, alpha
        self.good = successes(folds.select)
        # A band is judged with its shape from one half of the successes.
        self.styles = ("constant", "band") if len(self.good) >= 2 * LEAST else ("constant",)
        self._worth: dict[Candidate, float] = {}

    def sizes(self, candidate: Candidate) -> np.ndarray:
        """Units of the candidate's legs, from the select fold."""
        return usual_sizes(candidate, self.readings, self.good)

    def values(self, candidate: Candidate, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """The candidate's values of some rollouts."""
        return series(candidate, self.readings, rollouts, self.sizes(candidate))

    def limits(
        self, candidate: Candidate, good: Sequence[Rollout], rollouts: Sequence[Rollout]
    ) -> list[np.ndarray]:
        """Thresholds at every inference of ``rollouts``, calibrated on ``good``."""
        threshold = self.threshold(candidate, good)
        return [np.array([threshold.at(int(step), r.group) for step in r.starts]) for r in rollouts]

    def threshold(self, candidate: Candidate, good: Sequence[Rollout]) -> Threshold:
        """The candidate's threshold from successes ``good``; a band's shape from the select fold.

        On the select fold itself a band takes its centre and width from one half of the successes.
        """
        values, steps = self.values(candidate, good), [r.starts for r in good]
        if candidate.style == "constant":
            maxima = np.array([value.max() for value in values])
            return Constant(conformal_threshold(maxima, self.alpha), self.alpha, len(maxima))
        whole = self.good
        if good is self.good:
            whole, values, steps = self.good[::2], values[1::2], steps[1::2]
        shape = fit_shape(self.values(candidate, whole), [r.starts for r in whole])
        return calibrate_band(shape, values, steps, self.alpha)

    def worth(self, candidate: Candidate) -> float:
        """Length-matched TWA on the select fold."""
        if candidate not in self._worth:
            rollouts = self.folds.select
            limits = self.limits(candidate, self.good, rollouts)
            found = outcomes(rollouts, self.values(candidate, rollouts), limits)
            self._worth[candidate] = length_matched(found).twa.value
        return self._worth[candidate]

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """The worthiest; the first of equals, so put simple ones first."""
        return max(candidates, key=self.worth)

    def best_single(self, score: str) -> Candidate:
        """A score's own window and style."""
        return self.best(
            [Candidate((score,), (w,), style=style) for style in self.styles for w in WINDOWS]
        )

    def best_pair(self, first: str, second: str, rules: Sequence[str]) -> Candidate:
        """A pair's windows and style."""
        return self.best(
            [
                Candidate((first, second), windows, rule, style)
                for rule in rules
                for style in self.styles
                for windows in itertools.product(WINDOWS, repeat=2)
            ]
        )
