"""robosuite's own tasks through the interface of :class:`regrasp.sim.base.SimEnv`.

robosuite 1.4 with a Panda under OSC_POSE, at robomimic's horizons. It ships no initial states:
beginning k of seed s is drawn from the two, by robosuite's own samplers.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from regrasp.sim.base import EnvConfig, SimEnv
from regrasp.sim.scene import build_problem


@dataclass(frozen=True)
class RobosuiteTask:
    """One task.

    Attributes:
        problem: robosuite's name of it.
        instruction: the task in words.
        horizon: control steps (robomimic's, which robosuite's own lack).
    """

    problem: str
    instruction: str
    horizon: int


#: In the order of their indices.
ROBOSUITE_TASKS: dict[str, RobosuiteTask] = {
    "Lift": RobosuiteTask("Lift", "lift the red cube", 400),
    "Stack": RobosuiteTask("Stack", "stack the red cube on the green cube", 400),
    "Can": RobosuiteTask("PickPlaceCan", "pick up the can and place it in its bin", 400),
    "Square": RobosuiteTask("NutAssemblySquare", "put the square nut on the square peg", 400),
    "Door": RobosuiteTask("Door", "open the door", 400),
}

#: Beginnings of a seed, as many as a LIBERO task has.
NUM_INIT_STATES = 50


class RobosuiteEnv(SimEnv):
    """One robosuite task; see :class:`SimEnv` for its interface.

    Pictures are upright, as in robomimic's datasets. The model, with sizes that robosuite draws
    when it builds it (Lift's cube), is that of NumPy's global seed 0, whatever the episode's seed.

    Args:
        name: a key of :data:`ROBOSUITE_TASKS`, or its index.
        config: how it is built.
    """

    def __init__(self, name: str | int, config: EnvConfig | None = None) -> None:
        import robosuite.environments.base as registry

        config = config or EnvConfig(settle_steps=0)
        name = _task_name(name)
        self.task = ROBOSUITE_TASKS[name]
        with _global_seed(0):
            problem = build_problem(
                registry.REGISTERED_ENVS[self.task.problem],
                (),
                config.mode,
                config.lite,
                initialization_noise="default",
                hard_reset=False,
            )
        super().__init__(
            problem,
            suite="robosuite",
            task_name=name,
            instruction=self.task.instruction,
            horizon=self.task.horizon,
            num_init_states=NUM_INIT_STATES,
            config=config,
            default_seed=0,
        )

    def _begin(self, seed: int, index: int) -> None:
        with _global_seed(int(np.random.SeedSequence([seed, index]).generate_state(1)[0])):
            self.problem.reset()
        # robosuite reads the mass matrix before it places the fingers, and uses it for one substep.
        self._control.reset(self.problem.robots[0].controller.mass_matrix)

    def _orient(self, picture: np.ndarray) -> np.ndarray:
        return picture[::-1]


def make_robosuite_env(name: str | int, **config: Any) -> RobosuiteEnv:
    """Build one; keyword arguments are those of :class:`EnvConfig`, without settling by default."""
    return RobosuiteEnv(name, EnvConfig(**{"settle_steps": 0, **config}))


def _task_name(name: str | int) -> str:
    names = list(ROBOSUITE_TASKS)
    if isinstance(name, int):
        if not 0 <= name < len(names):
            raise IndexError(f"robosuite has tasks 0 to {len(names) - 1}; got {name}")
        return names[name]
    if name not in ROBOSUITE_TASKS:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
        raise KeyError(f"robosuite has no task {name!r} here; nearest: {', '.join(near)}")
    return name


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """robosuite draws from NumPy's global stream; leave that as it was."""
    outside = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(outside)  # noqa: NPY002
