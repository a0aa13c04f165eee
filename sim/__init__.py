"""LIBERO, LIBERO-PRO and robosuite environments, experts, perturbations, evaluation protocols."""

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
