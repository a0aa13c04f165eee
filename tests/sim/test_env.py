"""LiberoEnv: episodes, chunks, snapshots, pictures; each published trap has its test."""

import subprocess
import sys

import libero_jobs
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from regrasp.sim import make_env
from regrasp.sim.workers import run_episodes

SMALL = {"cameras": {"agentview": (64, 64), "wrist": (64, 64)}}
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (24, 7))


@pytest.fixture(scope="module")
def env():
    env = make_env("libero_object", 0, **SMALL)
    yield env
    env.close()


@pytest.fixture(scope="module")
def full():
    env = make_env("libero_object", 0, mode="full")
    yield env
    env.close()


def begin(env, index=0, render=False):
    return env.reset(seed=7, options={"init_state": index, "render": render})


def succeed_at(env, monkeypatch, steps):
    monkeypatch.setattr(env.problem, "_check_success", lambda: env.steps in steps)


def test_gymnasium_accepts_it(env):
    check_env(env, skip_render_check=True)
    assert env.metadata["render_fps"] == 20


def test_a_control_step_is_a_twentieth_of_a_second(env):
    begin(env)
    start = env.data.time
    env.step_chunk(ACTIONS[:10], "none")
    assert env.data.time - start == pytest.approx(0.5)


def test_stepping_needs_a_reset_and_valid_numbers():
    fresh = make_env("libero_object", 0, **SMALL)
    with pytest.raises(RuntimeError, match="reset"):
        fresh.step(np.zeros(7))
    begin(fresh)
    with pytest.raises(ValueError, match="7 finite"):
        fresh.step(np.full(7, np.nan))
    with pytest.raises(ValueError, match=r"\[h, 7\]"):
        fresh.step_chunk(np.zeros((0, 7)))
    with pytest.raises(ValueError, match="init_sate"):
        fresh.reset(options={"init_sate": 1})
    with pytest.raises(IndexError, match="has 50"):
        fresh.reset(options={"init_state": 50})
    fresh.close()
    fresh.close()


def test_a_reset_gives_the_state_that_was_asked_for_whatever_came_before(env):
    """lerobot#2402 (a state set before the reset is wiped) and #2832 (the index never advances)."""
    unsettled = make_env("libero_object", 0, settle_steps=0, **SMALL)
    states = unsettled.task.init_states()
    for index in (0, 1, 49):
        begin(unsettled, index)
        unsettled.step_chunk(ACTIONS[:2], "none")
        begin(unsettled, index)
        qpos = states[index][1 : 1 + unsettled.model.nq]
        assert np.array_equal(unsettled.data.qpos, qpos)
        assert unsettled.steps == 0
        assert unsettled.init_state == index
    unsettled.close()
    begin(env, 2)
    once = env.data.qpos.copy()
    env.step_chunk(ACTIONS[:5], "none")
    begin(env, 2)
    assert np.array_equal(env.data.qpos, once)


def test_settle_steps_are_not_counted_and_objects_rest(env):
    observation, info = begin(env, 1, render=True)
    assert env.steps == 0
    assert info["init_state"] == 1
    assert observation["agentview"].shape == (64, 64, 3)
    assert observation["state"].shape == (8,)
    free = [j for j in range(env.model.njnt) if env.model.jnt_type[j] == 0]
    speeds = [np.abs(env.data.qvel[env.model.jnt_dofadr[j] :][:3]).max() for j in free]
    assert max(speeds) < 0.05


def test_a_chunk_equals_its_steps(env):
    """GR00T PR722: all actions of a chunk are executed, not only the first."""
    begin(env)
    chunk = env.step_chunk(ACTIONS[:8], "all")
    after = env.data.qpos.copy()
    begin(env)
    for k in range(8):
        observation, reward, terminated, truncated, _ = env.step(ACTIONS[k])
        assert np.array_equal(observation["state"], chunk.states[k])
        assert np.array_equal(observation["agentview"], chunk.observations[k]["agentview"])
        assert (reward, terminated, truncated) == (0.0, False, False)
    assert np.array_equal(env.data.qpos, after)
    assert chunk.executed == 8
    begin(env)
    assert env.step_chunk(ACTIONS[:8], "none").observations == []
    assert np.array_equal(env.data.qpos, after), "drawing changes nothing"


def test_success_inside_a_chunk_ends_it_and_is_kept(env, monkeypatch):
    """pytorch/rl PR4024."""
    begin(env)
    succeed_at(env, monkeypatch, {3})
    chunk = env.step_chunk(ACTIONS[:8])
    assert chunk.rewards.tolist() == [0, 0, 1]
    assert (chunk.executed, chunk.terminated, chunk.truncated) == (3, True, False)
    assert len(chunk.observations) == 1
    _, reward, terminated, _, info = env.step(ACTIONS[3])
    assert (reward, terminated, info["success"]) == (0.0, True, True)
    snapshot = env.snapshot()
    begin(env)
    assert not env.succeeded
    env.restore(snapshot)
    assert env.succeeded
    assert env.steps == 4


def test_the_horizon_truncates_and_success_on_its_last_step_counts(env, monkeypatch):
    """LIBERO#40: stock's `done` at the horizon is overwritten, so episodes never end."""
    monkeypatch.setattr(env, "horizon", 5)
    begin(env)
    chunk = env.step_chunk(ACTIONS[:8])
    assert (chunk.executed, chunk.terminated, chunk.truncated) == (5, False, True)
    begin(env)
    succeed_at(env, monkeypatch, {5})
    chunk = env.step_chunk(ACTIONS[:8])
    assert (chunk.executed, chunk.terminated, chunk.truncated) == (5, True, False)


def test_restored_it_repeats_bit_for_bit(env):
    begin(env, 3)
    env.step_chunk(ACTIONS[:5], "none")
    snapshot = env.snapshot()
    seen = env.observe()
    first = env.step_chunk(ACTIONS[5:13])
    after = env.data.qpos.copy(), env.data.qvel.copy()
    begin(env, 8)
    env.restore(snapshot)
    again = env.observe()
    assert all(np.array_equal(seen[key], again[key]) for key in seen)
    assert (env.steps, env.init_state, env.seed_used) == (5, 3, 7)
    second = env.step_chunk(ACTIONS[5:13])
    assert np.array_equal(first.states, second.states)
    assert np.array_equal(first.observations[-1]["wrist"], second.observations[-1]["wrist"])
    assert np.array_equal(env.data.qpos, after[0])
    assert np.array_equal(env.data.qvel, after[1])


def test_an_edited_state_is_restored_too(env):
    begin(env)
    env.step_chunk(ACTIONS[:2], "none")
    joint = next(j for j in range(env.model.njnt) if env.model.jnt_type[j] == 0)
    env.data.qpos[env.model.jnt_qposadr[joint] + 2] += 0.1
    env.model.body_mass[-1] *= 2
    env.edited()
    snapshot = env.snapshot()
    mass = env.model.body_mass[-1]
    first = env.step_chunk(ACTIONS[2:6], "none").states
    begin(env)
    assert env.model.body_mass[-1] != mass, "a reset undoes edits"
    env.restore(snapshot)
    assert env.model.body_mass[-1] == mass
    assert np.array_equal(env.step_chunk(ACTIONS[2:6], "none").states, first)


def test_a_snapshot_continues_in_another_process(env):
    begin(env, 4)
    env.step_chunk(ACTIONS[:6], "none")
    job = ("libero_object", 0, SMALL, env.snapshot().to_bytes(), ACTIONS[6:12])
    ((_, there),) = run_episodes([job], libero_jobs.continue_from, workers=1, timeout_s=300.0)
    here = libero_jobs_equivalent(env, job)
    for a, b in zip(there, here, strict=True):
        assert np.array_equal(a, b)


def libero_jobs_equivalent(env, job):
    before = env.observe()["agentview"]
    chunk = env.step_chunk(job[4])
    last = chunk.observations[-1]["agentview"]
    return before, chunk.states, last, env.data.qpos.copy(), env.steps


@pytest.mark.parametrize(("mode", "bounds"), [("lite", (0.90, 0.85)), ("fine", (0.93, 0.9))])
def test_reduced_scenes_have_the_same_physics_and_nearly_the_same_picture(full, mode, bounds):
    """Reduced meshes keep their textures: without, SSIM falls below the bound."""
    from skimage.metrics import structural_similarity

    lite = make_env("libero_object", 0, mode=mode)
    begin(lite, 5)
    begin(full, 5)
    for chunk in (ACTIONS[:12], ACTIONS[12:]):
        assert np.array_equal(lite.data.qpos, full.data.qpos)
        a, b = lite.observe(), full.observe()
        for name, bound in zip(("agentview", "wrist"), bounds, strict=True):
            assert structural_similarity(a[name], b[name], channel_axis=2) > bound, name
        lite.step_chunk(chunk, "none")
        full.step_chunk(chunk, "none")
    assert np.array_equal(lite.data.qpos, full.data.qpos)
    assert np.array_equal(lite.data.qvel, full.data.qvel)
    faces = [int(e.model.mesh_facenum.sum()) for e in (lite, full)]
    assert faces[0] < faces[1] / 4
    lite.close()


def test_a_reset_never_loops_forever(env, monkeypatch):
    """Stock's `finally: continue` swallows every exception and tries for ever."""
    from robosuite.utils.errors import RandomizationError

    def impossible():
        raise RandomizationError("no room")

    def broken():
        raise ZeroDivisionError

    monkeypatch.setattr(env.problem, "reset", impossible)
    with pytest.raises(RuntimeError, match="no valid object placement"):
        env.reset(seed=12345)
    monkeypatch.setattr(env.problem, "reset", broken)
    with pytest.raises(ZeroDivisionError):
        env.reset(seed=12345)


def test_the_global_random_stream_is_left_alone(env):
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.get_state()[1].copy()  # noqa: NPY002
    env.reset(seed=99, options={"render": False})
    assert np.array_equal(np.random.get_state()[1], expected)  # noqa: NPY002


def test_the_bowl_of_spatial_5_seats_on_the_ramekin():
    """The settle premise: stored 11 cm above, it falls and stays (not so from mujoco 3.4 on)."""
    env = make_env("libero_spatial", 5, cameras={"agentview": (64, 64)})
    assert "ramekin" in env.instruction
    begin(env)
    body = {
        name: env.data.body(env.problem.objects_dict[name].root_body).xpos
        for name in ("akita_black_bowl_1", "glazed_rim_porcelain_ramekin_1")
    }
    bowl, ramekin = body.values()
    assert np.linalg.norm(bowl[:2] - ramekin[:2]) < 0.02
    height = bowl[2]
    assert 0.0 < height - ramekin[2] < 0.08
    env.step_chunk(np.tile([0, 0, 0, 0, 0, 0, -1.0], (20, 1)), "none")
    assert abs(bowl[2] - height) < 0.003
    touching = env.problem.check_contact(
        env.problem.objects_dict["akita_black_bowl_1"],
        env.problem.objects_dict["glazed_rim_porcelain_ramekin_1"],
    )
    assert touching
    env.close()


def test_observations_are_what_mujoco_says(env):
    """The state is openpi's: grip site, hand's axis-angle, two fingers."""
    from regrasp.sim.transforms import axis_angle_to_quat

    begin(env)
    state = env.state()
    site = mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_SITE, "gripper0_grip_site")
    assert np.allclose(state[:3], env.data.site_xpos[site], atol=1e-6)
    hand = env.data.body("robot0_right_hand").xquat
    assert abs(np.dot(axis_angle_to_quat(state[3:6]), hand)) == pytest.approx(1.0, abs=1e-5)
    assert state[6] > 0.03
    assert state[7] < -0.03


def test_a_renderer_goes_quietly_when_another_library_ended_the_display():
    """robosuite's own renderer ends the display at exit, and with it every context."""
    code = (
        "import atexit\n"
        "from regrasp.sim import make_env\n"
        "env = make_env('libero_object', 0)\n"
        "env.reset()\n"
        "from mujoco import egl\n"
        "from OpenGL import EGL\n"
        "atexit.register(EGL.eglTerminate, egl.EGL_DISPLAY)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "Error" not in done.stderr
