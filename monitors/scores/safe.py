"""SAFE: scores that learn from how episodes ended (arXiv 2506.09937).

``SafeMlp`` sums how bad each moment looked; ``SafeLstm`` asks a recurrent network at each moment:

    SafeMlp   s_t = sum_{tau <= t} sigmoid(g(x_tau))
              L   = sum_episodes w [ y sum_t (t - s_t) + (1 - y) sum_t s_t ]
    SafeLstm  s_t = sigmoid(LSTM(x_1..x_t))
              L   = sum_episodes w sum_t BCE(s_t, y)

y is 1 for an episode that failed, w balances the classes. Every moment of a failure counts as
failing, also its good beginning.

The published sum is confounded with length: it never falls, so that an episode's last value grows
with its length, and failures, which run into the time limit, are long. ``cumulative=False`` divides
s_t by t, in the score and in the loss: the running mean, which has no such advantage. The published
LSTM has 256 hidden units and one layer; the default here is 64, for hundreds of episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from regrasp.monitors.scores.labelled import Inputs, LabelledEpisodes, Projection
from regrasp.monitors.scores.learned import (
    Batch,
    LearnedScore,
    Torch,
    Training,
    fit,
    import_torch,
    member_seeds,
    prepare,
    samples_needed,
    sigmoid,
)
from regrasp.monitors.scores.lstm import LstmScore
from regrasp.monitors.scores.mlp import Mlp


def safe_mlp_loss(logits: Torch, batch: Batch, cumulative: bool) -> Torch:
    """SAFE's loss of g's logits ``[B, T]``, divided by the inferences in the batch.

    Not cumulative, each term is divided by its t.
    """
    torch = import_torch()
    total = (logits.sigmoid() * batch.mask).cumsum(dim=1)
    count = torch.arange(1, logits.shape[1] + 1).float()
    terms = torch.where(batch.failed[:, None] > 0.5, count - total, total)
    if not cumulative:
        terms = terms / count
    return (batch.weight[:, None] * terms * batch.mask).sum() / batch.mask.sum()


def safe_lstm_loss(logits: Torch, batch: Batch) -> Torch:
    """Cross-entropy at every inference with how the episode ended, mean over inferences."""
    torch = import_torch()
    target = batch.failed[:, None].expand_as(logits)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (batch.weight[:, None] * loss * batch.mask).sum() / batch.mask.sum()


class SafeLstm(LstmScore):
    """Probability that the episode will have failed; see :class:`LstmScore`."""

    name = "safe_lstm"

    @classmethod
    def train(
        cls,
        data: LabelledEpisodes,
        *,
        seed: int = 0,
        inputs: Inputs = "embedding",
        components: int = 32,
        hidden: int = 64,
        members: int = 3,
        window: int = 1,
        training: Training | None = None,
    ) -> Self:
        """Fit to failed and successful episodes."""
        return cls._train(
            data,
            safe_lstm_loss,
            seed=seed,
            inputs=inputs,
            components=components,
            hidden=hidden,
            members=members,
            window=window,
            training=training or Training(),
        )


class SafeMlp(LearnedScore):
    """Sum, or running mean, of how bad each moment looked.

    Args:
        projection: of the embedding.
        members: the trained networks g; their sigmoids are averaged.
        cumulative: the sum, as published; False for the mean over the episode so far.
        inputs: what they read.
        window: the score is the mean of the last ``window`` values of s_t.
        samples: see :class:`LearnedScore`.
    """

    name = "safe_mlp"

    def __init__(
        self,
        projection: Projection,
        members: Sequence[Mlp],
        cumulative: bool = True,
        inputs: Inputs = "embedding",
        window: int = 1,
        samples: int = 1,
    ) -> None:
        self.members = tuple(members)
        if not self.members:
            raise ValueError("SafeMlp: members is empty; give at least one network")
        self.cumulative = bool(cumulative)
        super().__init__(projection, inputs, window, samples)

    @classmethod
    def train(
        cls,
        data: LabelledEpisodes,
        *,
        seed: int = 0,
        inputs: Inputs = "embedding",
        components: int = 32,
        hidden: int = 64,
        members: int = 3,
        cumulative: bool = True,
        window: int = 1,
        training: Training | None = None,
    ) -> Self:
        """Fit g, one hidden layer, to failed and successful episodes."""
        training = training or Training()
        projection, batch = prepare(data, inputs, components)
        nn = import_torch().nn

        def make() -> Torch:
            return nn.Sequential(
                nn.Dropout(training.dropout),
                nn.Linear(projection.dims, hidden),
                nn.ReLU(),
                nn.Dropout(training.dropout),
                nn.Linear(hidden, 1),
                nn.Flatten(start_dim=1),
            )

        def loss(logits: Torch, batch: Batch) -> Torch:
            return safe_mlp_loss(logits, batch, cumulative)

        states = [fit(make, loss, batch, training, s) for s in member_seeds(seed, members)]
        networks = [
            Mlp([(np.ascontiguousarray(s[f"{i}.weight"].T), s[f"{i}.bias"]) for i in (1, 4)])
            for s in states
        ]
        return cls(projection, networks, cumulative, inputs, window, samples_needed(data, inputs))

    def read(self, x: np.ndarray) -> float:
        """See :class:`LearnedScore`."""
        bad = [sigmoid(float(member(x[None])[0, 0])) for member in self.members]
        self._total += float(np.mean(bad))
        self._count += 1
        return self._total if self.cumulative else self._total / self._count

    def forget(self) -> None:
        """Back to zero."""
        super().forget()
        self._total, self._count = 0.0, 0

    def memory(self) -> dict[str, np.ndarray]:
        """The sum and its number of terms, and the previous chunk."""
        return {
            "total": np.array(self._total, np.float64),
            "count": np.array(self._count, np.int64),
            **super().memory(),
        }

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`memory`."""
        super().recall(state)
        self._total, self._count = float(state["total"]), int(state["count"])

    def weights(self) -> dict[str, np.ndarray]:
        """The projection and the networks."""
        arrays = super().weights()
        for i, member in enumerate(self.members):
            arrays |= member.weights(f"mlp.{i}")
        return arrays

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {"cumulative": self.cumulative, **super().config()}

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Self:
        """Invert :meth:`config` and :meth:`weights`."""
        members: list[Mlp] = []
        while f"mlp.{len(members)}.0.weight" in weights:
            members.append(Mlp.from_weights(weights, f"mlp.{len(members)}"))
        return cls(Projection.from_weights(weights), members, **config)
