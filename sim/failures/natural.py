"""Failures that nobody injected: when they were past mending, and whether an advice helps.

A policy that fails by itself has no injection step. What can be known is what execution proves:
from which states an expert still brings the goal about. The last such state is found by bisection,
which takes for granted that what is lost stays lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.sim.failures.actors import Actor, CommittedActor, Plan
from regrasp.sim.failures.recover import ReplayConfig, way_out
from regrasp.sim.failures.rollout import Checkpoint, Robot, Trace, succeeds
from regrasp.sim.failures.stages import Progress
from scipy.spatial.transform import Rotation


@dataclass(frozen=True)
class Onset:
    """When a rollout went wrong, in control steps of its trace.

    Attributes:
        step: where it began to be lost: :attr:`no_return`, or :attr:`stalled` where there is none.
        no_return: the last checkpoint from which an expert still recovers; None where it recovers
            from every one.
        stalled: the first step at which as much was achieved as ever was.
    """

    step: int
    no_return: int | None
    stalled: int


def find_onset(
    robot: Robot, trace: Trace, progress: Progress, config: ReplayConfig | None = None
) -> Onset | None:
    """Date a failure by trying an expert from its checkpoints.

    Args:
        robot: the one that ``trace`` was made with; it is left anywhere.
        trace: a failure, with checkpoints.
        progress: of the same environment.
        config: how long a goal must hold to count.

    Returns:
        None where the expert cannot even from the beginning.
    """
    config = config or ReplayConfig()
    stalled = int(np.argmax(trace.stage.sum(axis=1)))
    marks = [trace.checkpoints[step] for step in sorted(trace.checkpoints)]

    def mendable(mark: Checkpoint) -> bool:
        robot.restore(mark.robot)
        return way_out(robot, mark.robot, progress, config) is not None

    if not mendable(marks[0]):
        return None
    if mendable(marks[-1]):
        return Onset(stalled, None, stalled)
    good, lost = 0, len(marks) - 1
    while lost - good > 1:
        middle = (good + lost) // 2
        if mendable(marks[middle]):
            good = middle
        else:
            lost = middle
    step = marks[good].step - trace.start
    return Onset(step, step, stalled)


def advised(
    robot: Robot,
    actions: np.ndarray,
    delta: Sequence[float] | None,
    actor: Actor,
    *,
    motion: int = 25,
    stay: int = 10,
) -> bool:
    """Whether an actor succeeds after a rollout's beginning and, maybe, an advised motion.

    Args:
        robot: just reset as the rollout began.
        actions: what the rollout executed up to where it is stopped, ``[T, 7]``.
        delta: how the hand moves then: metres, axis-angle, gripper as in a diagnosis; None for not.
        actor: goes on from there until the horizon; an advised motion is part of its time.
        motion: control steps that the motion takes.
        stay: control steps for which the goal must hold in a row.
    """
    for action in actions:
        robot.step_chunk(action[None], "none")
    left = robot.horizon - len(actions)
    if delta is not None:
        before = float(np.sign(actions[-1][6])) if len(actions) else -1.0
        follower = CommittedActor(_motion(robot.state(), delta, before))
        for _ in range(min(motion, left)):
            robot.step_chunk(follower.act(robot)[None], "none")
        left = max(0, left - motion)
    actor.reset()
    return succeeds(robot, actor, left, stay)


def _motion(state: np.ndarray, delta: Sequence[float], before: float) -> Plan:
    """One pose to be held: the hand's, moved by ``delta``."""
    there = state.astype(np.float64).copy()
    there[:3] += delta[:3]
    turn = Rotation.from_rotvec(np.asarray(delta[3:6], float))
    there[3:6] = (turn * Rotation.from_rotvec(there[3:6])).as_rotvec()
    action = np.zeros((1, 7), np.float32)
    action[0, 6] = delta[6] or before
    return Plan(there[None].astype(np.float32), action, np.zeros(1, np.int64), ("as advised",))
