"""Control failures in space: the hand goes beside where the actor wants it, or turned.

A servo would correct a displacement, so the offset is in the loop. Part of it is a bias on the
action: a law with the experts' gains comes to rest where its own action cancels the bias, at
``bias * POS_UNIT / POS_GAIN``. That ends at 0.4 units (9 mm, 0.2 rad): actions are limited to 1, so
a larger bias would leave the law no strength to catch up with what it follows, and one above 1
would carry the hand away. The rest is a bias on the proprioception, which a law that servoes on the
hand's pose turns into exactly that displacement. Whoever goes by pictures alone gets the first part
only.

Magnitudes: AHA's translation is 0.1 m by default and its rotation 0.1 pi (0.5 m and 1.57 rad in its
task files); FailSafe's 0.1 m and 1 rad; RoboFAC's reach is off by 5 to 7 cm, its push by 17 cm;
LabRobFail's position by 3 cm in the plane, its angle by 30 to 60 degrees; CureWM's wrist tilts by
0.8 of action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mujoco
import numpy as np
from regrasp.sim.experts.base import POS_GAIN, POS_UNIT, ROT_GAIN, ROT_UNIT, Phase
from regrasp.sim.failures.base import Injection, OnPhase
from regrasp.sim.perturb import Scene, Trigger
from regrasp.sim.transforms import axis_angle_to_quat, quat_to_axis_angle

#: Up to the moment when the object is in the hand, and for as long as a fixture is moved.
REACHING = (
    Phase.APPROACH,
    Phase.DESCEND,
    Phase.GRASP,
    Phase.REOPEN,
    Phase.PUSH,
    Phase.PULL_OPEN,
    Phase.PUSH_CLOSED,
    Phase.TURN,
)

#: Largest bias on the action, and the metres and radians that it amounts to.
_MOST = 0.4
_MOST_SHIFT = _MOST * POS_UNIT / POS_GAIN
_MOST_TURN = 0.5 * _MOST * ROT_UNIT / ROT_GAIN

#: The way an axis points, seen from the robot: increasing, decreasing.
_WAYS = {0: ("forward", "back"), 1: ("left", "right"), 2: ("high", "low")}


@dataclass(frozen=True)
class Offset(Injection):
    """Base: while the actor is in ``during``, the hand's pose is off by :meth:`shift`.

    Attributes:
        size: metres or radians at severity 1.
        during: phases; with the first other one it is over.
    """

    family: ClassVar[str] = "control"
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH, Phase.DESCEND)))
    size: float = 0.06
    during: tuple[int, ...] = REACHING

    def shift(self, scene: Scene, drawn: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Direction of the displacement and of the turn, world ``[3]`` each; one of them zero."""
        raise NotImplementedError

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Add the bias on the action."""
        move, turn = self.shift(scene, drawn)
        action = action.copy()
        action[:3] += self.severity * min(self.size, _MOST_SHIFT) * move * (POS_GAIN / POS_UNIT)
        action[3:6] += self.severity * min(self.size, _MOST_TURN) * turn * (ROT_GAIN / ROT_UNIT)
        return np.clip(action, -1.0, 1.0)

    def see(
        self, scene: Scene, observation: dict[str, Any], drawn: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Take the hand to be where the rest of the offset would bring it back from."""
        move, turn = self.shift(scene, drawn)
        rest = -self.severity * max(self.size - _MOST_SHIFT, 0.0) * move
        back = -self.severity * max(self.size - _MOST_TURN, 0.0) * turn
        return moved(observation, rest, back)

    def over(self, scene: Scene) -> bool:
        """With the first phase that is not in ``during``."""
        return scene.phase not in self.during


@dataclass(frozen=True)
class _Along(Offset):
    """Base: along one world axis, either way."""

    axis: ClassVar[int]

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Which way."""
        return {"sign": int(rng.choice([-1, 1]))}

    def shift(self, scene: Scene, drawn: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Along the axis."""
        return drawn["sign"] * np.eye(3)[self.axis], np.zeros(3)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        way = _WAYS[self.axis][drawn["sign"] < 0]
        what = f"the hand was too {way}" if self.axis == 2 else f"the hand was too far {way}"
        return {"what": what, "amount": f"{100 * self.severity * self.size:.1f} cm"}


@dataclass(frozen=True)
class OffsetX(_Along):
    """Nearer to or farther from the robot than wanted."""

    kind: ClassVar[str] = "offset_x"
    definition: ClassVar[str] = (
        "The hand reaches up to 6 cm too far or too short, seen from the robot."
    )
    axis: ClassVar[int] = 0


@dataclass(frozen=True)
class OffsetY(_Along):
    """To one side of what is wanted."""

    kind: ClassVar[str] = "offset_y"
    definition: ClassVar[str] = "The hand reaches up to 6 cm beside where it should, left or right."
    axis: ClassVar[int] = 1


@dataclass(frozen=True)
class OffsetZ(_Along):
    """Above or below what is wanted."""

    kind: ClassVar[str] = "offset_z"
    definition: ClassVar[str] = "The hand reaches up to 6 cm too high or too low."
    axis: ClassVar[int] = 2


@dataclass(frozen=True)
class _About(Offset):
    """Base: about one world axis, either way."""

    axis: ClassVar[int]
    size: float = 1.0

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Which way."""
        return {"sign": int(rng.choice([-1, 1]))}

    def shift(self, scene: Scene, drawn: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """About the axis."""
        return np.zeros(3), drawn["sign"] * np.eye(3)[self.axis]

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        what = f"the hand was turned about the {'xyz'[self.axis]} axis"
        return {"what": what, "amount": _degrees(self.severity * self.size)}


@dataclass(frozen=True)
class RotationX(_About):
    """Tipped to the side."""

    kind: ClassVar[str] = "rotation_x"
    definition: ClassVar[str] = "The hand is tipped sideways by up to 1 rad while it reaches."
    axis: ClassVar[int] = 0


@dataclass(frozen=True)
class RotationY(_About):
    """Tipped forward or back."""

    kind: ClassVar[str] = "rotation_y"
    definition: ClassVar[str] = "The hand is tipped forward or back by up to 1 rad as it reaches."
    axis: ClassVar[int] = 1


@dataclass(frozen=True)
class RotationZ(_About):
    """Turned about the vertical, so that the fingers close across the wrong direction."""

    kind: ClassVar[str] = "rotation_z"
    definition: ClassVar[str] = "The hand is turned about the vertical by up to 1 rad."
    axis: ClassVar[int] = 2


@dataclass(frozen=True)
class ApproachOffset(Offset):
    """The hand stops short of the object, or passes it, along its own way there."""

    kind: ClassVar[str] = "approach_offset"
    definition: ClassVar[str] = (
        "The hand stops up to 8 cm short of the object, or goes past it, on its way there."
    )
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.APPROACH,)))
    size: float = 0.08

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Short (-1) or past (+1)."""
        return {"sign": int(rng.choice([-1, 1]))}

    def applies(self, scene: Scene) -> bool:
        """There is an object to go to."""
        return scene.target is not None

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Remember the way to the object, in the plane."""
        way = scene.position() - scene.hand()
        way[2] = 0.0
        scene.memory[self] = way / max(float(np.linalg.norm(way)), 1e-9)

    def shift(self, scene: Scene, drawn: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Along that way."""
        return drawn["sign"] * scene.memory[self], np.zeros(3)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        short = drawn["sign"] < 0
        what = "the hand stopped short of the object" if short else "the hand went past the object"
        return {"what": what, "amount": f"{100 * self.severity * self.size:.1f} cm"}


@dataclass(frozen=True)
class PlaceOffset(Offset):
    """The object is carried to the wrong spot."""

    kind: ClassVar[str] = "place_offset"
    definition: ClassVar[str] = "The object is put down up to 15 cm beside where it belongs."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.CARRY, Phase.PLACE)))
    size: float = 0.15
    during: tuple[int, ...] = (Phase.LIFT, Phase.CARRY, Phase.PLACE, Phase.RELEASE)

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction in the table plane, radians."""
        return {"direction": float(rng.uniform(-np.pi, np.pi))}

    def shift(self, scene: Scene, drawn: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """That way."""
        return _planar(drawn["direction"]), np.zeros(3)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        x, y, _ = _planar(drawn["direction"])
        way = _WAYS[0][int(x < 0)] if abs(x) > abs(y) else _WAYS[1][int(y < 0)]
        what = f"the object was put down too far {way}"
        return {"what": what, "amount": f"{100 * self.severity * self.size:.1f} cm"}


@dataclass(frozen=True)
class WristTilt(Offset):
    """The wrist tips over while it carries (CureWM's ``wrist_tilt``)."""

    kind: ClassVar[str] = "wrist_tilt"
    definition: ClassVar[str] = "The wrist tilts by up to 1.2 rad while it carries the object."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.CARRY,)))
    size: float = 1.2
    during: tuple[int, ...] = (Phase.LIFT, Phase.CARRY, Phase.PLACE, Phase.RELEASE)

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction of the horizontal axis, radians."""
        return {"direction": float(rng.uniform(-np.pi, np.pi))}

    def shift(self, scene: Scene, drawn: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """About that axis."""
        return np.zeros(3), _planar(drawn["direction"])

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and by how much."""
        what = "the wrist tilted while it carried the object"
        return {"what": what, "amount": _degrees(self.severity * self.size)}


def moved(observation: dict[str, Any], by: np.ndarray, turn: np.ndarray) -> dict[str, Any]:
    """An observation whose ``state`` has the hand elsewhere.

    Args:
        observation: with ``state`` as of :data:`regrasp.episodes.types.LIBERO_STATE`.
        by: metres, world ``[3]``.
        turn: world axis-angle ``[3]``, radians.
    """
    if not (np.any(by) or np.any(turn)):
        return observation
    state = observation["state"].copy()
    state[:3] += by
    if np.any(turn):
        turned = np.zeros(4)
        facing = axis_angle_to_quat(state[3:6].astype(float))
        mujoco.mju_mulQuat(turned, axis_angle_to_quat(turn), facing)
        state[3:6] = quat_to_axis_angle(turned)
    return {**observation, "state": state}


def _planar(direction: float) -> np.ndarray:
    """Unit vector ``[3]`` in the table plane."""
    return np.array([np.cos(direction), np.sin(direction), 0.0])


def _degrees(angle: float) -> str:
    return f"{np.degrees(angle):.0f} degrees"
