"""A long short-term memory in NumPy, and the scores that are one.

    i, f, g, o = split(W_ih x_t + W_hh h_{t-1} + b)
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

with the weights, the order of the gates and the results of ``torch.nn.LSTM`` (one layer, one
direction), so that what torch trained runs on a robot's computer that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class Lstm:
    """One layer and a linear read-out to one logit; float32.

    Args:
        weight: ``[I + H, 4 H]``, of input and hidden state, gates in the order i, f, g, o.
        bias: ``[4 H]``.
        out: ``[H + 1]``, read-out weights and, last, its bias.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
        self.weight = np.ascontiguousarray(weight, dtype=np.float32)
        self.bias = np.asarray(bias, dtype=np.float32)
        self.out = np.asarray(out, dtype=np.float32)
        self.hidden = len(self.bias) // 4

    @classmethod
    def from_torch(cls, state: Mapping[str, np.ndarray]) -> Lstm:
        """From the parameters of :func:`network`."""
        weight = np.concatenate([state["lstm.weight_ih_l0"], state["lstm.weight_hh_l0"]], axis=1)
        return cls(
            weight.T,
            state["lstm.bias_ih_l0"] + state["lstm.bias_hh_l0"],
            np.concatenate([state["out.weight"][0], state["out.bias"]]),
        )

    def step(
        self, x: np.ndarray, h: np.ndarray, c: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """One step: input ``[I]`` and state ``[H]``, ``[H]`` to logit and new state."""
        gates = np.concatenate([x, h]) @ self.weight + self.bias
        n = self.hidden
        # sigmoid(z) = (1 + tanh(z / 2)) / 2 never overflows.
        opened = 0.5 * (1.0 + np.tanh(0.5 * gates))
        c = opened[n : 2 * n] * c + opened[:n] * np.tanh(gates[2 * n : 3 * n])
        h = opened[3 * n :] * np.tanh(c)
        return float(h @ self.out[:-1] + self.out[-1]), h, c


def network(inputs: int, hidden: int, dropout: float) -> Torch:
    """The torch module that becomes an :class:`Lstm`: ``[B, T, I]`` to logits ``[B, T]``."""
    nn = import_torch().nn

    class Network(nn.Module):  # type: ignore[name-defined]
        """Dropout, LSTM, dropout, linear."""

        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(dropout)
            self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
            self.out = nn.Linear(hidden, 1)

        def forward(self, x: Torch) -> Torch:
            hidden_states, _ = self.lstm(self.drop(x))
            return self.out(self.drop(hidden_states))[..., 0]

    return Network()


class LstmScore(LearnedScore):
    """sigmoid(LSTM) at each inference, the mean over the members of an ensemble, in (0, 1).

    Args:
        projection: of the embedding.
        members: the trained networks.
        inputs: what they read.
        window: the score is the mean of the last ``window`` readings.
        samples: see :class:`LearnedScore`.
    """

    def __init__(
        self,
        projection: Projection,
        members: Sequence[Lstm],
        inputs: Inputs = "embedding",
        window: int = 1,
        samples: int = 1,
    ) -> None:
        self.members = tuple(members)
        if len({member.hidden for member in self.members}) != 1:
            raise ValueError(
                f"{type(self).__name__}: members have hidden sizes "
                f"{[member.hidden for member in self.members]}; give at least one, all alike"
            )
        super().__init__(projection, inputs, window, samples)

    @classmethod
    def _train(
        cls,
        data: LabelledEpisodes,
        loss: Callable[[Torch, Batch], Torch],
        *,
        seed: int,
        inputs: Inputs,
        components: int,
        hidden: int,
        members: int,
        window: int,
        training: Training,
    ) -> Self:
        """Fit ``members`` networks to ``loss`` of logits ``[B, T]`` and their batch."""
        projection, batch = prepare(data, inputs, components)

        def make() -> Torch:
            return network(projection.dims, hidden, training.dropout)

        states = [fit(make, loss, batch, training, s) for s in member_seeds(seed, members)]
        networks = [Lstm.from_torch(state) for state in states]
        return cls(projection, networks, inputs, window, samples_needed(data, inputs))

    def read(self, x: np.ndarray) -> float:
        """See :class:`LearnedScore`."""
        total = 0.0
        for i, member in enumerate(self.members):
            logit, self._h[i], self._c[i] = member.step(x, self._h[i], self._c[i])
            total += sigmoid(logit)
        return total / len(self.members)

    def forget(self) -> None:
        """Forget the hidden states and the previous chunk."""
        super().forget()
        shape = (len(self.members), self.members[0].hidden)
        self._h: np.ndarray = np.zeros(shape, dtype=np.float32)
        self._c: np.ndarray = np.zeros(shape, dtype=np.float32)

    def memory(self) -> dict[str, np.ndarray]:
        """``h`` and ``c``, ``[members, H]`` each, and the previous chunk."""
        return {"h": self._h.copy(), "c": self._c.copy(), **super().memory()}

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`memory`."""
        super().recall(state)
        self._h = np.array(state["h"], dtype=np.float32)
        self._c = np.array(state["c"], dtype=np.float32)

    def weights(self) -> dict[str, np.ndarray]:
        """The projection and the members."""
        return super().weights() | {
            f"lstm.{i}.{part}": getattr(member, part)
            for i, member in enumerate(self.members)
            for part in ("weight", "bias", "out")
        }

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Self:
        """Invert :meth:`config` and :meth:`weights`."""
        members: list[Lstm] = []
        while f"lstm.{len(members)}.weight" in weights:
            stem = f"lstm.{len(members)}"
            members.append(Lstm(*(weights[f"{stem}.{part}"] for part in ("weight", "bias", "out"))))
        return cls(Projection.from_weights(weights), members, **config)
