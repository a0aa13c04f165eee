"""The one interface between regrasp and any policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
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


def stack_pictures(
    spec: PolicySpec, observations: Sequence[Observation], camera: str
) -> np.ndarray:
    """One camera's pictures, uint8 ``[B, h, w, 3]``; ValueError for what the spec does not fit."""
    height, width = spec.cameras[camera]
    frames = []
    for observation in observations:
        image = observation.images.get(camera)
        if image is None:
            raise ValueError(
                f"observation.images: no camera {camera!r}; it has "
                f"{sorted(observation.images)}, the policy needs {list(spec.cameras)}"
            )
        if image.shape != (height, width, 3) or image.dtype != np.uint8:
            raise ValueError(
                f"observation.images[{camera!r}]: {image.dtype} {image.shape}; "
                f"must be uint8 ({height}, {width}, 3)"
            )
        frames.append(image)
    return np.stack(frames)


def stack_states(spec: PolicySpec, observations: Sequence[Observation]) -> np.ndarray:
    """Proprioception, float32 ``[B, S]``; ValueError for another width or what is not finite."""
    state = np.stack([np.asarray(o.state, np.float32) for o in observations])
    if state.shape[1:] != (len(spec.state),) or not np.isfinite(state).all():
        raise ValueError(
            f"observation.state: shape {state.shape[1:]}; must be ({len(spec.state)},) and finite"
        )
    return state
