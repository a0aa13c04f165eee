"""Failures that are made on purpose: injected, verified by execution, explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrasp.sim import perturb
from regrasp.sim.failures import control, gripper, offsets, perception, physics, semantic
from regrasp.sim.failures.base import Injection

INJECTIONS: dict[str, type[Injection]] = {
    "early_release": gripper.EarlyRelease,
    "late_close": gripper.LateClose,
    "weak_grip": gripper.WeakGrip,
    "carry_slip": gripper.CarrySlip,
    "offset_x": offsets.OffsetX,
    "offset_y": offsets.OffsetY,
    "offset_z": offsets.OffsetZ,
    "rotation_x": offsets.RotationX,
    "rotation_y": offsets.RotationY,
    "rotation_z": offsets.RotationZ,
    "approach_offset": offsets.ApproachOffset,
    "place_offset": offsets.PlaceOffset,
    "wrist_tilt": offsets.WristTilt,
    "overshoot": control.Overshoot,
    "oscillation": control.Oscillation,
    "freeze": control.Freeze,
    "delay": control.Delay,
    "dropped_actions": control.DroppedActions,
    "repeated_actions": control.RepeatedActions,
    "too_fast": control.TooFast,
    "too_slow": control.TooSlow,
    "slippery": physics.Slippery,
    "heavy": physics.Heavy,
    "shoved": physics.Shoved,
    "obstacle": physics.Obstacle,
    "joint_damping": physics.JointDamping,
    "stuck_joint": physics.StuckJoint,
    "drawer_friction": physics.DrawerFriction,
    "distractor": semantic.Distractor,
    "camera_moved": perception.CameraMoved,
    "camera_blurred": perception.CameraBlurred,
    "camera_frozen": perception.CameraFrozen,
    "camera_occluded": perception.CameraOccluded,
    "camera_dark": perception.CameraDark,
    "camera_noisy": perception.CameraNoisy,
    "proprioception_biased": perception.ProprioceptionBiased,
}


def get_injection(kind: str) -> type[Injection]:
    """The injection of a kind.

    Raises:
        KeyError: there is none; the message names the nearest.
    """
    return perturb.lookup(INJECTIONS, kind, "injection")


def from_json(data: Mapping[str, Any]) -> Injection:
    """Rebuild an injection from its ``to_json``.

    Raises:
        KeyError: an unknown kind or trigger; the message names the nearest.
    """
    injection = perturb.from_json(data, INJECTIONS)
    assert isinstance(injection, Injection)
    return injection
