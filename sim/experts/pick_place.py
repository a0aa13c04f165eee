"""Pick an object up from above and put it down somewhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from regrasp.sim.experts.base import CLOSE, NOMINAL, OPEN, Command, Phase, funnel, rotation_z, wrap
from regrasp.sim.experts.grasps import TIP, Grasp, GraspRule, Option, choose
from regrasp.sim.experts.scene import Scene

#: Free height kept between whatever is carried and whatever it passes over, metres.
CLEARANCE = 0.025


@dataclass(frozen=True)
class Place:
    """Where a held object shall be let go.

    Attributes:
        spot: gives the wanted position of the object's body frame, world ``[3]``.
        predicate: the goal that must hold afterwards.
        tolerance: lateral error at which it may be let go, metres.
        hand_floor: gives the lowest height the grip site may take here (walls, racks), or -inf.
        on_contact: let go as soon as the object touches anything while over the spot.
        slide: stay on the table all the way instead of lifting.
    """

    spot: Callable[[Scene], np.ndarray]
    predicate: tuple[str, ...]
    tolerance: float = 0.015
    hand_floor: Callable[[Scene], float] = lambda scene: -np.inf
    on_contact: bool = True
    slide: bool = False


class PickPlace:
    """Approach, descend, grasp, lift, carry, place, release, retreat; again if the grasp fails.

    Args:
        name: the object.
        grasp: how to take hold of it.
        place: where it goes.
        hover: height above the grasp from which the hand comes straight down, metres.
    """

    def __init__(
        self,
        name: str,
        grasp: GraspRule,
        place: Place,
        hover: float = 0.06,
    ) -> None:
        self.object = name
        self.name = f"pick and place {name}"
        self.grasp = grasp
        self.place = place
        self.hover = hover
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered."""
        self._option: Option | None = None  # which of the possible grasps
        self._held = False  # hysteresis of the grasp
        self._lost = 0  # steps without a finger on a held object
        self._reopen = False  # fingers closed on nothing: open before coming down again
        self._done = False  # was satisfied once
        self._let_go_at = np.zeros(3)  # where the hand was then
        self._releasing = False  # from letting go until the hand has left

    # State

    def _grasp(self, scene: Scene) -> Grasp:
        """The grasp in the present state; which way is settled once, at the first call."""
        if self._option is None:
            self._option = choose(scene, self.object, self.grasp)
        return self.grasp.at(scene, self.object, self._option)

    def _update(self, scene: Scene, grasp: Grasp) -> None:
        touching = scene.fingers_on(scene.geoms(scene.body(self.object)))
        closing = scene.last_gripper > 0
        if self._held:
            self._lost = 0 if touching else self._lost + 1
            self._held = closing and self._lost < 4
        else:
            self._held = touching == 2 and closing and scene.finger_speed < 0.01
        if closing and not self._held and touching == 0 and scene.width < 0.004:
            self._reopen = True
        if self._reopen and scene.width > 0.07:
            self._reopen = False
        if self._releasing and scene.eef[2] > grasp.point[2] + 0.04:
            self._releasing = False

    def satisfied(self, scene: Scene) -> bool:
        """The goal holds, the object is let go and the hand is above it."""
        if self._done and scene.holds(self.place.predicate):
            return True  # the fingers may be busy with the next object
        grasp = self._grasp(scene)
        self._update(scene, grasp)
        clear = scene.eef[2] > grasp.point[2] + 0.03 or self._away(scene, grasp) > 0.09
        self._done = (
            not self._held
            and not self._releasing
            and clear
            and scene.width > 0.05
            and scene.holds(self.place.predicate)
        )
        return self._done

    @staticmethod
    def _away(scene: Scene, grasp: Grasp) -> float:
        return float(np.linalg.norm(scene.eef[:2] - grasp.point[:2]))

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """Grasp point and wanted object position."""
        return self._grasp(scene).point, self.place.spot(scene)

    # Law

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""
        grasp = self._grasp(scene)
        rot = rotation_z(grasp.yaw) @ NOMINAL
        if self._releasing:
            return self._release(scene, grasp, rot)
        if self._held:
            return self._carry(scene, grasp, rot)
        return self._reach(scene, grasp, rot)

    def _yaw_error(self, scene: Scene, yaw: float) -> float:
        side = scene.eef_rot[:, 0]  # closing axis of the hand; +y when yaw is 0
        return abs(wrap(float(np.arctan2(-side[0], side[1])) - yaw))

    def _reach(self, scene: Scene, grasp: Grasp, rot: np.ndarray) -> Command:
        eef, point = scene.eef, grasp.point
        lateral = self._away(scene, grasp)
        error = lateral + 0.05 * self._yaw_error(scene, grasp.yaw)
        below = eef[2] - point[2]
        closing = scene.last_gripper > 0 and not self._reopen
        near = 0.018 if closing else 0.008
        if not self._reopen and error < near + 0.004 and below < near:
            return Command(Phase.GRASP, point, rot, CLOSE)
        clear = max(point[2] + self.hover, grasp.top + TIP + CLEARANCE)
        if lateral > 0.03:
            over = scene.top_along(eef, point, 0.08, ignore=(self.object,))
            clear = max(clear, over + TIP + CLEARANCE)
        if self._reopen:
            target = np.array([point[0], point[1], point[2] + self.hover])
            return Command(Phase.REOPEN, target, rot, OPEN)
        target, scale = funnel(eef, point, clear, error)
        if error < 0.02:
            return Command(Phase.DESCEND, target, rot, OPEN, scale, speed=0.7)
        return Command(Phase.APPROACH, target, rot, OPEN, scale)

    def _carry(self, scene: Scene, grasp: Grasp, rot: np.ndarray) -> Command:
        eef, body = scene.eef, scene.pos(self.object)
        spot = self.place.spot(scene)
        offset = eef - body  # the hand relative to what it holds
        lateral = float(np.linalg.norm(spot[:2] - body[:2]))
        floor = self.place.hand_floor(scene)
        target = spot + offset
        target[2] = max(target[2], floor)
        arrived = lateral < self.place.tolerance
        down = eef[2] - target[2] < 0.006
        landed = (
            self.place.on_contact and eef[2] - target[2] < 0.03 and scene.supported(self.object)
        )
        if arrived and (down or landed):
            self._releasing = True
            self._held = False
            self._let_go_at = eef.copy()
            return self._release(scene, grasp, rot)
        if self.place.slide:
            return Command(Phase.PUSH, target, rot, CLOSE, speed=0.7)
        # Heights of the hand at which the object, and the hand itself, pass over everything.
        hanging = eef[2] - grasp.bottom
        if lateral > 0.03:
            ignore = (self.object,)
            radius = self._radius(scene)
            under = scene.top_along(body, spot, radius, ignore)
            beside = scene.top_along(eef, eef + spot - body, 0.09, ignore)
            clear = max(under + hanging + CLEARANCE, beside + TIP + 0.01)
        else:
            clear = target[2] + 0.05
        goal, scale = funnel(eef, target, max(clear, target[2]), lateral, slack=0.012)
        if lateral > 0.03 and eef[2] < goal[2] - 0.03:
            phase = Phase.LIFT
        elif lateral > 0.03:
            phase = Phase.CARRY
        else:
            return Command(Phase.PLACE, goal, rot, CLOSE, scale, speed=0.7)
        return Command(phase, goal, rot, CLOSE, scale)

    def _radius(self, scene: Scene) -> float:
        hull = scene.hull(self.object)[:, :2]
        return float(np.linalg.norm(hull - hull.mean(0), axis=1).max()) + 0.01

    def _release(self, scene: Scene, grasp: Grasp, rot: np.ndarray) -> Command:
        """Open where the hand is (a zero action would let it drift), then leave upwards."""
        here = self._let_go_at.copy()
        loose = scene.fingers_on(scene.geoms(scene.body(self.object))) == 0
        stuck = loose and scene.finger_speed < 0.005  # against the walls of what it went into
        if scene.width < 0.07 and not stuck:
            return Command(Phase.RELEASE, here, rot, OPEN)
        here[2] = scene.eef[2] + 0.05
        return Command(Phase.RETREAT, here, rot, OPEN)
