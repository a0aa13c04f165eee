"""Curation of demonstrations: load, score, control for length, keep the best, compare.

The question behind it (arXiv 2606.10229): does the metric that finds defective demonstrations best
also choose those that train the best policy? So AUROCs here come in three forms: plain, over pairs
of equal length only, and of scores from which length has been regressed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from regrasp.episodes.results import Figure
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.relabel.curation_metrics import METRICS, Demonstration

#: A policy's losses on the steps of an episode, ``[n]``.
PolicyLoss = Callable[[Episode], np.ndarray]

#: Two episodes are of equal length when they differ by at most this share of their group's mean.
SAME_LENGTH = 0.03

#: Pictures are averaged to this many pixels a side before their principal components are taken.
_THUMB = 8


def load_demonstrations(
    store: EpisodeStore, *, loss: PolicyLoss | None = None, components: int = 8
) -> list[Demonstration]:
    """Every episode of a store as the metrics see it.

    The embedding is the proprioceptive state and ``components`` principal components of the
    pictures, all of unit spread over the store.

    Args:
        store: episodes with ``state`` (hand position first), ``action`` or ``expert_action``, and
            pictures where it has any.
        loss: a policy's losses; None leaves :attr:`Demonstration.loss` empty.
        components: principal components of the pictures.
    """
    label = "expert_action" if "expert_action" in store.steps else "action"
    plain, states, thumbs = [], [], []
    for index in range(len(store)):
        episode = store.load(index)
        state = episode.steps["state"].astype(np.float64)
        states.append(state)
        thumbs.append(_thumbnails(episode))
        plain.append(
            Demonstration(
                position=state[:, :3],
                action=episode.steps[label].astype(np.float64),
                embedding=state,
                success=episode.header.success,
                group=f"{episode.header.suite}/{episode.header.task}",
                loss=None if loss is None else float(np.mean(loss(episode))),
            )
        )
    ends = np.cumsum([len(demo) for demo in plain])[:-1]
    seen = _principal(np.concatenate(thumbs), components)
    embedding = np.hstack([_unit_spread(np.concatenate(states)), seen])
    parts = np.split(embedding, ends)
    return [replace(demo, embedding=part) for demo, part in zip(plain, parts, strict=True)]


def _thumbnails(episode: Episode) -> np.ndarray:
    """All cameras' pictures, coarse and flat, float32 ``[T, n]``; n is 0 without pictures."""
    flat = [np.empty((len(episode), 0), np.float32)]
    for key in sorted(key for key in episode.steps if key.startswith("image/")):
        frames = episode.steps[key].astype(np.float32)
        steps, height, width, channels = frames.shape
        down, across = max(height // _THUMB, 1), max(width // _THUMB, 1)
        rows, columns = height // down, width // across
        frames = frames[:, : rows * down, : columns * across]
        blocks = frames.reshape(steps, rows, down, columns, across, channels)
        flat.append(blocks.mean(axis=(2, 4)).reshape(steps, -1))
    return np.concatenate(flat, axis=1)


def _principal(values: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` principal components of rows, each of unit spread, ``[n, <= count]``."""
    if values.shape[1] == 0:
        return np.empty((len(values), 0))
    centred = values - values.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T.astype(np.float64) @ centred)
    return _unit_spread(centred @ vectors[:, ::-1][:, :count])


def _unit_spread(values: np.ndarray) -> np.ndarray:
    """Columns with mean 0 and deviation 1; constant ones are 0."""
    spread = values.std(axis=0)
    return (values - values.mean(axis=0)) / np.where(spread > 1e-6, spread, 1.0)


def score(demos: Sequence[Demonstration]) -> dict[str, np.ndarray]:
    """Every metric that the demonstrations allow: name -> scores ``[N]``, higher is better."""
    known = all(demo.loss is not None for demo in demos)
    return {name: metric(demos) for name, metric in METRICS.items() if known or name != "bc_loss"}


def residualise(scores: np.ndarray, demos: Sequence[Demonstration]) -> np.ndarray:
    """Scores ``[N]`` less what length explains of them, by a parabola in each group.

    A group of three or fewer has its mean taken off.
    """
    lengths = np.array([len(demo) for demo in demos], float)
    groups = np.array([demo.group for demo in demos])
    out = np.empty(len(scores))
    for group in np.unique(groups):
        own = groups == group
        centred = lengths[own] - lengths[own].mean()
        degree = 2 if own.sum() > 3 else 0
        basis = np.vander(centred / max(float(np.abs(centred).max()), 1.0), degree + 1)
        fit, *_ = np.linalg.lstsq(basis, scores[own], rcond=None)
        rest = scores[own] - basis @ fit
        # Where length explains everything, what is left is rounding, and its ranks mean nothing.
        scale = float(np.abs(scores[own]).max())
        out[own] = np.where(np.abs(rest) > 1e-9 * max(scale, 1e-12), rest, 0.0)
    return out


def length_correlation(scores: np.ndarray, demos: Sequence[Demonstration]) -> float:
    """Spearman's correlation of a metric with length, averaged over groups by their size."""
    lengths = np.array([len(demo) for demo in demos], float)
    groups = np.array([demo.group for demo in demos])
    total = 0.0
    for group in np.unique(groups):
        own = groups == group
        total += own.sum() * spearman(scores[own], lengths[own])
    return float(total / len(demos))


@dataclass(frozen=True)
class _Pairs:
    """Good against defective of the same group: which pairs count and who wins them.

    Attributes:
        good, bad: indices of the demonstrations.
        wins: 1, a half or 0, ``[good, bad]``; counted: bool of the same shape.
    """

    good: np.ndarray
    bad: np.ndarray
    wins: np.ndarray
    counted: np.ndarray

    def auroc(self, weights: np.ndarray) -> float:
        """Share of pairs won, when demonstration i stands there ``weights[i]`` times; NaN: none."""
        left, right = weights[self.good], weights[self.bad]
        total = left @ self.counted @ right
        return float(left @ (self.wins * self.counted) @ right / total) if total else float("nan")


def auroc(
    scores: np.ndarray,
    defective: np.ndarray,
    demos: Sequence[Demonstration],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Figure:
    """Probability that a good demonstration outscores a defective one of its group.

    Args:
        scores: ``[N]``, higher is better.
        defective: bool ``[N]``.
        demos: for groups and lengths.
        resamples: bootstrap resamples over demonstrations, for the 95 % interval.
        seed: of the bootstrap.

    Raises:
        ValueError: no group has demonstrations of both kinds.
    """
    figure = _auroc(scores, defective, demos, np.inf, resamples, seed)
    if figure is None:
        raise ValueError("auroc: no group holds both good and defective demonstrations")
    return figure


def matched_auroc(
    scores: np.ndarray,
    defective: np.ndarray,
    demos: Sequence[Demonstration],
    *,
    tolerance: float = SAME_LENGTH,
    resamples: int = 1000,
    seed: int = 0,
) -> Figure | None:
    """As :func:`auroc`, over pairs of equal length only; None where there are none.

    ``n`` is the number of pairs. Lengths are equal when they differ by at most ``tolerance`` of
    the group's mean length.
    """
    return _auroc(scores, defective, demos, tolerance, resamples, seed)


def _auroc(
    scores: np.ndarray,
    defective: np.ndarray,
    demos: Sequence[Demonstration],
    tolerance: float,
    resamples: int,
    seed: int,
) -> Figure | None:
    pairs = _pairs(scores, defective, demos, tolerance)
    if not pairs.counted.any():
        return None
    rng = np.random.default_rng(seed)
    good, bad = len(pairs.good), len(pairs.bad)
    drawn = np.zeros((resamples, len(demos)))
    drawn[:, pairs.good] = rng.multinomial(good, np.full(good, 1 / good), resamples)
    drawn[:, pairs.bad] = rng.multinomial(bad, np.full(bad, 1 / bad), resamples)
    values = np.array([pairs.auroc(weights) for weights in drawn])
    low, high = np.nanpercentile(values, [2.5, 97.5])
    count = int(pairs.counted.sum()) if np.isfinite(tolerance) else len(demos)
    value = pairs.auroc(np.ones(len(demos)))
    return Figure(value, float(low), float(high), count, "AUROC")


def _pairs(
    scores: np.ndarray, defective: np.ndarray, demos: Sequence[Demonstration], tolerance: float
) -> _Pairs:
    lengths = np.array([len(demo) for demo in demos], float)
    groups = np.array([demo.group for demo in demos])
    mean = np.array([lengths[groups == group].mean() for group in groups])
    good, bad = np.flatnonzero(~defective), np.flatnonzero(defective)
    better, worse = scores[good][:, None], scores[bad][None]
    wins = (better > worse) + 0.5 * (better == worse)
    apart = np.abs(lengths[good][:, None] - lengths[bad][None]) / mean[good][:, None]
    counted = (groups[good][:, None] == groups[bad][None]) & (apart <= tolerance)
    return _Pairs(good, bad, wins, counted)


def keep_best(scores: np.ndarray, demos: Sequence[Demonstration], share: float) -> list[int]:
    """Indices of the best ``share`` of each group, ascending; ties go to the earlier one.

    Raises:
        ValueError: a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"keep_best: share {share} must be above 0 and at most 1")
    groups = np.array([demo.group for demo in demos])
    kept: list[int] = []
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        order = own[np.argsort(-scores[own], kind="stable")]
        kept += order[: max(1, round(share * len(own)))].tolist()
    return sorted(kept)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation with mean ranks for ties; 0 where either is constant."""
    x, y = _ranks(np.asarray(a, float)), _ranks(np.asarray(b, float))
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def rank_correlation(
    a: Sequence[float], b: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> Figure:
    """Spearman's correlation over metrics, with a percentile bootstrap interval over them.

    Raises:
        ValueError: fewer than three, or lists of different lengths.
    """
    x, y = np.asarray(a, float), np.asarray(b, float)
    if len(x) != len(y) or len(x) < 3:
        raise ValueError(f"rank_correlation: {len(x)} and {len(y)} values; give the same 3 or more")
    drawn = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    values = [spearman(x[rows], y[rows]) for rows in drawn]
    low, high = np.percentile(values, [2.5, 97.5])
    return Figure(spearman(x, y), float(low), float(high), len(x), "rank correlation")


__all__ = [
    "auroc",
    "keep_best",
    "length_correlation",
    "load_demonstrations",
    "matched_auroc",
    "rank_correlation",
    "residualise",
    "score",
    "spearman",
]
