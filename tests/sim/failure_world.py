"""A recorded rollout in a real scene, and what drives along it under injections."""

from dataclasses import dataclass

import mujoco
import numpy as np
from regrasp.sim.experts.tasks import make_expert
from regrasp.sim.failures import INJECTIONS
from regrasp.sim.failures.actors import CommittedActor, Plan
from regrasp.sim.perturbed import PerturbedEnv
from regrasp.sim.snapshot import get_state
from regrasp.sim.transforms import axis_angle_to_quat

RESET = {"init_state": 3, "render": False}


@dataclass
class World:
    """An environment and a rollout in it that succeeded."""

    env: object
    plan: Plan
    physics: np.ndarray

    def last(self, *phases):
        """The last row of the plan in one of these phases."""
        return int(np.flatnonzero(np.isin(self.plan.phase, phases))[-1])

    def pose(self, row):
        """The hand's position and orientation before that row."""
        return self.plan.state[row, :3], turned(self.plan.state[row])


def record(env):
    """An expert's rollout, until the goal has held for ten steps."""
    env.reset(options=RESET)
    expert = make_expert(env)
    rows = {"state": [], "action": [], "phase": [], "subtask": [], "physics": []}
    held = 0
    while held < 10 and len(rows["state"]) < 300:
        action = expert.act(env)
        now = (env.state(), action, int(expert.phase), expert.subtask, physics(env))
        for name, value in zip(rows, now, strict=True):
            rows[name].append(value)
        env.step_chunk(action[None], "none")
        held = held + 1 if env.success else 0
    assert held == 10
    plan = Plan(*(np.array(rows[n]) for n in ("state", "action", "phase")), tuple(rows["subtask"]))
    return World(env, plan, np.array(rows["physics"]))


def physics(env):
    return get_state(env.model, env.data)


def turned(state):
    """Orientation ``[3, 3]`` in a state."""
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, axis_angle_to_quat(state[3:6].astype(float)))
    return matrix.reshape(3, 3)


def start(world, injections, seed=0):
    robot = PerturbedEnv(world.env, injections, seed)
    robot.reset(options=RESET)
    return robot


def go(robot, actor, rows):
    """Let an actor drive; states of the physics after each step, and the actions as executed."""
    states, executed = [], []
    inner = robot.env.step_chunk

    def watched(actions, render):
        executed.extend(actions)
        return inner(actions, render=render)

    robot.env.step_chunk = watched
    try:
        for _ in range(rows):
            action = actor.act(robot)
            robot.scene.enter(actor.phase)
            robot.step_chunk(action[None], "none")
            states.append(physics(robot))
    finally:
        del robot.env.step_chunk
    return np.array(states), np.array(executed)


def run(world, kind, severity, rows=None, seed=0):
    """An injection on the committed follower of the world's plan."""
    robot = start(world, [INJECTIONS[kind](severity=severity)], seed)
    actor = CommittedActor(world.plan)
    _, executed = go(robot, actor, rows or len(world.plan))
    return robot, executed


def until_begun(world, kind, further=3):
    """The robot some steps after an injection at full severity began."""
    robot = start(world, [INJECTIONS[kind]()])
    actor = CommittedActor(world.plan)
    while not robot.events:
        go(robot, actor, 1)
    go(robot, actor, further)
    return robot, actor
