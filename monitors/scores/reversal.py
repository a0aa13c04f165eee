"""Reversal: how often the executed motion turns back on itself.

    s_t = 1 / k #{ i : a_i . a_{i-1} < 0 }

over the k actions executed since the last inference, a_i their translations. An action shorter than
a threshold has no direction worth the name: it is left out, and its neighbours follow each other.
The last motion before is remembered, so that a turn between two chunks counts as one within.

A cheap baseline that asks nothing of the policy: a robot that has lost its way dithers. Speed alone
says next to nothing of a policy with continuous actions, direction reversals do (a comparison in
arXiv 2605.28726, known here second hand). The mean over a window is over inferences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore


class Reversal(WindowedScore):
    """Direction reversals an executed action, from 0 to 1.

    Args:
        threshold: translations shorter than this are no motion, in action units (0.05: 2.5 mm a
            control step in LIBERO, where 1.0 is 0.05 m).
        window: the score is the mean of the last ``window`` rates (1: the newest).
    """

    name = "reversal"

    def __init__(self, threshold: float = 0.05, window: int = 1) -> None:
        if not threshold > 0:
            raise ValueError(f"Reversal: threshold is {threshold}; it must be positive")
        self.threshold = float(threshold)
        super().__init__(window)

    def forget(self) -> None:
        """Forget the last motion."""
        self._last: np.ndarray = np.zeros((0, 3))

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float | None:
        """See :class:`WindowedScore`; None where nothing was executed since the last inference."""
        executed = np.asarray(executed, dtype=np.float64)
        if len(executed) == 0:
            return None
        if executed.ndim != 2 or executed.shape[1] < 3:
            raise ValueError(
                f"Reversal: executed has shape {executed.shape}; give [k, A >= 3], the first three "
                "dimensions the end effector's displacement"
            )
        motions = executed[:, :3]
        motions = motions[np.linalg.norm(motions, axis=1) >= self.threshold]
        motions = np.concatenate([self._last, motions])
        self._last = motions[-1:]
        turned = np.sum(motions[1:] * motions[:-1], axis=1) < 0
        return float(np.sum(turned)) / len(executed)

    def memory(self) -> dict[str, np.ndarray]:
        """The last motion, ``[1, 3]``, or ``[0, 3]`` before the first."""
        return {"last": self._last.copy()}

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`memory`."""
        self._last = np.array(state["last"], dtype=np.float64).reshape(-1, 3)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {"threshold": self.threshold, **super().config()}
