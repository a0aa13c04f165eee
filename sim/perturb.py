"""Perturbations that make a policy fail: seeded, composable, recorded, undone at reset.

A perturbation is a frozen dataclass; :class:`PerturbedEnv` wraps an environment and applies any
number of them between control steps, on the raw MuJoCo model and data. Each waits for its trigger
(a step, the hand near the object, the object lifted), acts for a number of control steps and is
then over. What happened and when is in :attr:`PerturbedEnv.events`, for the episode's header.

The randomness of perturbation i of an episode comes from ``SeedSequence([seed, i])`` and nothing
else: not from how often the environment was rendered, nor from what the policy did.

Positions are metres in the world frame, velocities metres a second.
"""

from __future__ import annotations

import copy
import difflib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol

import mujoco
import numpy as np
from regrasp.episodes.types import Observation


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
    """

    def __init__(self, env: Any, target: str | None) -> None:
        self.env = env
        self.step = 0
        self.target = target
        self.phase = -1
        self.in_phase = 0
        self.wanted: list[np.ndarray] = []
        self._address: tuple[int, int, int] | None = None
        self.rest = self.position().copy() if target else np.zeros(3)

    def enter(self, phase: int) -> None:
        """Say what the actor is doing in the step to come."""
        self.in_phase = self.in_phase + 1 if phase == self.phase else 0
        self.phase = phase

    def position(self) -> np.ndarray:
        """Centre of the target object ``[3]``."""
        return self.env.data.xpos[self._free_joint()[0]]

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

    def end(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Called once after the last of its ``steps``."""

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


def from_json(data: Mapping[str, Any]) -> Perturbation:
    """Rebuild a perturbation from :meth:`Perturbation.to_json`."""
    fields = dict(data)
    kind = _lookup(PERTURBATIONS, fields.pop("kind"), "perturbation")
    when = dict(fields.pop("when"))
    trigger = _lookup(TRIGGERS, when.pop("kind"), "trigger")
    return kind(when=trigger(**when), **fields)


def _lookup(registry: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in registry:
        near = difflib.get_close_matches(key, registry, n=3, cutoff=0.4)
        raise KeyError(
            f"{what} {key!r} is unknown; did you mean {' or '.join(near) or 'none near'}? "
            f"There are {', '.join(sorted(registry))}."
        )
    return registry[key]


class PerturbedEnv:
    """An environment with perturbations; everything else is passed through.

    Args:
        env: a LIBERO environment (``regrasp.sim.make_env``).
        perturbations: in the order they are applied within a control step.
        seed: of the perturbations.

    Attributes:
        events: what has been applied: ``{"kind", "step", "end", "params", "drawn"}`` each.
    """

    def __init__(self, env: Any, perturbations: Sequence[Perturbation] = (), seed: int = 0) -> None:
        self.env = env
        self.perturbations = tuple(perturbations)
        self.seed = seed
        self.events: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset environment, model and perturbations; Gymnasium's ``(obs, info)``.

        An ``initial_pose`` perturbation moves the arm here.
        """
        out = self.env.reset(seed=seed, options=options)
        self.events = []
        self._drawn = [
            p.draw(np.random.default_rng(np.random.SeedSequence([self.seed, i])))
            for i, p in enumerate(self.perturbations)
        ]
        self._done = [0] * len(self.perturbations)
        self._begun: list[int | None] = [None] * len(self.perturbations)
        interest = self.env.problem.parsed_problem["obj_of_interest"]
        movable = [name for name in interest if name in self.env.problem.objects_dict]
        self.scene = Scene(self.env, movable[0] if movable else None)
        moved = False
        for i, perturbation in enumerate(self.perturbations):
            if isinstance(perturbation, InitialPose):
                self._begin(i)
                action = np.asarray(self._drawn[i]["action"], dtype=np.float32)
                self.env.step_chunk(np.tile(action, (perturbation.steps, 1)), render="none")
                self._end(i, perturbation.steps)
                moved = True
        if not moved:
            return self._seen(out[0]), out[1]
        render = (options or {}).get("render", True)
        return self.observe(render=render), out[1]

    def step(self, action: np.ndarray, *, render: bool = True) -> Any:
        """One control step under the perturbations; Gymnasium's five results."""
        out = self.env.step(self._before(np.asarray(action, dtype=np.float32)), render=render)
        return (self._seen(out[0]), *out[1:])

    def observe(self, render: bool = True) -> dict[str, np.ndarray]:
        """The observation now, as the perturbations let it be seen."""
        return self._seen(self.env.observe(render=render))

    def observation(self, render: bool = True) -> Observation:
        """The observation now, as a policy takes it."""
        now = self.observe(render)
        return Observation(now, now.pop("state"), self.env.instruction, time.monotonic())

    def step_chunk(self, actions: np.ndarray, render: str = "last") -> Any:
        """As the environment's, with the perturbations applied before every control step.

        A chunk of one step at a time gives what a whole chunk gives.
        """
        actions = np.asarray(actions, dtype=np.float32)
        if len(actions) == 1:
            part = self.env.step_chunk(self._before(actions[0])[None], render=render)
            return replace(part, observations=[self._seen(o) for o in part.observations])
        parts = []
        for i, action in enumerate(actions):
            last = render == "last" and i == len(actions) - 1
            each = render if render != "last" else ("last" if last else "none")
            parts.append(self.step_chunk(action[None], each))
            if parts[-1].terminated or parts[-1].truncated:
                break
        return _join(parts)

    def snapshot(self) -> Any:
        """The environment's snapshot with the perturbations' own progress."""
        progress = (list(self._done), list(self._begun), copy.deepcopy(self.events))
        scene = self.scene
        history = (scene.step, scene.phase, scene.in_phase, list(scene.wanted))
        return self.env.snapshot(), progress, history

    def restore(self, snapshot: Any) -> None:
        """Continue from :meth:`snapshot`."""
        inner, (done, begun, events), (step, phase, in_phase, wanted) = snapshot
        self.env.restore(inner)
        self.scene.step, self.scene.wanted = step, list(wanted)
        self.scene.phase, self.scene.in_phase = phase, in_phase
        self._done, self._begun = list(done), list(begun)
        self.events = copy.deepcopy(events)

    def _before(self, action: np.ndarray) -> np.ndarray:
        """Apply what is due before this control step; the action really executed."""
        self.scene.wanted.append(action)
        for i, perturbation in enumerate(self.perturbations):
            if self._begun[i] is not None and 0 < perturbation.steps == self._done[i]:
                perturbation.end(self.scene, self._drawn[i])
                self._done[i] += 1
            if self._begun[i] is None and perturbation.when.fires(self.scene):
                self._begin(i)
            if self._begun[i] is not None and self._done[i] < perturbation.steps:
                action = perturbation.act(self.scene, action, self._drawn[i], self._done[i])
                self._end(i, self._done[i] + 1)
        self.scene.step += 1
        return action

    def _seen(self, observation: dict[str, Any]) -> dict[str, Any]:
        for i, perturbation in enumerate(self.perturbations):
            if self._begun[i] is not None and self._done[i] < perturbation.steps:
                observation = perturbation.see(self.scene, observation, self._drawn[i])
        return observation

    def _begin(self, i: int) -> None:
        self._begun[i] = len(self.events)
        perturbation = self.perturbations[i]
        self.events.append(
            {
                "kind": perturbation.kind,
                "step": self.scene.step,
                "end": self.scene.step,
                "params": perturbation.to_json(),
                "drawn": self._drawn[i],
            }
        )
        perturbation.begin(self.scene, self._drawn[i])

    def _end(self, i: int, done: int) -> None:
        self._done[i] = done
        begun = self._begun[i]
        assert begun is not None
        self.events[begun]["end"] = self.scene.step + 1


def _join(parts: Sequence[Any]) -> Any:
    """One chunk result from those of its steps."""
    first = copy.copy(parts[0])
    last = parts[-1]
    values = {
        "observations": [o for part in parts for o in part.observations],
        "states": np.concatenate([part.states for part in parts]),
        "rewards": np.concatenate([part.rewards for part in parts]),
        "terminated": last.terminated,
        "truncated": last.truncated,
        "executed": sum(part.executed for part in parts),
    }
    return type(first)(**values)
