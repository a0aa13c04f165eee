"""How far a task has come, goal by goal, read from privileged state.

A success predicate says only whether all is done. To say when a failure shows, one needs to know
what had been achieved by then: :class:`Progress` reads it for every kind of goal that the experts
solve, in the present state alone, so that what is lost counts as lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import mujoco
import numpy as np
from regrasp.sim.experts.articulated import CloseDrawer, OpenDrawer, TurnKnob
from regrasp.sim.experts.base import Skill
from regrasp.sim.experts.pick_place import PickPlace
from regrasp.sim.experts.push import DragAside
from regrasp.sim.experts.tasks import make_expert


class Stage(IntEnum):
    """What is achieved of one goal, now.

    Objects to be placed: the hand is at it, both fingers hold it, it is moved while held, it
    is over the place, the predicate holds. Parts that move on a joint: the hand is at it,
    a finger touches it, a fifth of the way is done, four fifths, the predicate holds.
    """

    NOTHING = 0
    REACHED = 1
    GRASPED = 2
    MOVED = 3
    ARRIVED = 4
    DONE = 5


#: Distance of the grip site from the object's bounding box, or from the handle, at which the hand
#: is there; how far an object must have moved; how near over the place it must be. Metres.
_AT_OBJECT, _AT_HANDLE, _MOVED, _OVER = 0.03, 0.06, 0.02, 0.04


@dataclass(frozen=True)
class Reading:
    """One moment of an episode.

    Attributes:
        stage: per goal (:class:`Stage`), int8 ``[G]``.
        touch: how many fingers touch what each goal is about, int8 ``[G]``.
        objects: pose of every movable object (x, y, z, qw, qx, qy, qz), ``[N, 7]``.
        joints: position of every fixture's joint, metres or radians, ``[J]``.
    """

    stage: np.ndarray
    touch: np.ndarray
    objects: np.ndarray
    joints: np.ndarray


class Progress:
    """Reads stages, contacts and poses of one environment.

    Args:
        env: a LIBERO environment, just reset: where objects lie now is where they rested.

    Attributes:
        goals: the sub-task that each column of ``stage`` is about, as experts name it.
        names: the movable objects, in the order of ``objects``.
        movable: the objects that the goals place, and where each one's pose begins in ``qpos``.
        rest: where every movable object rested, world, metres ``[3]``.
        upright: the direction, in each one's own frame, that pointed up then ``[3]``.
    """

    def __init__(self, env: Any) -> None:
        expert = make_expert(env)
        self.scene = expert.scene
        self._skills = [s for s in expert.skills if not isinstance(s, DragAside)]
        self.goals = tuple(skill.name for skill in self._skills)
        self.names = tuple(sorted(env.problem.objects_dict))
        model = env.model
        bodies = [int(model.body_jntadr[self.scene.body(name)]) for name in self.names]
        starts = np.array([int(model.jnt_qposadr[joint]) for joint in bodies], np.int64)
        self._objects = starts[:, None] + np.arange(7)
        placed = [skill.object for skill in self._skills if isinstance(skill, PickPlace)]
        address = dict(zip(self.names, starts.tolist(), strict=True))
        self.movable = {name: address[name] for name in dict.fromkeys(placed)}
        self._joints = _fixture_joints(model)
        self.start()

    def start(self) -> None:
        """Remember where everything rests; call after every reset."""
        self.scene.reset()
        self.scene.update()
        self.rest = {name: self.scene.pos(name) for name in self.names}
        self.upright = {name: self.scene.rot(name)[2].copy() for name in self.names}
        self._begun = [self._joint(skill) for skill in self._skills]

    def read(self) -> Reading:
        """The present moment."""
        scene = self.scene
        scene.update()
        both = [self._of(i) for i in range(len(self._skills))]
        qpos = scene.data.qpos
        return Reading(
            np.array([stage for stage, _ in both], np.int8),
            np.array([touch for _, touch in both], np.int8),
            qpos[self._objects].copy(),
            qpos[self._joints].copy(),
        )

    def holding(self) -> bool:
        """Whether a finger touches any movable object, now."""
        scene = self.scene
        scene.update()
        return any(scene.fingers_on(scene.geoms(scene.body(name))) for name in self.names)

    def points(self, subtask: str) -> np.ndarray:
        """Where the thing of a sub-task is and where it shall go, world, metres ``[6]``.

        A sub-task that is not this task's own (a wrong plan's) gives those of the first goal that
        is not reached.
        """
        if subtask in self.goals:
            which = self.goals.index(subtask)
        else:
            states = (i for i in range(len(self._skills)) if self._of(i)[0] < Stage.DONE)
            which = next(states, 0)
        skill = self._skills[which]
        if isinstance(skill, PickPlace):
            return np.concatenate(
                [self.scene.pos(skill.object), np.asarray(skill.place.spot(self.scene))]
            )
        return np.concatenate(skill.points(self.scene))

    def _of(self, i: int) -> tuple[Stage, int]:
        """Stage of goal i and the fingers on what it is about."""
        skill = self._skills[i]
        if isinstance(skill, PickPlace):
            return self._carried(skill)
        return self._articulated(skill, self._begun[i])

    def _carried(self, skill: PickPlace) -> tuple[Stage, int]:
        scene, name = self.scene, skill.object
        fingers = scene.fingers_on(scene.geoms(scene.body(name)))
        if scene.holds(skill.place.predicate):
            return Stage.DONE, fingers
        position = scene.pos(name)
        moved = float(np.linalg.norm(position - self.rest[name])) > _MOVED
        away = float(np.linalg.norm((position - skill.place.spot(scene))[:2]))
        if moved and away < _OVER:
            return Stage.ARRIVED, fingers
        if fingers == 2:
            return (Stage.MOVED if moved else Stage.GRASPED), fingers
        hull = scene.hull(name)
        outside = np.maximum(np.maximum(hull.min(0) - scene.eef, scene.eef - hull.max(0)), 0.0)
        near = float(np.linalg.norm(outside)) < _AT_OBJECT
        return (Stage.REACHED if near or fingers else Stage.NOTHING), fingers

    def _articulated(self, skill: Skill, begun: float) -> tuple[Stage, int]:
        scene = self.scene
        assert isinstance(skill, OpenDrawer | CloseDrawer | TurnKnob)
        fingers = scene.fingers_on(self._geoms(skill))
        until = skill.until if isinstance(skill, OpenDrawer) else None
        if scene.holds(skill.goal) or (until is not None and scene.holds(until)):
            return Stage.DONE, fingers
        way = self._end(skill) - begun
        share = (self._joint(skill) - begun) / way if abs(way) > 1e-6 else 1.0
        if share > 0.2:
            return (Stage.ARRIVED if share > 0.8 else Stage.MOVED), fingers
        if fingers:
            return Stage.GRASPED, fingers
        near = float(np.linalg.norm(scene.eef - self._handle(skill))) < _AT_HANDLE
        return (Stage.REACHED if near else Stage.NOTHING), fingers

    def _joint(self, skill: Skill) -> float:
        """Position of a skill's joint; 0 where it has none."""
        if isinstance(skill, OpenDrawer | CloseDrawer):
            return skill.drawer.joint(self.scene)
        if isinstance(skill, TurnKnob):
            joint = self.scene.model.joint(f"{skill.fixture}_button")
            return float(self.scene.data.qpos[int(joint.qposadr[0])])
        return 0.0

    def _end(self, skill: OpenDrawer | CloseDrawer | TurnKnob) -> float:
        """Joint position at which the goal holds, as the experts aim at it."""
        return 0.0 if isinstance(skill, CloseDrawer) else skill.WANTED

    def _geoms(self, skill: OpenDrawer | CloseDrawer | TurnKnob) -> np.ndarray:
        if isinstance(skill, TurnKnob):
            joint = self.scene.model.joint(f"{skill.fixture}_button")
            return self.scene.geoms(int(joint.bodyid[0]))
        return skill.drawer.geoms(self.scene)

    def _handle(self, skill: OpenDrawer | CloseDrawer | TurnKnob) -> np.ndarray:
        return skill.points(self.scene)[0]


def _fixture_joints(model: mujoco.MjModel) -> np.ndarray:
    """Addresses in ``qpos`` of the one-dimensional joints that are not the robot's."""
    single = (mujoco.mjtJoint.mjJNT_SLIDE, mujoco.mjtJoint.mjJNT_HINGE)
    found = [
        int(model.jnt_qposadr[j])
        for j in range(model.njnt)
        if model.jnt_type[j] in single
        and not model.joint(j).name.startswith(("robot0", "gripper0", "mount0"))
    ]
    return np.array(found, np.int64)
