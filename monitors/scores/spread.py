"""Spread: how much the chunks sampled at one observation differ.

    s_t = 1 / (H D) sum_tau sum_d Var_b A_b[tau, d]

over B samples (variance with divisor B), H steps and D action dimensions. The plain baseline of
everything that asks a policy for several chunks: of a flow-matching or diffusion policy it is the
spread of what the noise becomes. It cannot tell two good ways from not knowing any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from regrasp.episodes.types import LIBERO_ACTION, PolicyOutput
from regrasp.monitors.base import WindowedScore

#: Displacement and rotation. The gripper jumps between -1 and +1 and would drown all else.
MOTION = tuple(i for i, name in enumerate(LIBERO_ACTION.names) if name != "gripper")


def chosen(samples: np.ndarray, dims: Sequence[int] | None, who: str) -> np.ndarray:
    """Some action dimensions of ``samples`` ``[N, H, A]``, float64 ``[N, H, len(dims)]``.

    Raises ValueError, beginning with ``who``, where the samples lack them.
    """
    samples = np.asarray(samples, dtype=np.float64)
    if samples.ndim != 3 or 0 in samples.shape:
        raise ValueError(f"{who}: samples have shape {samples.shape}; give [N >= 1, H >= 1, A]")
    if dims is None:
        return samples
    if not all(0 <= d < samples.shape[2] for d in dims):
        raise ValueError(
            f"{who}: dims are {list(dims)} but actions have {samples.shape[2]} dimensions; give "
            f"those to look at, each from 0 to {samples.shape[2] - 1}"
        )
    return samples[..., list(dims)]


def checked(dims: Sequence[int] | None, who: str) -> tuple[int, ...] | None:
    """``dims`` as a tuple; ValueError where there are none, or one twice."""
    if dims is None:
        return None
    clean = tuple(int(d) for d in dims)
    if not clean or len(set(clean)) != len(clean):
        raise ValueError(f"{who}: dims are {list(clean)}; give at least one, each once")
    return clean


class FlowSpread(WindowedScore):
    """Mean variance over the sampled chunks, in action units squared.

    Args:
        dims: action dimensions looked at, None for all.
        window: the score is the mean of the last ``window`` variances (1: the newest).
    """

    name = "spread"
    samples = 16

    def __init__(self, dims: Sequence[int] | None = MOTION, window: int = 1) -> None:
        self.dims = checked(dims, "FlowSpread")
        super().__init__(window)

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`; the executed actions play no part."""
        return float(np.mean(np.var(chosen(output.samples, self.dims, "FlowSpread"), axis=0)))

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        dims = None if self.dims is None else list(self.dims)
        return {"dims": dims, **super().config()}
