"""Where and how to take hold of an object from above, from its collision shape.

A grasp is a point for the grip site and a yaw about world z from the nominal hand, whose fingers
close along world y. The same kind of object is always taken in the same way, with as little
rotation as its shape allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regrasp.sim.experts.base import wrap
from regrasp.sim.experts.scene import Scene

#: Depth of the fingertips below the grip site, and of the palm above it (measured, metres).
TIP, PALM = 0.013, 0.024

#: Widest object side that the fingers, 0.0775 m apart when open, can be put around.
WIDEST = 0.068


@dataclass(frozen=True)
class Grasp:
    """A grasp from above.

    Attributes:
        point: where the grip site shall be, world, metres ``[3]``.
        yaw: rotation of the hand about world z, radians, in [-pi/2, pi/2).
        top: height of the object's highest point, metres.
        bottom: height of its lowest point, metres.
    """

    point: np.ndarray
    yaw: float
    top: float
    bottom: float


def _extent(points: np.ndarray, yaw: float) -> tuple[float, float]:
    """Middle and width of ``points`` along the closing direction of a hand turned by ``yaw``."""
    along = points[:, 0] * -np.sin(yaw) + points[:, 1] * np.cos(yaw)
    return float(along.max() + along.min()) / 2, float(along.max() - along.min())


def centre_grasp(scene: Scene, name: str, depth: float = 0.018, round_: bool = False) -> Grasp:
    """Around the middle, closing across a narrow side.

    Args:
        scene: the scene, updated.
        name: the object.
        depth: how far below the object's top the grip site goes.
        round_: the object is round about its upright axis: no yaw is needed while it stands.
    """
    hull = scene.hull(name)
    low, high = hull[:, 2].min(), hull[:, 2].max()
    axes = scene.rot(name)
    standing = np.abs(axes[2]).max() > 0.9
    if round_ and standing:
        yaw = 0.0
    else:
        # Sides of a box lie along the horizontal axes of its body frame.
        flat = [axes[:, i] for i in np.argsort(np.abs(axes[2]))[:2]]
        options = [wrap(np.arctan2(axis[1], axis[0]) - np.pi / 2) for axis in flat]
        widths = [_extent(hull, option)[1] for option in options]
        fits = [o for o, w in zip(options, widths, strict=True) if w <= WIDEST]
        yaw = min(fits, key=abs) if fits else options[int(np.argmin(widths))]
    across, _ = _extent(hull, yaw)
    along, _ = _extent(hull, yaw - np.pi / 2)
    c, s = np.cos(yaw), np.sin(yaw)
    x, y = along * c - across * s, along * s + across * c
    z = max(high - depth, low + TIP - 0.001)
    return Grasp(np.array([x, y, z]), yaw, float(high), float(low))


def rim_grasp(scene: Scene, name: str, side: float, depth: float = 0.010) -> Grasp:
    """One finger inside, one outside, on the rim point nearest to world +y or -y.

    Args:
        scene: the scene, updated.
        name: a bowl, cup or the like, roughly upright.
        side: +1 for the rim point towards +y, -1 for -y.
        depth: how far below the rim the grip site goes.
    """
    hull = scene.hull(name)
    low, high = hull[:, 2].min(), hull[:, 2].max()
    rim = hull[hull[:, 2] > high - 0.012]
    centre = (rim.min(0) + rim.max(0)) / 2
    edge = rim[:, 1].max() if side > 0 else rim[:, 1].min()
    near = rim[np.abs(rim[:, 1] - edge) < 0.004]
    point = np.array([centre[0], edge - side * 0.003, near[:, 2].mean() - depth])
    return Grasp(point, 0.0, float(high), float(low))
