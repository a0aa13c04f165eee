"""LIBERO and LIBERO-PRO tasks as Gymnasium environments."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from regrasp.sim.base import CAMERAS, ChunkResult, EnvConfig, SimEnv
from regrasp.sim.scene import Scene
from regrasp.sim.tasks import LiberoTask, get_task
from regrasp.sim.transforms import rotate_180

__all__ = ["CAMERAS", "ChunkResult", "EnvConfig", "LiberoEnv", "make_env"]


class LiberoEnv(SimEnv):
    """One LIBERO task; see :class:`SimEnv` for its interface.

    Pictures are rotated by 180 degrees, as every published LIBERO policy sees them. Seed s and
    initial state k give the fixtures that stock LIBERO has in its trial k after ``env.seed(s)``;
    the default seed is openpi's 7. The goal is the BDDL file's.

    Args:
        task: which task; see :func:`regrasp.sim.tasks.get_task`.
        config: how it is built.
    """

    def __init__(self, task: LiberoTask, config: EnvConfig | None = None) -> None:
        config = config or EnvConfig()
        self.task = task
        self._init_states = task.init_states()
        self._scene = Scene(task, config.mode, config.lite)
        super().__init__(
            self._scene.problem,
            suite=task.suite,
            task_name=task.name,
            instruction=task.instruction,
            horizon=task.horizon,
            num_init_states=len(self._init_states),
            config=config,
            default_seed=7,
        )

    def _begin(self, seed: int, index: int) -> None:
        self._scene.place_fixtures(seed, index)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self._scene.reset_qpos
        mujoco.mj_forward(self.model, self.data)
        self._control.reset()
        self._scene.set_state(self._init_states[index])

    def _orient(self, picture: np.ndarray) -> np.ndarray:
        return rotate_180(picture)

    def _update(self) -> None:
        self.problem._post_process()


def make_env(suite: str, task: int | str, **config: Any) -> SimEnv:
    """Build an environment; keyword arguments are those of :class:`EnvConfig`.

    Args:
        suite: a LIBERO suite, or ``robosuite``.
        task: index or name.

    Raises:
        KeyError: no such suite or task.
    """
    if suite == "robosuite":
        from regrasp.sim.robosuite_env import make_robosuite_env

        return make_robosuite_env(task, **config)
    return LiberoEnv(get_task(suite, task), EnvConfig(**config))
