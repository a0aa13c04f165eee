"""Thresholds as a monitor asks for them: at a moment, for a task, in a segment.

What they promise is decided where they are made: :mod:`regrasp.monitors.conformal` (one number for
an episode), :mod:`~regrasp.monitors.bands` (one for each moment),
:mod:`~regrasp.monitors.mondrian` (one for each task), :mod:`~regrasp.monitors.spending` (one for
each segment between recoveries).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from regrasp.monitors.base import lookup


class Threshold(Protocol):
    """An alarm is a score above :meth:`at`."""

    @property
    def promise(self) -> str:
        """What holds for a new episode exchangeable with the calibration's, in a sentence."""
        ...

    def at(self, step: int, group: str | None = None, segment: int = 0) -> float:
        """The threshold; +inf where nothing can be promised, so that it never alarms.

        Args:
            step: control steps since the segment began.
            group: the task; None where it is not known.
            segment: how many recoveries there were in the episode.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable, with its ``kind``; :func:`from_json` inverts it."""
        ...


class Constant:
    """One number for the whole episode.

    Args:
        value: alarm above this; +inf never alarms, -inf (``misses``, ``drift``) always.
        alpha: what it promises, P(any alarm | success); None promises nothing.
        n: calibration episodes behind it.
    """

    kind = "constant"

    def __init__(self, value: float, alpha: float | None = None, n: int = 0) -> None:
        if math.isnan(value):
            raise ValueError("Constant: value is NaN; it must be a number, +inf or -inf")
        self.value, self.alpha, self.n = float(value), alpha, int(n)

    @property
    def promise(self) -> str:
        """See :class:`Threshold`."""
        return say(self.alpha, self.n, "an episode that succeeds")

    def at(self, step: int, group: str | None = None, segment: int = 0) -> float:
        """The number, whenever."""
        return self.value

    def to_json(self) -> dict[str, Any]:
        """See :class:`Threshold`."""
        value = _finite(self.value)
        return {"kind": self.kind, "value": value, "alpha": self.alpha, "n": self.n}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Constant:
        """Invert :meth:`to_json`."""
        return cls(_infinite(data["value"]), data["alpha"], data["n"])


class Curve:
    """One number for each moment: linear between the moments given, constant outside them.

    Args:
        steps: int ``[G]``, control steps, increasing.
        values: float ``[G]``, alarm above these.
        alpha: what it promises; None promises nothing.
        n: calibration episodes behind it.
    """

    kind = "curve"

    def __init__(
        self,
        steps: Sequence[int] | np.ndarray,
        values: Sequence[float] | np.ndarray,
        alpha: float | None = None,
        n: int = 0,
    ) -> None:
        self.steps = np.asarray(steps, dtype=np.int64)
        self.values = np.asarray(values, dtype=np.float64)
        if self.steps.ndim != 1 or self.steps.shape != self.values.shape or not len(self.steps):
            raise ValueError(
                f"Curve: steps {self.steps.shape} and values {self.values.shape}; give as many of "
                "each, at least one"
            )
        if (np.diff(self.steps) <= 0).any() or np.isnan(self.values).any():
            raise ValueError("Curve: steps must increase and values must be numbers or +inf")
        self.alpha, self.n = alpha, int(n)

    @property
    def promise(self) -> str:
        """See :class:`Threshold`."""
        return say(self.alpha, self.n, "an episode that succeeds")

    def at(self, step: int, group: str | None = None, segment: int = 0) -> float:
        """See :class:`Threshold`."""
        return float(np.interp(step, self.steps, self.values))

    def to_json(self) -> dict[str, Any]:
        """See :class:`Threshold`."""
        values = [_finite(v) for v in self.values]
        steps = [int(s) for s in self.steps]
        return {
            "kind": self.kind, "steps": steps, "values": values, "alpha": self.alpha, "n": self.n
        }  # fmt: skip

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Curve:
        """Invert :meth:`to_json`."""
        values = [_infinite(v) for v in data["values"]]
        return cls(data["steps"], values, data["alpha"], data["n"])


class Grouped:
    """A threshold for each task, and one for all others.

    Args:
        groups: task -> its threshold.
        fallback: for a task without one, or where the task is not known.
    """

    kind = "grouped"

    def __init__(self, groups: Mapping[str, Threshold], fallback: Threshold) -> None:
        self.groups, self.fallback = dict(groups), fallback

    @property
    def promise(self) -> str:
        """See :class:`Threshold`."""
        return (
            f"in each of {len(self.groups)} tasks by itself: "
            f"{next((t.promise for t in self.groups.values()), 'nothing')}; in any other, over the "
            f"calibration's mixture of tasks alone: {self.fallback.promise}"
        )

    def at(self, step: int, group: str | None = None, segment: int = 0) -> float:
        """See :class:`Threshold`."""
        return self.groups.get(group or "", self.fallback).at(step, group, segment)

    def to_json(self) -> dict[str, Any]:
        """See :class:`Threshold`."""
        groups = {name: t.to_json() for name, t in sorted(self.groups.items())}
        return {"kind": self.kind, "groups": groups, "fallback": self.fallback.to_json()}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Grouped:
        """Invert :meth:`to_json`."""
        groups = {name: from_json(t) for name, t in data["groups"].items()}
        return cls(groups, from_json(data["fallback"]))


class Segmented:
    """A threshold for each segment of an episode; +inf once they are used up.

    Args:
        segments: the first segment's threshold, that after one recovery, ...
    """

    kind = "segmented"

    def __init__(self, segments: Sequence[Threshold]) -> None:
        if not segments:
            raise ValueError("Segmented: no segments; give at least the first one's threshold")
        self.segments = tuple(segments)

    @property
    def promise(self) -> str:
        """See :class:`Threshold`."""
        parts = "; ".join(f"segment {i}: {t.promise}" for i, t in enumerate(self.segments))
        return f"over all {len(self.segments)} segments together, by the union bound: {parts}"

    def at(self, step: int, group: str | None = None, segment: int = 0) -> float:
        """See :class:`Threshold`."""
        if segment >= len(self.segments):
            return math.inf
        return self.segments[segment].at(step, group, segment)

    def to_json(self) -> dict[str, Any]:
        """See :class:`Threshold`."""
        return {"kind": self.kind, "segments": [t.to_json() for t in self.segments]}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Segmented:
        """Invert :meth:`to_json`."""
        return cls([from_json(t) for t in data["segments"]])


KINDS: dict[str, Any] = {t.kind: t for t in (Constant, Curve, Grouped, Segmented)}


def from_json(data: Mapping[str, Any]) -> Threshold:
    """A threshold from its JSON; an unknown kind raises KeyError naming the nearest."""
    threshold: Threshold = lookup(KINDS, data["kind"], "threshold").of_json(data)
    return threshold


def say(alpha: float | None, n: int, what: str) -> str:
    """The promise of one alpha in words."""
    if alpha is None:
        return "no promise"
    return f"{what} alarms with probability at most {alpha:g} ({n} calibration episodes)"


def _finite(value: float) -> float | str | None:
    """JSON has no infinity: null never alarms, "-inf" always does."""
    if math.isfinite(value):
        return float(value)
    return None if value > 0 else "-inf"


def _infinite(value: float | str | None) -> float:
    return math.inf if value is None else float(value)
