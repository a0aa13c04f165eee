"""The one interface between regrasp and any policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regrasp.episodes.types import Observation, PolicyOutput, StateLayout


@dataclass(frozen=True)
class PolicySpec:
    """What a policy needs and gives.

    Attributes:
        cameras: camera name -> (height, width) in pixels.
        state: layout of ``Observation.state``.
        action: layout of an action.
        chunk: actions in one inferred chunk (H).
        control_hz: actions a second.
    """

    cameras: Mapping[str, tuple[int, int]]
    state: StateLayout
    action: StateLayout
    chunk: int
    control_hz: float


@runtime_checkable
class Policy(Protocol):
    """A chunked, language-conditioned policy."""

    spec: PolicySpec

    def reset(self, seed: int) -> None:
        """Forget the episode; the same seed and observations then give the same actions."""

    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """One output an observation, each with ``num_samples`` chunks ``[N, H, A]``."""
        ...
