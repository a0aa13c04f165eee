"""Several scores as one, so that one threshold keeps the promise for all of them together.

With u_k = s_k / c_k, each leg in units c_k of what its largest value rarely exceeds in successes,

    "or":      s = max_k u_k     alarms where any leg is high
    "and":     s = min_k u_k     alarms where all are high at the same inference, as FIPER does
    "sum":     s = sum_k w_k u_k, w_k = 1, or by logistic regression (:meth:`Combined.learn`)

The combination is a score like any other: split conformal on its maxima bounds false alarms by
alpha exactly, where thresholds for each leg apart are conservative (AND: each leg's alpha bounds
the conjunction; OR: alpha must be shared). Units and weights must come from rollouts that do not
calibrate the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import Score, lookup, shown

RULES = ("or", "and", "sum")


class Combined(Score):
    """One number from several scores, updated together.

    Args:
        legs: the scores, each with a different name.
        units: float ``[K]``, positive: what each leg's largest value rarely exceeds in a success.
        rule: "or", "and" or "sum".
        weights: float ``[K]`` for "sum", at least 0; None: all 1.
    """

    name = "combined"

    def __init__(
        self,
        legs: Sequence[Score],
        units: Sequence[float] | np.ndarray,
        rule: str = "or",
        weights: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        names = [leg.name for leg in legs]
        if len(legs) < 2 or len(set(names)) != len(names):
            raise ValueError(f"Combined: legs are {names}; give at least two with different names")
        if rule not in RULES:
            raise ValueError(f"Combined: rule is {rule!r}; it must be one of {', '.join(RULES)}")
        if weights is not None and rule != "sum":
            raise ValueError(f"Combined: weights belong to the rule 'sum', not to {rule!r}")
        self.legs, self.rule = tuple(legs), rule
        self.units = np.asarray(units, dtype=np.float64)
        self._weights = np.ones(len(legs)) if weights is None else np.asarray(weights, np.float64)
        for what, array in (("units", self.units), ("weights", self._weights)):
            if array.shape != (len(legs),) or not (np.isfinite(array) & (array >= 0)).all():
                raise ValueError(f"Combined: {what} are {array}; give {len(legs)} numbers >= 0")
        if not self.units.all():
            raise ValueError(f"Combined: units are {self.units}; they must be above 0")
        self.samples = max(leg.samples for leg in legs)

    @classmethod
    def learn(
        cls,
        legs: Sequence[Score],
        units: Sequence[float] | np.ndarray,
        values: Sequence[np.ndarray],
        begun: Sequence[np.ndarray],
    ) -> Combined:
        """Weights by logistic regression of "the failure has begun" on the legs, none negative.

        Args:
            legs: the scores.
            units: see the class.
            values: of labelled rollouts, each ``[C_i, K]``: what the legs said.
            begun: bool ``[C_i]`` each: whether a failure had begun by that inference.

        Raises:
            ValueError: where only one of the two answers occurs.
        """
        x = np.concatenate([np.asarray(v, np.float64) for v in values]) / np.asarray(units)
        y = np.concatenate([np.asarray(b, bool) for b in begun]).astype(np.float64)
        if not 0.0 < y.mean() < 1.0:
            raise ValueError(
                "Combined.learn: begun is all of one kind; give failures and successes"
            )
        return cls(legs, units, "sum", _logistic(x, y))

    def reset(self) -> None:
        """Every leg forgets."""
        for leg in self.legs:
            leg.reset()

    def update(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`Score`."""
        values = np.array([leg.update(shown(leg, output), executed) for leg in self.legs])
        return combine(values / self.units, self.rule, self._weights)

    def state(self) -> dict[str, np.ndarray]:
        """Every leg's, keys prefixed with its name."""
        return {f"{leg.name}/{k}": v for leg in self.legs for k, v in leg.state().items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`state`."""
        for leg in self.legs:
            leg.load_state(_below(state, leg.name))

    def config(self) -> dict[str, Any]:
        """The legs' configs, and the rest."""
        return {
            "legs": [{"name": leg.name, "config": leg.config()} for leg in self.legs],
            "units": self.units.tolist(),
            "rule": self.rule,
            "weights": self._weights.tolist() if self.rule == "sum" else None,
        }

    def weights(self) -> dict[str, np.ndarray]:
        """The legs' arrays, keys prefixed with their names."""
        return {f"{leg.name}/{k}": v for leg in self.legs for k, v in leg.weights().items()}

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Combined:
        """Invert :meth:`config` and :meth:`weights`."""
        from regrasp.monitors.scores import SCORES  # which names this class too

        legs = [
            lookup(SCORES, leg["name"], "Combined: leg").build(
                leg["config"], _below(weights, leg["name"])
            )
            for leg in config["legs"]
        ]
        return cls(legs, config["units"], config["rule"], config["weights"])


def combine(values: np.ndarray, rule: str, weights: np.ndarray) -> float:
    """The legs ``[K]``, in their units, as one number."""
    if rule == "or":
        return float(values.max())
    if rule == "and":
        return float(values.min())
    return float(values @ weights)


def _logistic(x: np.ndarray, y: np.ndarray, rounds: int = 2000) -> np.ndarray:
    """Non-negative weights ``[K]`` of a class-balanced logistic regression with intercept.

    Projected gradient descent on a convex loss: a leg that says nothing gets 0, none is turned
    against its meaning.
    """
    balance = np.where(y > 0, 0.5 / y.mean(), 0.5 / (1 - y.mean())) / len(y)
    weights, bias = np.zeros(x.shape[1]), 0.0
    rate = 4.0 / (1.0 + float(np.sum(balance[:, None] * x**2)))
    for _ in range(rounds):
        error = balance * (1.0 / (1.0 + np.exp(-np.clip(x @ weights + bias, -30, 30))) - y)
        weights = np.maximum(weights - rate * (x.T @ error), 0.0)
        bias -= rate * float(error.sum())
    return weights


def _below(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(f"{name}/"): v for k, v in arrays.items() if k.startswith(f"{name}/")}
