"""Perturbations on real LIBERO: they do what they say, repeatably, and are gone after a reset."""

import numpy as np
import pytest
from regrasp.sim import make_env
from regrasp.sim.experts.tasks import make_expert
from regrasp.sim.perturb import (
    PERTURBATIONS,
    ActionNoise,
    AtStep,
    CameraShift,
    InitialPose,
    Lifted,
    Nudge,
    Slip,
    from_json,
)
from regrasp.sim.perturbed import PerturbedEnv

RESET = {"init_state": 3, "render": False}


@pytest.fixture(scope="module")
def inner():
    env = make_env("libero_object", 9, cameras={"agentview": (64, 64)}, horizon=400)
    yield env
    env.close()


def drive(env, steps, expert=True, actions=None, until=None):
    """Run the expert (or given actions); states after each step."""
    brain = make_expert(env.env if isinstance(env, PerturbedEnv) else env) if expert else None
    states = []
    for i in range(steps):
        action = brain.act(env) if brain else actions[i]
        states.append(env.step_chunk(np.asarray(action, np.float32)[None], "none").states[0])
        if until and until(env):
            break
    return np.array(states)


def held(env):
    """Whether the object follows the hand up."""
    before = env.scene.position()[2]
    up = np.array([[0, 0, 1, 0, 0, 0, 1]] * 10, np.float32)
    env.step_chunk(up, "none")
    return env.scene.position()[2] > before + 0.02


def test_every_kind_survives_json():
    for kind, cls in PERTURBATIONS.items():
        perturbation = cls()
        data = perturbation.to_json()
        assert data["kind"] == kind
        assert from_json(data) == perturbation
    with pytest.raises(KeyError, match="did you mean nudge"):
        from_json({"kind": "nudged", "when": {"kind": "at_step", "step": 0}})


def test_slip_drops_the_object(inner):
    env = PerturbedEnv(inner, [Slip(when=Lifted(0.04))], seed=1)
    env.reset(options=RESET)
    drive(env, 250, until=lambda e: e.events and e.scene.step > e.events[0]["end"] + 2)
    assert [e["kind"] for e in env.events] == ["slip"]
    assert env.events[0]["end"] - env.events[0]["step"] <= env.perturbations[0].steps
    scene = env.scene
    assert scene.position()[2] < scene.rest[2] + 0.03  # it lies on the table again
    assert np.linalg.norm(scene.position()[:2] - scene.rest[:2]) > 0.04
    assert not held(env)


def test_nudge_moves_the_object_along_the_table(inner):
    env = PerturbedEnv(inner, [Nudge(distance=0.06)], seed=2)
    env.reset(options=RESET)
    before = env.scene.position().copy()
    drive(env, 250, until=lambda e: e.events and e.scene.step > e.events[0]["end"] + 5)
    moved = env.scene.position() - before
    assert 0.03 < np.linalg.norm(moved[:2]) < 0.12
    assert abs(moved[2]) < 0.03
    direction = env.events[0]["drawn"]["direction"]
    assert np.dot(moved[:2], [np.cos(direction), np.sin(direction)]) > 0.02


def test_noise_burst_throws_the_arm_off_for_its_steps_only(inner):
    still = np.zeros((30, 7), np.float32)
    env = PerturbedEnv(inner, [ActionNoise(when=AtStep(5), steps=6)], seed=3)
    env.reset(options=RESET)
    shaken = drive(env, 30, expert=False, actions=still)
    env = PerturbedEnv(inner, [], seed=3)
    env.reset(options=RESET)
    calm = drive(env, 30, expert=False, actions=still)
    np.testing.assert_array_equal(shaken[:5], calm[:5])
    assert np.linalg.norm(shaken[12, :3] - calm[12, :3]) > 0.05
    assert np.linalg.norm(shaken[29, :3] - shaken[20, :3]) < 0.02


def test_initial_pose_is_another_and_counts_as_steps(inner):
    env = PerturbedEnv(inner, [InitialPose()], seed=4)
    nominal = inner.reset(options=RESET)[0]["state"]
    obs, _ = env.reset(options=RESET)
    assert 0.08 < np.linalg.norm(obs["state"][:3] - nominal[:3]) < 0.4
    assert inner.steps == InitialPose().steps
    assert env.events[0]["kind"] == "initial_pose"


def test_camera_shift_lasts_until_reset(inner):
    options = {"init_state": 3}
    calm = inner.reset(options=options)[0]["agentview"].astype(int)
    env = PerturbedEnv(inner, [CameraShift(when=AtStep(2))], seed=5)
    env.reset(options=options)
    actions = np.zeros((4, 7), np.float32)
    actions[:, 6] = -1
    drive(env, 4, expert=False, actions=actions)
    first, second = env.observe()["agentview"].astype(int), env.observe()["agentview"].astype(int)
    assert np.abs(first - calm).mean() > 4  # and rendering did not undo it
    np.testing.assert_array_equal(first, second)
    again = inner.reset(options=options)[0]["agentview"].astype(int)
    np.testing.assert_array_equal(again, calm)


def test_same_seed_same_episode_however_it_is_stepped_and_rendered(inner):
    perturbations = [Nudge(when=AtStep(4)), ActionNoise(when=AtStep(10), steps=5)]
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (24, 7)).astype(np.float32)

    def run(seed, chunk, render):
        env = PerturbedEnv(inner, perturbations, seed)
        env.reset(options=RESET)
        parts = [env.step_chunk(actions[i : i + chunk], render) for i in range(0, 24, chunk)]
        return np.concatenate([p.states for p in parts]), env.events, inner.data.qpos.copy(), parts

    states, events, qpos, _ = run(6, 8, "none")
    for chunk, render in ((1, "none"), (8, "all"), (6, "last")):
        other, other_events, other_qpos, parts = run(6, chunk, render)
        np.testing.assert_array_equal(states, other)
        np.testing.assert_array_equal(qpos, other_qpos)
        assert events == other_events
        assert all(p.executed == chunk for p in parts)
        pictures = {"none": 0, "last": 1, "all": chunk}[render]
        assert all(len(p.observations) == pictures for p in parts)
    assert not np.array_equal(states, run(7, 8, "none")[0])


def test_snapshot_in_the_middle_of_a_burst(inner):
    env = PerturbedEnv(inner, [ActionNoise(when=AtStep(3), steps=8), Nudge(when=AtStep(6))], 8)
    env.reset(options=RESET)
    still = np.zeros((20, 7), np.float32)
    drive(env, 5, expert=False, actions=still)
    snapshot = env.snapshot()
    one = drive(env, 12, expert=False, actions=still)
    events = env.events
    env.restore(snapshot)
    two = drive(env, 12, expert=False, actions=still)
    np.testing.assert_array_equal(one, two)
    assert events == env.events
