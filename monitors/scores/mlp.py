"""A plain multilayer perceptron in NumPy, with AdamW: enough for monitors that need no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np


class Mlp:
    """Linear layers with ReLU between them; float32.

    Attributes:
        layers: list of (weight ``[in, out]``, bias ``[out]``).
    """

    def __init__(self, layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.layers = layers

    @classmethod
    def random(cls, sizes: list[int], rng: np.random.Generator) -> Mlp:
        """He-initialised layers of the given widths, input first."""
        return cls(
            [
                (
                    rng.normal(0.0, np.sqrt(2.0 / fan_in), (fan_in, out)).astype(np.float32),
                    np.zeros(out, dtype=np.float32),
                )
                for fan_in, out in itertools.pairwise(sizes)
            ]
        )

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Map ``[N, in]`` to ``[N, out]``."""
        last = len(self.layers) - 1
        for i, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias
            if i < last:
                x = np.maximum(x, 0.0)
        return x

    def gradients(
        self, x: np.ndarray, target: np.ndarray
    ) -> tuple[float, list[tuple[np.ndarray, np.ndarray]]]:
        """Mean squared error over ``[N, out]`` and its gradient for each layer."""
        inputs = []
        last = len(self.layers) - 1
        for i, (weight, bias) in enumerate(self.layers):
            inputs.append(x)
            x = x @ weight + bias
            if i < last:
                x = np.maximum(x, 0.0)
        error = x - target
        upstream = (2.0 / error.size) * error
        grads: list[tuple[np.ndarray, np.ndarray]] = []
        for i in range(last, -1, -1):
            grads.append((inputs[i].T @ upstream, upstream.sum(axis=0)))
            if i:
                # inputs[i] is the ReLU's output, so it is positive exactly where it passed.
                upstream = (upstream @ self.layers[i][0].T) * (inputs[i] > 0)
        return float(np.mean(error**2)), grads[::-1]

    def weights(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays named ``<prefix>.<layer>.weight`` and ``.bias``."""
        return {
            f"{prefix}.{i}.{part}": array
            for i, layer in enumerate(self.layers)
            for part, array in zip(("weight", "bias"), layer, strict=True)
        }

    @classmethod
    def from_weights(cls, weights: Mapping[str, np.ndarray], prefix: str) -> Mlp:
        """Invert :meth:`weights`; a missing prefix raises ValueError."""
        layers: list[tuple[np.ndarray, np.ndarray]] = []
        while f"{prefix}.{len(layers)}.weight" in weights:
            stem = f"{prefix}.{len(layers)}"
            layers.append(
                (np.asarray(weights[f"{stem}.weight"]), np.asarray(weights[f"{stem}.bias"]))
            )
        if not layers:
            raise ValueError(f"Mlp: no array {prefix}.0.weight among {sorted(weights)}")
        return cls(layers)


def fit(
    mlp: Mlp,
    x: np.ndarray,
    target: np.ndarray,
    *,
    epochs: int,
    batch: int,
    rng: np.random.Generator,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-2,
) -> list[float]:
    """Fit ``mlp`` to ``x [N, in] -> target [N, out]`` with AdamW and cosine decay, in place.

    Returns the mean loss of each epoch. AdamW: Loshchilov and Hutter, arXiv 1711.05101.
    """
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    moments = [[(np.zeros_like(p), np.zeros_like(p)) for p in layer] for layer in mlp.layers]
    total = epochs * -(-len(x) // batch)
    step, losses = 0, []
    for _ in range(epochs):
        order = rng.permutation(len(x))
        epoch_losses = []
        for start in range(0, len(x), batch):
            rows = order[start : start + batch]
            loss, grads = mlp.gradients(x[rows], target[rows])
            epoch_losses.append(loss)
            rate = learning_rate * 0.5 * (1.0 + np.cos(np.pi * step / total))
            step += 1
            for layer, layer_grads, layer_moments in zip(mlp.layers, grads, moments, strict=True):
                for p, g, (m, v) in zip(layer, layer_grads, layer_moments, strict=True):
                    m += (1 - beta1) * (g - m)
                    v += (1 - beta2) * (g * g - v)
                    update = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
                    p -= np.float32(rate) * (update + weight_decay * p)
        losses.append(float(np.mean(epoch_losses)))
    return losses
