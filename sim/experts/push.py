"""Slide a flat object over the table with closed fingers."""

from __future__ import annotations

import numpy as np
from regrasp.sim.experts.base import CLOSE, NOMINAL, Command, Phase, funnel
from regrasp.sim.experts.grasps import TIP
from regrasp.sim.experts.scene import Scene


class DragPlate:
    """Put the closed fingers inside a plate, against its raised edge, and drag it along.

    A contact ahead of the plate's middle pulls it straight, where one behind would let it veer.

    Args:
        name: the plate.
        region: the site it shall lie on.
        goal: the predicate that must hold afterwards.
    """

    #: How far from the plate's middle the fingers go down, and how deep above its lowest point.
    REACH, DEPTH = 0.030, 0.007

    def __init__(self, name: str, region: str, goal: tuple[str, ...]) -> None:
        self.object = name
        self.region = region
        self.goal = goal
        self.name = f"push {name}"

    def reset(self) -> None:
        """Nothing is remembered."""

    def _gap(self, scene: Scene) -> np.ndarray:
        gap = scene.site(self.region) - scene.pos(self.object)
        gap[2] = 0.0
        return gap

    def satisfied(self, scene: Scene) -> bool:
        """The plate is well inside the region and the hand above it."""
        inside = scene.holds(self.goal) and float(np.linalg.norm(self._gap(scene))) < 0.025
        return inside and scene.eef[2] > scene.pos(self.object)[2] + 0.06

    def points(self, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
        """The plate's middle, and the region's."""
        return scene.pos(self.object), scene.site(self.region)

    def command(self, scene: Scene) -> Command:
        """The wanted motion in the present state."""
        plate, gap = scene.pos(self.object), self._gap(scene)
        left = float(np.linalg.norm(gap))
        bottom = float(scene.hull(self.object)[:, 2].min())
        if left < 0.02:
            up = scene.eef + np.array([0.0, 0.0, 0.05])
            return Command(Phase.RETREAT, up, NOMINAL, CLOSE)
        way = gap / left
        start = plate + way * self.REACH
        start[2] = bottom + self.DEPTH + TIP
        offset = scene.eef - plate
        along, across = float(offset @ way), offset - way * float(offset @ way)
        sideways = float(np.linalg.norm(across[:2]))
        low = scene.eef[2] - start[2] < 0.012
        if low and sideways < 0.025 and -0.02 < along < 0.075:
            ahead = min(0.03, left)
            target = np.array([*(scene.eef[:2] + way[:2] * ahead - across[:2]), start[2]])
            return Command(Phase.PUSH, target, NOMINAL, CLOSE, speed=0.6)
        lateral = float(np.linalg.norm(scene.eef[:2] - start[:2]))
        clear = start[2] + 0.05
        if lateral > 0.06:
            clear = max(clear, scene.top_along(scene.eef, start, 0.06, (self.object,)) + 0.04)
        target, scale = funnel(scene.eef, start, clear, lateral)
        phase = Phase.DESCEND if lateral < 0.02 else Phase.APPROACH
        return Command(phase, target, NOMINAL, CLOSE, scale, speed=0.7 if lateral < 0.02 else 1.0)
