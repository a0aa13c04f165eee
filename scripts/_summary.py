"""What a demo run comes to: rates, the paired difference and false alarms, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regrasp.episodes.results import Figure
from regrasp.episodes.types import EpisodeHeader
from regrasp.monitors.conformal import false_alarm_band
from regrasp.recovery.paired import Paired

BASE, SUPERVISED = "base", "supervised"
UNPERTURBED = "none"


@dataclass(frozen=True)
class Pair:
    """One episode in both arms; ``kind`` is its perturbation or ``"none"``."""

    id: str
    kind: str
    base: EpisodeHeader
    supervised: EpisodeHeader

    @property
    def outcome(self) -> str:
        """``both``, ``rescued``, ``harmed`` or ``neither``."""
        if self.base.success:
            return "both" if self.supervised.success else "harmed"
        return "rescued" if self.supervised.success else "neither"


@dataclass(frozen=True)
class Summary:
    """Everything the table and the report's first screen say.

    Attributes:
        paired: outcomes of the perturbed pairs.
        unperturbed: outcomes of the unperturbed ones.
        kinds: perturbation -> its own outcomes.
        alpha: bound on false alarms the thresholds were calibrated for.
        false_alarms: unperturbed episodes that the policy alone solves and the monitor
            nevertheless flags, over those it solves.
        band: where chance puts ``false_alarms`` at alpha (binomial, 95 %).
        calibrated_band: likewise, the luck of the calibration set included (beta-binomial).
        alarmed: perturbed episodes with an alarm in the supervised arm.
        rewinds: rewinds in the supervised arm, perturbed episodes.
        caught: perturbed episodes that fail alone, with an alarm, over those that fail.
    """

    paired: Paired
    unperturbed: Paired
    kinds: dict[str, Paired]
    alpha: float
    false_alarms: Figure
    band: tuple[float, float]
    calibrated_band: tuple[float, float]
    alarmed: int
    rewinds: int
    caught: Figure

    def figures(self) -> dict[str, Figure]:
        """The figures of ``docs/results/demo.json``, but for the minutes."""
        p, u = self.paired, self.unperturbed
        low, high = p.interval()
        return {
            "success_base": Figure.rate(p.both + p.harmed, p.n),
            "success_supervised": Figure.rate(p.both + p.rescued, p.n),
            "paired_difference": Figure(p.difference, low, high, p.n, "success rate difference"),
            "false_alarm_rate": self.false_alarms,
            "false_alarm_band": Figure(
                self.alpha, *self.band, self.false_alarms.n, "binomial band at alpha"
            ),
            "false_alarm_band_with_calibration": Figure(
                self.alpha, *self.calibrated_band, self.false_alarms.n, "beta-binomial band"
            ),
            "alpha": Figure(self.alpha, unit="false alarms an episode"),
            "caught": self.caught,
            "alarmed": Figure(self.alarmed, n=p.n, unit="episodes"),
            "rewinds": Figure(self.rewinds, n=p.n, unit="rewinds"),
            "rescued": Figure(p.rescued, n=p.n, unit="episodes"),
            "harmed": Figure(p.harmed, n=p.n, unit="episodes"),
            "rescue_rate": Figure.rate(p.rescued, max(1, p.rescued + p.neither), "of failures"),
            "unperturbed_base": Figure.rate(u.both + u.harmed, u.n),
            "unperturbed_supervised": Figure.rate(u.both + u.rescued, u.n),
            "unperturbed_harmed": Figure(u.harmed, n=u.n, unit="episodes"),
        }


def pair_up(headers: Sequence[EpisodeHeader]) -> list[Pair]:
    """Pairs of the two arms, in order of their ids; half pairs raise ValueError."""
    arms: dict[str, dict[str, EpisodeHeader]] = {}
    for header in headers:
        arms.setdefault(header.extra["pair"], {})[header.extra["arm"]] = header
    half = sorted(key for key, found in arms.items() if set(found) != {BASE, SUPERVISED})
    if half:
        raise ValueError(f"demo: {len(half)} episodes ran in one arm only, as {half[0]!r}")
    return [
        Pair(key, found[BASE].extra["kind"], found[BASE], found[SUPERVISED])
        for key, found in sorted(arms.items())
    ]


def alarmed(header: EpisodeHeader) -> bool:
    """Whether the monitor raised any alarm."""
    return any(entry["kind"] == "alarm" for entry in header.interventions)


def rewinds(header: EpisodeHeader) -> list[dict[str, Any]]:
    """The rewinds of an episode."""
    return [entry for entry in header.interventions if entry["kind"] == "rewind"]


def summarise(pairs: Sequence[Pair], alpha: float, n_calibration: int) -> Summary:
    """Count what happened; both perturbed and unperturbed pairs are needed."""
    shaken = [pair for pair in pairs if pair.kind != UNPERTURBED]
    calm = [pair for pair in pairs if pair.kind == UNPERTURBED]
    if not shaken or not calm:
        raise ValueError(
            f"demo: {len(shaken)} perturbed and {len(calm)} unperturbed episodes; both are needed"
        )
    solved = [pair for pair in calm if pair.base.success]
    if not solved:
        raise ValueError("demo: the policy alone solves no unperturbed episode")
    failed = [pair for pair in shaken if not pair.base.success]
    return Summary(
        paired=_count(shaken),
        unperturbed=_count(calm),
        kinds={
            kind: _count([pair for pair in shaken if pair.kind == kind])
            for kind in sorted({pair.kind for pair in shaken})
        },
        alpha=alpha,
        false_alarms=Figure.rate(
            sum(alarmed(pair.base) for pair in solved), len(solved), "false-alarm rate"
        ),
        band=false_alarm_band(len(solved), alpha),
        calibrated_band=false_alarm_band(len(solved), alpha, n_calibration),
        alarmed=sum(alarmed(pair.supervised) for pair in shaken),
        rewinds=sum(len(rewinds(pair.supervised)) for pair in shaken),
        caught=Figure.rate(
            sum(alarmed(pair.base) for pair in failed), max(1, len(failed)), "of failures"
        ),
    )


def _count(pairs: Sequence[Pair]) -> Paired:
    return Paired.count([p.base.success for p in pairs], [p.supervised.success for p in pairs])
