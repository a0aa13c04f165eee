"""STAC: statistical temporal action consistency.

A policy of chunks plans some moments twice: the last H - k actions of the old plan and the first
H - k of the new one are meant for the same time, k actions having been executed. TIDE compares the
plans; STAC compares distributions, so that a policy may change between two equally good ways as
long as it knew both before. With x_1..x_N the old samples A[k:H] and y_1..y_M the new samples
A[:H-k], flattened, without the gripper, in the R^((H - k) D) of their joint plan:

    StacMmd  s_t = mean_ij K(x_i, x_j) + mean_ij K(y_i, y_j) - 2 mean_ij K(x_i, y_j)
             K(a, b) = exp(-g |a - b|^2),  g = 1 / (2 median of the squared distances above zero)
    StacKl   s_t = mean_i [ log p(x_i) - log q(x_i) ],  p, q kernel densities of x and of y,
             Gaussian, bandwidth the square root of the covariance's largest eigenvalue

Median and covariance are of both samples pooled; the MMD is the biased V-statistic. The KL
divergence is the forward one, of the old distribution to the new, high where the new one no longer
covers what the old one planned; as an estimate it can fall below zero and is cut there. p(x_i)
counts x_i itself, so that with few samples that vary in many directions even equal distributions
are some nats apart. Sentinel (arXiv 2410.04640).

Both are without scale: bandwidths follow the samples, so that two tight clusters a hair apart look
like two far apart (MMD 0.79 for one point against another). A policy that answers with nearly the
same chunk whatever its noise is better served by TIDE.

Sentinel alarms on the sum since the episode began (``cumulative=True``). A sum of numbers above
zero grows with time alone, and in simulation failures are the long episodes: a threshold on it is
in good part a clock. The default is the mean over the window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore
from regrasp.monitors.scores.spread import MOTION, checked, chosen

#: Squared distances this small beside the points' own squared norms are rounding.
ROUNDING = 1e-12


def squared_distances(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances between the rows of ``z`` ``[n, F]`` and their Gram matrix, ``[n, n]``.

    Equal rows are exactly zero apart. The Gram matrix is of the rows minus their mean.
    """
    centred = z - z.mean(axis=0)
    gram = centred @ centred.T
    norms = np.diag(gram)
    sums = norms[:, None] + norms[None, :]
    squared = sums - 2.0 * gram
    return np.where(squared > ROUNDING * sums, squared, 0.0), gram


def mmd_squared(x: np.ndarray, y: np.ndarray) -> float:
    """Biased squared MMD of ``x`` ``[N, F]`` and ``y`` ``[M, F]``; RBF kernel, median heuristic.

    From 0 (equal samples) to 2; 0 too where all points coincide.
    """
    squared, _ = squared_distances(np.concatenate([x, y]))
    apart = squared[squared > 0]
    if not len(apart):
        return 0.0
    kernel = np.exp(-squared / (2.0 * np.median(apart)))
    n = len(x)
    value = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2.0 * kernel[:n, n:].mean()
    return max(float(value), 0.0)


def kde_kl(x: np.ndarray, y: np.ndarray) -> float:
    """KL(x || y) of Gaussian kernel densities of ``x`` ``[N, F]`` and ``y`` ``[M, F]``, in nats.

    The mean of the log ratio over ``x``, at least 0; 0 too where all points coincide.
    """
    squared, gram = squared_distances(np.concatenate([x, y]))
    # The covariance's nonzero eigenvalues are the Gram matrix's, which is the smaller of the two.
    bandwidth2 = float(np.linalg.eigvalsh(gram)[-1]) / (len(gram) - 1)
    if not bandwidth2 > 0:
        return 0.0
    n = len(x)
    # One bandwidth for both densities: the kernels' normalisation cancels.
    exponents = squared[:n] / (-2.0 * bandwidth2)
    ratio = _log_mean_exp(exponents[:, :n]) - _log_mean_exp(exponents[:, n:])
    return max(float(np.mean(ratio)), 0.0)


def _log_mean_exp(exponents: np.ndarray) -> np.ndarray:
    """log of the mean over the last axis of exp, where each exp may be too small for a float."""
    top = exponents.max(axis=-1, keepdims=True)
    return top[..., 0] + np.log(np.mean(np.exp(exponents - top), axis=-1))


class Stac(WindowedScore):
    """What both statistics share: the same moments of two answers, side by side.

    Args:
        dims: action dimensions compared, None for all; the gripper is left out by default.
        cumulative: the sum since the last reset, as published, in place of each statistic.
        window: the score is the mean of the last ``window`` values (1: the newest).
    """

    samples = 16

    def __init__(
        self, dims: Sequence[int] | None = MOTION, cumulative: bool = False, window: int = 1
    ) -> None:
        self.dims = checked(dims, type(self).__name__)
        self.cumulative = bool(cumulative)
        super().__init__(window)

    @abstractmethod
    def statistic(self, x: np.ndarray, y: np.ndarray) -> float:
        """How different old plans ``[N, F]`` and new plans ``[M, F]`` are, at least 0."""

    def forget(self) -> None:
        """Forget the previous answer and the sum."""
        self._previous: np.ndarray | None = None
        self._total = 0.0

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float | None:
        """See :class:`WindowedScore`; None at the first inference: nothing to compare with.

        Raises ValueError where the old chunk was executed to its end, so that nothing overlaps.
        """
        who = type(self).__name__
        now = chosen(output.samples, self.dims, who)
        previous, self._previous = self._previous, now
        if previous is None:
            return None
        k, horizon = len(executed), previous.shape[1]
        overlap = min(horizon - k, now.shape[1])
        if overlap < 1:
            raise ValueError(
                f"{who}: {k} actions were executed of a chunk of {horizon}, so no moment is "
                "planned twice; execute fewer actions than the chunk holds, or use another score"
            )
        x = previous[:, k : k + overlap].reshape(len(previous), -1)
        value = self.statistic(x, now[:, :overlap].reshape(len(now), -1))
        if not self.cumulative:
            return value
        self._total += value
        return self._total

    def memory(self) -> dict[str, np.ndarray]:
        """The sum and the previous answer; the latter absent before the first."""
        arrays = {"total": np.array(self._total, np.float64)}
        if self._previous is not None:
            arrays["previous"] = self._previous.copy()
        return arrays

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`memory`."""
        self._total = float(state["total"])
        if "previous" in state:
            self._previous = np.array(state["previous"], dtype=np.float64)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        dims = None if self.dims is None else list(self.dims)
        return {"dims": dims, "cumulative": self.cumulative, **super().config()}


class StacMmd(Stac):
    """Squared maximum mean discrepancy of old and new plans, from 0 to 2."""

    name = "stac"

    def statistic(self, x: np.ndarray, y: np.ndarray) -> float:
        """See :func:`mmd_squared`."""
        return mmd_squared(x, y)


class StacKl(Stac):
    """KL divergence from old plans to new ones, in nats."""

    name = "stac_kl"

    def statistic(self, x: np.ndarray, y: np.ndarray) -> float:
        """See :func:`kde_kl`."""
        return kde_kl(x, y)
