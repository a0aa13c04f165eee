"""``regrasp monitors calibrate``: a monitor of one's own, from stored rollouts of one's policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.monitors.base import Score, WindowedScore, lookup, score_episode
from regrasp.monitors.mondrian import calibrate_groups
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.monitors.scores.labelled import LabelledEpisodes
from regrasp.scripts._bench_scores import FITS, Training
from rich.console import Console
from rich.table import Table

#: Scores that learn from failures.
SUPERVISED = ("safe_mlp", "safe_lstm", "hide_and_seek", "onset")


@dataclass(frozen=True)
class Args:
    """Train scores on some rollouts and set their thresholds on others, by initial state.

    The rollouts must have been recorded with their chunks (``step``, ``samples``, ``embedding``),
    under one policy and one protocol. Initial states are split in two: what trains a score never
    calibrates it. Thresholds come from the successes of the second part alone.

    Attributes:
        store: the rollouts.
        out: folder of the monitor.
        scores: names; several share alpha (each gets its part of it). Those that learn from
            failures need some in the store, and "onset" the control step at which each began, in
            ``header.extra["onset_step"]``.
        window: inferences that each score is averaged over.
        alpha: bound on the chance that an episode that succeeds alarms at all.
        per_task: keep alpha in each task by itself, where a task has enough successes.
        train: share of the initial states that trains.
        fold: use episodes whose ``header.extra["fold"]`` says so and no others: "train" trains,
            "calibrate" calibrates, as ``regrasp monitors bench`` records them.
        seed: of the training.
    """

    store: Path = Path("data/rollouts")
    out: Path = Path("runs/monitor")
    scores: tuple[str, ...] = ("tide", "rnd_oe")
    window: int = 3
    alpha: float = 0.05
    per_task: bool = False
    train: float = 0.5
    fold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.train < 1.0:
            raise ValueError(f"Args.train: {self.train} must lie strictly between 0 and 1")
        if self.per_task and len(self.scores) > 1:
            raise ValueError("Args.per_task: give one score; several would share each task's alpha")


def split(args: Args, episodes: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
    """Episodes that train and episodes that calibrate.

    Raises:
        SystemExit: where either is empty.
    """
    if args.fold:
        parts = [
            [e for e in episodes if e.header.extra.get("fold") == name]
            for name in ("train", "calibrate")
        ]
    else:
        states = sorted({e.header.init_state for e in episodes})
        first = set(states[: round(args.train * len(states))])
        parts = [
            [e for e in episodes if (e.header.init_state in first) == training]
            for training in (True, False)
        ]
    if not all(parts):
        raise SystemExit(
            f"{args.store}: {len(parts[0])} episodes to train and {len(parts[1])} to calibrate; "
            "record more initial states"
        )
    return parts[0], parts[1]


def trained(args: Args, episodes: Sequence[Episode]) -> list[Score]:
    """The scores, trained.

    Raises:
        SystemExit: without any success; for a score of failures without failures.
    """
    good = [e for e in episodes if e.header.success]
    if not good:
        raise SystemExit(f"{args.store}: none of {len(episodes)} training episodes succeeded")
    wanted = [name for name in args.scores if name in SUPERVISED]
    if wanted and len(good) == len(episodes):
        raise SystemExit(
            f"{', '.join(wanted)}: no training episode failed; record failures, or use scores that "
            "need none"
        )
    onsets = [e.header.extra.get("onset_step") for e in episodes]
    labelled = LabelledEpisodes.from_episodes(episodes, onsets) if wanted else None
    training = Training(good, labelled, args.seed)
    return [_windowed(lookup(FITS, name, "score")(training), args.window) for name in args.scores]


def _windowed(score: Score, window: int) -> Score:
    """The same score with another window, where it has one."""
    if not isinstance(score, WindowedScore):
        return score
    return type(score).build(score.config() | {"window": window}, score.weights())


def main(args: Args) -> Monitor:
    """Train, calibrate, save; print what is promised and what else happened."""
    console = Console()
    store = EpisodeStore.open(args.store)
    episodes = [store.load(i) for i in range(len(store))]
    training, calibration = split(args, episodes)
    scores = trained(args, training)
    monitor = calibrate_monitor(
        scores,
        calibration,
        args.alpha,
        provenance={
            "training_states": sorted({e.header.init_state for e in training}),
            "calibration_states": sorted({e.header.init_state for e in calibration}),
            "seed": args.seed,
        },
    )
    if args.per_task:
        monitor = per_task(monitor, calibration)
    path = monitor.save(args.out)
    table = Table("score", "promise", "failures of the calibration part that alarm")
    failures = [e for e in calibration if not e.header.success]
    for score in monitor.scores:
        threshold = monitor.thresholds[score.name]
        caught = sum(_alarms(monitor, score, e) for e in failures)
        table.add_row(score.name, threshold.promise, f"{caught} of {len(failures)}")
    console.print(table)
    console.print(f"saved: {path}")
    return monitor


def per_task(monitor: Monitor, episodes: Sequence[Episode]) -> Monitor:
    """The same monitor with a threshold for each task."""
    (score,) = monitor.scores
    maxima: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.header.success:
            values = score_episode(score, episode)
            maxima.setdefault(_task(episode), []).append(float(values.max()))
    threshold = calibrate_groups(
        {task: np.array(values) for task, values in maxima.items()}, monitor.calibration.alpha
    )
    return Monitor(
        monitor.scores,
        monitor.calibration,
        policy_hash=monitor.policy_hash,
        protocol_hash=monitor.protocol_hash,
        thresholds={score.name: threshold},
        provenance=monitor.provenance,
    )


def _task(episode: Episode) -> str:
    return f"{episode.header.suite}/{episode.header.task}"


def _alarms(monitor: Monitor, score: Score, episode: Episode) -> bool:
    values, steps = score_episode(score, episode), episode.chunks["step"]
    threshold, task = monitor.thresholds[score.name], _task(episode)
    return any(v > threshold.at(int(s), task) for v, s in zip(values, steps, strict=True))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
