"""RND-OE: random network distillation on the policy's own embedding of the observation.

    s_t = || f_theta(h(o_t)) - g(h(o_t)) ||_2

h is the frozen policy's encoder, g a random frozen MLP (4 layers), f_theta an MLP (6 layers)
trained to imitate g on embeddings of successful rollouts. Where the policy looks at what it saw
in success the two agree; elsewhere f_theta has had no reason to. FIPER (arXiv 2510.09459).

Training needs NumPy alone. Train on rollouts disjoint from those that calibrate the threshold:
on its own training data f_theta errs less, and the threshold would come out too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore
from regrasp.monitors.scores.mlp import Mlp, fit

TARGET_LAYERS = 4
PREDICTOR_LAYERS = 6


class RndOe(WindowedScore):
    """Distance between predictor and target on the policy embedding.

    Args:
        predictor: the trained f_theta.
        target: the frozen random g.
        mean: float ``[D]``, subtracted from an embedding first.
        scale: float ``[D]``, divides it then.
        window: the score is the mean of the last ``window`` distances (1: the newest).
    """

    name = "rnd_oe"

    def __init__(
        self, predictor: Mlp, target: Mlp, mean: np.ndarray, scale: np.ndarray, window: int = 1
    ) -> None:
        self.predictor, self.target = predictor, target
        self.mean = np.asarray(mean, dtype=np.float32)
        self.scale = np.asarray(scale, dtype=np.float32)
        super().__init__(window)

    @classmethod
    def train(
        cls,
        embeddings: np.ndarray,
        *,
        seed: int = 0,
        width: int = 128,
        outputs: int = 32,
        epochs: int = 100,
        batch: int = 256,
        window: int = 1,
    ) -> RndOe:
        """Fit f_theta to g on ``embeddings`` ``[N, D]`` of successful rollouts."""
        embeddings = np.asarray(embeddings, dtype=np.float32)
        if embeddings.ndim != 2 or len(embeddings) < 2:
            raise ValueError(
                f"RndOe.train: embeddings have shape {embeddings.shape}; give [N >= 2, D]"
            )
        rng = np.random.default_rng(seed)
        mean = embeddings.mean(axis=0)
        # A dimension that never moved in training would turn any rounding into an alarm; it is
        # scaled by the typical dimension instead.
        spread = embeddings.std(axis=0)
        scale = np.maximum(spread, max(0.1 * float(np.median(spread)), 1e-6))
        x = (embeddings - mean) / scale
        dims = x.shape[1]
        target = Mlp.random([dims] + [width] * (TARGET_LAYERS - 1) + [outputs], rng)
        predictor = Mlp.random([dims] + [width] * (PREDICTOR_LAYERS - 1) + [outputs], rng)
        fit(predictor, x, target(x), epochs=epochs, batch=batch, rng=rng)
        return cls(predictor, target, mean, scale, window)

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`; the executed actions play no part."""
        embedding = np.asarray(output.embedding, dtype=np.float32)
        if embedding.shape != self.mean.shape:
            raise ValueError(
                f"RndOe: embedding has shape {embedding.shape}, this score was trained on "
                f"{self.mean.shape}; retrain it for this policy"
            )
        # One row always: a matrix product over many rows may sum in another order, and the
        # stored episode must give the live run's numbers exactly.
        x = ((embedding - self.mean) / self.scale)[None]
        return float(np.linalg.norm(self.predictor(x) - self.target(x)))

    def weights(self) -> dict[str, np.ndarray]:
        """Both networks and the normalisation."""
        return {
            **self.predictor.weights("predictor"),
            **self.target.weights("target"),
            "mean": self.mean,
            "scale": self.scale,
        }

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> RndOe:
        """Invert :meth:`config` and :meth:`weights`."""
        return cls(
            Mlp.from_weights(weights, "predictor"),
            Mlp.from_weights(weights, "target"),
            weights["mean"],
            weights["scale"],
            **config,
        )
