"""Where and how to take hold of an object from above, from its collision shape.

A grasp is a point for the grip site and a yaw about world z from the nominal hand, whose fingers
close along world y. A rule lists the ways in which a kind of object can be taken, the preferred
one first; the first that does not run the open hand into a neighbour is chosen, once an episode.
So the same object in the same place is always taken in the same way, with as little rotation as
its shape and its neighbours allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from regrasp.sim.experts.base import rotation_z, wrap
from regrasp.sim.experts.scene import Scene

#: Depth of the fingertips below the grip site (measured), metres.
TIP = 0.013

#: Widest object side that the fingers, 0.0775 m apart when open, can be put around.
WIDEST = 0.068

#: The open hand as boxes about the grip site at yaw 0: low and high corner, world axes (measured).
_HAND = (
    ((-0.014, 0.031, -0.013), (0.014, 0.068, 0.049)),
    ((-0.014, -0.068, -0.013), (0.014, -0.031, 0.049)),
    ((-0.033, -0.106, 0.024), (0.040, 0.106, 0.126)),
)


#: Sample points of the grown hand that may lie in a neighbour: the margin touches, the hand not.
_GRAZING = 6


@dataclass(frozen=True)
class Grasp:
    """A grasp from above.

    Attributes:
        point: where the grip site shall be, world, metres ``[3]``.
        yaw: rotation of the hand about world z, radians, in [-pi/2, pi/2).
        top: height of the object's highest point, metres.
        bottom: height of its lowest point, metres.
        draw: how far the closing fingers move it, metres ``[3]``.
    """

    point: np.ndarray
    yaw: float
    top: float
    bottom: float
    draw: np.ndarray = field(default_factory=lambda: np.zeros(3))


@dataclass(frozen=True)
class Option:
    """One way of taking an object: what it means is the rule's business."""

    angle: float = 0.0
    shift: float = 0.0


class GraspRule(Protocol):
    """How a kind of object is taken."""

    def options(self) -> list[Option]:
        """The ways, the preferred one first."""
        ...

    def at(self, scene: Scene, name: str, option: Option) -> Grasp:
        """The grasp on the object ``name`` in the present state."""
        ...


def _extent(points: np.ndarray, yaw: float) -> tuple[float, float]:
    """Middle and width of ``points`` along the closing direction of a hand turned by ``yaw``."""
    along = points[:, 0] * -np.sin(yaw) + points[:, 1] * np.cos(yaw)
    return float(along.max() + along.min()) / 2, float(along.max() - along.min())


@dataclass(frozen=True)
class Around:
    """Around the middle, closing across a narrow side; an option shifts along the other side.

    Attributes:
        depth: how far below the object's top the grip site goes, metres.
        round_: the object is round about its upright axis: no yaw is needed while it stands.
        shifts: offsets along the long side that may be used, metres.
        band: only this much of its top counts, metres (a lid's knob); all of it when None.
    """

    depth: float = 0.018
    round_: bool = False
    shifts: tuple[float, ...] = (0.0, -0.01, 0.01, -0.018, 0.018, -0.025, 0.025)
    band: float | None = None

    def options(self) -> list[Option]:
        """The shifts, in their order."""
        return [Option(shift=shift) for shift in ((0.0,) if self.round_ else self.shifts)]

    def at(self, scene: Scene, name: str, option: Option) -> Grasp:
        """See :class:`GraspRule`."""
        hull = scene.hull(name)
        low, high = hull[:, 2].min(), hull[:, 2].max()
        if self.band is not None:
            hull = hull[hull[:, 2] > high - self.band]
        axes = scene.rot(name)
        standing = np.abs(axes[2]).max() > 0.9
        if self.round_ and standing:
            yaw = 0.0
        else:
            # Sides of a box lie along the horizontal axes of its body frame.
            flat = [axes[:, i] for i in np.argsort(np.abs(axes[2]))[:2]]
            yaws = [wrap(np.arctan2(axis[1], axis[0]) - np.pi / 2) for axis in flat]
            widths = [_extent(hull, yaw)[1] for yaw in yaws]
            fits = [o for o, w in zip(yaws, widths, strict=True) if w <= WIDEST]
            yaw = min(fits, key=abs) if fits else yaws[int(np.argmin(widths))]
        across, _ = _extent(hull, yaw)
        along, length = _extent(hull, yaw - np.pi / 2)
        room = max(0.0, length / 2 - 0.012)  # the fingers stay on the object
        along += float(np.clip(option.shift, -room, room))
        c, s = np.cos(yaw), np.sin(yaw)
        x, y = along * c - across * s, along * s + across * c
        z = max(high - self.depth, low + TIP - 0.001)
        return Grasp(np.array([x, y, z]), yaw, float(high), float(low))


@dataclass(frozen=True)
class Rim:
    """One finger inside, one outside, across the wall.

    An option is the rim point's direction and a shift of the hand inwards, for want of room
    outside; closing then draws the bowl that much towards its middle between the fingers.

    Attributes:
        depth: how far below the rim the grip site goes, metres.
        inset: how far inside the outermost rim the grip site is, metres.
        drawer: cabinet in whose drawer the bowl stands: it is drawn across the drawer, for drawn
            along it the drawer would close over it.
    """

    depth: float = 0.006
    inset: float = 0.003
    drawer: str | None = None

    def options(self) -> list[Option]:
        """The rim point towards world +y first, then -y, then those that need more yaw."""
        if self.drawer:
            return [Option(angle, shift) for shift in (0.018, 0.024) for angle in (np.pi, 0.0)]
        turns = np.radians((0, 30, -30, 60, -60, 90))
        return [Option(side + turn) for turn in turns for side in (np.pi / 2, -np.pi / 2)]

    def at(self, scene: Scene, name: str, option: Option) -> Grasp:
        """See :class:`GraspRule`."""
        hull = scene.hull(name)
        low, high = hull[:, 2].min(), hull[:, 2].max()
        rim = hull[hull[:, 2] > high - 0.012]
        centre = (rim.min(0) + rim.max(0)) / 2
        angle = option.angle
        if self.drawer:
            across = scene.rot(self.drawer)[:, 0]  # drawers slide along the cabinet's y
            angle += float(np.arctan2(across[1], across[0]))
        out = np.array([np.cos(angle), np.sin(angle)])
        reach = (rim[:, :2] - centre[:2]) @ out
        near = rim[reach > reach.max() - 0.004]
        # As the outer finger closes it pushes the wall before it: less and less of a shift.
        shift = min(option.shift, scene.width / 2)
        xy = centre[:2] + out * (reach.max() - self.inset - shift)
        z = max(near[:, 2].mean() - self.depth, low + TIP + 0.001)
        yaw = wrap(angle - np.pi / 2 + 1e-6)
        draw = np.array([*out, 0.0]) * -option.shift
        return Grasp(np.array([xy[0], xy[1], z]), yaw, float(high), float(low), draw)


def _hand_points(margin: float) -> np.ndarray:
    """Points filling the open hand's boxes, grown by ``margin``, ``[N, 3]``."""
    parts = []
    for low, high in _HAND:
        axes = [
            np.linspace(a - margin, b + margin, max(3, int((b - a) / 0.005)))
            for a, b in zip(low, high, strict=True)
        ]
        parts.append(np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3))
    return np.concatenate(parts)


def choose(scene: Scene, name: str, rule: GraspRule, margin: float = 0.004) -> Option:
    """The first option whose open hand meets nothing but the object, else the one that meets least.

    Args:
        scene: the scene, updated.
        name: the object to take.
        rule: how it is taken.
        margin: how far the hand must stay from everything else, metres.
    """
    points = _hand_points(margin)
    hull = scene.hull(name)
    options = rule.options()
    best, least = options[0], np.inf
    for option in options:
        grasp = rule.at(scene, name, option)
        hand = points @ rotation_z(grasp.yaw).T + grasp.point
        # Lifted straight up from where the closing fingers draw it, it must hit nothing either.
        raised = [hull + grasp.draw * 1.5 + np.array([0.0, 0.0, up]) for up in (0.015, 0.03, 0.045)]
        hits = scene.inside(hand, (name,)) + 5 * scene.inside(np.concatenate(raised), (name,))
        if hits <= _GRAZING:
            return option
        if hits < least:
            best, least = option, hits
    return best
