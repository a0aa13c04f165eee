"""The scripted experts on real LIBERO: they solve tasks, retry, and are a law of the state."""

import numpy as np
import pytest
from regrasp.sim import make_env
from regrasp.sim.experts import (
    Disturbance,
    NoiseConfig,
    Phase,
    alternative_goals,
    make_expert,
    rollout_expert,
)
from regrasp.sim.experts.articulated import tilted
from regrasp.sim.experts.base import NOMINAL, Command, funnel, rotation_vector, rotation_z, servo

CAMERAS = {"agentview": (32, 32)}


def solve(env, expert, init_state, limit, interfere=None):
    """Run an expert; its phases, or None in place of the steps when it fails."""
    env.reset(options={"init_state": init_state, "render": False})
    expert.reset()
    phases = []
    for step in range(limit):
        action = expert.act(env)
        assert action.dtype == np.float32
        assert action.shape == (7,)
        assert np.abs(action).max() <= 1.0
        assert action[6] in (-1.0, 1.0)
        if interfere is not None:
            action = interfere(step, expert, action)
        phases.append(Phase(expert.phase))
        env.step_chunk(action[None], render="none")
        if env.succeeded:
            return step + 1, phases
    return None, phases


@pytest.fixture(scope="module")
def basket():
    env = make_env("libero_object", 9, cameras=CAMERAS)
    yield env
    env.close()


@pytest.fixture(scope="module")
def bowls():
    env = make_env("libero_spatial", 4, cameras=CAMERAS)
    yield env
    env.close()


@pytest.fixture(scope="module")
def kitchen():
    env = make_env("libero_goal", 3, cameras=CAMERAS)
    yield env
    env.close()


def test_puts_an_object_in_the_basket(basket):
    steps, phases = solve(basket, make_expert(basket), 3, 130)
    assert steps is not None
    order = [phases.index(p) for p in (Phase.APPROACH, Phase.GRASP, Phase.LIFT, Phase.CARRY)]
    assert order == sorted(order)


def test_takes_a_bowl_out_of_a_drawer(bowls):
    steps, _ = solve(bowls, make_expert(bowls), 0, 200)
    assert steps is not None


def test_opens_a_drawer_and_fills_it(kitchen):
    steps, phases = solve(kitchen, make_expert(kitchen), 1, 280)
    assert steps is not None
    assert phases.index(Phase.PULL_OPEN) < phases.index(Phase.LIFT)


@pytest.mark.parametrize(
    ("goal", "limit"),
    [
        (("turnon", "flat_stove_1"), 150),
        (("on", "plate_1", "flat_stove_1_cook_region"), 150),
        (("on", "cream_cheese_1", "akita_black_bowl_1"), 130),
    ],
)
def test_other_goals_of_the_same_scene(kitchen, goal, limit):
    expert = make_expert(kitchen, goal=[goal])
    kitchen.reset(options={"init_state": 2, "render": False})
    expert.reset()
    for _ in range(limit):
        kitchen.step_chunk(expert.act(kitchen)[None], render="none")
    assert expert.scene.holds(goal)
    assert expert.done


def test_alternative_goals_are_worded_as_the_benchmark_does_and_solvable(basket):
    goals = alternative_goals(basket)
    assert len(goals) == 5
    goal, instruction = goals[0]
    words = goal[0][1].rpartition("_")[0].replace("_", " ")
    assert instruction == f"pick up the {words} and place it in the basket"
    expert = make_expert(basket, goal=goal)
    basket.reset(options={"init_state": 4, "render": False})
    expert.reset()
    for _ in range(140):
        basket.step_chunk(expert.act(basket)[None], render="none")
    assert expert.scene.holds(goal[0])
    assert not basket.succeeded


def test_the_other_bowl_of_a_spatial_scene_is_a_goal_of_its_own(bowls):
    ((goal, instruction),) = alternative_goals(bowls)
    assert goal == [("on", "akita_black_bowl_2", "plate_1")]
    on_cabinet = "pick up the black bowl on the wooden cabinet and place it on the plate"
    assert instruction == on_cabinet != bowls.task.instruction
    expert = make_expert(bowls, goal=goal)
    bowls.reset(options={"init_state": 1, "render": False})
    expert.reset()
    for _ in range(160):
        bowls.step_chunk(expert.act(bowls)[None], render="none")
    assert expert.scene.holds(goal[0])
    assert not bowls.succeeded


def test_a_scene_without_other_goals_says_so(kitchen):
    with pytest.raises(ValueError, match="no basket and no twin"):
        alternative_goals(kitchen)


def test_grasps_again_after_dropping(basket):
    dropping = []

    def drop(step, expert, action):
        if not dropping and expert.phase == Phase.CARRY:
            dropping.append(step)
        if not dropping or step > dropping[0] + 25:
            return action
        return np.array([*action[:6], -1.0], np.float32)

    steps, phases = solve(basket, make_expert(basket), 5, 280, drop)
    assert steps is not None
    assert dropping
    again = phases[dropping[0] + 25 :]
    assert Phase.GRASP in again


def test_the_action_is_a_law_of_the_state(basket):
    """A second expert that has seen nothing agrees, before and after the object is held."""
    expert = make_expert(basket)
    basket.reset(options={"init_state": 6, "render": False})
    expert.reset()
    for step in range(60):
        action = expert.act(basket)
        if step in (0, 8, 15, 50):
            fresh = make_expert(basket)
            fresh.scene.last_gripper = expert.scene.last_gripper
            fresh.skills[0]._held = expert.skills[0]._held
            np.testing.assert_allclose(fresh.act(basket), action, atol=1e-6)
        basket.step_chunk(action[None], render="none")


def test_actions_change_smoothly(basket):
    """Apart from the fingers no component jumps by more than its range within one step."""
    expert = make_expert(basket)
    basket.reset(options={"init_state": 7, "render": False})
    expert.reset()
    actions = []
    for _ in range(80):
        actions.append(expert.act(basket))
        basket.step_chunk(actions[-1][None], render="none")
    jumps = np.abs(np.diff(np.array(actions)[:, :6], axis=0)).max(axis=1)
    assert np.mean(jumps) < 0.2
    assert jumps.max() < 1.1


def test_unknown_goals_say_what_is_known(basket):
    with pytest.raises(ValueError, match="known are In a basket"):
        make_expert(basket, goal=[("up", "milk_1")])


def test_a_disturbed_demonstration_carries_clean_labels(basket):
    expert = make_expert(basket)
    episode = rollout_expert(basket, expert, 8, seed=1, noise=NoiseConfig())
    steps = episode.steps
    assert episode.header.success
    assert steps["success"][-5:].all()
    assert steps["image/agentview"].shape == (len(episode), 32, 32, 3)
    assert steps["aux"].shape == (len(episode), 9)
    changed = np.abs(steps["action"] - steps["expert_action"]).max(axis=1) > 1e-6
    assert changed.mean() > 0.8
    assert np.all(np.diff(steps["segment"]) >= 0)
    np.testing.assert_allclose(steps["aux"][:, 6:], steps["state"][:, :3], atol=1e-6)


def test_the_same_seed_disturbs_alike_and_none_does_not():
    action = np.zeros(7, np.float32)
    one, two = (Disturbance(NoiseConfig(), seed=3) for _ in range(2))
    runs = [[d.apply(action) for _ in range(40)] for d in (one, two)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert Disturbance(None, seed=3).apply(action) is action


@pytest.mark.parametrize("yaw", [-3.0, -0.5, 0.0, 1e-9, 2.0, np.pi])
def test_rotation_vector_inverts_rotation_z(yaw):
    np.testing.assert_allclose(
        np.abs(rotation_vector(rotation_z(yaw))), [0, 0, abs(yaw)], atol=1e-6
    )


def test_servo_moves_straight_and_within_its_range():
    action = servo(
        Command(Phase.CARRY, np.array([0.3, 0.1, 0.0]), NOMINAL, 1.0), np.zeros(3), NOMINAL
    )
    assert np.linalg.norm(action[:2]) == pytest.approx(1.0)
    assert action[0] / action[1] == pytest.approx(3.0)
    np.testing.assert_allclose(action[3:6], 0.0, atol=1e-6)


def test_funnel_rises_before_it_moves_over():
    low, scale = funnel(np.zeros(3), np.array([0.2, 0.0, 0.0]), 0.1, lateral=0.2)
    assert low[2] == pytest.approx(0.1)
    assert scale == 0.0
    down, scale = funnel(np.array([0.2, 0.0, 0.05]), np.array([0.2, 0.0, 0.0]), 0.1, lateral=0.0)
    assert down[2] == 0.0
    assert scale == 1.0


def test_a_leaning_hand_points_where_it_should():
    rot = tilted(np.array([0.0, -1.0, 0.0]), np.pi / 2)
    np.testing.assert_allclose(rot[:, 2], [0.0, -1.0, 0.0], atol=0.06)
    np.testing.assert_allclose(rot.T @ rot, np.eye(3), atol=1e-12)
