"""Failures that nobody injected: dated by an expert, and an advised motion is the hand's."""

import numpy as np
import pytest
from regrasp.sim import make_env
from regrasp.sim.failures.actors import ExpertActor
from regrasp.sim.failures.natural import _motion, advised, find_onset
from regrasp.sim.failures.rollout import Robot, run, stayed
from regrasp.sim.failures.stages import Progress
from scipy.spatial.transform import Rotation

RESET = {"init_state": 3, "render": False}


class Idle:
    """Does nothing; at one step, somebody takes what it should grasp away."""

    phase, subtask = 0, "pick and place it"

    def __init__(self, progress, gone):
        self.progress, self.gone, self.step = progress, gone, 0

    def reset(self):
        self.step = 0

    def act(self, robot):
        if self.step == self.gone:
            for address in self.progress.movable.values():
                robot.env.data.qpos[address : address + 3] += (0.0, 2.0, 0.5)
            robot.env.edited()
        self.step += 1
        return np.array([0.0] * 6 + [-1.0], np.float32)

    def memory(self):
        return self.step

    def recall(self, memory):
        self.step = memory


@pytest.fixture(scope="module")
def robot():
    env = make_env("libero_object", 0)
    yield Robot(env)
    env.close()


def begun(robot):
    robot.reset(options=RESET)
    return Progress(robot.env)


def test_onset_is_the_last_state_that_an_expert_mends(robot):
    progress = begun(robot)
    trace = run(robot, Idle(progress, gone=22), 60, progress, every=5)
    onset = find_onset(robot, trace, progress)
    assert onset.step == onset.no_return == 20


def test_what_an_expert_mends_to_the_end_went_wrong_where_it_stalled(robot):
    progress = begun(robot)
    expert = ExpertActor(robot.env)
    first = run(robot, expert, 25, progress, every=5)
    onset = find_onset(robot, first, progress)
    assert onset.no_return is None
    assert onset.step == onset.stalled == int(np.argmax(first.stage.sum(1)))


def test_an_advised_motion_is_the_hands(robot):
    begun(robot)
    before = robot.state()
    delta = (0.05, 0.0, -0.04, 0.0, 0.0, 0.3, 0.0)
    still = Idle(None, gone=-1)
    still.reset()
    calls = []

    class Watch(Idle):
        def act(self, robot):
            calls.append(robot.state())
            return super().act(robot)

    assert not advised(robot, np.zeros((0, 7), np.float32), delta, Watch(None, -1))
    after = calls[0]
    np.testing.assert_allclose(after[:3] - before[:3], delta[:3], atol=0.01)
    turn = Rotation.from_rotvec(after[3:6]) * Rotation.from_rotvec(before[3:6]).inv()
    np.testing.assert_allclose(turn.as_rotvec(), delta[3:6], atol=0.05)
    assert len(calls) == robot.horizon - 25
    assert _motion(before, delta, 1.0).action[0, 6] == 1.0  # no word of the fingers: as they were


def test_without_advice_a_rollout_goes_on_as_it_was(robot):
    progress = begun(robot)
    trace = run(robot, ExpertActor(robot.env), robot.horizon, progress, until=stayed(10))
    assert trace.success[-1]
    begun(robot)
    assert advised(robot, trace.executed[:40], None, ExpertActor(robot.env))
