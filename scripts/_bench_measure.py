"""The benchmark's figures: every score and the chosen monitor, on what nothing was chosen on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.results import Figure
from regrasp.monitors.metrics import (
    EARLY,
    Outcomes,
    auroc,
    before_onset_share,
    lead_fraction,
    lead_fractions,
    length_matched,
    twa,
    twa_difference,
)
from regrasp.scripts._bench_choose import Candidate, Chooser, outcomes
from regrasp.scripts._bench_data import Rollout, successes

#: Alphas at which the promise is compared with what is observed.
ALPHAS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)

#: Fewer failures than this have no table row of their own.
FEWEST = 5


@dataclass(frozen=True)
class Entry:
    """One line of the leaderboard.

    Attributes:
        key: its figures' first word.
        candidate: what was chosen for it.
        samples: chunks that the policy is asked for.
        cost_ms: of each of many updates.
    """

    key: str
    candidate: Candidate
    samples: int
    cost_ms: np.ndarray


def measure(chooser: Chooser, entries: Sequence[Entry]) -> dict[str, Figure]:
    """All figures of the entries; those of seen tasks have no prefix but the entry's key."""
    figures: dict[str, Figure] = {}
    for entry in entries:
        for prefix, rollouts in (("", chooser.folds.seen), ("unseen.", chooser.folds.unseen)):
            found = judged(chooser, entry.candidate, rollouts)
            for name, figure in of_outcomes(found).items():
                figures[f"{prefix}{entry.key}.{name}"] = figure
            figures[f"{prefix}{entry.key}.false_alarm_rate"] = false_alarms(found, rollouts)
        figures[f"{entry.key}.p99_ms"] = Figure(
            float(np.quantile(entry.cost_ms, 0.99)), n=len(entry.cost_ms), unit="ms"
        )
        figures[f"{entry.key}.samples"] = Figure(entry.samples, unit="chunks an inference")
    return figures


def judged(chooser: Chooser, candidate: Candidate, rollouts: Sequence[Rollout]) -> Outcomes:
    """A candidate, calibrated on the calibration fold, on some rollouts."""
    limits = chooser.limits(candidate, chooser.folds.calibrate, rollouts)
    return outcomes(rollouts, chooser.values(candidate, rollouts), limits)


def of_outcomes(found: Outcomes) -> dict[str, Figure]:
    """The leaderboard's figures."""
    matched = length_matched(found)
    early = lead_fractions(found) <= EARLY
    figures = {
        "twa": twa(found),
        "twa_length_matched": matched.twa,
        "auroc": auroc(found),
        "auroc_length_matched": matched.auroc,
        "tpr": _rate(found.alarmed & found.failed, found.failed),
        "tpr_length_matched": matched.tpr,
        "tnr": _rate(~found.alarmed & ~found.failed, ~found.failed),
        "lead_fraction": lead_fraction(found),
        "early_share": Figure.rate(int(early.sum()), len(early), "of failures"),
    }
    if (found.alarmed & found.failed).any():
        figures["before_onset_share"] = before_onset_share(found)
    return figures


def _rate(hits: np.ndarray, of: np.ndarray) -> Figure:
    """A rate with Wilson's interval: a bootstrap has none where all or none are hits."""
    return Figure.rate(int(hits.sum()), int(of.sum()), "of episodes")


def false_alarms(found: Outcomes, rollouts: Sequence[Rollout]) -> Figure:
    """Unperturbed successes that alarmed: what alpha promises."""
    good = np.array([r.plain and not r.failed for r in rollouts])
    return Figure.rate(int((found.alarmed & good).sum()), int(good.sum()), "of plain successes")


def differences(
    chooser: Chooser, entries: Mapping[str, Entry], baselines: Sequence[str]
) -> dict[str, Figure]:
    """The default's length-matched TWA less each baseline's, paired."""
    figures = {}
    for prefix, rollouts in (("", chooser.folds.seen), ("unseen.", chooser.folds.unseen)):
        mine = judged(chooser, entries["default"].candidate, rollouts)
        for key in baselines:
            other = judged(chooser, entries[key].candidate, rollouts)
            figures[f"{prefix}default_minus_{key}.twa_length_matched"] = twa_difference(mine, other)
    return figures


def by_kind(chooser: Chooser, candidate: Candidate) -> dict[str, Figure]:
    """What the default sees and does not see: by family, and by severity, of all test tasks."""
    rollouts = [*chooser.folds.seen, *chooser.folds.unseen]
    found = judged(chooser, candidate, rollouts)
    told = judged(chooser, candidate, chooser.folds.told)
    figures: dict[str, Figure] = {}
    parts = {f"family.{f}": _where(rollouts, "family", f) for f in _values(rollouts, "family")}
    parts |= {
        f"severity.{s:g}": _where(rollouts, "severity", s)
        for s in _values(rollouts, "severity")
        if s > 0
    }
    for name, part in parts.items():
        figures |= _of_part(name, found, part)
    instruction = np.array([r.family == "instruction" for r in chooser.folds.told])
    return figures | _of_part("family.instruction", told, instruction)


def _values(rollouts: Sequence[Rollout], field: str) -> list:
    return sorted({getattr(r, field) for r in rollouts})


def _where(rollouts: Sequence[Rollout], field: str, value: object) -> np.ndarray:
    return np.array([getattr(r, field) == value for r in rollouts])


def _of_part(name: str, found: Outcomes, part: np.ndarray) -> dict[str, Figure]:
    """Detected failures of a part, early ones, and successes of it that alarmed."""
    failed, good = part & found.failed, part & ~found.failed
    figures = {}
    if good.sum() >= FEWEST:
        quiet = int((good & found.alarmed).sum())
        figures[f"default.{name}.alarmed_success"] = Figure.rate(
            quiet, int(good.sum()), "of successes"
        )
    if failed.sum() >= FEWEST:
        hits = int((failed & found.alarmed).sum())
        figures[f"default.{name}.tpr"] = Figure.rate(hits, int(failed.sum()), "of failures")
        span = found.lengths - found.onset
        early = failed & found.alarmed & (found.alarms - found.onset <= span / 3)
        figures[f"default.{name}.early_share"] = Figure.rate(
            int(early.sum()), int(failed.sum()), "of failures"
        )
    return figures


def promises(chooser: Chooser, candidate: Candidate) -> dict[float, tuple[int, int, int]]:
    """alpha -> (plain successes of seen test tasks that alarmed, how many there are, n)."""
    good = successes(chooser.folds.seen)
    result = {}
    for alpha in ALPHAS:
        other = Chooser(chooser.folds, chooser.readings, alpha)
        found = judged(other, candidate, good)
        result[alpha] = (int(found.alarmed.sum()), len(good), len(chooser.folds.calibrate))
    return result
