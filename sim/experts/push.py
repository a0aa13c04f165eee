"""Slide a bowl over the table with closed fingers inside it."""

from __future__ import annotations

import numpy as np
from regrasp.sim.experts.articulated import Drawer
from regrasp.sim.experts.base import CLOSE, NOMINAL, Command, Phase, funnel
from regrasp.sim.experts.grasps import TIP
from regrasp.sim.experts.scene import Scene


class DragAside:
    """Drag a bowl out from under the place where a drawer will come out.

    The closed fingers go down inside the bowl and pull it by the wall ahead: a contact ahead of
    the middle keeps it on course, where one behind would let it veer.

    Args:
        name: the bowl.
        drawer: the drawer to be opened over it.
        until: what it is moved for; once that holds it may lie anywhere.
    """

    #: How far from the bowl's middle the fingers go down, how far above its lowest point, and how
    #: near to the spot it must come, metres.
    REACH, DEPTH, NEAR = 0.022, 0.016, 0.015

    def __init__(self, name: str, drawer: Drawer, until: tuple[str, ...]) -> None:
        self.object = name
        self.drawer = drawer
        self.until = until
        self.name = f"drag {name} aside"
        self.reset()

    def reset(self) -> None:
        """Forget everything remembered."""
        self._done = False

    def _spot(self, scene: Scene) -> np.ndarray:
        """Beside the drawer, on the robot's side; far enough for the hand."""
        out = self.drawer.opening(scene)
        side = scene.rot(self.drawer.cabinet)[:, 0]
        side = side if side[0] < 0 else -side
        spot = scene.pos(self.drawer.cabinet) + out * 0.265 + side * 0.185
        spot[2] = scene.pos(self.object)[2]
        return spot

    def _free(self, scene: Scene) -> bool:
        """Whether the bowl and a hand over it are beside the drawer's way."""
        side = scene.rot(self.drawer.cabinet)[:, 0]
        side = side if side[0] < 0 else -side
        offset = scene.pos(self.object) - scene.pos(self.drawer.cabinet)
        return float(offset @ side) > 0.185 - self.NEAR

    def satisfied(self, scene: Scene) -> bool:
        """The bowl is out of the way, the drawer open already, or the goal reached."""
        opened = self.drawer.joint(scene) < -0.02
        if opened or self._done or scene.holds(self.until):
            return True
        inside = scene.eef[2] < scene.hull(self.object)[:, 2].max() + TIP + 0.01
        self._done = self._free(scene) and not inside
        return self._done

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """The bowl's middle, and where it shall stand."""
        return scene.pos(self.object), self._spot(scene)

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""
        bowl, gap = scene.pos(self.object), self._spot(scene) - scene.pos(self.object)
        hull = scene.hull(self.object)
        bottom, top = float(hull[:, 2].min()), float(hull[:, 2].max())
        if self._free(scene):
            up = scene.eef + np.array([0.0, 0.0, 0.05])
            return Command(Phase.RETREAT, up, NOMINAL, CLOSE)
        way = gap / float(np.linalg.norm(gap))
        start = bowl + way * self.REACH
        start[2] = bottom + self.DEPTH + TIP
        offset = scene.eef - bowl
        if float(np.linalg.norm(offset[:2])) < 0.045 and scene.eef[2] < start[2] + 0.015:
            across = offset - way * float(offset @ way)
            target = scene.eef + way * min(0.03, float(np.linalg.norm(gap))) - across
            target[2] = start[2]
            return Command(Phase.PUSH, target, NOMINAL, CLOSE, speed=0.6)
        lateral = float(np.linalg.norm(scene.eef[:2] - start[:2]))
        clear = top + TIP + 0.02
        if lateral > 0.06:
            over = scene.top_along(scene.eef, start, 0.06, (self.object,))
            clear = max(clear, over + TIP + 0.025)
        target, scale = funnel(scene.eef, start, clear, lateral)
        phase = Phase.DESCEND if lateral < 0.02 else Phase.APPROACH
        return Command(phase, target, NOMINAL, CLOSE, scale, speed=0.7 if lateral < 0.02 else 1.0)
