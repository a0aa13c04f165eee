"""VLAC-CUT: rollouts cut into progress, idle, failure-inducing and recovery segments.

After HELP's rollout segmentation critic, which names the four kinds and publishes no rule. Here: a
failure begins where the value last was near its running maximum before it fell, or where the hand
moves on and the value does not; a recovery begins at the lowest value after that and counts only if
it comes back to where the failure began; idle is neither hand, gripper nor value moving. The idle
filter drops frames, never an episode or a task (openvla#316, openpi#605).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from regrasp.episodes.results import Figure
from regrasp.relabel.rollouts import Rollout


class Label(IntEnum):
    """What a step of a rollout is."""

    PROGRESS = 0
    IDLE = 1
    FAILURE = 2
    RECOVERY = 3


#: What one stage of a task's only goal is worth.
STAGE = 0.2


@dataclass(frozen=True)
class CutConfig:
    """How a rollout is cut. Values are 0 to 1, lengths control steps.

    Attributes:
        smooth: width of the median filter over values.
        fall: how far the value falls below its running maximum in a failure.
        near: within this of a maximum or minimum the value has not left it.
        stall: steps of moving without ``near`` more value that make a failure; 0: none do.
        still: norm of an action's motion below which the hand is still.
        steady: largest change of the value over a step that is idle.
        shortest_idle: steps.
        shortest: shorter segments of the other kinds go to their neighbour.
    """

    smooth: int = 5
    fall: float = 0.15
    near: float = 0.05
    stall: int = 40
    still: float = 0.05
    steady: float = 0.01
    shortest_idle: int = 6
    shortest: int = 3


#: What :func:`fit` tries, on rollouts that training has seen.
GRID: dict[str, Sequence[float]] = {
    "fall": (0.08, 0.15, 0.25),
    "near": (0.03, 0.06),
    "stall": (0, 30, 50),
    "still": (0.03, 0.1),
}


def truth(rollout: Rollout, still: float = 0.002, shortest: int = 6) -> np.ndarray:
    """The generators' own labels, int8 ``[T]``.

    From a failure's first effect on a rollout is failure-inducing, until the recovery begins; that
    lasts until the value is back to what it was at the first effect, and a stage above that of the
    recovery's beginning. Idle is where the simulated
    hand and fingers rest, whatever was commanded.

    Args:
        rollout: of which generator's truth is known.
        still: metres that hand and fingers move in a step at most, at rest.
        shortest: steps that a rest lasts at least.
    """
    labels = np.full(len(rollout), Label.PROGRESS, np.int8)
    if rollout.effect is not None:
        end = len(rollout) if rollout.back is None else rollout.back
        labels[rollout.effect : end] = Label.FAILURE
        if rollout.back is not None:
            had = float(rollout.target[: rollout.effect + 1].max())
            had = max(had, min(1.0, float(rollout.target[rollout.back]) + STAGE))
            regained = np.flatnonzero(rollout.target[rollout.back :] >= had)
            until = rollout.back + int(regained[0]) if len(regained) else len(rollout)
            labels[rollout.back : until] = Label.RECOVERY
    moved = np.abs(np.diff(rollout.state, axis=0, append=rollout.state[-1:]))
    rests = (moved[:, :3].max(axis=1) < still) & (moved[:, 6:].max(axis=1) < still / 4)
    # A ramp of the target is made of time alone; only a change of stage speaks against rest.
    for a, b in runs(rests & (labels == Label.PROGRESS)):
        if b - a >= shortest:
            labels[a:b] = Label.IDLE
    return labels


def cut(values: np.ndarray, actions: np.ndarray, config: CutConfig | None = None) -> np.ndarray:
    """Labels of every step, int8 ``[T]``.

    Args:
        values: of a reward model, 0 to 1, ``[T]``.
        actions: executed ``[T, 7]``: motion, rotation, gripper (environment units).
        config: thresholds.
    """
    c = config or CutConfig()
    if len(values) != len(actions):
        raise ValueError(f"cut: {len(values)} values for {len(actions)} actions")
    value = _median(np.asarray(values, np.float64), c.smooth)
    labels = np.full(len(value), Label.PROGRESS, np.int8)
    idle = _idle(value, actions, c)
    begin = 0
    while begin < len(value):
        failure = _next_failure(value, idle, begin, c)
        if failure is None:
            break
        lowest, back = _way_back(value, failure, c)
        labels[failure:lowest] = Label.FAILURE
        labels[lowest:back] = Label.RECOVERY
        begin = max(back, failure + 1)
    labels[idle & (labels == Label.PROGRESS)] = Label.IDLE
    return _without_slivers(labels, c)


def action_norm(actions: np.ndarray, config: CutConfig | None = None) -> np.ndarray:
    """The baseline: progress where the action moves the hand or the gripper, idle elsewhere."""
    c = config or CutConfig()
    labels = np.full(len(actions), Label.PROGRESS, np.int8)
    labels[_long(_still(actions, c.still), c.shortest_idle)] = Label.IDLE
    return labels


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def boundaries(labels: np.ndarray) -> np.ndarray:
    """Steps at which a new segment begins, without the first one."""
    return np.flatnonzero(np.diff(labels)) + 1


@dataclass(frozen=True)
class Counts:
    """Boundaries found, and those of each side: sums over rollouts make one F1."""

    hits: int
    predicted: int
    true: int

    @property
    def f1(self) -> float:
        """Of precision and recall; 1 where there is nothing to find and nothing was found."""
        total = self.predicted + self.true
        return 2 * self.hits / total if total else 1.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.hits + other.hits, self.predicted + other.predicted, self.true + other.true
        )


def match(predicted: np.ndarray, true: np.ndarray, tolerance: int) -> Counts:
    """Boundaries of labels ``[T]`` matched one to one, each within ``tolerance`` steps.

    A match also needs the same kind of segment to begin; a rollout that begins with anything but
    progress has a boundary there. In the order of time, which on a line gives as many matches as
    any other way.
    """
    hits = total_predicted = total_true = 0
    for label in Label:
        a, b = _begins(predicted, label), _begins(true, label)
        total_predicted, total_true = total_predicted + len(a), total_true + len(b)
        i = j = 0
        while i < len(a) and j < len(b):
            if abs(a[i] - b[j]) <= tolerance:
                hits, i, j = hits + 1, i + 1, j + 1
            elif a[i] < b[j]:
                i += 1
            else:
                j += 1
    return Counts(hits, total_predicted, total_true)


def f1_figure(counts: Sequence[Counts], resamples: int = 2000, seed: int = 0) -> Figure:
    """F1 over the boundaries of all rollouts, one :class:`Counts` each, rollouts resampled."""
    table = np.array([(c.hits, c.predicted, c.true) for c in counts])
    rng = np.random.default_rng(seed)
    drawn = [
        Counts(*table[rng.integers(len(table), size=len(table))].sum(axis=0).tolist()).f1
        for _ in range(resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    value = Counts(*table.sum(axis=0).tolist()).f1
    return Figure(value, float(low), float(high), len(table), "boundary F1")


def frame_figure(
    predicted: Sequence[np.ndarray],
    true: Sequence[np.ndarray],
    resamples: int = 2000,
    seed: int = 0,
) -> Figure:
    """Balanced accuracy of the steps' labels over the labels that occur, rollouts resampled."""
    tables = np.zeros((len(true), len(Label), len(Label)))
    for table, guess, right in zip(tables, predicted, true, strict=True):
        np.add.at(table, (right, guess), 1)
    rng = np.random.default_rng(seed)
    drawn = [
        _balanced(tables[rng.integers(len(tables), size=len(tables))].sum(axis=0))
        for _ in range(resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    value = _balanced(tables.sum(axis=0))
    return Figure(value, float(low), float(high), len(tables), "balanced accuracy")


def _balanced(table: np.ndarray) -> float:
    total = table.sum(axis=1)
    there = total > 0
    return float((np.diag(table)[there] / total[there]).mean())


def _begins(labels: np.ndarray, label: Label) -> list[int]:
    changes = np.flatnonzero(np.diff(labels, prepend=Label.PROGRESS))
    return [int(i) for i in changes if labels[i] == label]


#: Labels of a rollout, from its values and thresholds.
Cutter = Callable[[Rollout, np.ndarray, CutConfig], np.ndarray]


def cut_by_value(rollout: Rollout, value: np.ndarray, config: CutConfig) -> np.ndarray:
    """:func:`cut` of a rollout."""
    return cut(value, rollout.action, config)


def fit(
    rollouts: Sequence[Rollout],
    values: Sequence[np.ndarray],
    cutter: Cutter = cut_by_value,
    tolerance: int = 10,
) -> CutConfig:
    """The thresholds of :data:`GRID` with the best boundary F1, and the first of equal ones."""
    if not rollouts:
        raise ValueError("fit: no rollouts")
    truths = [truth(rollout) for rollout in rollouts]
    best, config = -1.0, CutConfig()
    for tried in _grid():
        total = Counts(0, 0, 0)
        for rollout, value, true in zip(rollouts, values, truths, strict=True):
            total += match(cutter(rollout, value, tried), true, tolerance)
        if total.f1 > best:
            best, config = total.f1, tried
    return config


def keep_frames(
    labels: Sequence[np.ndarray], *, margin: int = 3, least: float = 0.5
) -> list[np.ndarray]:
    """Which frames of some episodes to train on: idle ones go, episodes and tasks stay.

    Each idle run keeps ``margin`` frames at both ends, for a gripper that closes needs waiting.
    What an episode keeps is never less than ``least`` of it: then frames of its idle runs come
    back, evenly spaced. So nothing is decided an episode at a time, and no task can vanish.

    Args:
        labels: of each episode's steps, from :func:`cut` or :func:`action_norm`.
        margin: frames.
        least: share in (0, 1].

    Returns:
        one bool ``[T]`` an episode.
    """
    if not 0 < least <= 1:
        raise ValueError(f"keep_frames: least={least}; it must lie in (0, 1]")
    kept = []
    for steps in labels:
        keep = np.ones(len(steps), bool)
        for a, b in runs(steps == Label.IDLE):
            keep[a + margin : max(a + margin, b - margin)] = False
        dropped = np.flatnonzero(~keep)
        lacking = int(np.ceil(least * len(steps))) - int(keep.sum())
        if lacking > 0:
            keep[dropped[np.linspace(0, len(dropped) - 1, lacking).round().astype(int)]] = True
        kept.append(keep)
    return kept


def _grid() -> Iterator[CutConfig]:
    for values in itertools.product(*GRID.values()):
        chosen: dict[str, Any] = dict(zip(GRID, values, strict=True))
        yield replace(CutConfig(), **chosen)


def _still(actions: np.ndarray, still: float) -> np.ndarray:
    """Steps whose action neither moves the hand nor changes the gripper's command."""
    quiet = np.linalg.norm(actions[:, :6], axis=1) < still
    grip = np.sign(actions[:, 6])
    return quiet & (grip == np.concatenate([grip[:1], grip[:-1]]))


def _long(mask: np.ndarray, shortest: int) -> np.ndarray:
    """The runs of True that last ``shortest`` steps."""
    out = np.zeros_like(mask)
    for a, b in runs(mask):
        out[a:b] = b - a >= shortest
    return out


def _idle(value: np.ndarray, actions: np.ndarray, c: CutConfig) -> np.ndarray:
    steady = np.abs(np.diff(value, prepend=value[:1])) <= c.steady
    return _long(_still(actions, c.still) & steady, c.shortest_idle)


def _next_failure(value: np.ndarray, idle: np.ndarray, begin: int, c: CutConfig) -> int | None:
    """First step of the next failure from ``begin`` on; None if there is none."""
    highest = gained = value[begin]
    at, spent = begin - 1, 0
    for t in range(begin, len(value)):
        highest = max(highest, value[t])
        if value[t] < highest - c.fall:
            return _left(value, begin, t, highest - c.near)
        if value[t] >= gained + c.near:
            gained, at, spent = value[t], t, 0
        # Done is done: what comes after it is no stall.
        spent += int(not idle[t] and highest < 1 - c.fall)
        if c.stall and spent > c.stall:
            return at + 1
    return None


def _left(value: np.ndarray, begin: int, t: int, level: float) -> int:
    """The step after the last one before ``t`` at which the value was at ``level`` or above."""
    above = np.flatnonzero(value[begin:t] >= level)
    return begin + int(above[-1]) + 1 if len(above) else begin


def _way_back(value: np.ndarray, failure: int, c: CutConfig) -> tuple[int, int]:
    """Where the recovery from a failure begins and ends; both the last step if there is none."""
    had = value[max(0, failure - 1)]
    lowest = failure
    for t in range(failure, len(value)):
        if value[t] <= value[lowest] + c.near / 4:
            lowest = t if value[t] <= value[lowest] else lowest
        elif value[t] >= had - c.near and value[t] > value[lowest] + c.fall:
            last = np.flatnonzero(value[failure:t] <= value[lowest] + c.near)
            return failure + int(last[-1]) + 1, t
    return len(value), len(value)


def _without_slivers(labels: np.ndarray, c: CutConfig) -> np.ndarray:
    """Segments shorter than the shortest allowed get the label before them."""
    out = labels.copy()
    edges = [0, *boundaries(labels).tolist(), len(labels)]
    for a, b in itertools.pairwise(edges):
        if a and b - a < c.shortest:
            out[a:b] = out[a - 1]
    return out


def _median(value: np.ndarray, width: int) -> np.ndarray:
    """Running median, the ends repeated."""
    if width < 2 or len(value) == 0:
        return value
    half = width // 2
    padded = np.pad(value, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
