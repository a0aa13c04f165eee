"""What the supervisor needs of a robot and of a policy; simulators and real arms both give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from regrasp.episodes.types import Observation, PolicyOutput


class ChunkResult(Protocol):
    """What came of a few actions.

    Attributes:
        states: float32 ``[executed, S]``, the proprioception after each action.
        executed: actions really executed; fewer than asked where the episode ended.
        terminated: the task is done.
        truncated: time is up.
    """

    states: np.ndarray
    executed: int
    terminated: bool
    truncated: bool


class Robot(Protocol):
    """An arm at a task, already reset. ``Observation.state`` is laid out as ``LIBERO_STATE``."""

    def observation(self, render: bool = True) -> Observation:
        """What the policy sees now; without images where ``render`` is false."""
        ...

    def step_chunk(self, actions: np.ndarray, render: str = "none") -> ChunkResult:
        """Execute ``[h, 7]`` actions laid out as ``LIBERO_ACTION``."""
        ...


class ChunkPolicy(Protocol):
    """The part of ``regrasp.policies.Policy`` that a supervisor calls."""

    def reset(self, seed: int) -> None:
        """Forget the episode."""

    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """One output an observation."""
        ...
