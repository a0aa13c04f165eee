"""Mahalanobis distance of the policy's embedding from those of successful rollouts.

    s_t = sqrt( (h - m)^T C^-1 (h - m) )

m is their mean, C their covariance shrunk towards a multiple of the identity by as much as Ledoit
and Wolf (J. Multivariate Analysis 88, 2004) find best for N independent rows:

    C = (1 - r) S + r mu I,   mu = tr(S) / D,   r = min(b, d) / d
    d = |S - mu I|^2,   b = 1/N^2 sum_i |x_i x_i^T - S|^2     (x_i centred, |.| Frobenius)

Rows of one episode resemble each other, so that r is rather too small than too large. On pi0's
embeddings SAFE (arXiv 2506.09937) reports this distance on a par with its own networks.

Train on rollouts disjoint from those that calibrate the threshold: training rows are closer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore

#: No direction's variance is taken for less than this share of the mean variance: one that was
#: constant in training would turn rounding into an alarm.
FLOOR = 1e-6


def training_rows(embeddings: np.ndarray, who: str) -> np.ndarray:
    """``embeddings`` as float64 ``[N, D]``; ValueError, beginning with ``who``, if unusable."""
    rows = np.asarray(embeddings, dtype=np.float64)
    if rows.ndim != 2 or len(rows) < 2 or rows.shape[1] < 1:
        raise ValueError(
            f"{who}.train: embeddings have shape {rows.shape}; give [N >= 2, D >= 1], one row an "
            "inference of a successful rollout"
        )
    if not np.isfinite(rows).all() or np.all(rows == rows[0]):
        raise ValueError(
            f"{who}.train: embeddings are not finite, or all the same; give those of rollouts"
        )
    return rows


def one_row(output: PolicyOutput, mean: np.ndarray, who: str) -> np.ndarray:
    """The embedding minus ``mean``, float32 ``[1, D]``; ValueError where the size differs."""
    embedding = np.asarray(output.embedding, dtype=np.float32)
    if embedding.shape != mean.shape:
        raise ValueError(
            f"{who}: embedding has shape {embedding.shape}, this score was trained on "
            f"{mean.shape}; retrain it for this policy"
        )
    return (embedding - mean)[None]


def ledoit_wolf(rows: np.ndarray) -> tuple[np.ndarray, float]:
    """Shrunk covariance ``[D, D]`` of ``rows`` ``[N, D]``, and the shrinkage r from 0 to 1."""
    x = rows - rows.mean(axis=0)
    n, dims = x.shape
    sample = x.T @ x / n
    mu = float(np.trace(sample)) / dims
    identity = np.eye(dims)
    d = float(np.sum((sample - mu * identity) ** 2))
    # sum |x x^T - S|^2 = sum |x|^4 - N |S|^2, without N matrices.
    b = (float(np.mean(np.sum(x**2, axis=1) ** 2)) - float(np.sum(sample**2))) / n
    shrinkage = min(b, d) / d if d > 0 else 1.0
    return (1.0 - shrinkage) * sample + shrinkage * mu * identity, shrinkage


class Mahalanobis(WindowedScore):
    """Distance of the embedding from the mean of successes, in their standard deviations.

    Args:
        mean: float ``[D]``.
        whitening: float ``[D, D]``, W with W W^T = C^-1.
        window: the score is the mean of the last ``window`` distances (1: the newest).
    """

    name = "mahalanobis"

    def __init__(self, mean: np.ndarray, whitening: np.ndarray, window: int = 1) -> None:
        self.mean = np.asarray(mean, dtype=np.float32)
        self.whitening = np.asarray(whitening, dtype=np.float32)
        if self.mean.ndim != 1 or self.whitening.shape != (len(self.mean), len(self.mean)):
            raise ValueError(
                f"Mahalanobis: mean has shape {self.mean.shape}, whitening {self.whitening.shape}; "
                "give [D] and [D, D]"
            )
        super().__init__(window)

    @classmethod
    def train(cls, embeddings: np.ndarray, *, window: int = 1) -> Mahalanobis:
        """Fit to ``embeddings`` ``[N, D]`` of successful rollouts."""
        rows = training_rows(embeddings, "Mahalanobis")
        covariance, _ = ledoit_wolf(rows)
        variances, axes = np.linalg.eigh(covariance)
        variances = np.maximum(variances, FLOOR * variances.mean())
        return cls(rows.mean(axis=0), axes / np.sqrt(variances), window)

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`; the executed actions play no part."""
        return float(np.linalg.norm(one_row(output, self.mean, "Mahalanobis") @ self.whitening))

    def weights(self) -> dict[str, np.ndarray]:
        """Mean and whitening."""
        return {"mean": self.mean, "whitening": self.whitening}

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Mahalanobis:
        """Invert :meth:`config` and :meth:`weights`."""
        return cls(weights["mean"], weights["whitening"], **config)
