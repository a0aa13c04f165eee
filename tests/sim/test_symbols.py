"""Symbols sit where the things are that they mark."""

import numpy as np
import pytest
from regrasp.sim import make_env
from regrasp.sim.failures.symbols import COLOURS, Mark, Symbol, draw_marks, marks_of, project

SIZE = 128


@pytest.fixture(scope="module")
def env():
    env = make_env("libero_object", 0)
    env.reset(options={"init_state": 1})
    yield env
    env.close()


def seen_at(env, camera, name):
    """Middle of an object's pixels (0 to 1), found by moving it away and comparing pictures."""
    before = env.observe()[camera].astype(int)
    snapshot = env.snapshot()
    joint = env.problem.objects_dict[name].joints[0]
    address = env.model.joint(joint).qposadr[0]
    env.data.qpos[address + 2] -= 10.0
    env.edited()
    changed = np.abs(env.observe()[camera].astype(int) - before).sum(-1) > 30
    env.restore(snapshot)
    row, column = np.argwhere(changed).mean(axis=0)
    return np.array([column + 0.5, row + 0.5]) / SIZE


@pytest.mark.parametrize("camera", ["agentview", "wrist"])
def test_points_project_to_where_objects_are_seen(env, camera):
    compared = 0
    for name in env.problem.objects_dict:
        if name.startswith("basket"):
            continue
        place = project(env, camera, env.data.xpos[env.problem.obj_body_id[name]][None])[0]
        if np.isnan(place).any() or (np.abs(place - 0.5) > 0.4).any():
            continue
        seen = seen_at(env, camera, name)
        # A tall thing's middle in the picture is not its origin's place, but near it.
        assert np.abs(seen - place).max() < 10 / SIZE, name
        compared += 1
    assert compared >= (3 if camera == "agentview" else 1)


def test_a_point_behind_the_camera_has_no_place(env):
    index = env.model.camera("agentview").id
    behind = env.data.cam_xpos[index] + env.data.cam_xmat[index].reshape(3, 3)[:, 2]
    assert np.isnan(project(env, "agentview", behind[None])).all()
    assert marks_of(env, "agentview", [Symbol("target", (tuple(behind),))]) == []


def test_every_symbol_leaves_its_colour_and_survives_json(env):
    picture = np.zeros((SIZE, SIZE, 3), np.uint8)
    hand = tuple(float(x) for x in env.eef_pose()[0])
    below = (hand[0], hand[1] + 0.1, hand[2] - 0.1)
    for kind, colour in COLOURS.items():
        points = (hand, below) if kind == "move" else (below,)
        symbol = Symbol(kind, points, amount=1.0)
        assert Symbol.from_json(symbol.to_json()) == symbol
        marks = marks_of(env, "agentview", [symbol])
        assert [Mark.from_json(mark.to_json()) for mark in marks] == marks
        drawn = draw_marks(picture, marks, scale=2)
        assert drawn.shape == (2 * SIZE, 2 * SIZE, 3)
        assert (drawn == colour).all(-1).sum() > 20, kind


def test_a_symbol_without_its_points_is_refused():
    with pytest.raises(ValueError, match="2 points"):
        Symbol("target", ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0)))
