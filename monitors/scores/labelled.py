"""What learned scores learn from: episodes known to have failed or not, as padded arrays.

A learned score reads, at each inference, the policy's embedding and, if asked (``inputs`` is
"embedding+action"), cheap signs of doubt in the plan itself (:func:`action_features`). Both are
brought to unit scale, the embedding by a PCA (:class:`Projection`): a few hundred episodes cannot
support a weight on each of 192 dimensions.

Length is the trap of this data. In simulation a failed episode lasts until the time limit, so that
"it is late" separates failures from successes and a network will learn just that. Episodes are
therefore cut where the longest success of their group (their task) ended: beyond it there is no
success to tell a failure from (:meth:`LabelledEpisodes.cut`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from regrasp.episodes.types import Episode, PolicyOutput

#: What a learned score reads at an inference.
Inputs = Literal["embedding", "embedding+action"]

#: Standardised inputs are clipped here, so that one wild dimension moves a score only so far.
CLIP = 5.0


def check_inputs(inputs: str) -> None:
    """Raise ValueError unless ``inputs`` is one of :data:`Inputs`."""
    if inputs not in get_args(Inputs):
        raise ValueError(f"inputs is {inputs!r}; it must be one of {', '.join(get_args(Inputs))}")


def action_features(
    output: PolicyOutput, executed: np.ndarray, previous: np.ndarray | None
) -> np.ndarray:
    """Cheap signs of doubt in a plan, float32 ``[3 A]``, in action units.

    Three numbers an action dimension, so that a gripper's jumps stay apart from motion whichever
    dimension it has: the mean of the chunk that runs; the standard deviation over the samples
    (root mean square over the horizon), 0 for one sample; the disagreement with the previous chunk
    where both plan the same moments (root mean square), 0 where none is planned twice.

    Args:
        output: the policy's answer now.
        executed: float ``[k, A]``, executed since the previous one.
        previous: the chunk that ran before, ``[H, A]``, None at the first.
    """
    samples = np.asarray(output.samples, dtype=np.float32)
    chunk = samples[0]
    spread = np.sqrt(np.mean(np.var(samples, axis=0), axis=0))
    gap = np.zeros(chunk.shape[1], dtype=np.float32)
    if previous is not None:
        k = len(executed)
        overlap = min(len(previous) - k, len(chunk))
        if overlap > 0:
            gap = np.sqrt(np.mean((previous[k : k + overlap] - chunk[:overlap]) ** 2, axis=0))
    return np.concatenate([chunk.mean(axis=0), spread, gap]).astype(np.float32)


@dataclass(frozen=True)
class LabelledEpisodes:
    """Episodes and what became of them.

    Attributes:
        embeddings: float ``[C_i, D]`` an episode, one row an inference.
        failed: bool ``[E]``.
        onset: index of the first inference at or after the failure began, up to ``C_i`` (after
            the last one), None where unknown; None altogether where no onset is known. Only that
            of a failed episode counts: what was survived was no failure.
        actions: :func:`action_features` of each inference, ``[C_i, F]``; None without.
        groups: the task of each episode, within which lengths are comparable; None: one group.
        samples: chunks of each inference that ``actions`` were computed from.
    """

    embeddings: Sequence[np.ndarray]
    failed: np.ndarray
    onset: Sequence[int | None] | None = None
    actions: Sequence[np.ndarray] | None = None
    groups: Sequence[str] | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        count = len(self.embeddings)
        for name in ("failed", "onset", "actions", "groups"):
            value = getattr(self, name)
            if value is not None and len(value) != count:
                raise ValueError(
                    f"LabelledEpisodes.{name}: {len(value)} entries for {count} episodes"
                )
        shapes = {x.shape[1:] for x in self.embeddings}
        if len(shapes) != 1 or any(x.ndim != 2 or len(x) == 0 for x in self.embeddings):
            raise ValueError(
                "LabelledEpisodes.embeddings: give [C >= 1, D] an episode with one D, got "
                f"{sorted({x.shape for x in self.embeddings})}"
            )
        for i, x in enumerate(self.embeddings):
            if self.actions is not None and len(self.actions[i]) != len(x):
                raise ValueError(
                    f"LabelledEpisodes.actions[{i}]: {len(self.actions[i])} rows for {len(x)} "
                    "embeddings; give one an inference"
                )
            onset = None if self.onset is None else self.onset[i]
            if onset is not None and not 0 <= onset <= len(x):
                raise ValueError(
                    f"LabelledEpisodes.onset[{i}]: {onset} is outside an episode of {len(x)} "
                    "inferences"
                )

    def __len__(self) -> int:
        return len(self.embeddings)

    def take(self, rows: Sequence[int] | np.ndarray) -> LabelledEpisodes:
        """Some of the episodes."""
        return LabelledEpisodes(
            [self.embeddings[i] for i in rows],
            np.asarray(self.failed)[np.asarray(rows, dtype=np.int64)],
            None if self.onset is None else [self.onset[i] for i in rows],
            None if self.actions is None else [self.actions[i] for i in rows],
            None if self.groups is None else [self.groups[i] for i in rows],
            self.samples,
        )

    def cut(self) -> LabelledEpisodes:
        """Without what came after the longest success of the group had ended.

        Where a group has no success, its failures are cut at the longest success of all. Without
        any success nothing is cut.
        """
        groups = list(self.groups or [""] * len(self))
        lengths = [len(x) for x in self.embeddings]
        limit: dict[str, int] = {}
        for group, length, failed in zip(groups, lengths, self.failed, strict=True):
            if not failed:
                limit[group] = max(limit.get(group, 0), length)
        longest = max(limit.values(), default=max(lengths))
        keep = [
            min(length, limit.get(group, longest))
            for group, length in zip(groups, lengths, strict=True)
        ]
        onset = self.onset
        if onset is not None:
            onset = [None if o is None else min(o, n) for o, n in zip(onset, keep, strict=True)]
        actions = self.actions
        if actions is not None:
            actions = [x[:n] for x, n in zip(actions, keep, strict=True)]
        embeddings = [x[:n] for x, n in zip(self.embeddings, keep, strict=True)]
        return replace(self, embeddings=embeddings, onset=onset, actions=actions)

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[Episode],
        onsets: Sequence[int | None] | None = None,
        samples: int = 1,
    ) -> LabelledEpisodes:
        """What a monitor would have seen of stored episodes, and how they ended.

        Args:
            episodes: with recorded chunks (``step``, ``samples``, ``embedding``). One with several
                segments, that is with rewinds, raises ValueError: its parts ended differently.
            onsets: the control step at which each one's failure began, None where unknown.
            samples: chunks of each inference that are read, and that a score trained on their
                actions will ask for; more than were recorded raise ValueError.
        """
        embeddings, actions, chunk_onsets = [], [], []
        for i, episode in enumerate(episodes):
            missing = {"step", "samples", "embedding"} - set(episode.chunks)
            if missing or len(np.unique(episode.chunks.get("segment", [0]))) > 1:
                raise ValueError(
                    f"LabelledEpisodes.from_episodes: episodes[{i}] lacks {sorted(missing)} or was "
                    "rewound; give rollouts recorded with their chunks, without recoveries"
                )
            recorded = episode.chunks["samples"].shape[1]
            if not 1 <= samples <= recorded:
                raise ValueError(
                    f"LabelledEpisodes.from_episodes: samples is {samples}, episodes[{i}] has "
                    f"{recorded} an inference; ask for 1 to that many"
                )
            embeddings.append(np.asarray(episode.chunks["embedding"], dtype=np.float32))
            actions.append(_episode_features(episode, samples))
            onset = None if onsets is None else onsets[i]
            steps = episode.chunks["step"]
            chunk_onsets.append(None if onset is None else int(np.searchsorted(steps, onset)))
        return cls(
            embeddings,
            np.array([not episode.header.success for episode in episodes]),
            None if onsets is None else chunk_onsets,
            actions,
            [f"{episode.header.suite}/{episode.header.task}" for episode in episodes],
            samples,
        )


def _episode_features(episode: Episode, samples: int) -> np.ndarray:
    """:func:`action_features` of each inference of a stored episode, ``[C, F]``."""
    chunks, actions = episode.chunks, episode.steps["action"]
    rows, previous, last = [], None, 0
    for i, step in enumerate(chunks["step"]):
        output = PolicyOutput(chunks["samples"][i][:samples], chunks["embedding"][i])
        rows.append(action_features(output, actions[last:step], previous))
        previous, last = np.asarray(output.samples[0], dtype=np.float32), step
    return np.stack(rows)


class Projection:
    """Standardises an embedding, keeps its leading principal components at unit variance.

    Args:
        mean: ``[D + F]``, of embedding and action features.
        scale: ``[D + F]``, divides next.
        components: ``[D, K]``, principal axes divided by the standard deviation along them.
    """

    def __init__(self, mean: np.ndarray, scale: np.ndarray, components: np.ndarray) -> None:
        self.mean = np.asarray(mean, dtype=np.float32)
        self.scale = np.asarray(scale, dtype=np.float32)
        self.components = np.asarray(components, dtype=np.float32)

    @property
    def dims(self) -> int:
        """Width of what it returns: K + F."""
        return len(self.mean) - self.components.shape[0] + self.components.shape[1]

    @classmethod
    def fit(cls, embeddings: np.ndarray, actions: np.ndarray | None, components: int) -> Projection:
        """From rows ``[N, D]`` and ``[N, F]``; fewer components where the rank is lower."""
        if components < 1:
            raise ValueError(f"Projection.fit: components is {components}; it must be at least 1")
        embeddings = np.asarray(embeddings, dtype=np.float64)
        dims = embeddings.shape[1]
        rows = embeddings if actions is None else np.concatenate([embeddings, actions], axis=1)
        mean, spread = rows.mean(axis=0), rows.std(axis=0)
        # A dimension that hardly moved would turn rounding into signal; embedding and action
        # features differ in unit, so each has its own idea of "hardly".
        floor = np.full(len(spread), max(0.1 * float(np.median(spread[:dims])), 1e-6))
        if actions is not None:
            floor[dims:] = max(0.1 * float(np.median(spread[dims:])), 1e-6)
        scale = np.maximum(spread, floor)
        standard = (embeddings - mean[:dims]) / scale[:dims]
        values, axes = np.linalg.eigh(standard.T @ standard / len(standard))
        values, axes = values[::-1], axes[:, ::-1]
        keep = min(components, int(np.sum(values > 1e-6 * values[0])))
        return cls(mean, scale, axes[:, :keep] / np.sqrt(values[:keep]))

    def __call__(self, embedding: np.ndarray, actions: np.ndarray | None) -> np.ndarray:
        """Map ``[..., D]`` and ``[..., F]`` to float32 ``[..., K + F]``, unclipped."""
        dims = len(self.components)
        x: np.ndarray = np.asarray(embedding, dtype=np.float32)
        x = ((x - self.mean[:dims]) / self.scale[:dims]) @ self.components
        if actions is None:
            return x
        actions = np.asarray(actions, dtype=np.float32)
        return np.concatenate([x, (actions - self.mean[dims:]) / self.scale[dims:]], axis=-1)

    def weights(self) -> dict[str, np.ndarray]:
        """Its arrays."""
        return {
            "projection.mean": self.mean,
            "projection.scale": self.scale,
            "projection.components": self.components,
        }

    @classmethod
    def from_weights(cls, weights: Mapping[str, np.ndarray]) -> Projection:
        """Invert :meth:`weights`."""
        names = ("mean", "scale", "components")
        missing = [f"projection.{n}" for n in names if f"projection.{n}" not in weights]
        if missing:
            raise ValueError(f"Projection: no array {missing} among {sorted(weights)}")
        return cls(*(weights[f"projection.{name}"] for name in names))
