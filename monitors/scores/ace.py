"""ACE: action-chunk entropy, how many different ways to go on the policy has in mind.

B chunks are sampled at one observation. For each step of the horizon the B end-effector positions
they lead to are counted in the cells of a grid, and

    s_t = 1 / H sum_tau  - sum_c p_tau(c) log2 p_tau(c)

where p_tau(c) is the share of the samples whose position at step tau lies in cell c. Several modes
count as such however far apart they are, which a variance cannot tell. At most log2(B) bits.
FIPER (arXiv 2510.09459); its paper sums over the horizon where its code takes the mean, a constant
factor.

A cell's side along x is 0.03 of the range of x in successful rollouts, and so for y and z; the grid
starts 1 % of the samples' own extent below their smallest value, at each step anew. Rotation and
gripper are not looked at.

FIPER's policies answer absolute positions. Ours answer displacements a control step (OSC_POSE; see
``LIBERO_ACTION``), so their cumulative sum is where the end effector will be relative to now, in
action units (the unit cancels: cells are measured in the same one). Its range is the extent of what
one chunk covers, not of the workspace, and cells are accordingly finer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore

#: The grid begins this share of the samples' extent below their smallest value.
MARGIN = 0.01


def positions(chunks: np.ndarray) -> np.ndarray:
    """End-effector positions after each action, relative to now: ``[N, H, A]`` to ``[N, H, 3]``.

    Raises ValueError unless the first three of A >= 3 dimensions can be displacements.
    """
    chunks = np.asarray(chunks)
    if chunks.ndim != 3 or 0 in chunks.shape or chunks.shape[2] < 3:
        raise ValueError(
            f"Ace: chunks have shape {chunks.shape}; give [N >= 1, H >= 1, A >= 3], the first "
            "three dimensions the end effector's displacement"
        )
    return np.cumsum(chunks[..., :3], axis=1, dtype=np.float64)


def grid_entropy(points: np.ndarray, cell: np.ndarray) -> float:
    """Mean over H of the Shannon entropy in bits of which cell the points ``[B, H, 3]`` are in.

    Args:
        points: B points at each of H steps.
        cell: ``[3]``, sides of a cell, in the points' unit.
    """
    low, high = points.min(axis=0), points.max(axis=0)
    cells = np.floor((points - (low - MARGIN * (high - low))) / cell)
    # Each point counts how many share its cell; the mean of -log2(share) over points is then the
    # entropy, with no need to number the cells.
    shared = np.all(cells[:, None] == cells[None, :], axis=-1).sum(axis=1)
    return abs(float(np.mean(np.log2(shared / len(points)))))


class Ace(WindowedScore):
    """Entropy in bits of the end-effector positions that the sampled chunks lead to.

    Args:
        ranges: float ``[3]``, extent of x, y and z over the chunks of successful rollouts.
        fraction: side of a cell, as a share of the range.
        window: the score is the mean of the last ``window`` entropies (1: the newest).
    """

    name = "ace"
    samples = 16

    def __init__(self, ranges: np.ndarray, fraction: float = 0.03, window: int = 1) -> None:
        self.ranges = np.asarray(ranges, dtype=np.float32)
        if self.ranges.shape != (3,) or not np.all(self.ranges > 0):
            raise ValueError(f"Ace: ranges are {ranges}; give three positive extents, of x, y, z")
        if not fraction > 0:
            raise ValueError(f"Ace: fraction is {fraction}; it must be positive")
        self.fraction = float(fraction)
        self._cell = self.ranges.astype(np.float64) * self.fraction
        super().__init__(window)

    @classmethod
    def train(cls, chunks: np.ndarray, *, fraction: float = 0.03, window: int = 1) -> Ace:
        """Measure the ranges on ``chunks`` ``[N, H, A]`` of successful rollouts.

        A direction in which nothing ever moved takes the widest range, as in FIPER.
        """
        points = positions(chunks).reshape(-1, 3)
        ranges = points.max(axis=0) - points.min(axis=0)
        if not np.all(np.isfinite(ranges)) or not np.any(ranges > 0):
            raise ValueError(
                f"Ace.train: positions range over {ranges.tolist()}; give chunks that move"
            )
        return cls(np.where(ranges > 0, ranges, ranges.max()), fraction, window)

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`; the executed actions play no part."""
        return grid_entropy(positions(output.samples), self._cell)

    def weights(self) -> dict[str, np.ndarray]:
        """The ranges."""
        return {"ranges": self.ranges}

    def config(self) -> dict[str, Any]:
        """Constructor arguments besides the ranges."""
        return {"fraction": self.fraction, **super().config()}

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Ace:
        """Invert :meth:`config` and :meth:`weights`."""
        return cls(weights["ranges"], **config)
