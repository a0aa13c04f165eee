"""What drives the arm when failures are made: the expert, a follower that does not look, a policy.

Most injections would only show how well an expert grasps again, if an expert drove. So the stand-in
for a policy that does not notice is :class:`CommittedActor`: it follows a rollout that succeeded,
moment by moment, correcting the hand's pose and nothing else. Undisturbed it repeats that rollout
bit for bit; disturbed it carries on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mujoco
import numpy as np
from regrasp.episodes.types import Observation
from regrasp.sim.experts.base import (
    OPEN,
    POS_GAIN,
    POS_UNIT,
    ROT_GAIN,
    ROT_UNIT,
    Expert,
    Phase,
    Skill,
    rotation_vector,
)
from regrasp.sim.experts.tasks import Goal, make_expert
from regrasp.sim.transforms import axis_angle_to_quat

#: Errors below this are rounding, not disturbance: metres and radians.
_ROUNDING = 1e-6


class Actor(Protocol):
    """Whatever chooses actions.

    Attributes:
        phase: what the last action was part of (:class:`regrasp.sim.experts.base.Phase`).
        subtask: the sub-task it belonged to, in words.
    """

    phase: int
    subtask: str

    def reset(self) -> None:
        """Forget everything remembered: an episode begins, or the actor takes over here."""
        ...

    def act(self, robot: Any) -> np.ndarray:
        """The action for the robot's present state, float32 ``[7]`` in [-1, 1]."""
        ...

    def memory(self) -> Any:
        """What it remembers now; :meth:`recall` returns to it."""
        ...

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        ...


class ExpertActor:
    """A scripted expert: looks at everything, tries again.

    Args:
        env: the environment whose privileged state it reads.
        goal: what it pursues; the task's own goal when None.
        expert: the expert itself, in the place of one made for ``goal``.
    """

    def __init__(
        self, env: Any, goal: Sequence[Goal] | None = None, expert: Expert | None = None
    ) -> None:
        self.expert = expert or make_expert(env, goal)
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered."""
        self.expert.reset()
        self.phase, self.subtask = int(self.expert.phase), self.expert.subtask

    def act(self, robot: Any) -> np.ndarray:
        """The expert's action."""
        action = self.expert.act(robot)
        self.phase, self.subtask = int(self.expert.phase), self.expert.subtask
        return action

    @property
    def done(self) -> bool:
        """Whether nothing was left to do at the last call."""
        return self.expert.done

    def memory(self) -> Any:
        """Each skill's bits of hysteresis, and the last gripper command."""
        skills = [dict(vars(skill)) for skill in self.expert.skills]
        return skills, self.expert.scene.last_gripper, self.expert.done, self.phase, self.subtask

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        skills, gripper, self.expert.done, self.phase, self.subtask = memory
        for skill, values in zip(self.expert.skills, skills, strict=True):
            vars(skill).update(values)
        self.expert.scene.last_gripper = gripper


class ScriptActor:
    """Runs skills in a given order, each once: it never goes back to one, needed or not.

    Args:
        expert: lends its scene.
        skills: in the order in which they are run.
        budget: control steps after which a skill that does not end is given up.
    """

    def __init__(self, expert: Expert, skills: Sequence[Skill], budget: Sequence[int]) -> None:
        self._parts = [ExpertActor(None, expert=Expert(expert.scene, [s])) for s in skills]
        self._budget = list(budget)
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered."""
        for part in self._parts:
            part.reset()
        self._index = self._spent = 0
        self.phase, self.subtask = self._parts[0].phase, self._parts[0].subtask

    def act(self, robot: Any) -> np.ndarray:
        """The present skill's action; the next one's once it is done."""
        action = self._parts[self._index].act(robot)
        while self._ended and self._index + 1 < len(self._parts):
            self._index, self._spent = self._index + 1, 0
            action = self._parts[self._index].act(robot)
        self._spent += 1
        part = self._parts[self._index]
        self.phase, self.subtask = part.phase, part.subtask
        return action

    @property
    def done(self) -> bool:
        """Whether the last skill has ended."""
        return self._index + 1 == len(self._parts) and self._ended

    @property
    def _ended(self) -> bool:
        return self._parts[self._index].done or self._spent >= self._budget[self._index]

    def memory(self) -> Any:
        """Where it is in the list, and each skill's hysteresis."""
        return self._index, self._spent, [part.memory() for part in self._parts]

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        self._index, self._spent, parts = memory
        for part, values in zip(self._parts, parts, strict=True):
            part.recall(values)
        part = self._parts[self._index]
        self.phase, self.subtask = part.phase, part.subtask


@dataclass(frozen=True)
class Plan:
    """What a :class:`CommittedActor` follows: one row a control step.

    Attributes:
        state: proprioception before each action, float32 ``[T, 8]``.
        action: the action wanted there, float32 ``[T, 7]``.
        phase: ``[T]``.
        subtask: one name a row.
    """

    state: np.ndarray
    action: np.ndarray
    phase: np.ndarray
    subtask: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.action)

    def since(self, step: int) -> Plan:
        """The plan from row ``step`` on."""
        rows = slice(step, None)
        return Plan(self.state[rows], self.action[rows], self.phase[rows], self.subtask[rows])


class CommittedActor:
    """Follows a plan, time index by time index: the plan's action plus a servo on the hand's pose.

    It sees proprioception (as perturbations let it be seen) and no object. After the plan's end it
    holds the last pose.

    Args:
        plan: what it follows.
        lead: control steps at most that it takes to come to the plan's first pose before it begins.
    """

    #: How near to the first pose it begins, metres and radians.
    _NEAR, _TURNED = 0.015, 0.15

    def __init__(self, plan: Plan, lead: int = 0) -> None:
        self.plan = plan
        self.lead = lead
        self._rot = [_matrix(state) for state in plan.state]
        self.reset()

    def reset(self) -> None:
        """Go back to the plan's beginning."""
        self.index, self._led = 0, 0
        self.phase, self.subtask = int(self.plan.phase[0]), self.plan.subtask[0]

    def act(self, robot: Any) -> np.ndarray:
        """The plan's action at this moment, corrected by how far the hand is off the plan."""
        state = robot.observe(render=False)["state"]
        row = min(self.index, len(self.plan) - 1)
        off, turned = self.plan.state[row, :3] - state[:3], self._turn(row, state)
        action = self.plan.action[row].copy()
        away = np.linalg.norm(off) > self._NEAR or np.linalg.norm(turned) > self._TURNED
        if self.index == 0 and self._led < self.lead and away:
            self._led += 1
            action[:6] = 0.0
        else:
            if self.index >= len(self.plan):
                action[:6] = 0.0
            self.index += 1
        if max(np.abs(off).max(), np.abs(turned).max()) > _ROUNDING:
            action[:3] += _limited(off * (POS_GAIN / POS_UNIT))
            action[3:6] += _limited(turned * (ROT_GAIN / ROT_UNIT))
            action = np.clip(action, -1.0, 1.0)
        self.phase, self.subtask = int(self.plan.phase[row]), self.plan.subtask[row]
        return action.astype(np.float32)

    def _turn(self, row: int, state: np.ndarray) -> np.ndarray:
        """Rotation from the hand's orientation to the plan's, world axis-angle ``[3]``."""
        return rotation_vector(self._rot[row] @ _matrix(state).T)

    def memory(self) -> Any:
        """How far it has come."""
        return self.index, self._led, self.phase, self.subtask

    def memory_at(self, index: int) -> Any:
        """What it would remember had it followed the plan up to row ``index``."""
        last = max(index - 1, 0)
        return index, 0, int(self.plan.phase[last]), self.plan.subtask[last]

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        self.index, self._led, self.phase, self.subtask = memory


class LetGoActor:
    """Opens the hand where it is, then hands over: for experts that must begin with a free hand.

    Args:
        actor: who goes on.
        steps: control steps for which the hand opens; it takes about nine.
    """

    def __init__(self, actor: ExpertActor, steps: int = 12) -> None:
        self.actor, self._steps = actor, steps
        self.reset()

    def reset(self) -> None:
        """Begin by opening the hand."""
        self.actor.reset()
        self._left = self._steps
        self.phase, self.subtask = int(Phase.RELEASE), self.actor.subtask

    def act(self, robot: Any) -> np.ndarray:
        """Open, or what the actor does."""
        if self._left > 0:
            self._left -= 1
            return np.array([0.0] * 6 + [OPEN], np.float32)
        action = self.actor.act(robot)
        self.phase, self.subtask = self.actor.phase, self.actor.subtask
        return action

    @property
    def done(self) -> bool:
        """Whether the actor has nothing left to do."""
        return self._left == 0 and self.actor.done

    def memory(self) -> Any:
        """How long it goes on opening, and the actor's memory."""
        return self._left, self.actor.memory(), self.phase, self.subtask

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        self._left, actor, self.phase, self.subtask = memory
        self.actor.recall(actor)


class ShakenActor:
    """Another actor with white noise on its motion; the gripper stays the actor's.

    Args:
        actor: who acts.
        sigma: standard deviation on the translation, action units; a quarter of it on the rotation.
        rng: where the noise comes from.
    """

    def __init__(self, actor: Actor, sigma: float, rng: np.random.Generator) -> None:
        self.actor, self._sigma, self._rng = actor, sigma, rng
        self.phase, self.subtask = actor.phase, actor.subtask

    def reset(self) -> None:
        """Reset the actor; the noise goes on."""
        self.actor.reset()

    def act(self, robot: Any) -> np.ndarray:
        """The actor's action, shaken."""
        action = self.actor.act(robot).astype(float)
        action[:3] += self._rng.normal(0.0, self._sigma, 3)
        action[3:6] += self._rng.normal(0.0, self._sigma / 4, 3)
        self.phase, self.subtask = self.actor.phase, self.actor.subtask
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def memory(self) -> Any:
        """The actor's memory and the noise's."""
        return self.actor.memory(), self._rng.bit_generator.state

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        inner, self._rng.bit_generator.state = memory
        self.actor.recall(inner)


class ChunkedActor:
    """A policy from outside, with an expert at its side that says what phase this is.

    Args:
        infer: observation -> action chunk ``[H, 7]``; the same observation gives the same chunk.
        shadow: the expert of what the policy is told; it watches and never acts.
        execute: actions executed of each chunk.
        instruction: what the policy is told; the environment's own words when None.
    """

    def __init__(
        self,
        infer: Callable[[Observation], np.ndarray],
        shadow: Expert,
        execute: int = 5,
        instruction: str | None = None,
    ) -> None:
        self._infer, self._execute, self._instruction = infer, execute, instruction
        self._shadow = ExpertActor(None, expert=shadow)
        self.reset()

    def reset(self) -> None:
        """Look anew at the next step."""
        self._shadow.reset()
        self._chunk: list[np.ndarray] = []
        self.phase, self.subtask = self._shadow.phase, self._shadow.subtask

    def act(self, robot: Any) -> np.ndarray:
        """The chunk's next action; a new chunk from a new look when it is used up."""
        if not self._chunk:
            seen = robot.observation()
            told = (
                seen if self._instruction is None else replace(seen, instruction=self._instruction)
            )
            self._chunk = list(np.asarray(self._infer(told))[: self._execute])
        action = np.clip(self._chunk.pop(0), -1.0, 1.0).astype(np.float32)
        self._shadow.act(robot)
        # The shadow's idea of what is held must follow the fingers' real command.
        self._shadow.expert.scene.last_gripper = 1.0 if action[6] > 0 else -1.0
        self.phase, self.subtask = self._shadow.phase, self._shadow.subtask
        return action

    def memory(self) -> Any:
        """What is left of the chunk, and the shadow's memory."""
        return list(self._chunk), self._shadow.memory()

    def recall(self, memory: Any) -> None:
        """Continue from :meth:`memory`."""
        chunk, shadow = memory
        self._chunk = list(chunk)
        self._shadow.recall(shadow)
        self.phase, self.subtask = self._shadow.phase, self._shadow.subtask


def _matrix(state: np.ndarray) -> np.ndarray:
    """Orientation of the hand in a state ``[8]``, as a matrix ``[3, 3]``."""
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, axis_angle_to_quat(state[3:6].astype(float)))
    return matrix.reshape(3, 3)


def _limited(vector: np.ndarray, most: float = 1.0) -> np.ndarray:
    """``vector`` shortened to the length ``most``."""
    norm = float(np.linalg.norm(vector))
    return vector * (most / norm) if norm > most else vector
