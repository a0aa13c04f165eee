"""logpZO: a flow from observations to noise, stopped after one step (FAIL-Detect, 2503.08558).

    train  v(O_t, t) ~ Z - O,   O_t = (1 - t) O + t Z,   Z ~ N(0, I),  t ~ U[0, 1]
    score  s = || O + v(O, 0) ||^2

O is the policy's embedding, standardised; v is fitted on successes alone. An exact flow ends at
noise, whose density gives log p(O); the published score takes one Euler step from t = 0 instead. At
t = 0 the best v(O, 0) is E[Z - O | O] = -O, so that in theory the score is zero on what was seen in
training and says nothing of density: like RND's it is the error of a network where it was not
trained. That is why v is a network that bends (ReLU), not a linear map, which would be right
everywhere.

O is reduced to its leading principal components, at unit variance each, fixed by the training
data: in the raw dimensions of an embedding most directions hardly vary, and the noise that v must
predict drowns the few that do. A deviation orthogonal to the components is kept as one number more,
the length of what the PCA leaves out in units of its root mean square in training.

Training needs NumPy alone. Train on rollouts disjoint from those that calibrate the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore
from regrasp.monitors.scores.labelled import Projection
from regrasp.monitors.scores.mlp import Mlp, fit


class LogpZo(WindowedScore):
    """Squared length of an observation moved one step towards noise.

    Args:
        velocity: the trained v, of ``[O_t, t]``.
        projection: standardisation and PCA.
        residual: root mean square length, in training, of what the PCA leaves out.
        window: the score is the mean of the last ``window`` readings (1: the newest).
    """

    name = "logpzo"

    def __init__(
        self, velocity: Mlp, projection: Projection, residual: float, window: int = 1
    ) -> None:
        self.velocity, self.projection = velocity, projection
        self.residual = float(residual)
        super().__init__(window)

    @classmethod
    def train(
        cls,
        embeddings: np.ndarray,
        *,
        seed: int = 0,
        components: int = 32,
        width: int = 128,
        layers: int = 4,
        draws: int = 32,
        epochs: int = 6,
        batch: int = 256,
        window: int = 1,
    ) -> Self:
        """Fit v to ``embeddings`` ``[N, D]`` of successful rollouts.

        Each embedding is paired with ``draws`` noises and times, seen ``epochs`` times each.
        """
        embeddings = np.asarray(embeddings, dtype=np.float32)
        if embeddings.ndim != 2 or len(embeddings) < 2:
            raise ValueError(
                f"LogpZo.train: embeddings have shape {embeddings.shape}; give [N >= 2, D]"
            )
        rng = np.random.default_rng(seed)
        projection = Projection.fit(embeddings, None, components)
        left = np.sqrt(np.mean(_left_out(projection, embeddings) ** 2))
        score = cls(Mlp([]), projection, max(float(left), 1e-6), window)
        x = np.repeat(score._observation(embeddings), draws, axis=0)
        noise = rng.standard_normal(x.shape, dtype=np.float32)
        time = rng.random((len(x), 1), dtype=np.float32)
        moved = np.concatenate([(1 - time) * x + time * noise, time], axis=1)
        dims = x.shape[1]
        score.velocity = Mlp.random([dims + 1] + [width] * (layers - 1) + [dims], rng)
        fit(score.velocity, moved, noise - x, epochs=epochs, batch=batch, rng=rng)
        return score

    def _observation(self, embeddings: np.ndarray) -> np.ndarray:
        """``[N, D]`` to O, float32 ``[N, K + 1]``."""
        left = _left_out(self.projection, embeddings) / self.residual
        return np.concatenate([self.projection(embeddings, None), left[:, None]], axis=1)

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`; the executed actions play no part."""
        embedding = np.asarray(output.embedding, dtype=np.float32)
        if embedding.shape != self.projection.mean.shape:
            raise ValueError(
                f"LogpZo: embedding has shape {embedding.shape}, this score was trained on "
                f"{self.projection.mean.shape}; retrain it for this policy"
            )
        # One row always, so that a stored episode gives the live run's numbers exactly.
        x = self._observation(embedding[None])
        start = np.concatenate([x, np.zeros((1, 1), dtype=np.float32)], axis=1)
        return float(np.sum((x + self.velocity(start)) ** 2))

    def weights(self) -> dict[str, np.ndarray]:
        """The network, the projection and the scale of the residual."""
        return {
            **self.velocity.weights("velocity"),
            **self.projection.weights(),
            "residual": np.array([self.residual], np.float64),
        }

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Self:
        """Invert :meth:`config` and :meth:`weights`."""
        return cls(
            Mlp.from_weights(weights, "velocity"),
            Projection.from_weights(weights),
            float(weights["residual"][0]),
            **config,
        )


def _left_out(projection: Projection, embeddings: np.ndarray) -> np.ndarray:
    """Length ``[N]`` of what the components leave of standardised embeddings ``[N, D]``."""
    standard = (np.asarray(embeddings, dtype=np.float32) - projection.mean) / projection.scale
    axes = projection.components / np.linalg.norm(projection.components, axis=0)
    return np.linalg.norm(standard - (standard @ axes) @ axes.T, axis=1)
