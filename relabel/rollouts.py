"""Failure samples as whole rollouts, with the value that each of their moments deserves.

A store of failure samples (docs/failures.md) keeps a failure and the recovery from it as two
episodes. Here they are joined where the recovery takes over, so that a model also sees a task lost
and regained. The value of a moment comes from the store's ``progress`` (the mean stage of the
goals, read from the simulator): a ramp from each stage to the next one that is really reached, a
fall between a failure's first effect and the step at which its stage is behind, and no way to 1 but
through the task's own predicate. Time enters nowhere, so a long failure is worth no more than a
short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import EpisodeHeader

Kind = Literal["nominal", "failure", "recovered"]
Fold = Literal["train", "states", "tasks"]

#: Dips of the stage shorter than this are contacts that flicker while an object settles, steps.
FLICKER = 6


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of one episode of a store."""

    episode: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rollout:
    """One attempt at a task from its beginning to its end.

    Attributes:
        header: of the nominal rollout or of the failure.
        kind: ``nominal`` (succeeds), ``failure`` (fails to its end), ``recovered`` (a failure up to
            the moment from which a recovery turns it into a success).
        parts: where its steps lie in the store, in order.
        target: the value of each step, 0 to 1, float32 ``[T]``.
        success: whether the task's predicate holds, bool ``[T]``.
        action: executed, ``[T, 7]``.
        state: proprioception, ``[T, S]``.
        effect: first step at which the failure shows; None without a failure.
        failed: step from which the stage is behind the nominal's; None without a failure.
        back: first step of the recovery; None without one.
    """

    header: EpisodeHeader
    kind: Kind
    parts: tuple[Part, ...]
    target: np.ndarray
    success: np.ndarray
    action: np.ndarray
    state: np.ndarray
    effect: int | None = None
    failed: int | None = None
    back: int | None = None

    def __len__(self) -> int:
        return len(self.target)

    @property
    def succeeds(self) -> bool:
        """Whether the task is done in the end."""
        return self.kind != "failure"

    @property
    def task(self) -> str:
        """Suite and task."""
        return task_of(self.header)


@dataclass(frozen=True)
class Split:
    """What training never sees.

    Attributes:
        tasks: tasks held out as a whole, as ``suite/task``.
        states: initial states held out of the other tasks.
    """

    tasks: tuple[str, ...]
    states: tuple[int, ...]

    @classmethod
    def make(cls, headers: Sequence[EpisodeHeader], every: int = 5) -> Split:
        """Hold out each suite's every ``every``-th task and every ``every``-th initial state.

        The same headers in any order give the same split. What there is fewer than three of is not
        held out.
        """
        suites: dict[str, set[str]] = {}
        for header in headers:
            suites.setdefault(header.suite, set()).add(task_of(header))
        tasks = [t for suite in sorted(suites) for t in sorted(suites[suite])[2::every]]
        states = sorted({header.init_state for header in headers})[2::every]
        return cls(tuple(tasks), tuple(states))

    def of(self, header: EpisodeHeader) -> Fold:
        """``train``, or ``states`` (a known task's held-out initial state), or ``tasks``."""
        if task_of(header) in self.tasks:
            return "tasks"
        return "states" if header.init_state in self.states else "train"


def task_of(header: EpisodeHeader) -> str:
    """``suite/task``: tasks of different suites may share a name."""
    return f"{header.suite}/{header.task}"


def read_rollouts(store: EpisodeStore) -> list[Rollout]:
    """Every rollout of a store of failure samples: nominal ones, failures, recovered failures.

    Raises:
        ValueError: if no episode of the store says which role it plays.
    """
    roles: dict[str, list[int]] = {"nominal": [], "failure": [], "recovery": []}
    for i, header in enumerate(store.headers):
        if header.extra.get("role") in roles:
            roles[header.extra["role"]].append(i)
    if not any(roles.values()):
        raise ValueError(
            f"{store.path}: none of its {len(store)} episodes has a role in header.extra; "
            "make the store with: regrasp failures generate"
        )
    nominals = {store.headers[i].extra["context"]: _small(store, i) for i in roles["nominal"]}
    failures = {store.headers[i].extra["sample"]: i for i in roles["failure"]}
    rollouts = [_nominal(store, i, _small(store, i)) for i in roles["nominal"]]
    for i in roles["failure"]:
        nominal = nominals.get(store.headers[i].extra["context"])
        rollouts.append(_failure(store, i, nominal))
    of = {rollout.parts[0].episode: rollout for rollout in rollouts}
    for i in roles["recovery"]:
        j = failures.get(store.headers[i].extra["sample"])
        if j is not None:
            rollouts.append(_recovered(store, of[j], i))
    return rollouts


def dense(progress: np.ndarray) -> np.ndarray:
    """A staircase of stages as ramps, float32 ``[T]``.

    Each stage rises towards the next one if that is higher, and is held if it is lower or if there
    is none: what was not achieved is not credited.
    """
    stairs = without_flicker(progress)
    value = stairs.astype(np.float32)
    edges = [0, *(np.flatnonzero(np.diff(stairs)) + 1).tolist(), len(stairs)]
    for a, b in pairwise(edges[:-1]):
        if stairs[b] > stairs[a]:
            value[a:b] = np.linspace(stairs[a], stairs[b], b - a, endpoint=False)
    return value


def dense_failure(
    progress: np.ndarray, effect: int, failed: int, nominal: np.ndarray | None = None
) -> np.ndarray:
    """The value of each step of a failure, float32 ``[T]``.

    Args:
        progress: stages of the failure ``[T]``.
        effect: first step at which it shows.
        failed: step from which its stage is behind the nominal's.
        nominal: value of the nominal rollout; until ``effect`` the two are the same.
    """
    value = dense(progress)
    effect = min(effect, len(value) - 1)
    failed = min(max(failed, effect), len(value) - 1)
    if nominal is not None:
        same = min(effect, len(nominal))
        value[:same] = nominal[:same]
    begin = value[effect - 1] if effect else value[0]
    # It cannot be worth more while it goes wrong than either before or by its own stages.
    low = min(begin, value[failed])
    value[effect : failed + 1] = np.linspace(begin, low, failed - effect + 1)
    # The stage it is in then is one that it came to by going wrong.
    later = np.flatnonzero(np.diff(without_flicker(progress))[failed:])
    end = failed + 1 + int(later[0]) if len(later) else len(value)
    value[failed:end] = np.minimum(value[failed:end], low)
    return value


def without_flicker(progress: np.ndarray, longest: int = FLICKER) -> np.ndarray:
    """Stages with dips shorter than ``longest`` steps filled up to their lower side."""
    stairs = np.array(progress, np.float64)
    edges = [0, *(np.flatnonzero(np.diff(stairs)) + 1).tolist(), len(stairs)]
    for a, b in pairwise(edges[1:-1]):
        around = min(stairs[a - 1], stairs[b])
        if b - a < longest and stairs[a] < around:
            stairs[a:b] = around
    return stairs


def _small(store: EpisodeStore, i: int) -> dict[str, Any]:
    """The arrays of an episode that are not pictures."""
    return store.load(i, ("progress", "success", "action", "state")).steps


def _nominal(store: EpisodeStore, i: int, steps: dict[str, Any]) -> Rollout:
    part = Part(i, 0, len(steps["action"]))
    value = dense(steps["progress"])
    return Rollout(store.headers[i], "nominal", (part,), value, *_rest(steps["success"], steps))


def _failure(store: EpisodeStore, i: int, nominal: dict[str, Any] | None) -> Rollout:
    header, steps = store.headers[i], _small(store, i)
    last = len(steps["action"]) - 1
    effect = min(header.extra["first_effect_step"], last)
    failed = min(max(header.extra["predicate_fail_step"], effect), last)
    like = None if nominal is None else dense(nominal["progress"])
    value = dense_failure(steps["progress"], effect, failed, like)
    rest = _rest(steps["success"], steps)
    part = Part(i, 0, last + 1)
    return Rollout(header, "failure", (part,), value, *rest, effect=effect, failed=failed)


def _recovered(store: EpisodeStore, failure: Rollout, i: int) -> Rollout:
    steps = _small(store, i)
    back = min(int(failure.header.extra["recovery"]["from_step"]), len(failure))
    head = failure.parts[0]
    first = {"success": failure.success, "action": failure.action, "state": failure.state}
    joined = {key: np.concatenate([first[key][:back], steps[key]]) for key in first}
    value = np.concatenate([failure.target[:back], dense(steps["progress"])])
    assert failure.effect is not None
    assert failure.failed is not None
    return Rollout(
        failure.header,
        "recovered",
        (Part(head.episode, 0, back), Part(i, 0, len(steps["action"]))),
        value,
        *_rest(joined["success"], joined),
        effect=min(failure.effect, back),
        failed=min(failure.failed, back),
        back=back,
    )


def _rest(success: np.ndarray, steps: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return success.astype(bool), steps["action"], steps["state"]
