"""robosuite's own tasks through the same interface, equal to robosuite itself."""

import gymnasium
import numpy as np
import pytest
import regrasp.sim.registration  # noqa: F401 - registers the ids
from regrasp.sim import make_env
from regrasp.sim.robosuite_env import ROBOSUITE_TASKS

SMALL = {"agentview": (48, 48), "wrist": (48, 48)}
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (30, 7))


@pytest.fixture(scope="module")
def lift():
    env = make_env("robosuite", "Lift", cameras=SMALL, exact=True)
    yield env
    env.close()


def test_lift_equals_robosuite(lift):
    import robosuite

    np.random.seed(0)  # noqa: NPY002 - robosuite's stream
    stock = robosuite.make(
        "Lift",
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        use_camera_obs=False,
        has_offscreen_renderer=False,
        control_freq=20,
        ignore_done=True,
        hard_reset=False,
    )
    np.random.seed(int(np.random.SeedSequence([5, 2]).generate_state(1)[0]))  # noqa: NPY002
    stock.reset()
    lift.reset(seed=5, options={"init_state": 2, "render": False})
    assert np.array_equal(lift.data.qpos, stock.sim.data.qpos)
    for action in ACTIONS:
        stock.step(action)
        lift.step(action, render=False)
        assert np.array_equal(lift.data.qpos, stock.sim.data.qpos)
        assert np.array_equal(lift.data.qvel, stock.sim.data.qvel)
    stock.close()


def test_success_snapshot_and_beginnings(lift):
    first, _ = lift.reset(seed=1, options={"init_state": 0})
    assert first["agentview"].shape == (48, 48, 3)
    start = lift.data.qpos.copy()
    lift.reset(seed=1, options={"init_state": 1, "render": False})
    assert not np.array_equal(lift.data.qpos, start)
    again, _ = lift.reset(seed=1, options={"init_state": 0})
    assert np.array_equal(lift.data.qpos, start)
    assert np.array_equal(first["agentview"], again["agentview"])
    snapshot = lift.snapshot()
    states = lift.step_chunk(ACTIONS[:5], "none").states
    lift.restore(snapshot)
    assert np.array_equal(lift.step_chunk(ACTIONS[:5], "none").states, states)
    assert not lift.success
    joint = lift.model.joint(lift.problem.cube.joints[0])
    lift.data.qpos[joint.qposadr[0] + 2] += 0.2
    lift.edited()
    assert lift.success
    chunk = lift.step_chunk(ACTIONS[:3])
    assert chunk.terminated
    assert chunk.executed == 1


@pytest.mark.parametrize("name", ["Stack", "Can"])
def test_other_tasks_begin_and_step(name):
    env = gymnasium.make(f"regrasp/robosuite-{name}", cameras=SMALL)
    observation, info = env.reset(seed=0, options={"init_state": 3})
    assert env.observation_space.contains(observation)
    assert info["instruction"] == ROBOSUITE_TASKS[name].instruction
    chunk = env.unwrapped.step_chunk(ACTIONS[:4])
    assert (chunk.executed, chunk.terminated) == (4, False)
    env.close()
    env.close()


def test_unknown_tasks_name_the_nearest():
    with pytest.raises(KeyError, match="Lift"):
        make_env("robosuite", "Lft")
    with pytest.raises(IndexError, match="0 to"):
        make_env("robosuite", 99)
