"""The conventions of robots and simulators as pure functions, each with its inverse.

A wrong gripper sign, picture orientation or quaternion order still runs, and fails a task without a
word. So each convention is one function here, and nothing else in the repository repeats it.
"""

from __future__ import annotations

import numpy as np


def gripper_to_libero(opening: np.ndarray) -> np.ndarray:
    """Gripper commands in [0, 1], 1 open, as LIBERO's: -1 opens, +1 closes.

    Any shape. Exactly 0.5 opens: a sign of zero would leave the gripper as it is (OpenVLA's
    datasets use this convention; pi0's native commands are LIBERO's already and must not pass
    here). :func:`gripper_from_libero` inverts it for 0 and 1.
    """
    opening = np.asarray(opening, float)
    if ((opening < 0.0) | (opening > 1.0)).any():
        raise ValueError(f"gripper_to_libero: {opening} is outside [0, 1]; 0 is closed, 1 is open")
    return np.where(opening >= 0.5, -1.0, 1.0)


def gripper_from_libero(command: np.ndarray) -> np.ndarray:
    """LIBERO's gripper commands (-1 opens, +1 closes) as 1 open, 0 closed; 0 counts as open."""
    return np.where(np.asarray(command, float) <= 0.0, 1.0, 0.0)


def rotate_180(picture: np.ndarray) -> np.ndarray:
    """Rotate ``[..., H, W, C]`` by 180 degrees in the picture's plane; its own inverse.

    Every published LIBERO policy sees ``image[::-1, ::-1]`` of robosuite's picture, whose first row
    is the bottom one. A mirror (``[::-1]`` alone) looks upright but swaps left and right.
    """
    return picture[..., ::-1, ::-1, :]


def quat_wxyz_to_xyzw(quat: np.ndarray) -> np.ndarray:
    """MuJoCo's quaternion order ``[..., 4]`` as robosuite's, scipy's and ROS's."""
    return np.concatenate([quat[..., 1:], quat[..., :1]], axis=-1)


def quat_xyzw_to_wxyz(quat: np.ndarray) -> np.ndarray:
    """Inverse of :func:`quat_wxyz_to_xyzw`."""
    return np.concatenate([quat[..., 3:], quat[..., :3]], axis=-1)


def quat_to_axis_angle(quat: np.ndarray) -> np.ndarray:
    """Axis-angle ``[3]`` (rad) of a (w, x, y, z) quaternion, with openpi's branch choice.

    The quaternion's sign is kept, so the angle lies in [0, 2 pi]; so do the states that published
    LIBERO policies were trained on. Below 1e-8 rad the result is exactly zero.
    """
    w = float(np.clip(quat[0], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return quat[1:] * 2.0 * np.arccos(w) / sine


def axis_angle_to_quat(axis_angle: np.ndarray) -> np.ndarray:
    """(w, x, y, z) quaternion of an axis-angle ``[3]`` (rad) with an angle in [0, 2 pi]."""
    angle = float(np.linalg.norm(axis_angle))
    if angle == 0.0:
        return np.array([1.0, 0.0, 0.0, 0.0])
    axis = np.asarray(axis_angle, float) / angle
    return np.concatenate([[np.cos(angle / 2)], axis * np.sin(angle / 2)])
