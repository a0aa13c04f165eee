"""Gymnasium ids: ``gymnasium.make("regrasp/libero_object-0")`` after importing this module.

``gymnasium.make("regrasp.sim.registration:regrasp/libero_object-0")`` imports it by itself.
Keyword arguments are those of :class:`regrasp.sim.EnvConfig`; ``step_chunk``, ``snapshot`` and the
rest are on ``env.unwrapped``.
"""

from __future__ import annotations

import gymnasium
from regrasp.sim.robosuite_env import ROBOSUITE_TASKS
from regrasp.sim.tasks import SUITES

#: Tasks of a suite; ten where it is not named.
_SIZES = {"libero_90": 90}


def register_all() -> list[str]:
    """Register every task of every suite; safe to call twice. Returns the ids."""
    tasks: list[tuple[str, int | str]] = [
        (suite, task) for suite in SUITES for task in range(_SIZES.get(suite, 10))
    ]
    tasks += [("robosuite", name) for name in ROBOSUITE_TASKS]
    ids = []
    for suite, task in tasks:
        name = f"regrasp/{suite}-{task}"
        ids.append(name)
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name,
                entry_point="regrasp.sim.env:make_env",
                kwargs={"suite": suite, "task": task},
            )
    return ids


register_all()
