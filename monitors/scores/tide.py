"""TIDE: temporal inter-chunk discrepancy.

A chunked policy plans H actions and replans after k of them, so the last H - k actions of the
old plan and the first H - k of the new one are meant for the same moments. A policy that knows
what it does agrees with itself there; one that is lost does not.

    s_t = 1 / (B D T) sum_b sum_d sum_tau (A_prev[k + tau, d] - A_now[tau, d])^2

with T = H - k the overlap, D the action dimensions compared and B the samples (here sample b of
the old answer is compared with sample b of the new one; B = 1 suffices). Rewind-IL
(arXiv 2604.16683).

The alignment is in absolute time: comparing prev[:T] with now[:T] instead, as one port did,
compares different moments and scores a constant motion as perfect agreement. The published form
compares every dimension; ``dims`` drops some (Sentinel drops the gripper, whose -1/+1 steps
otherwise dominate).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore


class Tide(WindowedScore):
    """Mean squared disagreement of successive chunks on their overlap, in action units squared.

    Args:
        dims: action dimensions compared, None for all.
        window: the score is the mean of the last ``window`` disagreements (1: the newest).
    """

    name = "tide"

    def __init__(self, dims: tuple[int, ...] | list[int] | None = None, window: int = 1) -> None:
        self.dims = None if dims is None else tuple(int(d) for d in dims)
        super().__init__(window)

    def forget(self) -> None:
        """Forget the previous chunk."""
        self._previous: np.ndarray | None = None

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float | None:
        """See :class:`WindowedScore`; None at the first inference: nothing to compare with.

        Raises ValueError where the old chunk was executed to its end, so that nothing overlaps.
        """
        now = np.asarray(output.samples, dtype=np.float64)
        if self.dims is not None:
            now = now[..., list(self.dims)]
        previous, self._previous = self._previous, now
        if previous is None:
            return None
        k, horizon = len(executed), previous.shape[1]
        overlap = min(horizon - k, now.shape[1])
        if overlap < 1:
            raise ValueError(
                f"Tide: {k} actions were executed of a chunk of {horizon}, so no moment is planned "
                "twice; execute fewer actions than the chunk holds, or use another score"
            )
        pairs = min(len(previous), len(now))
        difference = previous[:pairs, k : k + overlap] - now[:pairs, :overlap]
        return float(np.mean(difference**2))

    def memory(self) -> dict[str, np.ndarray]:
        """The previous chunk; absent before the first."""
        return {} if self._previous is None else {"previous": self._previous.copy()}

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`memory`."""
        if "previous" in state:
            self._previous = np.array(state["previous"], dtype=np.float64)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        dims = None if self.dims is None else list(self.dims)
        return {"dims": dims, **super().config()}
