"""Labelled pixels lie on the object, in LIBERO's own pictures."""

import mujoco
import numpy as np
import pytest
from regrasp.policies.keypoints import CAMERAS, label_pixels, rotation_matrix
from regrasp.sim import make_env


@pytest.mark.parametrize(
    ("suite", "name"),
    [("libero_object", "alphabet_soup_1"), ("libero_spatial", "akita_black_bowl_1")],
)
def test_pixels_are_where_the_object_is_seen(suite, name):
    env = make_env(suite, 0)
    env.reset(seed=0, options={"init_state": 0, "render": False})
    # Towards the workspace, so that the wrist camera, tilted, sees the objects too.
    for _ in range(10):
        env.step(np.array([0.5, 0.3, -0.4, 0.2, -0.3, 0.3, -1.0]))
    with_object = env.observe(render=True)
    body = env.problem.objects_dict[name].root_body
    point = env.data.body(body).xpos.copy()
    joint = env.model.body_jntadr[env.model.body(body).id]
    env.data.qpos[env.model.jnt_qposadr[joint]] += 50.0
    mujoco.mj_forward(env.model, env.data)
    without = env.observe(render=True)
    pixels = label_pixels(
        suite, ("agentview", "wrist"), point[None, None], with_object["state"][None]
    )
    seen = 0
    for i, camera in enumerate(("agentview", "wrist")):
        changed = np.abs(with_object[camera].astype(int) - without[camera]).sum(axis=-1) > 40
        if changed.sum() < 20 or np.isnan(pixels[0, i]).any():
            continue
        seen += 1
        rows, columns = np.nonzero(changed)
        centre = (np.array([np.median(columns), np.median(rows)]) + 0.5) / 64 - 1
        # Near the middle of what vanished; a bowl's origin is its foot, 6 pixels below.
        assert np.abs(pixels[0, i, 0] - centre).max() < 8 / 64, (camera, pixels[0, i, 0], centre)
    assert seen >= 1
    data, model = env.data, env.model
    for camera, mujoco_name in (("agentview", "agentview"), ("wrist", "robot0_eye_in_hand")):
        index = model.camera(mujoco_name).id
        assert model.cam_fovy[index] == pytest.approx(CAMERAS[suite][camera].fovy)
    state = env.observe(render=False)["state"]
    hand = rotation_matrix(state[3:6].astype(float))
    index = model.camera("robot0_eye_in_hand").id
    wrist = CAMERAS[suite]["wrist"]
    np.testing.assert_allclose(state[:3] + hand @ wrist.pos, data.cam_xpos[index], atol=1e-3)
    np.testing.assert_allclose(
        hand @ np.reshape(wrist.mat, (3, 3)), data.cam_xmat[index].reshape(3, 3), atol=1e-3
    )
    index = model.camera("agentview").id
    front = CAMERAS[suite]["agentview"]
    np.testing.assert_allclose(front.pos, data.cam_xpos[index], atol=1e-3)
    np.testing.assert_allclose(front.mat, data.cam_xmat[index], atol=1e-3)
    env.close()


def test_unknown_suites_and_points_out_of_sight_have_no_pixels():
    state = np.array([[0, 0, 0.3, np.pi, 0, 0, 0, 0]], np.float32)
    behind = np.array([[[5.0, 0.0, 0.0]]])
    assert np.isnan(label_pixels("libero_object", ("agentview",), behind, state)).all()
    inside = np.zeros((1, 1, 3))
    assert np.isfinite(label_pixels("libero_object", ("agentview",), inside, state)).all()
    assert np.isnan(label_pixels("elsewhere", ("agentview",), inside, state)).all()
