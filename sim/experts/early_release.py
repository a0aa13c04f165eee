"""A demonstrator with one bad habit: it lets go while it still carries, and leaves.

The defect of the curation testbed (arXiv 2606.10229). The recorded action *is* the defective one:
unlike a disturbance, it is what a policy would learn from the episode. Sometimes the object still
falls where it should.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from regrasp.episodes.types import Episode
from regrasp.sim.experts.base import OPEN, Command, Expert, Phase, servo

#: Control steps after which an open hand leaves, whether or not anything still clings to it.
_LET_GO = 12

#: Metres it rises before it has left.
_RISE = 0.06

#: Control steps recorded after it has left.
_STAY = 6


class EarlyRelease(Expert):
    """An expert until its hand has gone ``share`` of the way from the grasp to the place.

    Then it opens where it is, rises and is done, wherever the object fell.

    Attributes:
        released: control step since the reset at which it began to open; None before.
    """

    def __init__(self, expert: Expert, share: float) -> None:
        """Take over an expert's skills.

        Args:
            expert: a pick-and-place expert.
            share: of the lateral way from where the carrying begins, in (0, 1).
        """
        self.share = share
        super().__init__(expert.scene, expert.skills)

    def reset(self) -> None:
        """Forget everything remembered; call it at the start of an episode."""
        super().reset()
        self.released: int | None = None
        self._step = -1
        self._way: float | None = None  # lateral distance when carrying began
        self._at, self._rot = np.zeros(3), np.eye(3)

    def act(self, env: object) -> np.ndarray:
        """The action for the environment's present state, float32 ``[7]`` in [-1, 1]."""
        self._step += 1
        if self.released is None:
            action = super().act(env)
            if not self._lets_go():
                return action
            self.released = self._step
            self._at, self._rot = self.scene.eef.copy(), self.scene.eef_rot.copy()
        else:
            self.scene.update()
            self.target_pos, self.goal_pos = self.skills[0].points(self.scene)
        command = self._leave()
        self.phase = command.phase
        self.done = command.phase == Phase.DONE
        self.scene.last_gripper = command.gripper
        return servo(command, self.scene.eef, self.scene.eef_rot)

    def _lets_go(self) -> bool:
        """Whether the share of the way is covered."""
        if self.phase != Phase.CARRY:
            return False
        left = float(np.linalg.norm(self.goal_pos[:2] - self.target_pos[:2]))
        if self._way is None:
            self._way = left
        return left <= (1.0 - self.share) * self._way

    def _leave(self) -> Command:
        """Open where the hand is, then rise, then stay."""
        scene = self.scene
        open_for = self._step - (self.released or 0)
        if scene.width < 0.07 and open_for < _LET_GO:
            return Command(Phase.RELEASE, self._at, self._rot, OPEN)
        if scene.eef[2] < self._at[2] + _RISE and open_for < 3 * _LET_GO:
            up = np.array([*self._at[:2], scene.eef[2] + 0.05])
            return Command(Phase.RETREAT, up, self._rot, OPEN)
        return Command(Phase.DONE, None, scene.eef_rot, OPEN)


def cut_after_leaving(episode: Episode) -> Episode:
    """The episode up to a moment after the demonstrator was done; success is that of its end."""
    done = np.flatnonzero(episode.steps["phase"] == Phase.DONE)
    end = int(done[0]) + 1 + _STAY if len(done) else len(episode)
    steps = {key: value[:end] for key, value in episode.steps.items()}
    return Episode(replace(episode.header, success=bool(steps["success"][-1])), steps)
