"""Drawers and knobs: the hand takes hold of the moving part, or pushes it, along its joint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from regrasp.sim.experts.base import (
    CLOSE,
    NOMINAL,
    OPEN,
    Command,
    Phase,
    funnel,
    rotation_vector,
    rotation_z,
    wrap,
)
from regrasp.sim.experts.scene import Scene

#: Gain on the orientation where the hand must turn far; see ``base.ROT_GAIN``.
_TURN_GAIN = 1.0


def tilted(direction: np.ndarray, angle: float, across: bool = False) -> np.ndarray:
    """Orientation of the hand whose fingers point ``angle`` radians up from straight down.

    Args:
        direction: horizontal world direction that the fingers lean towards, ``[3]``.
        angle: 0 points straight down, pi/2 along ``direction``.
        across: the fingers close horizontally, across ``direction``; else in the plane of
            ``direction`` and the vertical.
    """
    yaw = wrap(float(np.arctan2(direction[1], direction[0])) - (0.0 if across else np.pi / 2))
    axis = np.cross([0.0, 0.0, -1.0], direction)
    x, y, z = axis / np.linalg.norm(axis)
    c, s = np.cos(angle), np.sin(angle)
    skew = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    lean = np.eye(3) + s * skew + (1 - c) * (skew @ skew)
    return lean @ rotation_z(yaw) @ NOMINAL


def _along(
    eef: np.ndarray, target: np.ndarray, heading: np.ndarray, back: float, extra: float
) -> tuple[np.ndarray, float]:
    """Come up to a target along ``heading``: depth as a continuous function of the lateral error.

    Args:
        eef: position of the hand ``[3]``.
        target: where it shall end ``[3]``.
        heading: unit direction of the approach ``[3]``.
        back: how far before the target the hand waits while it is off the line, metres.
        extra: further error to be counted as lateral (orientation), metres.

    Returns:
        The position to servo to, and the lateral error, metres.
    """
    offset = eef - target
    sideways = offset - heading * float(offset @ heading)
    lateral = float(np.linalg.norm(sideways)) + extra
    depth = float(np.clip(5.0 * (lateral - 0.008), 0.0, back))
    return target - heading * depth, lateral


@dataclass(frozen=True)
class Drawer:
    """A drawer of a LIBERO cabinet, from its region site's name.

    Attributes:
        region: such as ``wooden_cabinet_1_top_region``.
    """

    region: str

    @property
    def cabinet(self) -> str:
        """The fixture's name."""
        return self.region.rsplit("_", 2)[0]

    def joint(self, scene: Scene) -> float:
        """Joint position: 0 closed, -0.16 open, metres."""
        name = self.region.removesuffix("region") + "level"
        return float(scene.data.qpos[int(scene.model.joint(name).qposadr[0])])

    def geoms(self, scene: Scene) -> np.ndarray:
        """Solid geoms of the sliding part."""
        name = self.region.removesuffix("region") + "level"
        return scene.geoms(int(scene.model.joint(name).bodyid[0]))

    def opening(self, scene: Scene) -> np.ndarray:
        """World direction in which it opens, horizontal unit vector ``[3]``."""
        return -scene.rot(self.cabinet)[:, 1]

    def handle(self, scene: Scene) -> np.ndarray:
        """Middle of the handle's bar, world ``[3]``: the geom that sticks out farthest."""
        geoms, out = self.geoms(scene), self.opening(scene)
        reach = scene.data.geom_xpos[geoms] @ out
        return scene.data.geom_xpos[geoms[int(np.argmax(reach))]].copy()

    def wall_top(self, scene: Scene) -> float:
        """Height of the drawer's highest point, metres."""
        return scene.top_of(self.geoms(scene))


class OpenDrawer:
    """Point the fingers at the cabinet, close them about the handle's bar, pull, let go, back off.

    Args:
        drawer: which drawer.
        goal: the predicate that must hold afterwards.
        lean: how far the fingers point up from straight down, radians.
        until: what the drawer is opened for; once that holds it need not be open.
    """

    #: Joint position aimed at; LIBERO calls -0.14 open, the stop is at -0.16.
    WANTED = -0.158

    def __init__(
        self,
        drawer: Drawer,
        goal: tuple[str, ...],
        lean: float = 1.2,
        until: tuple[str, ...] | None = None,
    ) -> None:
        self.drawer = drawer
        self.goal = goal
        self.until = until
        self.lean = lean
        self.name = f"open {drawer.region.removesuffix('_region')}"
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered."""
        self._held = False
        self._reopen = False
        self._done = False  # was satisfied once

    def _open(self, scene: Scene) -> bool:
        return self.drawer.joint(scene) < -0.15

    def satisfied(self, scene: Scene) -> bool:
        """The drawer is open and the hand is off the handle."""
        if self.until is not None and scene.holds(self.until):
            return True
        away = float(np.linalg.norm(scene.eef - self.drawer.handle(scene)))
        self._done = scene.holds(self.goal) and (self._done or (not self._held and away > 0.07))
        return self._done

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """The handle, and where it is when the drawer is open."""
        handle = self.drawer.handle(scene)
        left = self.drawer.joint(scene) - self.WANTED
        return handle, handle + self.drawer.opening(scene) * left

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""
        out = self.drawer.opening(scene)
        rot = tilted(-out, self.lean)
        heading = rot[:, 2]  # where the fingers point
        handle = self.drawer.handle(scene)
        touching = scene.fingers_on(self.drawer.geoms(scene))
        closing = scene.last_gripper > 0
        if self._held:
            self._held = closing and touching >= 1
        else:
            self._held = closing and touching == 2 and scene.finger_speed < 0.01
        if closing and not self._held and scene.width < 0.004:
            self._reopen = True
        if self._reopen and scene.width > 0.07:
            self._reopen = False

        if self._open(scene):
            self._held = False
            away = float((handle - scene.eef) @ heading)
            if scene.width < 0.06 and away < 0.03:
                return Command(Phase.RELEASE, scene.eef, rot, OPEN, turn=_TURN_GAIN)
            back = scene.eef - heading * 0.05
            return Command(Phase.RETREAT, back, rot, OPEN, turn=_TURN_GAIN)
        if self._held:
            left = self.drawer.joint(scene) - self.WANTED
            target = scene.eef + out * (left + 0.03)
            # Stay at the bar: errors across the pull would bend the grip.
            across = handle - scene.eef
            target += across - out * float(across @ out)
            return Command(Phase.PULL_OPEN, target, rot, CLOSE, speed=0.8, turn=_TURN_GAIN)
        turn_error = float(np.linalg.norm(rotation_vector(rot @ scene.eef_rot.T)))
        extra = 0.1 * max(0.0, turn_error - 0.12)
        target, lateral = _along(scene.eef, handle, heading, 0.10, extra)
        depth = float((handle - scene.eef) @ heading)
        near = 0.016 if closing else 0.008
        if not self._reopen and lateral < near + 0.006 and depth < near:
            return Command(Phase.GRASP, handle, rot, CLOSE, turn=_TURN_GAIN)
        if self._reopen:
            target = handle - heading * 0.08
            return Command(Phase.REOPEN, target, rot, OPEN, turn=_TURN_GAIN)
        phase = Phase.APPROACH if lateral > 0.03 else Phase.DESCEND
        speed = 1.0 if lateral > 0.03 else 0.6
        return Command(phase, target, rot, OPEN, speed=speed, turn=_TURN_GAIN)


class CloseDrawer:
    """Push a drawer shut with closed fingers against its handle.

    The hand's thin side faces the cabinet and leans back, so that the fingers lead and the hand
    does not run into the handles above.

    Args:
        drawer: which drawer.
        goal: the predicate that must hold afterwards.
        lean: how far the fingers point up from straight down, radians.
    """

    def __init__(self, drawer: Drawer, goal: tuple[str, ...], lean: float = 0.6) -> None:
        self.drawer = drawer
        self.goal = goal
        self.lean = lean
        self.name = f"close {drawer.region.removesuffix('_region')}"

    def reset(self) -> None:
        """Nothing is remembered."""

    def satisfied(self, scene: Scene) -> bool:
        """The drawer is shut."""
        return scene.holds(self.goal)

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """The handle, and where it is when the drawer is shut."""
        handle = self.drawer.handle(scene)
        return handle, handle + self.drawer.opening(scene) * self.drawer.joint(scene)

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""
        out = self.drawer.opening(scene)
        rot = tilted(-out, self.lean, across=True)
        handle = self.drawer.handle(scene)
        # On the half of the handle that is farther from the robot there is more room for the arm.
        side = scene.rot(self.drawer.cabinet)[:, 0]
        side = side if side[0] > 0 else -side
        front = handle + out * 0.03 + side * 0.025
        offset = scene.eef - front
        ahead = float(offset @ out)  # positive: before the drawer
        lateral = float(np.linalg.norm(offset - out * ahead))
        turn_error = float(np.linalg.norm(rotation_vector(rot @ scene.eef_rot.T)))
        ready = lateral + 0.1 * max(0.0, turn_error - 0.12)
        if ready < 0.03 and ahead > -0.03:
            target = front - out * 0.08
            return Command(Phase.PUSH_CLOSED, target, rot, CLOSE, speed=0.6, turn=_TURN_GAIN)
        # Go round the drawer's front: rise and come out before moving over.
        target = front + out * 0.08
        if ahead < 0.04 and lateral > 0.05:
            target = scene.eef + out * 0.10 + np.array([0.0, 0.0, 0.05])
        return Command(Phase.APPROACH, target, rot, CLOSE, turn=_TURN_GAIN)


class TurnKnob:
    """Take a knob's ridge between the fingers and turn the hand about the vertical.

    Args:
        fixture: the stove.
        goal: the predicate that must hold afterwards.
        lead: how far ahead of the ridge the hand is turned while it holds it, radians.
    """

    #: Joint position aimed at; LIBERO calls 0.5 on.
    WANTED = 0.65

    def __init__(self, fixture: str, goal: tuple[str, ...], lead: float = 0.5) -> None:
        self.fixture = fixture
        self.goal = goal
        self.lead = lead
        self.name = f"turn on {fixture}"
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered."""
        self._held = False
        self._reopen = False
        self._done = False  # was satisfied once

    def _joint(self, scene: Scene) -> float:
        return float(scene.data.qpos[int(scene.model.joint(f"{self.fixture}_button").qposadr[0])])

    def _ridge(self, scene: Scene) -> tuple[np.ndarray, float]:
        """Top of the ridge ``[3]`` and the yaw of a hand that closes across it."""
        body = int(scene.model.joint(f"{self.fixture}_button").bodyid[0])
        rot = scene.data.xmat[body].reshape(3, 3)
        geoms = scene.geoms(body)
        top = scene.top_of(geoms)
        # The ridge runs along the knob's own y axis, through its middle.
        yaw = wrap(float(np.arctan2(rot[1, 1], rot[0, 1])))
        point = scene.data.xpos[body].copy()
        point[2] = top
        return point, yaw

    def satisfied(self, scene: Scene) -> bool:
        """The stove is on and the hand is above the knob."""
        point, _ = self._ridge(scene)
        off = not self._held and scene.eef[2] > point[2] + 0.05
        self._done = scene.holds(self.goal) and (self._done or off)
        return self._done

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """The knob, twice: it turns on the spot."""
        point, _ = self._ridge(scene)
        return point, point

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""

        point, yaw = self._ridge(scene)
        point = point - np.array([0.0, 0.0, 0.012])
        body = int(scene.model.joint(f"{self.fixture}_button").bodyid[0])
        touching = scene.fingers_on(scene.geoms(body))
        closing = scene.last_gripper > 0
        self._held = closing and (
            touching >= 1 if self._held else touching == 2 and scene.finger_speed < 0.01
        )
        if closing and not self._held and scene.width < 0.004:
            self._reopen = True
        if self._reopen and scene.width > 0.07:
            self._reopen = False
        side = scene.eef_rot[:, 0]
        now = wrap(float(np.arctan2(-side[0], side[1])))
        rot = rotation_z(yaw) @ NOMINAL
        if self._joint(scene) > self.WANTED:
            self._held = False
            keep = rotation_z(now) @ NOMINAL
            if scene.width < 0.06 and scene.eef[2] < point[2] + 0.02:
                return Command(Phase.RELEASE, scene.eef, keep, OPEN)
            up = scene.eef + np.array([0.0, 0.0, 0.05])
            return Command(Phase.RETREAT, up, keep, OPEN)
        if self._held:
            ahead = rotation_z(yaw + self.lead) @ NOMINAL
            return Command(Phase.TURN, point, ahead, CLOSE, turn=_TURN_GAIN)
        lateral = float(np.linalg.norm(scene.eef[:2] - point[:2]))
        error = lateral + 0.05 * abs(wrap(now - yaw))
        near = 0.018 if closing else 0.008
        if not self._reopen and error < near + 0.006 and scene.eef[2] - point[2] < near:
            return Command(Phase.GRASP, point, rot, CLOSE)
        target, scale = funnel(scene.eef, point, point[2] + 0.08, error)
        if self._reopen:
            return Command(Phase.REOPEN, point + np.array([0.0, 0.0, 0.06]), rot, OPEN)
        phase = Phase.DESCEND if error < 0.02 else Phase.APPROACH
        return Command(phase, target, rot, OPEN, scale, speed=0.7 if error < 0.02 else 1.0)
