"""``regrasp monitors coverage``: do calibrations keep their promise where the truth is known?

A repetition draws n calibration episodes and one new episode, calibrates with the library's own
functions and looks whether the new episode alarms. Over repetitions the alarms of one cell
(calibration, alpha, n) are binomial with a rate of at most what was promised, and for some
calibrations with a known rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from regrasp.episodes.results import Figure, write_result
from regrasp.monitors.conformal import (
    TooFewEpisodesWarning,
    conformal_threshold,
    false_alarm_band,
)
from regrasp.monitors.drift import Adaptive
from regrasp.monitors.misses import TooFewFailuresWarning
from regrasp.monitors.mondrian import PooledGroupsWarning
from regrasp.scripts._coverage_items import (
    BROKEN,
    CALIBRATIONS,
    DELTA,
    MEMORY,
    MOMENTS,
    SEGMENTS,
    TASKS,
    Fixed,
    Item,
    Repetition,
    draw,
    largest,
    streams,
)
from rich.console import Console
from rich.table import Table

#: Chance that a study of calibrations which all keep their promise calls any cell outside.
FAMILY = 0.01
#: Adaptive thresholds: episodes calibrated on, episodes of a sequence, rise of the level over it.
ADAPTIVE_N, SEQUENCE, RISE = 200, 1000, 1.5

#: What alpha means to calibrations on failures.
ASKED = {"miss_average": "beta", "miss_confident": "beta", "miss_bound": "delta"}


@dataclass(frozen=True)
class Args:
    """Simulate every calibration on episodes of a known process.

    Attributes:
        repetitions: calibrations a cell, each with a new episode.
        sizes: calibration episodes.
        alphas: bounds promised.
        sequences: sequences of episodes for adaptive thresholds.
        seed: of the simulation.
        result: also write docs/results/<result>.json.
    """

    repetitions: int = 2000
    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500)
    alphas: tuple[float, ...] = (0.01, 0.05, 0.1)
    sequences: int = 100
    seed: int = 0
    result: str | None = None


@dataclass
class Cell:
    """Alarms of one calibration at one alpha and n.

    Attributes:
        name: of the calibration.
        alpha: asked for.
        n: calibration episodes.
        promised: the bound on the rate.
        exact: the rate, where it is known.
        alarms: one 0 or 1 a repetition.
    """

    name: str
    alpha: float
    n: int
    promised: float
    exact: float | None
    alarms: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Share of repetitions that alarmed."""
        return float(np.mean(self.alarms))

    def over(self, rate: float) -> float:
        """How far the observed rate lies above ``rate``, in its binomial standard deviations."""
        if not 0.0 < rate < 1.0:  # a silent threshold: nothing may alarm
            return 0.0 if self.rate == rate else math.inf
        return (self.rate - rate) / math.sqrt(rate * (1 - rate) / len(self.alarms))

    def outside(self, tail: float) -> bool:
        """Whether chance ``tail`` is too small for it, on any side on which something is known."""
        count = len(self.alarms)
        if self.rate > false_alarm_band(count, self.promised, level=1 - 2 * tail)[1]:
            return True
        if self.exact is None:
            return False
        if not 0.0 < self.exact < 1.0:
            return self.rate != self.exact
        low, high = false_alarm_band(count, self.exact, level=1 - 2 * tail)
        return not low <= self.rate <= high


def simulate(args: Args, items: Mapping[str, Item], console: Console | None = None) -> list[Cell]:
    """Every cell of the items in which something is promised."""
    rng = np.random.default_rng(args.seed)
    fixed = Fixed.draw(rng)
    cells = []
    for n in args.sizes:
        found: dict[tuple[str, float, int], Cell] = {}
        done = 0
        while done < args.repetitions:
            count = min(args.repetitions - done, max(1, 20_000 // n))
            for repetition in draw(rng, n, count, fixed):
                _tally(found, repetition, items, args.alphas)
            done += count
        cells += [cell for cell in found.values() if cell.alarms]
        if console is not None:
            console.print(f"n = {n}: {done} repetitions")
    return cells


def _tally(
    found: dict[tuple[str, float, int], Cell],
    repetition: Repetition,
    items: Mapping[str, Item],
    alphas: Sequence[float],
) -> None:
    """Add one repetition to its cells."""
    n = repetition.n
    for name, item in items.items():
        for alpha in alphas:
            for part, alarm in enumerate(item.alarms(repetition, alpha)):
                if (name, alpha, part) not in found:
                    exact = item.exact(n, alpha) if item.exact else None
                    found[name, alpha, part] = Cell(name, alpha, n, item.delta or alpha, exact)
                if not math.isnan(alarm):
                    found[name, alpha, part].alarms.append(alarm)


def tail_of(cells: Sequence[Cell]) -> float:
    """Bonferroni: the chance allowed at each end that is looked at, of all cells together."""
    return FAMILY / sum(1 if cell.exact is None else 3 for cell in cells)


def summarise(cells: Sequence[Cell]) -> dict[str, Figure]:
    """Worst deviation of each calibration, and the rate there."""
    figures = {}
    for name in dict.fromkeys(cell.name for cell in cells):
        mine = [cell for cell in cells if cell.name == name]
        worst = max(mine, key=lambda cell: cell.over(cell.promised))
        count = len(worst.alarms)
        unit = f"binomial sd over the promise, worst of {len(mine)} cells"
        figures[name] = Figure(worst.over(worst.promised), n=count, unit=unit)
        where = f"{ASKED.get(name, 'alpha')} {worst.alpha:g}, n {worst.n}"
        where += "" if worst.promised == worst.alpha else f", delta {worst.promised:g}"
        figures[f"{name}.rate"] = Figure.rate(int(sum(worst.alarms)), count, f"rate at {where}")
        known = [cell for cell in mine if cell.exact]
        if known:
            off = max(abs(cell.over(cell.exact)) for cell in known if cell.exact)
            unit = f"binomial sd from the exact rate, worst of {len(known)} cells"
            figures[f"{name}.from_exact"] = Figure(off, n=count, unit=unit)
    return figures


def adapt(args: Args) -> dict[str, Figure]:
    """Adaptive thresholds on sequences whose level rises, beside a threshold that stays."""
    rng = np.random.default_rng([args.seed, 1])
    calibration = largest(streams(rng, (args.sequences, ADAPTIVE_N)))
    rise = np.linspace(0.0, RISE, SEQUENCE)
    episodes = largest(streams(rng, (args.sequences, SEQUENCE), rise))
    shares, figures = [], {}
    for alpha in args.alphas:
        start = Adaptive(alpha)
        # From Gibbs and Candes (2021), proposition 4.1; it holds for every single sequence.
        bound = (max(alpha, 1 - alpha) + start.gamma) / (start.gamma * SEQUENCE)
        rates, stays = [], []
        for maxima, new in zip(calibration, episodes, strict=True):
            rates.append(_follow(start, maxima, new))
            stays.append(float((new > conformal_threshold(maxima, alpha)).mean()))
        shares += [abs(rate - alpha) / bound for rate in rates]
        unit = f"false alarms a sequence, alpha {alpha:g}"
        figures[f"adaptive.rate_{alpha:g}"] = Figure.mean(rates, unit)
        figures[f"broken.not_adapted.rate_{alpha:g}"] = Figure.mean(stays, unit)
    unit = "of the guaranteed distance, worst sequence"
    return {"adaptive": Figure(max(shares), n=len(shares), unit=unit), **figures}


def _follow(adaptive: Adaptive, maxima: np.ndarray, new: np.ndarray) -> float:
    """Share of false alarms in one sequence of successes."""
    alarms = 0
    for score in new:
        alarmed = bool(score > adaptive.threshold(maxima))
        adaptive = adaptive.after(alarmed)
        alarms += alarmed
    return alarms / len(new)


def study(args: Args, console: Console | None = None) -> dict[str, Figure]:
    """All figures; ``cells_outside`` is 0 when every calibration kept its promise."""
    with warnings.catch_warnings():
        for kind in (TooFewEpisodesWarning, TooFewFailuresWarning, PooledGroupsWarning):
            warnings.simplefilter("ignore", kind)
        cells = simulate(args, CALIBRATIONS | BROKEN, console)
        adapted = adapt(args)
    good = [cell for cell in cells if cell.name in CALIBRATIONS]
    tail = tail_of(good)
    outside = [cell for cell in good if cell.outside(tail)]
    limit = NormalDist().inv_cdf(1 - tail)
    stricter = NormalDist().inv_cdf(1 - 0.05 / len(good))
    worst = max(cell.over(cell.promised) for cell in good)
    return {
        "cells_outside": Figure(len(outside), n=len(good), unit="cells"),
        "limit": Figure(limit, unit="normal sd at the adjusted level"),
        "limit_above_only": Figure(stricter, unit="normal sd, 5 % over all cells, above alone"),
        "worst": Figure(worst, n=len(good), unit="binomial sd over the promise, of all cells"),
        **summarise(cells),
        **adapted,
    }


def main(args: Args) -> None:
    """Simulate, print, write."""
    console = Console()
    figures = study(args, console)
    table = Table("figure", "value", "unit")
    for name, figure in figures.items():
        table.add_row(name, f"{figure.value:.3g}", figure.unit)
    console.print(table)
    if args.result:
        protocol = {
            "repetitions": args.repetitions,
            "sizes": args.sizes,
            "alphas": args.alphas,
            "new_episodes_a_repetition": 1,
            "delta_of_misses": DELTA,
            "family_error": FAMILY,
            "moments": MOMENTS,
            "memory": MEMORY,
            "tasks": TASKS,
            "segments": SEGMENTS,
            "adaptive": [args.sequences, ADAPTIVE_N, SEQUENCE, RISE],
        }
        command = f"regrasp monitors coverage --result {args.result}"
        print(write_result(args.result, command, protocol, [args.seed], figures))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
