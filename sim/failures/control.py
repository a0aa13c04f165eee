"""Control failures in time: motions that overshoot, swing, freeze, come late, never, or too fast.

Magnitudes: CureWM's ``approach_overshoot`` (0.6 s) and ``contact_oscillation`` (0.7 s on z) are
amounts of action at its severity s, on open-loop replays; here the actor goes on correcting, so
what CureWM adds for a moment lasts longer where it would otherwise vanish. FailSafe's no-op is
:class:`Freeze`. No public generator delays, drops or repeats actions or changes their speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from regrasp.sim.experts.base import Phase
from regrasp.sim.failures.base import CONTROL_STEP, Injection, OnPhase, Spell
from regrasp.sim.failures.gripper import with_gripper
from regrasp.sim.perturb import Scene, Trigger

#: From here on the actor is about to touch something, or does.
TOUCHING = (
    Phase.DESCEND,
    Phase.GRASP,
    Phase.PUSH,
    Phase.PULL_OPEN,
    Phase.PUSH_CLOSED,
    Phase.TURN,
)


@dataclass(frozen=True)
class Overshoot(Spell):
    """The hand does not brake: it goes on in the plane as it came, at full speed.

    CureWM adds 0.6 s of action along the approach; a tenth of a second of full action is about two
    centimetres.
    """

    kind: ClassVar[str] = "overshoot"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = (
        "The hand shoots past its goal: it goes on the way it came for up to 0.6 s at full speed."
    )
    when: Trigger = field(default_factory=lambda: OnPhase(TOUCHING))
    steps: int = 12
    lookback: int = 20

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Remember which way the hand came."""
        way = np.sum(scene.wanted[-self.lookback :], axis=0)[:2]
        size = float(np.linalg.norm(way))
        scene.memory[self] = way / size if size > 0.0 else np.array([1.0, 0.0])

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Go on in the plane; height, turn and fingers are the actor's."""
        action = action.copy()
        action[:2] = scene.memory[self]
        return action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and for how long."""
        return {"what": "the hand shot past its goal", "amount": self.seconds()}


@dataclass(frozen=True)
class Oscillation(Injection):
    """The hand swings up and down in contact (CureWM's ``contact_oscillation``, 0.7 s on z).

    Attributes:
        swing: amplitude at severity 1, action units; CureWM's 0.7 is severity 0.7.
        period: control steps.
    """

    kind: ClassVar[str] = "oscillation"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = (
        "The hand swings up and down in contact for 2 s, by up to full action at 1.25 Hz."
    )
    when: Trigger = field(default_factory=lambda: OnPhase(TOUCHING))
    steps: int = 40
    swing: float = 1.0
    period: int = 16

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Where in the swing it begins, radians."""
        return {"start": float(rng.uniform(0.0, 2 * np.pi))}

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Add the swing."""
        angle = drawn["start"] + 2 * np.pi * i / self.period
        action = action.copy()
        action[2] = np.clip(action[2] + self.severity * self.swing * np.sin(angle), -1.0, 1.0)
        return action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how strongly."""
        amount = f"{100 * self.severity:.0f} % of full action"
        return {"what": "the hand swung up and down in contact", "amount": amount}


@dataclass(frozen=True)
class Freeze(Spell):
    """The arm stands still; the fingers obey."""

    kind: ClassVar[str] = "freeze"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The arm stands still for up to 1.2 s."
    when: Trigger = field(default_factory=lambda: OnPhase(TOUCHING))
    steps: int = 24

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Ask for no motion."""
        action = action.copy()
        action[:6] = 0.0
        return action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and for how long."""
        return {"what": "the arm stood still", "amount": self.seconds()}


@dataclass(frozen=True)
class Delay(Injection):
    """Every action comes later than the actor sent it.

    Attributes:
        late: control steps at severity 1.
    """

    kind: ClassVar[str] = "delay"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "Every action is executed up to 0.6 s late."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH,)))
    late: int = 12

    def _late(self) -> int:
        return round(self.severity * self.late)

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """The action of some steps ago; before there is one, none."""
        late = self._late()
        if len(scene.wanted) > late:
            return scene.wanted[-1 - late] if late else action
        return _still(action)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how late."""
        return {"what": "the actions came late", "amount": f"{self._late() * CONTROL_STEP:.2f} s"}


@dataclass(frozen=True)
class DroppedActions(Injection):
    """Some actions never arrive: in those control steps arm and fingers are told nothing.

    Attributes:
        most: share of lost actions at severity 1.
    """

    kind: ClassVar[str] = "dropped_actions"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "Up to 90 % of the actions are lost."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH,)))
    most: float = 0.9

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Seed of which are lost: of the same draw, what is lost stays lost as severity grows."""
        return {"seed": int(rng.integers(2**31))}

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Lose it or not."""
        chance = np.random.default_rng([drawn["seed"], i]).random()
        return with_gripper(_still(action), 0.0) if chance < self.severity * self.most else action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how often."""
        amount = f"{100 * self.severity * self.most:.0f} % of them"
        return {"what": "actions were lost on the way to the arm", "amount": amount}


@dataclass(frozen=True)
class RepeatedActions(Injection):
    """The arm gets a fresh action only now and then and repeats it in between.

    Attributes:
        most: control steps for which an action is repeated at severity 1.
    """

    kind: ClassVar[str] = "repeated_actions"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "Each action is executed over and over, for up to 0.6 s."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH,)))
    most: int = 12

    def _hold(self) -> int:
        return 1 + round(self.severity * (self.most - 1))

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """The last fresh action."""
        age = i % self._hold()
        return scene.wanted[-1 - age] if age else action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and for how long each time."""
        amount = f"{self._hold() * CONTROL_STEP:.2f} s each"
        return {"what": "stale actions were executed again and again", "amount": amount}


@dataclass(frozen=True)
class TooFast(Injection):
    """Every motion is larger than asked for, up to the controller's limit.

    Attributes:
        gain: further factor on the motion at severity 1.
    """

    kind: ClassVar[str] = "too_fast"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The arm moves up to six times as far as each action asks."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH,)))
    gain: float = 5.0

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Enlarge the motion."""
        return _scaled(action, 1.0 + self.gain * self.severity)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        factor = 1.0 + self.gain * self.severity
        return {"what": "the arm moved too fast", "amount": f"{factor:.1f} times"}


@dataclass(frozen=True)
class TooSlow(Injection):
    """Every motion is smaller than asked for.

    Attributes:
        least: factor on the motion at severity 1.
    """

    kind: ClassVar[str] = "too_slow"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The arm moves as little as a tenth of what each action asks."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH,)))
    least: float = 0.1

    def _factor(self) -> float:
        return 1.0 - (1.0 - self.least) * self.severity

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Shrink the motion."""
        return _scaled(action, self._factor())

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        return {"what": "the arm moved too slowly", "amount": f"{100 * self._factor():.0f} %"}


def _still(action: np.ndarray) -> np.ndarray:
    """A copy of an action without motion."""
    return _scaled(action, 0.0)


def _scaled(action: np.ndarray, factor: float) -> np.ndarray:
    """A copy of an action with its motion scaled, within the controller's limits."""
    action = action.copy()
    action[:6] = np.clip(action[:6] * factor, -1.0, 1.0)
    return action
