"""Perturbations that make a policy fail: seeded, composable, recorded, undone at reset.

A perturbation is a frozen dataclass; :class:`regrasp.sim.perturbed.PerturbedEnv` wraps an
environment and applies any number of them between control steps, on the raw MuJoCo model and data.
Each waits for its trigger (a step, the hand near the object, the object lifted), acts for a number
of control steps and is then over.

Positions are metres in the world frame, velocities metres a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

import mujoco
import numpy as np


@dataclass(frozen=True)
class AtStep:
    """From control step ``step`` on (0: before the first action)."""

    kind: ClassVar[str] = "at_step"
    step: int = 0

    def fires(self, scene: Scene) -> bool:
        """Whether the moment has come."""
        return scene.step >= self.step


@dataclass(frozen=True)
class NearObject:
    """Once the hand is within ``distance`` of the target object's centre, and above it."""

    kind: ClassVar[str] = "near_object"
    distance: float = 0.12

    def fires(self, scene: Scene) -> bool:
        """Whether the moment has come."""
        return bool(np.linalg.norm(scene.hand() - scene.position()) < self.distance)


@dataclass(frozen=True)
class Lifted:
    """Once the target object is ``height`` above where it rested at reset."""

    kind: ClassVar[str] = "lifted"
    height: float = 0.04

    def fires(self, scene: Scene) -> bool:
        """Whether the moment has come."""
        return bool(scene.position()[2] > scene.rest[2] + self.height)


#: Control steps that robosuite's gripper needs to let go of what it holds.
RELEASE_STEPS = 9

TRIGGERS: dict[str, type] = {t.kind: t for t in (AtStep, NearObject, Lifted)}


class Trigger(Protocol):
    """When a perturbation begins: a frozen dataclass, registered in :data:`TRIGGERS`."""

    kind: ClassVar[str]

    def fires(self, scene: Scene) -> bool:
        """Whether the moment has come."""
        ...


class Scene:
    """The wrapped environment as a perturbation sees it.

    Attributes:
        env: the environment itself.
        step: control steps since the reset.
        target: the object of interest; None where the task moves none.
        rest: where its centre was at the reset, ``[3]``.
        phase: what the actor is doing (an expert's phase), where whoever drives says so; else -1.
        in_phase: control steps it has been doing that.
        wanted: the actor's actions so far, before anything was done to them.
        memory: what each perturbation keeps from its beginning to its end; values are replaced,
            never changed in place.
    """

    def __init__(self, env: Any, target: str | None) -> None:
        self.env = env
        self.step = 0
        self.target = target
        self.phase = -1
        self.in_phase = 0
        self.wanted: list[np.ndarray] = []
        self.memory: dict[Perturbation, Any] = {}
        self._address: tuple[int, int, int] | None = None
        self.rest = self.position().copy() if target else np.zeros(3)

    def enter(self, phase: int) -> None:
        """Say what the actor is doing in the step to come."""
        self.in_phase = self.in_phase + 1 if phase == self.phase else 0
        self.phase = phase

    def body(self) -> int:
        """Body id of the target object."""
        return self._free_joint()[0]

    def position(self) -> np.ndarray:
        """Centre of the target object ``[3]``."""
        return self.env.data.xpos[self.body()]

    def hand(self) -> np.ndarray:
        """Grip site position ``[3]``."""
        return self.env.eef_pose()[0]

    def drift(self, offset: np.ndarray) -> None:
        """Move the target by ``offset`` metres in the plane; it goes on falling, unturned."""
        _, address, dof = self._free_joint()
        self.env.data.qpos[address : address + 2] += offset[:2]
        self.env.data.qvel[dof : dof + 2] = 0.0
        self.env.data.qvel[dof + 3 : dof + 6] = 0.0
        self.env.edited()

    def _free_joint(self) -> tuple[int, int, int]:
        """Body id, first qpos and first dof of the target's free joint."""
        if self._address is None:
            if self.target is None:
                raise ValueError("perturb: this task has no movable object of interest")
            model = self.env.model
            body = model.body(self.env.problem.objects_dict[self.target].root_body).id
            joint = model.body_jntadr[body]
            if joint < 0 or model.jnt_type[joint] != mujoco.mjtJoint.mjJNT_FREE:
                raise ValueError(f"perturb: target {self.target!r} is not a free object")
            self._address = (body, int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint]))
        return self._address


@dataclass(frozen=True)
class Perturbation:
    """Base: waits for ``when``, then acts on ``steps`` successive control steps."""

    kind: ClassVar[str]
    when: Trigger = field(default_factory=AtStep)
    steps: int = 0

    @property
    def duration(self) -> int:
        """Control steps it acts on, unless it is over before."""
        return self.steps

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """The random choices, JSON-serialisable, made once before the episode starts."""
        return {}

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Called once, when it triggers."""

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Called before control step i of its ``steps``; returns the action really executed."""
        return action

    def see(
        self, scene: Scene, observation: dict[str, Any], drawn: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the actor gets to see while the perturbation acts; the world is as it is."""
        return observation

    def over(self, scene: Scene) -> bool:
        """Asked before each control step but the first: whether it ends here."""
        return False

    def end(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Called once after the last step that it acts on."""

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; :func:`from_json` inverts it."""
        data = asdict(self)
        data["when"] = {"kind": self.when.kind, **data["when"]}
        return {"kind": self.kind, **data}


@dataclass(frozen=True)
class Nudge(Perturbation):
    """The target object slides ``distance`` metres over the table in a random direction.

    It is moved a little each control step: a tall bottle pushed by a velocity topples instead.
    """

    kind: ClassVar[str] = "nudge"
    when: Trigger = field(default_factory=NearObject)
    steps: int = 10
    distance: float = 0.06

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction in the table plane, radians."""
        return {"direction": float(rng.uniform(-np.pi, np.pi))}

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Slide the object by its share of the distance."""
        angle = drawn["direction"]
        scene.drift(self.distance / self.steps * np.array([np.cos(angle), np.sin(angle)]))
        return action


@dataclass(frozen=True)
class Slip(Perturbation):
    """The gripper opens for ``steps`` control steps while it carries, whatever the policy says.

    LIBERO's gripper needs about eight to let go. The object falls, and comes to lie ``drift``
    metres away in a random direction instead of straight below.
    """

    kind: ClassVar[str] = "slip"
    when: Trigger = field(default_factory=Lifted)
    steps: int = 14
    drift: float = 0.05

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction of the drift in the table plane, radians."""
        return {"direction": float(rng.uniform(-np.pi, np.pi))}

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Open the hand; let the object drift once the fingers have let go."""
        if i >= RELEASE_STEPS:
            angle = drawn["direction"]
            share = self.drift / (self.steps - RELEASE_STEPS)
            scene.drift(share * np.array([np.cos(angle), np.sin(angle)]))
        action = action.copy()
        action[6] = -1.0
        return action


@dataclass(frozen=True)
class ActionNoise(Perturbation):
    """A burst that throws the arm off: one random motion held, plus white noise.

    Attributes:
        bias: size of the held translation, in action units (1.0 asks for 5 cm a control step; the
            arm follows about a quarter of it).
        turn: size of the held rotation, in action units (1.0 asks for 0.5 rad a control step).
        noise: standard deviation of the white part, in action units.
    """

    kind: ClassVar[str] = "action_noise"
    when: Trigger = field(default_factory=NearObject)
    steps: int = 14
    bias: float = 0.9
    turn: float = 0.6
    noise: float = 0.2

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """The bias and each step's noise, ``[steps, 6]`` in all."""
        direction, axis = rng.normal(size=3), rng.normal(size=3)
        direction[2] = abs(direction[2])  # not into the table
        burst = self.noise * rng.normal(size=(self.steps, 6))
        burst[:, :3] += self.bias * direction / np.linalg.norm(direction)
        burst[:, 3:] += self.turn * axis / np.linalg.norm(axis)
        return {"burst": burst.round(6).tolist()}

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Replace the motion by the burst; the gripper stays the policy's."""
        burst = np.clip(drawn["burst"][i], -1.0, 1.0)
        return np.append(burst, action[6]).astype(np.float32)


@dataclass(frozen=True)
class InitialPose(Perturbation):
    """The arm starts elsewhere: driven ``steps`` control steps in a random direction first.

    It happens inside ``reset``, through actions, so that the pose is one the arm can really be
    left in. The steps count against the horizon.

    Attributes:
        size: action units a step in the drawn direction.
        turn: radians-worth of action units a step about a drawn axis.
    """

    kind: ClassVar[str] = "initial_pose"
    steps: int = 20
    size: float = 1.0
    turn: float = 0.6

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """The action, ``[7]``."""
        direction, axis = rng.normal(size=3), rng.normal(size=3)
        direction[2] = -abs(direction[2]) * 0.5  # sideways and down: up is soon out of reach
        action = np.concatenate(
            [
                self.size * direction / np.linalg.norm(direction),
                self.turn * axis / np.linalg.norm(axis),
                [-1.0],
            ]
        )
        return {"action": action.round(6).tolist()}


@dataclass(frozen=True)
class CameraShift(Perturbation):
    """A camera is knocked: moved and turned by a random amount, for the rest of the episode.

    Attributes:
        camera: name in the MuJoCo model.
        distance: metres.
        angle: radians.
    """

    kind: ClassVar[str] = "camera_shift"
    camera: str = "agentview"
    distance: float = 0.08
    angle: float = 0.1

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Offset ``[3]`` and axis-angle ``[3]``."""
        offset, axis = rng.normal(size=3), rng.normal(size=3)
        return {
            "offset": (self.distance * offset / np.linalg.norm(offset)).tolist(),
            "turn": (self.angle * axis / np.linalg.norm(axis)).tolist(),
        }

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Move the camera in the model; the environment's reset puts it back."""
        model = scene.env.model
        camera = model.camera(self.camera).id
        model.cam_pos[camera] += drawn["offset"]
        turn, axis = np.zeros(4), np.asarray(drawn["turn"])
        mujoco.mju_axisAngle2Quat(turn, axis / np.linalg.norm(axis), float(np.linalg.norm(axis)))
        turned = np.zeros(4)
        mujoco.mju_mulQuat(turned, turn, model.cam_quat[camera])
        model.cam_quat[camera] = turned
        scene.env.edited()


PERTURBATIONS: dict[str, type[Perturbation]] = {
    p.kind: p for p in (Nudge, Slip, ActionNoise, InitialPose, CameraShift)
}


def from_json(
    data: Mapping[str, Any], registry: Mapping[str, type[Perturbation]] = PERTURBATIONS
) -> Perturbation:
    """Rebuild a perturbation from :meth:`Perturbation.to_json`, its lists as tuples.

    Raises:
        KeyError: a kind that is not in ``registry``, or an unknown trigger.
    """
    fields = dict(data)
    kind = lookup(registry, fields.pop("kind"), "perturbation")
    when = dict(fields.pop("when"))
    trigger = lookup(TRIGGERS, when.pop("kind"), "trigger")
    return kind(when=trigger(**_tuples(when)), **_tuples(fields))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}


def lookup(registry: Mapping[str, Any], key: str, what: str) -> Any:
    """What ``registry`` holds under ``key``; a KeyError names the nearest keys."""
    if key not in registry:
        near = difflib.get_close_matches(key, registry, n=3, cutoff=0.4)
        raise KeyError(
            f"{what} {key!r} is unknown; did you mean {' or '.join(near) or 'none near'}? "
            f"There are {', '.join(sorted(registry))}."
        )
    return registry[key]
