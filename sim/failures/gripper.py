"""Control failures of the gripper: what the fingers are told, and when.

Magnitudes: CureWM's ``insufficient_grip``, ``premature_release`` and ``carry_slip``; AHA's ``slip``
opens the hand four or five steps after a waypoint, its ``grasp`` never closes it; RoboFAC's timing
error closes late.

LIBERO's gripper takes the sign of its command: each control step moves the fingers' set point by an
eighth of their travel, and a command of 0 leaves it. So "half closed" is a matter of time, not of
the command's size, and a weak grip one of the fingers' force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from regrasp.sim.experts.base import OPEN, Phase
from regrasp.sim.failures.base import CONTROL_STEP, Injection, ModelEdit, OnPhase, Spell
from regrasp.sim.perturb import Scene, Trigger


@dataclass(frozen=True)
class EarlyRelease(Spell):
    """The hand opens while it carries. Below about nine control steps it may not let go."""

    kind: ClassVar[str] = "early_release"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The gripper opens for up to 1.2 s while it carries the object."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.CARRY,), after=2))
    steps: int = 24

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Open, whatever the actor says."""
        return with_gripper(action, OPEN)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and for how long."""
        what = "the gripper opened while it was still carrying the object"
        return {"what": what, "amount": self.seconds()}


@dataclass(frozen=True)
class LateClose(Spell):
    """The fingers begin to close later than the actor wants."""

    kind: ClassVar[str] = "late_close"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The gripper closes up to 1 s too late."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.GRASP,)))
    steps: int = 20

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Stay open, whatever the actor says."""
        return with_gripper(action, OPEN)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        return {"what": "the gripper closed too late", "amount": self.seconds()}


@dataclass(frozen=True)
class WeakGrip(ModelEdit):
    """The fingers' force is limited, from the grasp on.

    LIBERO's objects weigh some ten grams, so almost any force that closes the fingers holds them:
    below 1 N the fingers' own friction keeps them from closing.

    Attributes:
        least: force at severity 1, as a share of the gripper's 20 N.
    """

    kind: ClassVar[str] = "weak_grip"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The gripper presses with as little as 3 % of its force."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.GRASP,)))
    least: float = 0.03

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Limit the force."""
        fingers = np.array(scene.env.problem.robots[0]._ref_joint_gripper_actuator_indexes)
        limits = scene.env.model.actuator_forcerange[fingers]
        self.write(scene, "actuator_forcerange", fingers, limits * self._share())

    def _share(self) -> float:
        return 1.0 - (1.0 - self.least) * self.severity

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how weak the grip was."""
        amount = f"{100 * self._share():.0f} % of its force"
        return {"what": "the gripper pressed too weakly", "amount": amount}


@dataclass(frozen=True)
class CarrySlip(Injection):
    """The grip loosens in pulses while the hand is jerked sideways (CureWM's ``carry_slip``).

    Its ``max(1, round(3 s))`` pulses and N(0, 0.5 s) of lateral action; a pulse opens for up to
    eight control steps, which lets anything go, and four of closing follow it.
    """

    kind: ClassVar[str] = "carry_slip"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = (
        "The grip loosens in up to three pulses of 0.4 s while the hand jerks sideways."
    )
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.CARRY,), after=2))
    pulses: int = 3
    pulse: int = 8
    pause: int = 4
    jerk: float = 0.5

    @property
    def duration(self) -> int:
        """Control steps of all pulses and the pauses after them."""
        count, length = self._shape()
        return count * (length + self.pause) if length else 0

    def _shape(self) -> tuple[int, int]:
        """How many pulses, and how long each."""
        return max(1, round(self.pulses * self.severity)), round(self.pulse * self.severity)

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Each step's jerk in the plane, of unit deviation."""
        steps = self.pulses * (self.pulse + self.pause)
        return {"jerk": rng.normal(size=(steps, 2)).round(6).tolist()}

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Loosen and jerk within a pulse."""
        if i % (self._shape()[1] + self.pause) >= self._shape()[1]:
            return action
        action = with_gripper(action, OPEN)
        action[:2] += self.jerk * self.severity * np.array(drawn["jerk"][i], np.float32)
        return np.clip(action, -1.0, 1.0)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how often."""
        count, length = self._shape()
        amount = f"{count} time{'s' if count > 1 else ''} for {length * CONTROL_STEP:.1f} s"
        return {"what": "the object slipped in the gripper while it was carried", "amount": amount}


def with_gripper(action: np.ndarray, command: float) -> np.ndarray:
    """A copy of an action with another gripper command."""
    action = action.copy()
    action[6] = command
    return action
