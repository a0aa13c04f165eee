"""The clock: control steps since the episode, or the segment after a rewind, began.

The baseline every learned score must beat. In simulation a failure ends at the time limit, so that
elapsed time alone separates failures from successes perfectly at the end (`an episode that lasts
too long has failed`), and a detector compared without it may have learned nothing else. As an
alarm it is a calibrated time-out: longer than all but a share alpha of the successes took.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import Score


class Clock(Score):
    """Control steps executed since the last reset."""

    name = "clock"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to zero."""
        self._steps = 0

    def update(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`Score`; only the number of executed actions counts."""
        self._steps += len(executed)
        return float(self._steps)

    def state(self) -> dict[str, np.ndarray]:
        """The count."""
        return {"steps": np.array(self._steps, np.int64)}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`state`."""
        self._steps = int(state["steps"])

    def config(self) -> dict[str, Any]:
        """No arguments."""
        return {}
