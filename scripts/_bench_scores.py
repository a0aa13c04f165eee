"""The benchmark's scores: trained on its training folds, then read over every rollout."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.types import Episode, PolicyOutput
from regrasp.monitors.base import Score, WindowedScore, shown
from regrasp.monitors.scores.ace import Ace
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.hide_and_seek import HideAndSeek
from regrasp.monitors.scores.knn import Knn
from regrasp.monitors.scores.labelled import LabelledEpisodes
from regrasp.monitors.scores.logpzo import LogpZo
from regrasp.monitors.scores.mahalanobis import Mahalanobis
from regrasp.monitors.scores.onset import Onset
from regrasp.monitors.scores.reversal import Reversal
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.safe import SafeLstm, SafeMlp
from regrasp.monitors.scores.spread import FlowSpread
from regrasp.monitors.scores.stac import StacKl, StacMmd
from regrasp.monitors.scores.tide import Tide
from regrasp.scripts._bench_data import Rollout, of_fold, successes

#: A family in which the policy does well what it was wrongly told: nothing to learn there.
UNTEACHABLE = "instruction"


@dataclass(frozen=True)
class Training:
    """What scores may learn from.

    Attributes:
        good: unperturbed successes.
        labelled: successes and failures, with what became of them; None where no score of
            failures is asked for.
        seed: of initialisation and order.
    """

    good: Sequence[Episode]
    labelled: LabelledEpisodes | None
    seed: int

    @property
    def outcomes(self) -> LabelledEpisodes:
        """``labelled``; ValueError where there is none."""
        if self.labelled is None:
            raise ValueError("Training.labelled: this score learns from failures; give some")
        return self.labelled

    @property
    def embeddings(self) -> np.ndarray:
        """Of the successes, ``[N, D]``."""
        return np.concatenate([e.chunks["embedding"] for e in self.good])

    @property
    def chunks(self) -> np.ndarray:
        """What ran in the successes, ``[N, H, A]``."""
        return np.concatenate([e.chunks["samples"][:, 0] for e in self.good])


def training_of(rollouts: Sequence[Rollout], seed: int) -> Training:
    """The training folds of a benchmark."""
    good = [r.episode for r in successes(of_fold(rollouts, "train"))]
    every = [r for r in of_fold(rollouts, "train", "failures") if r.family != UNTEACHABLE]
    onsets = [int(r.onset) if r.failed else None for r in every]
    labelled = LabelledEpisodes.from_episodes([r.episode for r in every], onsets)
    return Training(good, labelled, seed)


#: Every score of the benchmark, each with a window of one inference; windows are chosen later.
FITS: dict[str, Callable[[Training], Score]] = {
    "clock": lambda t: Clock(),
    "tide": lambda t: Tide(),
    "reversal": lambda t: Reversal(),
    "spread": lambda t: FlowSpread(),
    "ace": lambda t: Ace.train(t.chunks),
    "stac": lambda t: StacMmd(),
    "stac_kl": lambda t: StacKl(),
    "rnd_oe": lambda t: RndOe.train(t.embeddings, seed=t.seed),
    "mahalanobis": lambda t: Mahalanobis.train(t.embeddings),
    "knn": lambda t: Knn.train(t.embeddings),
    "logpzo": lambda t: LogpZo.train(t.embeddings, seed=t.seed),
    "safe_mlp": lambda t: SafeMlp.train(t.outcomes, seed=t.seed),
    "safe_lstm": lambda t: SafeLstm.train(t.outcomes, seed=t.seed),
    "hide_and_seek": lambda t: HideAndSeek.train(t.outcomes, seed=t.seed),
    "onset": lambda t: Onset.train(t.outcomes, seed=t.seed),
}


def answers(episode: Episode) -> list[tuple[PolicyOutput, np.ndarray]]:
    """What a monitor saw of an episode: each answer, and what was executed since the one before."""
    chunks, actions = episode.chunks, episode.steps["action"]
    rows, last = [], 0
    for i, step in enumerate(chunks["step"]):
        output = PolicyOutput(chunks["samples"][i], chunks["embedding"][i])
        rows.append((output, actions[last:step]))
        last = int(step)
    return rows


def read(score: Score, episode: Episode) -> np.ndarray:
    """Every reading of an episode before windowing, ``[C]``; nan where there is nothing to say."""
    score.reset()
    values = []
    for output, executed in answers(episode):
        seen = shown(score, output)
        if isinstance(score, WindowedScore):
            reading = score.raw(seen, executed)
            values.append(np.nan if reading is None else float(reading))
        else:
            values.append(score.update(seen, executed))
    return np.array(values)


def windowed(readings: np.ndarray, window: int) -> np.ndarray:
    """What a :class:`WindowedScore` of that window says, given its readings ``[C]``."""
    values = np.zeros(len(readings))
    recent: list[float] = []
    for i, reading in enumerate(readings):
        if not np.isnan(reading):
            recent = [*recent, float(reading)][-window:]
        values[i] = float(np.mean(recent)) if recent else 0.0
    return values


def cost(score: Score, rollouts: Sequence[Rollout], updates: int = 2000) -> np.ndarray:
    """Milliseconds of each of some updates, on real answers; the first hundred are not counted."""
    took: list[float] = []
    for rollout in rollouts:
        score.reset()
        for output, executed in answers(rollout.episode):
            seen = shown(score, output)
            begun = time.perf_counter()
            score.update(seen, executed)
            took.append(1e3 * (time.perf_counter() - begun))
        if len(took) >= updates + 100:
            break
    return np.array(took[100:])


def fit_all(training: Training, names: Sequence[str] = ()) -> dict[str, Score]:
    """Train every score, or the named ones."""
    return {name: FITS[name](training) for name in names or FITS}


def read_all(
    scores: Mapping[str, Score], rollouts: Sequence[Rollout]
) -> dict[str, dict[str, np.ndarray]]:
    """Every score's readings: score -> the rollout's job -> ``[C]``."""
    return {
        name: {r.episode.header.extra["job"]: read(score, r.episode) for r in rollouts}
        for name, score in scores.items()
    }
