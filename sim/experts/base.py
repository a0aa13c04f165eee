"""What an expert is: phases, the skill interface, and the servo law that all skills share.

An expert reads privileged simulator state and answers with one ordinary action (OSC_POSE deltas,
1.0 = 0.05 m or 0.5 rad a control step at 20 Hz, gripper -1 open and +1 close). Its actions are
imitated by an image policy, so every skill is a smooth feedback law on the present state; what it
remembers is a bit or two of hysteresis, never a trajectory. Any state that a noisy or learned
policy reaches can therefore be labelled by calling :meth:`Expert.act` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from regrasp.sim.experts.scene import Scene

OPEN, CLOSE = -1.0, 1.0

#: Proportional gains. The controller is uncoupled: a standing orientation error (friction in the
#: wrist) pulls the hand up to 0.013 m off its position. A stiff position and a soft orientation
#: leave the small error where it does no harm.
POS_GAIN, ROT_GAIN = 2.2, 0.5

#: Metres and radians of one unit of action (robosuite OSC_POSE ``output_max``).
POS_UNIT, ROT_UNIT = 0.05, 0.5

#: Largest rotation component of an action.
_MOST_TURN = 0.5

#: Present orientation of the hand in every LIBERO initial state, give or take 0.05 rad: pointing
#: down, tilted 0.057 rad about world y, fingers closing along world y. Keeping the tilt means no
#: rotation is asked for at the start, and keeps the axis-angle state away from its cut at pi.
_TILT = 0.057
NOMINAL = np.array(
    [
        [0.0, np.cos(_TILT), -np.sin(_TILT)],
        [1.0, 0.0, 0.0],
        [0.0, -np.sin(_TILT), -np.cos(_TILT)],
    ]
)


class Phase(IntEnum):
    """What the expert is doing; the number is what episodes store under ``phase``."""

    APPROACH = 0
    DESCEND = 1
    GRASP = 2
    LIFT = 3
    CARRY = 4
    PLACE = 5
    RELEASE = 6
    RETREAT = 7
    PUSH = 8
    PULL_OPEN = 9
    PUSH_CLOSED = 10
    TURN = 11
    REOPEN = 12
    DONE = 13


@dataclass(frozen=True)
class Command:
    """What a skill wants now: a hand pose to move towards, and the fingers.

    Attributes:
        phase: label of this step.
        pos: world position for the grip site, metres ``[3]``; None holds still.
        rot: wanted orientation of the grip site, world, ``[3, 3]``.
        gripper: OPEN or CLOSE.
        xy_scale: factor in [0, 1] on the horizontal motion (rise first, then move over).
        speed: largest action component, at most 1.
        turn: gain on the orientation error.
    """

    phase: Phase
    pos: np.ndarray | None
    rot: np.ndarray
    gripper: float
    xy_scale: float = 1.0
    speed: float = 1.0
    turn: float = ROT_GAIN


class Skill(Protocol):
    """One sub-task of an expert."""

    name: str

    def satisfied(self, scene: Scene) -> bool:
        """Whether nothing is left to do for this sub-task, the hand's withdrawal included."""
        ...

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""
        ...

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """World positions of what is manipulated and of where it shall go, ``[3]`` each."""
        ...

    def reset(self) -> None:
        """Forget everything remembered."""
        ...


def rotation_z(yaw: float) -> np.ndarray:
    """Rotation by ``yaw`` radians about world z, ``[3, 3]``."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def rotation_vector(rot: np.ndarray) -> np.ndarray:
    """Axis-angle vector of a rotation matrix, radians ``[3]``; the angle lies in [0, pi]."""
    cos = np.clip((np.trace(rot) - 1.0) / 2.0, -1.0, 1.0)
    angle = float(np.arccos(cos))
    skew = np.array([rot[2, 1] - rot[1, 2], rot[0, 2] - rot[2, 0], rot[1, 0] - rot[0, 1]]) / 2.0
    norm = float(np.linalg.norm(skew))
    if angle < 1e-6:
        return skew
    if norm > 1e-6:
        return skew / norm * angle
    # Half a turn: the axis is the largest column of R + I.
    column = (rot + np.eye(3))[:, int(np.argmax(np.diag(rot)))]
    return column / np.linalg.norm(column) * angle


def wrap(angle: float, period: float = np.pi) -> float:
    """``angle`` brought into ``[-period/2, period/2)``; a gripper is symmetric under pi."""
    return float((angle + period / 2) % period - period / 2)


def servo(command: Command, pos: np.ndarray, rot: np.ndarray) -> np.ndarray:
    """Proportional law from a command to an action float32 ``[7]``.

    OSC_POSE's goal is the present pose plus the action's delta. The action is limited in norm, not
    component by component, so that the hand moves straight.
    """
    action = np.zeros(7)
    if command.pos is not None:
        error = (command.pos - pos) * (POS_GAIN / POS_UNIT)
        error[:2] *= command.xy_scale
        for part in (slice(0, 2), slice(2, 3)):
            norm = float(np.linalg.norm(error[part]))
            if norm > command.speed:
                error[part] *= command.speed / norm
        action[:3] = error
    turn = rotation_vector(command.rot @ rot.T) * (command.turn / ROT_UNIT)
    norm = float(np.linalg.norm(turn))
    if norm > _MOST_TURN:
        turn *= _MOST_TURN / norm
    action[3:6] = turn
    action[6] = command.gripper
    return action.astype(np.float32)


def funnel(
    pos: np.ndarray, target: np.ndarray, clear_z: float, lateral: float, slack: float = 0.010
) -> tuple[np.ndarray, float]:
    """Come down vertically onto a target: height as a continuous function of the lateral error.

    Args:
        pos: present position of the hand, metres ``[3]``.
        target: where the hand shall end, metres ``[3]``.
        clear_z: height at which the hand may travel sideways.
        lateral: lateral error, metres (may include a term for the yaw error).
        slack: lateral error below which the hand may be all the way down.

    Returns:
        The position to servo to, and the factor on the horizontal motion: zero while the hand is
        far below the height that its lateral error asks for, so that it rises first.
    """
    rise = max(0.0, clear_z - target[2])
    z = target[2] + float(np.clip(5.0 * (lateral - slack), 0.0, rise))
    scale = float(np.clip(1.0 - (z - pos[2] - 0.015) / 0.03, 0.0, 1.0))
    return np.array([target[0], target[1], z]), scale


class Expert:
    """Runs a sequence of skills: the first that is not satisfied acts.

    Attributes:
        phase: label of the last action.
        subtask: name of the skill that made it.
        target_pos: world position of what is being manipulated, metres ``[3]``.
        goal_pos: world position of where it shall go, metres ``[3]``.
        done: whether every skill was satisfied at the last call.
    """

    def __init__(self, scene: Scene, skills: list[Skill]) -> None:
        self.scene = scene
        self.skills = skills
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered; call it at the start of an episode."""
        for skill in self.skills:
            skill.reset()
        self.scene.reset()
        self.phase = Phase.APPROACH
        self.subtask = self.skills[0].name
        self.target_pos = np.zeros(3)
        self.goal_pos = np.zeros(3)
        self.done = False

    def act(self, env: object) -> np.ndarray:
        """The action for the environment's present state, float32 ``[7]`` in [-1, 1]."""
        scene = self.scene
        scene.update()
        for skill in self.skills:
            if not skill.satisfied(scene):
                self.done = False
                break
        else:
            self.done = True
        self.subtask = skill.name
        self.target_pos, self.goal_pos = skill.points(scene)
        command = (
            Command(Phase.DONE, None, scene.eef_rot, OPEN) if self.done else skill.command(scene)
        )
        self.phase = command.phase
        scene.last_gripper = command.gripper
        return servo(command, scene.eef, scene.eef_rot)
