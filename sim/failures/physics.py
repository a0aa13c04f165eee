"""Physics failures: things are slippery, heavy, not where they were, in the way, or stiff.

LIBERO's objects weigh some ten grams and are held with 20 N, so friction and mass matter on a
logarithmic scale only: severity interpolates them geometrically. Contacts take the larger friction
of the two surfaces, which is why the fingers' goes down with the object's.

Magnitudes: RoboFAC pushes its cube by up to 17 cm in the plane, REFLECT puts things on top of and
in front of others (``occupied``, ``blocking``); no public generator changes friction, mass or
joints in LIBERO, so those go as far as the nominal rollout can no longer succeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mujoco
import numpy as np
from regrasp.sim.experts.base import Phase
from regrasp.sim.experts.grasps import TIP
from regrasp.sim.failures.base import Injection, ModelEdit, OnPhase, unit
from regrasp.sim.perturb import Scene, Trigger


def _at_start() -> OnPhase:
    """As soon as anything is done."""
    return OnPhase((Phase.APPROACH,))


@dataclass(frozen=True)
class _OnTarget(ModelEdit):
    """Base: needs an object that can be moved."""

    family: ClassVar[str] = "physics"
    when: Trigger = field(default_factory=_at_start)

    def applies(self, scene: Scene) -> bool:
        """The task moves an object."""
        return scene.target is not None

    def weigh(self, scene: Scene, body: int, factor: float) -> None:
        """Scale mass, inertia, and what MuJoCo derives from them, of a free body and its parts."""
        model = scene.env.model
        bodies = np.flatnonzero(model.body_rootid == body)
        for name, power in (
            ("body_mass", 1),
            ("body_inertia", 1),
            ("body_subtreemass", 1),
            ("body_invweight0", -1),
        ):
            self.write(scene, name, bodies, getattr(model, name)[bodies] * factor**power)
        dofs = np.flatnonzero(np.isin(model.dof_bodyid, bodies))
        self.write(scene, "dof_invweight0", dofs, model.dof_invweight0[dofs] / factor)


@dataclass(frozen=True)
class Slippery(_OnTarget):
    """Object and fingers lose their friction.

    Attributes:
        least: share of the friction that is left at severity 1; between, geometrically.
    """

    kind: ClassVar[str] = "slippery"
    definition: ClassVar[str] = (
        "The object and the fingers have as little as a hundred-thousandth of their friction."
    )
    least: float = 1e-5

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Scale the friction of the object's and the hand's geoms."""
        model = scene.env.model
        geoms = np.concatenate(
            [
                geoms_below(model, scene.body()),
                geoms_below(model, model.body("gripper0_right_gripper").id),
            ]
        )
        friction = model.geom_friction[geoms] * self.least**self.severity
        self.write(scene, "geom_friction", geoms, friction)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how much friction was left."""
        amount = f"{100 * self.least**self.severity:.2g} % of the friction"
        return {"what": "the object was slippery", "amount": amount}


@dataclass(frozen=True)
class Heavy(_OnTarget):
    """The object is heavier than it looks.

    Attributes:
        weight: kilograms at severity 1; between, geometrically.
    """

    kind: ClassVar[str] = "heavy"
    definition: ClassVar[str] = "The object weighs up to 20 kg."
    weight: float = 20.0

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Scale the object's mass."""
        own = float(scene.env.model.body_subtreemass[scene.body()])
        self.weigh(scene, scene.body(), max(1.0, self.weight / own) ** self.severity)

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how strongly."""
        amount = f"{100 * self.severity:.0f} % of the way to {self.weight:.0f} kg"
        return {"what": "the object was too heavy", "amount": amount}


@dataclass(frozen=True)
class Shoved(Injection):
    """The object slides away over the table while the hand comes down to it.

    Attributes:
        distance: metres at severity 1.
    """

    kind: ClassVar[str] = "shoved"
    family: ClassVar[str] = "physics"
    definition: ClassVar[str] = "The object is shoved up to 12 cm over the table as the hand comes."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.DESCEND,)))
    steps: int = 10
    distance: float = 0.12

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction in the table plane ``[2]``."""
        return {"direction": unit(rng, 2)}

    def applies(self, scene: Scene) -> bool:
        """The task moves an object."""
        return scene.target is not None

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Slide the object by its share of the distance."""
        if self.severity > 0.0:
            share = self.severity * self.distance / self.steps
            scene.drift(share * np.array(drawn["direction"]))
        return action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how far."""
        amount = f"{100 * self.severity * self.distance:.1f} cm"
        return {"what": "the object was shoved away before it was grasped", "amount": amount}


@dataclass(frozen=True)
class Obstacle(_OnTarget):
    """Another object of the scene stands where one of the fingers comes down.

    It is the tallest that the hand clears as yet and that has room there. At severity 1 it touches
    the object to be grasped; below, there is a gap.

    Attributes:
        weight: its kilograms, so that it is not just pushed aside.
        gap: metres at severity 0.
    """

    kind: ClassVar[str] = "obstacle"
    definition: ClassVar[str] = (
        "Another object, of two kilograms, stands up to right beside the one to be grasped, where "
        "a finger comes down."
    )
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.DESCEND,)))
    weight: float = 2.0
    gap: float = 0.06

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """On the side of which finger."""
        return {"side": int(rng.choice([-1, 1]))}

    def applies(self, scene: Scene) -> bool:
        """There is an object to grasp and another to put beside it."""
        return scene.target is not None and bool(self._others(scene))

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Put the other object there, upright as it was, at its own height."""
        spot = self.spot(scene, drawn)
        if spot is None or self.severity == 0.0:
            return
        body, beside, away = spot
        model, data = scene.env.model, scene.env.data
        joint = model.body_jntadr[body]
        address, dof = model.jnt_qposadr[joint], model.jnt_dofadr[joint]
        data.qpos[address : address + 2] = beside + (1.0 - self.severity) * self.gap * away
        data.qvel[dof : dof + 6] = 0.0
        self.weigh(scene, body, max(1.0, self.weight / float(model.body_subtreemass[body])))
        scene.env.edited()

    def spot(
        self, scene: Scene, drawn: Mapping[str, Any]
    ) -> tuple[int, np.ndarray, np.ndarray] | None:
        """Which body, its spot right beside the object ``[2]``, and the way from there ``[2]``.

        The same at every severity; None where nothing has room.
        """
        hand, rot = scene.env.eef_pose()
        closing = rot[:2, 0] / np.linalg.norm(rot[:2, 0])
        off = float(closing @ (hand - scene.position())[:2])
        # A hand over the rim: inside, there is no room for anything.
        away = (np.sign(off) if abs(off) > 0.02 else drawn["side"]) * closing
        clear = hand[2] - TIP - 0.005
        others = [(bounds(scene, b)[1][2], b) for b in self._others(scene)]
        for _, body in sorted(others, reverse=True):
            low, high = bounds(scene, body)
            centre = scene.env.data.xpos[body]
            if high[2] > clear:
                continue
            target = bounds(scene, scene.body())
            for far in np.arange(0.0, 0.2, 0.002):
                by = np.append(hand[:2] + far * away - centre[:2], 0.0)
                if apart((low + by, high + by), target):
                    break
            beside = hand[:2] + far * away
            if self._room(scene, body, beside - centre[:2], away):
                return body, beside, away
        return None

    def _others(self, scene: Scene) -> list[int]:
        """Bodies of the free objects that the task is not about."""
        problem, model = scene.env.problem, scene.env.model
        interest = problem.parsed_problem["obj_of_interest"]
        names = [name for name in problem.objects_dict if name not in interest]
        bodies = [int(problem.obj_body_id[name]) for name in names]
        free = mujoco.mjtJoint.mjJNT_FREE
        return [b for b in bodies if model.jnt_type[model.body_jntadr[b]] == free]

    def _room(self, scene: Scene, body: int, by: np.ndarray, away: np.ndarray) -> bool:
        """Whether a body, moved ``by`` and further ``away`` to any gap, meets no other."""
        problem = scene.env.problem
        names = [*problem.objects_dict, *problem.fixtures_dict]
        bodies = {int(problem.obj_body_id[n]) for n in names if n in problem.obj_body_id}
        boxes = [bounds(scene, other) for other in bodies - {body}]
        low, high = bounds(scene, body)
        for gap in (0.0, 0.5 * self.gap, self.gap):
            move = np.append(by + gap * away, 0.0)
            if not all(apart((low + move, high + move), box) for box in boxes):
                return False
        return True

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how near it was."""
        amount = f"{100 * (1.0 - self.severity) * self.gap:.1f} cm away"
        return {"what": "another object stood where a finger comes down", "amount": amount}


@dataclass(frozen=True)
class _OnJoints(ModelEdit):
    """Base: resistance in some joints.

    Attributes:
        most: added at severity 1, in the joint's units.
    """

    family: ClassVar[str] = "physics"
    when: Trigger = field(default_factory=_at_start)
    most: float = 0.0

    def resist(self, scene: Scene, name: str, dofs: np.ndarray) -> None:
        """Add to damping or friction loss."""
        now = getattr(scene.env.model, name)[dofs]
        self.write(scene, name, dofs, now + self.extra())

    def extra(self) -> float:
        """What is added."""
        return self.severity * self.most


@dataclass(frozen=True)
class JointDamping(_OnJoints):
    """Every joint of the arm moves as through honey.

    Attributes:
        most: N m s/rad.
    """

    kind: ClassVar[str] = "joint_damping"
    definition: ClassVar[str] = "The arm's joints are damped by up to 100 N m s/rad."
    most: float = 100.0

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Damp them."""
        self.resist(scene, "dof_damping", arm_dofs(scene))

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how strongly."""
        amount = f"{self.extra():.0f} N m s/rad"
        return {"what": "the arm's joints were too stiff to follow", "amount": amount}


@dataclass(frozen=True)
class StuckJoint(_OnJoints):
    """One joint of the arm sticks: little is soon too much, so severity acts by its cube.

    Attributes:
        most: N m; the motors have 80 (12 in the last two joints).
    """

    kind: ClassVar[str] = "stuck_joint"
    definition: ClassVar[str] = "One joint of the arm sticks with up to 80 N m of friction."
    most: float = 80.0

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Which of the seven."""
        return {"joint": int(rng.integers(7))}

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Let it stick."""
        self.resist(scene, "dof_frictionloss", arm_dofs(scene)[[drawn["joint"]]])

    def extra(self) -> float:
        """What is added."""
        return self.severity**3 * self.most

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how strongly."""
        what = f"joint {drawn['joint'] + 1} of the arm was stuck"
        return {"what": what, "amount": f"{self.extra():.1f} N m"}


@dataclass(frozen=True)
class DrawerFriction(_OnJoints):
    """The drawers jam.

    Attributes:
        most: N.
    """

    kind: ClassVar[str] = "drawer_friction"
    definition: ClassVar[str] = "The drawers jam with up to 40 N of friction."
    most: float = 40.0

    def applies(self, scene: Scene) -> bool:
        """There are drawers."""
        return len(drawer_dofs(scene)) > 0

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Jam them."""
        if not self.applies(scene):
            raise ValueError("drawer_friction: nothing in this scene slides")
        self.resist(scene, "dof_frictionloss", drawer_dofs(scene))

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how strongly."""
        return {"what": "the drawer jammed", "amount": f"{self.extra():.0f} N"}


def geoms_below(model: mujoco.MjModel, body: int) -> np.ndarray:
    """Geoms of a body and of everything attached to it."""
    inside = np.zeros(model.nbody, bool)
    inside[body] = True
    for child in range(body + 1, model.nbody):  # a parent comes before its children
        inside[child] = inside[model.body_parentid[child]]
    return np.flatnonzero(inside[model.geom_bodyid])


def arm_dofs(scene: Scene) -> np.ndarray:
    """Degrees of freedom of the arm's seven joints."""
    return np.array(scene.env.problem.robots[0]._ref_joint_vel_indexes)


def drawer_dofs(scene: Scene) -> np.ndarray:
    """Degrees of freedom of the fixtures that slide."""
    model = scene.env.model
    fixtures = tuple(scene.env.problem.fixtures_dict)
    slide = mujoco.mjtJoint.mjJNT_SLIDE
    return np.array(
        [
            int(model.jnt_dofadr[joint])
            for joint in np.flatnonzero(model.jnt_type == slide)
            if model.joint(joint).name.startswith(fixtures)
        ],
        np.int64,
    )


def bounds(scene: Scene, body: int) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest coordinates of the solid geoms of a body and its parts, ``[3]`` each."""
    model, data = scene.env.model, scene.env.data
    geoms = geoms_below(model, body)
    geoms = geoms[(model.geom_contype[geoms] != 0) | (model.geom_conaffinity[geoms] != 0)]
    rot = data.geom_xmat[geoms].reshape(-1, 3, 3)
    centre = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", rot, model.geom_aabb[geoms, :3])
    half = np.einsum("gij,gj->gi", np.abs(rot), model.geom_aabb[geoms, 3:])
    return (centre - half).min(0), (centre + half).max(0)


def apart(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether two boxes are 2 mm apart in the plane; one may stand on the other."""
    space = np.maximum(one[0] - other[1], other[0] - one[1])
    return bool((space > (0.002, 0.002, -0.003)).any())
