"""A rewind reaches its checkpoint through actions alone, and puts back what the hand holds."""

import numpy as np
import pytest
from regrasp.recovery.rewind import (
    Checkpoint,
    Rewind,
    RewindConfig,
    plan_rewind,
    rotation_between,
    rotation_matrix,
)
from tabletop import HOME, TABLE, Tabletop

CONFIG = RewindConfig()


def axis_angle(rng, angle):
    axis = rng.normal(0, 1, 3)
    return axis / np.linalg.norm(axis) * angle


def test_rotations():
    rng = np.random.default_rng(0)
    for angle in (0.0, 1e-7, 0.5, 3.0, np.pi - 1e-3, np.pi):
        a, delta = axis_angle(rng, 2.0), axis_angle(rng, angle)
        target = rotation_matrix(delta) @ rotation_matrix(a)
        b = rotation_between(np.zeros(3), vector_of(target))
        found = rotation_matrix(rotation_between(a, b))
        np.testing.assert_allclose(found @ rotation_matrix(a), target, atol=1e-6)
    # Either sign of half a turn is the same orientation: the hand points down at about pi.
    assert np.linalg.norm(rotation_between([np.pi, 0, 0], [-np.pi, 0, 0])) < 1e-6


def vector_of(matrix):
    """Axis-angle by eigenvector, another way than the code's."""
    angle = np.arccos(np.clip((np.trace(matrix) - 1) / 2, -1, 1))
    values, vectors = np.linalg.eig(matrix)
    axis = np.real(vectors[:, np.argmin(np.abs(values - 1))])
    for sign in (1, -1):
        if np.allclose(rotation_matrix(sign * axis * angle), matrix, atol=1e-5):
            return sign * axis * angle
    raise AssertionError("no axis fits")


def drive(env, rewind, limit=200):
    path = []
    while (action := rewind.action(env.state)) is not None:
        assert np.abs(action).max() <= 1.0
        env.step_chunk(action[None])
        path.append(env.state)
        assert len(path) < limit
    return np.array(path)


def history(env, moves):
    """Execute (actions, repeats) and return what a supervisor would have recorded."""
    states, grippers = [env.state], []
    for action, repeats in moves:
        for _ in range(repeats):
            env.step_chunk(np.array([action], np.float32))
            states.append(env.state)
            grippers.append(action[6])
    return np.stack(states), np.array(grippers)


def test_empty_hand_opens_rises_and_travels_home():
    env = Tabletop(0)
    away, down = [1, 1, 0, 0, 0, 0, 1], [0, 0, -1, 0, 0, 0, 1]
    states, grippers = history(env, [(away, 4), (down, 5)])
    target = Checkpoint(0, HOME, "start")
    rewind = Rewind(plan_rewind(states, grippers, target, CONFIG, HOME[2]), CONFIG)
    path = drive(env, rewind)
    assert np.linalg.norm(env.hand[:3] - HOME[:3]) <= CONFIG.tolerance
    assert env.width == pytest.approx(0.08)
    assert rewind.skipped == 0
    # It does not sweep sideways across the table: risen before it travels.
    moved = np.linalg.norm(path[:, :2] - states[-1][:2], axis=1) > 0.02
    assert path[moved][0, 2] > HOME[2] - CONFIG.tolerance - 0.05


def test_held_object_is_put_back_where_it_was_grasped():
    env = Tabletop(3)
    start = env.object.copy()
    to_object = (start[:3] - HOME[:3]) / 0.05
    steps = int(np.ceil(np.abs(to_object).max()))
    approach = [*(to_object / steps), 0, 0, 0, -1]
    states, grippers = history(
        env,
        [
            (approach, steps),
            ([0, 0, 0, 0, 0, 0, 1], 4),
            ([0, 0, 1, 0, 0, 0, 1], 4),
            ([1, 1, 0, 0, 0, 0, 1], 3),
        ],
    )
    assert env.held
    target = Checkpoint(0, HOME, "start")
    drive(env, Rewind(plan_rewind(states, grippers, target, CONFIG, HOME[2]), CONFIG))
    assert not env.held
    np.testing.assert_allclose(env.object, [*start[:2], TABLE], atol=0.03)
    assert np.linalg.norm(env.hand[:3] - HOME[:3]) <= CONFIG.tolerance


def test_blocked_waypoint_is_given_up_and_counted():
    class Stuck(Tabletop):
        def _step(self, action):
            self.t += 1

    env = Stuck(0)
    states, grippers = history(env, [([0, 0, 0, 0, 0, 0, 1], 1)])
    target = Checkpoint(0, HOME + 0.1 * np.eye(6)[0], "start")
    rewind = Rewind(plan_rewind(states, grippers, target, CONFIG, HOME[2]), CONFIG)
    drive(env, rewind, limit=500)
    assert rewind.skipped >= 2
