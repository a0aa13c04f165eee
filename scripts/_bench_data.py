"""The benchmark's rollouts in memory, each with the moment at which it began to fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.scripts._bench_rollouts import NONE, UNSEEN


@dataclass(frozen=True)
class Rollout:
    """One episode of the benchmark.

    Attributes:
        episode: ``steps`` and ``chunks`` as recorded.
        fold: see ``FOLDS`` in ``_bench_rollouts``.
        group: ``suite/task``.
        family: of the injection, or "none".
        severity: of the injection; 0 for none.
        unseen: of a task that no monitor was trained or calibrated on.
        failed: the predicate never held before the horizon.
        length: control steps.
        horizon: control steps, at most.
        onset: control step at which it began to fail; nan for a success.
    """

    episode: Episode
    fold: str
    group: str
    family: str
    severity: float
    unseen: bool
    failed: bool
    length: int
    horizon: int
    onset: float

    @property
    def plain(self) -> bool:
        """Whether nothing was done to it."""
        return self.family == NONE

    @property
    def starts(self) -> np.ndarray:
        """Control step of each inference, int64 ``[C]``."""
        return np.asarray(self.episode.chunks["step"], dtype=np.int64)


def load(path: Path, tasks: int) -> list[Rollout]:
    """Every rollout of a store, dated."""
    store = EpisodeStore.open(path)
    episodes = [store.load(i) for i in range(len(store))]
    patience = longest_stays(episodes)
    return [_rollout(episode, tasks, patience) for episode in episodes]


def _rollout(episode: Episode, tasks: int, patience: dict[str, np.ndarray]) -> Rollout:
    header, extra = episode.header, episode.header.extra
    group = f"{header.suite}/{header.task}"
    onset = float("nan")
    if not header.success:
        onset = float(find_onset(episode.steps["stage"], patience.get(group), extra["injected_at"]))
    return Rollout(
        episode,
        extra["fold"],
        group,
        extra["family"],
        float(extra["severity"]),
        int(extra["task_index"]) >= max(1, tasks - UNSEEN),
        not header.success,
        len(episode),
        int(extra["horizon"]),
        onset,
    )


def longest_stays(episodes: Iterable[Episode]) -> dict[str, np.ndarray]:
    """How long unperturbed successes of each task stay short of each stage.

    Returns:
        ``suite/task`` -> float ``[S]``: entry s is the time, in control steps, within which all of
        them went on from the moment they first reached stage s (or the beginning) to a higher one.
        The last entry is infinite: nothing is higher.
    """
    stays: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for episode in episodes:
        if episode.header.success and episode.header.extra["family"] == NONE:
            group = f"{episode.header.suite}/{episode.header.task}"
            for stage, begun, left in _stays(episode.steps["stage"]):
                stays[group][stage] = max(stays[group][stage], left - begun)
    return {
        group: np.array([by_stage.get(s, np.inf) for s in range(max(by_stage))] + [np.inf])
        for group, by_stage in stays.items()
    }


def _stays(stage: np.ndarray) -> list[tuple[int, int, int]]:
    """(stage, first step at which it was the best so far, step at which a better one was)."""
    best = np.maximum.accumulate(np.asarray(stage, dtype=np.int64))
    begun = [0, *(int(i) for i in np.flatnonzero(np.diff(best)) + 1)]
    return [(int(best[b]), b, e) for b, e in zip(begun, [*begun[1:], len(best)], strict=True)]


def find_onset(stage: np.ndarray, longest: np.ndarray | None, injected_at: int | None) -> int:
    """The control step at which a failed episode began to fail.

    Whichever is first: from then on it is always short of the best stage that it reached; or it has
    for the first time stayed at a stage longer than any success did (:func:`longest_stays`). Never
    before what was injected began, and never after the last step.

    Args:
        stage: int ``[T]``, what was achieved at each step.
        longest: of the episode's task; None where no success is known, and stalls cannot be told.
        injected_at: control step at which the injection began; None for none.
    """
    stage = np.asarray(stage, dtype=np.int64)
    last = len(stage) - 1
    onset = min(int(np.flatnonzero(stage == stage.max())[-1]) + 1, last)
    if longest is not None:
        for reached, begun, left in _stays(stage):
            patience = longest[min(reached, len(longest) - 1)]
            if left - begun > patience:
                onset = min(onset, begun + int(patience))
    return max(onset, injected_at or 0)


def of_fold(rollouts: Sequence[Rollout], *folds: str) -> list[Rollout]:
    """Those of some folds."""
    return [r for r in rollouts if r.fold in folds]


def successes(rollouts: Sequence[Rollout], *, plain: bool = True) -> list[Rollout]:
    """Those that succeeded; unperturbed ones alone unless told otherwise."""
    return [r for r in rollouts if not r.failed and (r.plain or not plain)]
