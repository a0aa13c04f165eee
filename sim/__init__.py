"""LIBERO, LIBERO-PRO and robosuite environments, experts, perturbations, evaluation protocols.

Names load on first use, so that a command's ``--help`` or a worker that never simulates does not
wait for MuJoCo and the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrasp.sim.env import ChunkResult, EnvConfig, LiberoEnv, make_env
    from regrasp.sim.snapshot import Snapshot
    from regrasp.sim.tasks import SUITES, LiberoTask, get_task, task_names

__all__ = [
    "SUITES",
    "ChunkResult",
    "EnvConfig",
    "LiberoEnv",
    "LiberoTask",
    "Snapshot",
    "get_task",
    "make_env",
    "task_names",
]

_HOMES = {
    "env": ("ChunkResult", "EnvConfig", "LiberoEnv", "make_env"),
    "snapshot": ("Snapshot",),
    "tasks": ("SUITES", "LiberoTask", "get_task", "task_names"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"regrasp.sim.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
