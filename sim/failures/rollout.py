"""Rollouts that can be branched, compared row by row, and drawn afterwards.

Nothing is rendered while failures are looked for: physics is three times as fast as two pictures.
A trace that is kept is run again with pictures, and must repeat itself bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from regrasp.sim.failures.actors import Actor, Plan
from regrasp.sim.failures.stages import Progress
from regrasp.sim.perturbed import PerturbedEnv
from regrasp.sim.snapshot import get_state


class Robot(PerturbedEnv):
    """A perturbed environment that tells what it really executed.

    Attributes:
        executed: the last action after everything was done to it, float32 ``[7]``.
    """

    executed: np.ndarray = np.zeros(7, np.float32)

    def _before(self, action: np.ndarray) -> np.ndarray:
        self.executed = super()._before(action)
        return self.executed

    def take_over(self, physics: Any, step: int) -> None:
        """Continue from an environment's snapshot as if nothing had been injected before.

        Args:
            physics: of the environment itself, as in :attr:`Checkpoint.physics`.
            step: control steps since the reset.
        """
        fresh: tuple[list[Any], ...] = (
            [0] * len(self.perturbations),
            [None] * len(self.perturbations),
            [],
        )
        self.restore((physics, fresh, (step, -1, 0, [], {})))

    @property
    def idle(self) -> bool:
        """Whether whatever was to be injected has begun and is over."""
        done = zip(self.perturbations, self._done, strict=True)
        return all(n > injection.duration for injection, n in done)

    def lift(self, families: Sequence[str]) -> None:
        """End whatever injection of these families is going on, for good."""
        for i, injection in enumerate(self.perturbations):
            going = self._begun[i] is not None and self._done[i] <= injection.duration
            if going and getattr(injection, "family", "") in families:
                injection.end(self.scene, self._drawn[i])
                self._done[i] = injection.duration + 1


def fingerprint(snapshot: Any) -> bytes:
    """A hash of an environment's :class:`regrasp.sim.snapshot.Snapshot`: equal states, equal."""
    h = hashlib.sha256()
    for array in (snapshot.now, snapshot.before, snapshot.control, snapshot.counters):
        h.update(array.tobytes())
    for name in sorted(snapshot.model):
        h.update(snapshot.model[name].tobytes())
    return h.digest()


@dataclass(frozen=True)
class Checkpoint:
    """A moment to branch from.

    Attributes:
        step: control steps since the reset.
        robot: the :class:`Robot`'s snapshot.
        memory: the actor's.
    """

    step: int
    robot: Any
    memory: Any

    @property
    def physics(self) -> Any:
        """The environment's own :class:`regrasp.sim.snapshot.Snapshot`."""
        return self.robot[0]


#: Arrays of a trace that have one row a control step.
_ROWS = (
    "wanted",
    "executed",
    "state",
    "phase",
    "success",
    "stage",
    "touch",
    "objects",
    "joints",
    "points",
    "physics",
)


@dataclass(frozen=True)
class Trace:
    """What happened, one row a control step; a row is the moment before its action.

    Attributes:
        start: control steps since the reset at the first row.
        wanted: the actor's action, float32 ``[T, 7]``.
        executed: what was left of it, float32 ``[T, 7]``.
        state: proprioception, float32 ``[T, 8]``.
        phase: ``[T]``; subtask: one name a row.
        success: whether the task's goal holds after the action, bool ``[T]``.
        stage, touch: of each goal, int8 ``[T, G]``.
        objects: poses of the movable objects, ``[T, N, 7]``.
        joints: of the fixtures, ``[T, J]``.
        points: where the thing to be moved is and where it shall go, ``[T, 6]``.
        physics: MuJoCo's integration state, ``[T, S]``.
        events: what was injected (:attr:`PerturbedEnv.events`).
        checkpoints: step -> a moment to branch from.
    """

    start: int
    wanted: np.ndarray
    executed: np.ndarray
    state: np.ndarray
    phase: np.ndarray
    subtask: tuple[str, ...]
    success: np.ndarray
    stage: np.ndarray
    touch: np.ndarray
    objects: np.ndarray
    joints: np.ndarray
    points: np.ndarray
    physics: np.ndarray
    events: list[dict[str, Any]]
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.wanted)

    @property
    def latched(self) -> bool:
        """Whether the goal held after any row."""
        return bool(self.success.any())

    @property
    def plan(self) -> Plan:
        """What it takes to do this again."""
        return Plan(self.state, self.wanted, self.phase, self.subtask)

    def digest(self) -> str:
        """Twelve hex digits of everything that happened."""
        h = hashlib.sha256()
        for name in _ROWS:
            h.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        h.update(repr((self.start, self.subtask, self.events)).encode())
        return h.hexdigest()[:12]


def joined(first: Trace, second: Trace) -> Trace:
    """``first`` up to where ``second`` begins, then ``second``.

    Raises:
        ValueError: there is a gap between them.
    """
    rows = second.start - first.start
    if not 0 <= rows <= len(first):
        raise ValueError(f"joined: a trace that starts at {second.start} does not follow")
    arrays = {n: np.concatenate([getattr(first, n)[:rows], getattr(second, n)]) for n in _ROWS}
    early = {step: c for step, c in first.checkpoints.items() if step < second.start}
    return Trace(
        start=first.start,
        subtask=first.subtask[:rows] + second.subtask,
        events=second.events,
        checkpoints=early | second.checkpoints,
        **arrays,
    )


def run(
    robot: Robot,
    actor: Actor,
    steps: int,
    progress: Progress,
    every: int = 0,
    until: Callable[[list[bool]], bool] = lambda success: False,
) -> Trace:
    """Let an actor drive from here, without pictures.

    Args:
        robot: just reset, or at a snapshot.
        actor: just reset, or with its memory recalled.
        steps: control steps at most.
        progress: of the same environment.
        every: control steps between checkpoints; 0 keeps none. With any, the moment before the
            first injection begins is kept too.
        until: given the success after each step so far, whether to stop.
    """
    rows: dict[str, list[Any]] = {name: [] for name in (*_ROWS, "subtask")}
    checkpoints: dict[int, Checkpoint] = {}
    start, quiet = robot.scene.step, not robot.events
    for step in range(start, start + steps):
        wanted_now = step % every == 0 if every else False
        before = Checkpoint(step, robot.snapshot(), actor.memory()) if every else None
        row = _row(robot, actor, progress)
        if before is not None and (wanted_now or (quiet and robot.events)):
            checkpoints[step] = before
        quiet = quiet and not robot.events
        for name, value in row.items():
            rows[name].append(value)
        if until(rows["success"]):
            break
    arrays = {name: np.stack([np.asarray(value) for value in rows[name]]) for name in _ROWS}
    return Trace(
        start=start,
        subtask=tuple(rows["subtask"]),
        events=copy.deepcopy(robot.events),
        checkpoints=checkpoints,
        **arrays,
    )


def _row(robot: Robot, actor: Actor, progress: Progress) -> dict[str, Any]:
    """One control step: what was before it, and what it did."""
    row: dict[str, Any] = dict(vars(progress.read()))
    row["state"] = robot.state()
    row["physics"] = get_state(robot.model, robot.data)
    row["wanted"] = actor.act(robot)
    row["phase"], row["subtask"] = int(actor.phase), actor.subtask
    row["points"] = progress.points(actor.subtask)
    robot.scene.enter(actor.phase)
    robot.step_chunk(row["wanted"][None], "none")
    row["executed"], row["success"] = robot.executed, robot.success
    return row


def stayed(steps: int) -> Callable[[list[bool]], bool]:
    """For :func:`run`: stop once success has held for ``steps`` control steps in a row."""
    return lambda success: len(success) >= steps and all(success[-steps:])


def finished(actor: Actor, stay: int) -> Callable[[list[bool]], bool]:
    """Stop once the goal has held for ``stay`` steps and the actor is done, or four times that."""

    def until(success: list[bool]) -> bool:
        long = stayed(4 * stay)(success)
        return long or (getattr(actor, "done", False) and stayed(stay)(success))

    return until


def succeeds(robot: Robot, actor: Actor, steps: int, stay: int) -> bool:
    """Whether an actor brings the goal about from here, and it stays; nothing is recorded.

    Args:
        robot, actor: as in :func:`run`.
        steps: control steps it has.
        stay: control steps for which the goal must hold in a row.
    """
    held = 0
    for _ in range(steps):
        action = actor.act(robot)
        robot.scene.enter(actor.phase)
        robot.step_chunk(action[None], "none")
        held = held + 1 if robot.success else 0
        if held >= stay:
            return True
    return False


def draw(robot: Robot, trace: Trace) -> dict[str, np.ndarray]:
    """Run a trace again with pictures, injections and all.

    Args:
        robot: with the trace's injections and seed, where the trace begins.
        trace: what is drawn.

    Returns:
        Camera -> uint8 ``[T, H, W, 3]``, what the actor got to see before each action.

    Raises:
        RuntimeError: it did not repeat itself bit for bit.
    """
    pictures: dict[str, list[np.ndarray]] = {name: [] for name in robot.config.cameras}
    for row in range(len(trace)):
        if not np.array_equal(get_state(robot.model, robot.data), trace.physics[row]):
            raise RuntimeError(f"draw: row {row} is not the trace's; was the start the same?")
        seen = robot.observe()
        for name, frames in pictures.items():
            frames.append(seen[name])
        robot.scene.enter(int(trace.phase[row]))
        robot.step_chunk(trace.wanted[row][None], "none")
        if not np.array_equal(robot.executed, trace.executed[row]):
            raise RuntimeError(f"draw: the action of row {row} is not the trace's")
    return {name: np.stack(frames) for name, frames in pictures.items()}
