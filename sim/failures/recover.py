"""Out of a failed state: the way an expert finds, and whether it holds where it was not found.

What "replayed over K seeds" means here. Physics repeats itself bit for bit, so the same actions
from the same state prove nothing K times. Actions alone from another state prove too little: open
loop, a millimetre decides. A correction is of use if someone can follow it. So the found
trajectory becomes a plan, and a :class:`CommittedActor` follows it (servo on the hand's pose, no
look at any object) from the failed state with the goal's objects moved by millimetres and with
noise on every action, K times. The retry it is measured against has the same actor, the same K
states, noise of the same size and at least as many steps; only its plan is the original one: what
the actor had meant to do, right or wrong, from the beginning of the sub-task that failed.

What was done to the actor (control, perception) is over by then, for the retry as for the recovery:
so a retry succeeds where nothing but the actor was disturbed. What is wrong with the world
(physics) stays for both as long as it would have stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from regrasp.sim.failures.actors import CommittedActor, ExpertActor, LetGoActor, Plan, ShakenActor
from regrasp.sim.failures.rollout import (
    Checkpoint,
    Robot,
    Trace,
    fingerprint,
    finished,
    run,
    succeeds,
)
from regrasp.sim.failures.stages import Progress

#: Families that are the actor's fault and end with it.
ACTORS_FAULT = ("control", "perception", "semantic")

#: Farthest that the hand comes from the robot's base over the table, metres; how deep below the
#: lowest place at the start an object has fallen off it; how far tilted it has toppled, radians.
_REACH, _FALLEN, _TOPPLED = 0.80, 0.1, 0.8


class Outcome(StrEnum):
    """Whether an expert finds a way out, and why it does not."""

    FOUND = "found"
    OUT_OF_REACH = "out_of_reach"
    TOPPLED = "toppled"
    NOT_FOUND = "not_found"


@dataclass(frozen=True)
class ReplayConfig:
    """How a trajectory is tried again.

    Attributes:
        seeds: how often (K).
        noise: standard deviation on each action's translation, action units (1.0 is 0.05 m, of
            which the arm does a quarter); a quarter of it on the rotation.
        jitter: standard deviation of each object's displacement in x and y, metres.
        grace: control steps after the plan's end.
        stay: control steps for which the goal must hold in a row.
        lead: control steps at most to come to a plan's first pose.
    """

    seeds: int = 5
    noise: float = 0.05
    jitter: float = 0.002
    grace: int = 20
    stay: int = 10
    lead: int = 60


@dataclass(frozen=True)
class Recovery:
    """What became of a failed state.

    Attributes:
        outcome: whether the expert found a way.
        trace: what it did, from the failed state; None without a way.
        replays: whether each of the K replays of it succeeded.
        retries: whether each of the K retries of the original plan did.
    """

    outcome: Outcome
    trace: Trace | None = None
    replays: tuple[bool, ...] = ()
    retries: tuple[bool, ...] = ()

    @property
    def mends(self) -> bool:
        """Whether most replays succeed: only then is it a correction to be taught."""
        return sum(self.replays) > len(self.replays) / 2


def recover(
    robot: Robot,
    checkpoint: Checkpoint,
    progress: Progress,
    original: Plan,
    seed: Sequence[int],
    config: ReplayConfig,
    known: dict[bytes, Recovery],
) -> Recovery:
    """Find a way out of a failed state, and try it and the original plan again.

    Severities that end in the same state, bit for bit, have the same recovery: nothing is run
    twice.

    Args:
        robot: with the injections that led here, reset.
        checkpoint: the failed state.
        progress: of the same environment.
        original: what is retried.
        seed: of the replays.
        config: how they are done.
        known: what became of states so far, for the same original and seed; is added to.
    """
    robot.restore(checkpoint.robot)
    robot.lift(ACTORS_FAULT)
    start = robot.snapshot()
    state = fingerprint(start[0])
    if robot.idle and state in known:
        return known[state]
    recovery = _recovered(robot, start, progress, original, seed, config)
    if robot.idle:
        known[state] = recovery
    return recovery


def _recovered(
    robot: Robot,
    start: Any,
    progress: Progress,
    original: Plan,
    seed: Sequence[int],
    config: ReplayConfig,
) -> Recovery:
    """See :func:`recover`; the robot is at ``start``."""
    trace = way_out(robot, start, progress, config)
    if trace is None:
        robot.restore(start)
        return Recovery(_why_not(robot.env, progress))
    replays, retries = (
        replayed(robot, start, progress, plan, seed, config, steps)
        for plan, steps in ((trace.plan, len(trace)), (original, max(len(original), len(trace))))
    )
    return Recovery(Outcome.FOUND, trace, replays, retries)


def way_out(robot: Robot, start: Any, progress: Progress, config: ReplayConfig) -> Trace | None:
    """What an expert does to succeed from a snapshot; None where it does not.

    With something in the hand, it may have to let go first.
    """
    expert = ExpertActor(robot.env)
    ways: list[ExpertActor | LetGoActor] = [expert]
    if progress.holding():
        ways.append(LetGoActor(expert))
    for actor in ways:
        robot.restore(start)
        actor.reset()
        until = finished(actor, config.stay)
        trace = run(robot, actor, robot.horizon, progress, until=until)
        if len(trace) >= config.stay and trace.success[-config.stay :].all():
            return trace
    return None


def replayed(
    robot: Robot,
    start: Any,
    progress: Progress,
    plan: Plan,
    seed: Sequence[int],
    config: ReplayConfig,
    steps: int,
) -> tuple[bool, ...]:
    """Whether each of K shaken followers of a plan succeeds from a shaken state.

    Args:
        robot: the environment.
        start: its snapshot to begin from.
        progress: of the same environment.
        plan: what is followed.
        seed: the k-th follower draws from ``SeedSequence([*seed, k])``.
        config: how much is shaken.
        steps: control steps it has, lead and grace not counted.
    """
    verdicts = []
    for k in range(config.seeds):
        rng = np.random.default_rng(np.random.SeedSequence([*seed, k]))
        robot.restore(start)
        _jitter(robot.env, progress, rng, config.jitter)
        actor = ShakenActor(CommittedActor(plan, config.lead), config.noise, rng)
        most = config.lead + steps + config.grace
        verdicts.append(succeeds(robot, actor, most, config.stay))
    return tuple(verdicts)


def _jitter(env: Any, progress: Progress, rng: np.random.Generator, size: float) -> None:
    """Move the goal's objects a little in the plane, those in the hand excepted."""
    progress.scene.update()
    for name, address in progress.movable.items():
        offset = rng.normal(0.0, size, 2)
        if not progress.scene.fingers_on(progress.scene.geoms(progress.scene.body(name))):
            env.data.qpos[address : address + 2] += offset
    env.edited()


def _why_not(env: Any, progress: Progress) -> Outcome:
    """What keeps an object of the goal from being taken in the present state."""
    base = env.model.body("robot0_base").pos
    lowest = min(float(place[2]) for place in progress.rest.values())
    outcome = Outcome.NOT_FOUND
    for name in progress.movable:
        position = progress.scene.pos(name)
        far = float(np.linalg.norm((position - base)[:2])) > _REACH
        if far or position[2] < lowest - _FALLEN:
            return Outcome.OUT_OF_REACH
        upright = progress.scene.rot(name) @ progress.upright[name]
        if float(np.arccos(np.clip(upright[2], -1.0, 1.0))) > _TOPPLED:
            outcome = Outcome.TOPPLED
    return outcome
