"""Nearest neighbours: distance of the policy's embedding from what it saw in success.

    s_t = 1 / k sum_{j in nearest k} | z - z_j |

z is the embedding with each dimension brought to unit variance, z_j those of successful rollouts.
It assumes no shape of their distribution, at the price of keeping them: a bank of at most 2000,
drawn at random from the training rows and rounded to float16 at training time, so that a saved
score and the one that was saved hold the same numbers.

Train on rollouts disjoint from those that calibrate the threshold: a training row is its own
nearest neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore
from regrasp.monitors.scores.mahalanobis import one_row, training_rows


class Knn(WindowedScore):
    """Mean distance to the nearest embeddings of successes, in standard deviations a dimension.

    Args:
        bank: ``[M, D]``, standardised embeddings; kept as float16.
        mean: float ``[D]``, subtracted from an embedding first.
        scale: float ``[D]``, divides it then.
        k: neighbours averaged.
        window: the score is the mean of the last ``window`` distances (1: the newest).
    """

    name = "knn"

    def __init__(
        self, bank: np.ndarray, mean: np.ndarray, scale: np.ndarray, k: int = 5, window: int = 1
    ) -> None:
        self.bank = np.asarray(bank, dtype=np.float16)
        self.mean = np.asarray(mean, dtype=np.float32)
        self.scale = np.asarray(scale, dtype=np.float32)
        dims = self.mean.shape
        if self.mean.ndim != 1 or self.scale.shape != dims or self.bank.shape[1:] != dims:
            raise ValueError(
                f"Knn: bank has shape {self.bank.shape}, mean {dims}, scale {self.scale.shape}; "
                "give [M, D], [D] and [D]"
            )
        if not 1 <= k <= len(self.bank):
            raise ValueError(
                f"Knn: k is {k}; it must be from 1 to the {len(self.bank)} embeddings of the bank"
            )
        self.k = int(k)
        self._rows = self.bank.astype(np.float32)
        self._half_norms = 0.5 * np.sum(self._rows**2, axis=1)
        super().__init__(window)

    @classmethod
    def train(
        cls,
        embeddings: np.ndarray,
        *,
        seed: int = 0,
        k: int = 5,
        bank: int = 2000,
        window: int = 1,
    ) -> Knn:
        """Keep at most ``bank`` of ``embeddings`` ``[N, D]`` of successful rollouts."""
        if bank < 1:
            raise ValueError(f"Knn.train: bank is {bank}; keep at least one embedding")
        rows = training_rows(embeddings, "Knn")
        mean, spread = rows.mean(axis=0), rows.std(axis=0)
        # As in RndOe: a dimension that hardly moved is scaled by the typical one instead.
        scale = np.maximum(spread, max(0.1 * float(np.median(spread)), 1e-6))
        if len(rows) > bank:
            kept = np.random.default_rng(seed).choice(len(rows), size=bank, replace=False)
            rows = rows[np.sort(kept)]
        return cls((rows - mean) / scale, mean, scale, k, window)

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`; the executed actions play no part."""
        z = one_row(output, self.mean, "Knn")[0] / self.scale
        # |z - z_j|^2 / 2 up to a constant ranks the bank by one product; the k that win are then
        # measured by their difference, which is exact where they are close.
        ranking = self._half_norms - self._rows @ z
        nearest = np.argpartition(ranking, self.k - 1)[: self.k]
        return float(np.mean(np.linalg.norm(self._rows[nearest] - z, axis=1)))

    def weights(self) -> dict[str, np.ndarray]:
        """The bank and the normalisation."""
        return {"bank": self.bank, "mean": self.mean, "scale": self.scale}

    def config(self) -> dict[str, Any]:
        """Constructor arguments besides the arrays."""
        return {"k": self.k, **super().config()}

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Knn:
        """Invert :meth:`config` and :meth:`weights`."""
        return cls(weights["bank"], weights["mean"], weights["scale"], **config)
