"""Stock LIBERO and ours, number by number: the same resets, steps, goals and pictures."""

from pathlib import Path

import numpy as np
import pytest
from regrasp.sim import EnvConfig, LiberoEnv, get_task
from regrasp.sim.control import CompiledControl, choose_options

SETTLE = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])

#: One task of each suite; goal has movable fixtures, so its second trial is compared too.
TRIALS = {
    ("libero_object", 0): 1,
    ("libero_spatial", 0): 1,
    ("libero_goal", 3): 2,
    ("libero_10", 0): 1,
}


def apart(stock, env):
    data = stock.sim.data
    return max(np.abs(env.data.qpos - data.qpos).max(), np.abs(env.data.qvel - data.qvel).max())


@pytest.fixture(scope="module", params=TRIALS, ids=lambda key: f"{key[0]}-{key[1]}")
def pair(request):
    """(stock, ours exact, trials to compare): the last trial begun, nothing stepped."""
    from libero.libero.envs.env_wrapper import ControlEnv

    task = get_task(*request.param)
    with_pictures = request.param[0] == "libero_object"
    # With its renderer, as every evaluation has it: building that runs one more forward pass.
    stock = ControlEnv(
        bddl_file_name=str(task.bddl), has_offscreen_renderer=True, use_camera_obs=False
    )
    stock.env.ignore_done = True
    config = EnvConfig(mode="full" if with_pictures else "lite", exact=True, settle_steps=0)
    ours = LiberoEnv(task, config)
    stock.seed(7)
    trial = TRIALS[request.param] - 1
    for _ in range(trial + 1):
        stock.reset()
    stock.set_init_state(task.init_states()[trial])
    ours.reset(seed=7, options={"init_state": trial, "render": False})
    yield stock, ours
    ours.close()
    stock.close()


def test_every_number_equals_stocks(pair):
    """Fixtures of the k-th trial, the first step after setting a state, settling, 50 actions."""
    stock, ours = pair
    assert np.array_equal(ours.model.body_pos, stock.sim.model._model.body_pos)
    assert np.array_equal(ours.model.body_quat, stock.sim.model._model.body_quat)
    assert apart(stock, ours) == 0.0
    stock.step(SETTLE)
    ours.step(SETTLE, render=False)
    assert apart(stock, ours) == 0.0, "the first step uses the controller's state from the reset"
    for _ in range(9):
        stock.step(SETTLE)
        ours.step(SETTLE, render=False)
    settled = ours.snapshot()
    actions = np.random.default_rng(0).uniform(-1.2, 1.2, (50, 7))
    path = []
    for action in actions:
        _, _, done, _ = stock.step(action)
        ours.step(action, render=False)
        assert apart(stock, ours) == 0.0
        assert bool(done) == ours.success == bool(stock.check_success())
        path.append(np.concatenate([ours.data.qpos, ours.data.qvel]))

    # Without the repeated solves the same physics to the last digits, from the same state on.
    exact, robot = ours._control, ours.problem.robots[0]
    ours._control = CompiledControl(robot, exact.substeps, exact=False)
    choose_options(ours.model, exact=False)
    ours.restore(settled)
    for action, there in zip(actions, path, strict=True):
        ours.step(action, render=False)
        here = np.concatenate([ours.data.qpos, ours.data.qvel])
        assert np.abs(here - there).max() < 1e-12
    ours._control = exact
    choose_options(ours.model, exact=True)


def test_full_pictures_are_stocks_rotated(pair):
    stock, ours = pair
    if ours.config.mode != "full":
        pytest.skip("one suite is drawn; the renderer is the same for all")
    ours.reset(seed=7, options={"init_state": 0, "render": False})
    stock.set_init_state(get_task(ours.suite, 0).init_states()[0])
    ours.edited()
    pictures = ours.observe()
    for name, camera in (("agentview", "agentview"), ("wrist", "robot0_eye_in_hand")):
        raw = stock.sim.render(width=128, height=128, camera_name=camera)
        assert np.abs(raw[::-1, ::-1].astype(int) - pictures[name]).max() <= 1, name
        assert np.abs(raw[::-1].astype(int) - pictures[name]).max() > 50, "a mirror would differ"


def test_array_contacts_equal_robosuites(pair):
    """The goal predicates' contact check, over all pairs of bodies, against the original."""
    _, ours = pair
    problem = ours.problem
    original = type(problem).__mro__[1].check_contact
    things = [*problem.objects_dict.values(), *problem.fixtures_dict.values()]
    things.append(problem.robots[0].gripper)
    for first in things:
        assert problem.check_contact(first) == original(problem, first)
        for second in things:
            if first is not second:
                assert problem.check_contact(first, second) == original(problem, first, second)
        name = first.contact_geoms[0]
        assert problem.check_contact(name, first.contact_geoms) == original(
            problem, name, first.contact_geoms
        )
    assert ours.data.ncon > 0


def test_stale_path_configuration_is_refused(tmp_path, monkeypatch):
    """RLinf's `_repoint_libero_config`: another LIBERO's config swaps scenes without a word."""
    (tmp_path / "config.yaml").write_text(f"bddl_files: {tmp_path}\n")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    with pytest.raises(ValueError, match="LIBERO_CONFIG_PATH"):
        get_task("libero_object", 0)
    (tmp_path / "config.yaml").unlink()
    assert Path(get_task("libero_object", 0).bddl).is_file()
