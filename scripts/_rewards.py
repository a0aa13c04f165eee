"""What evaluations of the reward model share: held-out rollouts and values of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.reward import RewardModel, spread
from regrasp.relabel.rollouts import Fold, Rollout, Split, read_rollouts
from rich.console import Console
from rich.progress import track

#: What is evaluated, and the prefix of its figures.
HELD_OUT: dict[Fold, str] = {"tasks": "", "states": "states."}


@dataclass
class Study:
    """A trained model and the rollouts of a store, by what training saw of them.

    Attributes:
        folds: rollouts by :meth:`Split.of`.
        split: what was held out of the training.
        step: optimiser steps of the model.
    """

    store: EpisodeStore
    model: RewardModel
    folds: dict[Fold, list[Rollout]]
    split: Split
    step: int

    @classmethod
    def open(cls, store: Path, model: Path, limit: int, seed: int) -> Study:
        """Read a store and a model.

        Args:
            store: of failure samples, the one that was trained on.
            model: folder of the model.
            limit: rollouts a fold at most, drawn at random; 0 takes all.
            seed: of that draw.

        Raises:
            ValueError: if no rollout of a held-out task is there.
        """
        opened = EpisodeStore.open(store)
        network, meta = RewardModel.load(model)
        split = Split(**{key: tuple(value) for key, value in meta["split"].items()})
        folds: dict[Fold, list[Rollout]] = {"train": [], "states": [], "tasks": []}
        for rollout in read_rollouts(opened):
            folds[split.of(rollout.header)].append(rollout)
        if not folds["tasks"]:
            raise ValueError(
                f"{store}: no rollout of the held-out tasks {split.tasks}; "
                "is it the store that the model was trained on?"
            )
        for fold, rollouts in folds.items():
            if limit and len(rollouts) > limit:
                chosen = np.random.default_rng(seed).choice(len(rollouts), limit, replace=False)
                folds[fold] = [rollouts[i] for i in sorted(chosen)]
        return cls(opened, network, folds, split, meta["step"])

    def outputs(self, rollouts: Sequence[Rollout], console: Console, what: str) -> list[np.ndarray]:
        """Value and chance of success of every step, ``[T, 2]`` a rollout."""
        return [self._output(r) for r in track(rollouts, what, console=console, transient=True)]

    def _output(self, rollout: Rollout) -> np.ndarray:
        cameras = self.model.config.cameras
        keys = [f"image/{name}" for name in cameras]
        parts = [
            {k: v[part.start : part.stop] for k, v in self._pictures(part.episode, keys).items()}
            for part in rollout.parts
        ]
        images = {
            name: np.concatenate([part[key] for part in parts])
            for name, key in zip(cameras, keys, strict=True)
        }
        both = self.model.outputs(self.model.frames(images), rollout.header.instruction)
        every = self.model.config.every
        return np.stack([spread(both[:, i], every, len(rollout)) for i in range(2)], axis=1)

    def _pictures(self, episode: int, keys: Sequence[str]) -> dict[str, np.ndarray]:
        return self.store.load(episode, keys).steps
