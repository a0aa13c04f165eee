"""What examining a failure says: kept or rejected and why, when it happened, what mends it."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from regrasp.sim.failures.recover import Recovery
from regrasp.sim.failures.rollout import Checkpoint, Trace


class Reason(StrEnum):
    """Why an attempt is rejected."""

    NOMINAL_FAILS = "nominal_fails"
    NOMINAL_LEAVES = "nominal_leaves"  # it succeeds, and the goal is lost again
    NOMINAL_FRAGILE = "nominal_fragile"
    NOT_OFFERED = "not_offered"  # the scene lacks what the type needs
    NOT_TRIGGERED = "not_triggered"
    SUCCEEDS = "succeeds"
    LATCHED = "latched"  # the goal held for a while
    NON_MONOTONE = "non_monotone"  # a higher severity succeeds
    MILDER = "milder"  # not run, for the highest severity succeeds
    PLAN_FAILS = "plan_fails"  # a wrong plan that does not reach its own goal
    CAUSE_UNPROVEN = "cause_unproven"  # without the cause it fails as well


@dataclass(frozen=True)
class Attempt:
    """One severity of a cell.

    Attributes:
        severity: of the injection; 1 for a wrong plan.
        reason: why it is rejected; None when it passes.
        trace: from the reset on; None where nothing was run.
    """

    severity: float
    reason: Reason | None
    trace: Trace | None


@dataclass(frozen=True)
class Failure:
    """A kept failure; steps count from the reset.

    Attributes:
        severity, trace: as of its :class:`Attempt`.
        injection: what was injected, JSON-serialisable; of a wrong plan, the plan.
        words: ``what`` happened and ``amount``.
        injection_step: the first step at which anything was done.
        first_effect_step: the first at which hand, objects or contacts are not the nominal's.
        predicate_fail_step: from here on some goal's stage stays below what the nominal has got to.
        checkpoint: the failed state that is mended.
        recovery: what became of it.
    """

    severity: float
    trace: Trace
    injection: dict[str, Any]
    words: dict[str, str]
    injection_step: int
    first_effect_step: int
    predicate_fail_step: int
    checkpoint: Checkpoint
    recovery: Recovery


@dataclass
class CellResult:
    """What examining a cell gave.

    Attributes:
        suite, task, init_state, seed, kind: which cell; the task's name.
        nominal: the rollout without failure.
        attempts: one a severity, the highest first.
        failures: those kept of the attempts that passed, the highest severity first.
        sturdy: share of the nominal's shaken followers that succeed; None where none was asked,
            because nothing passed the gates before or because a policy drives.
        proven: whether the actor succeeds without the cause; None where that was not asked.
        seconds: what each part took.
    """

    suite: str
    task: str
    init_state: int
    seed: int
    kind: str
    nominal: Trace
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    sturdy: float | None = None
    proven: bool | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def rejections(self) -> Counter[str]:
        """How many severities were rejected, by reason."""
        return Counter(str(a.reason) for a in self.attempts if a.reason is not None)

    def digest(self) -> str:
        """Twelve hex digits of everything but the time it took: equal seeds, equal digests."""
        parts: list[Any] = [self.suite, self.task, self.init_state, self.seed, self.kind]
        parts += [self.nominal.digest()]
        parts += [(a.severity, a.reason, a.trace and a.trace.digest()) for a in self.attempts]
        for f in self.failures:
            steps = (f.injection_step, f.first_effect_step, f.predicate_fail_step)
            recovery = f.recovery
            found = recovery.trace and recovery.trace.digest()
            parts += [steps, f.checkpoint.step, f.injection, f.words]
            parts += [recovery.outcome, found, recovery.replays, recovery.retries]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
