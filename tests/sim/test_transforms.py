"""Robot quirks: each transform and its inverse."""

import numpy as np
import pytest
from regrasp.sim import transforms as t


def test_gripper_signs():
    assert t.gripper_to_libero(np.array([1.0, 0.0])).tolist() == [-1.0, 1.0]
    assert t.gripper_to_libero(np.array(0.5)) == -1.0, "a half-open command must not freeze it"
    opening = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert np.array_equal(t.gripper_from_libero(t.gripper_to_libero(opening)), opening)
    command = np.array([-1.0, 1.0])
    assert np.array_equal(t.gripper_to_libero(t.gripper_from_libero(command)), command)
    with pytest.raises(ValueError, match="outside"):
        t.gripper_to_libero(np.array(-1.0))  # already LIBERO's: flipping it again inverts it


def test_rotation_is_not_a_mirror():
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    turned = t.rotate_180(picture)
    assert np.array_equal(turned[0, 0], picture[-1, -1])
    assert np.array_equal(turned, np.rot90(picture, 2))
    assert not np.array_equal(turned, picture[::-1])
    assert np.array_equal(t.rotate_180(turned), picture)
    assert np.array_equal(t.rotate_180(picture[None])[0], turned)


def test_quaternion_orders():
    quat = np.array([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]])
    assert t.quat_wxyz_to_xyzw(quat).tolist() == [[0.2, 0.3, 0.4, 0.1], [0.0, 0.0, 0.0, 1.0]]
    assert np.array_equal(t.quat_xyzw_to_wxyz(t.quat_wxyz_to_xyzw(quat)), quat)


def test_axis_angle():
    from robosuite.utils.transform_utils import quat2axisangle

    rng = np.random.default_rng(0)
    for _ in range(50):
        quat = rng.normal(size=4)
        quat /= np.linalg.norm(quat)
        vector = t.quat_to_axis_angle(quat)
        assert np.allclose(vector, quat2axisangle(t.quat_wxyz_to_xyzw(quat)))
        assert np.allclose(t.axis_angle_to_quat(vector), quat)
    assert np.array_equal(t.quat_to_axis_angle(np.array([1.0, 0.0, 0.0, 0.0])), np.zeros(3))
    assert np.array_equal(t.axis_angle_to_quat(np.zeros(3)), [1.0, 0.0, 0.0, 0.0])
