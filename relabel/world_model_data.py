"""Counterfactual sets as a world model's data: split by task, budgets that match, batches.

An episode has one row a frame, as :mod:`regrasp.sim.failures.counterfactuals` writes it; its
``extra["context"]`` names the beginning that it shares with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import EpisodeHeader
from torch import Tensor

#: What a model is trained on: only what succeeds, or what fails too.
ARMS = ("success_only", "counterfactual")


@dataclass(frozen=True)
class Split:
    """Tasks ``suite/task`` to train on, and tasks of which nothing is trained on."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def task_of(header: EpisodeHeader) -> str:
    """A task's name over all suites."""
    return f"{header.suite}/{header.task}"


def split_tasks(headers: Sequence[EpisodeHeader], share: float, seed: int) -> Split:
    """Hold out a share of the tasks, at least one.

    Raises:
        ValueError: there are fewer than two tasks.
    """
    tasks = sorted({task_of(header) for header in headers})
    if len(tasks) < 2:
        raise ValueError(f"world model: {len(tasks)} tasks; two at least, to hold one out")
    count = min(max(1, round(share * len(tasks))), len(tasks) - 1)
    order = np.random.default_rng(seed).permutation(len(tasks))
    held = {tasks[i] for i in order[:count]}
    return Split(tuple(t for t in tasks if t not in held), tuple(sorted(held)))


def choose(
    headers: Sequence[EpisodeHeader], tasks: Sequence[str], arm: str, budget: int, seed: int
) -> list[int]:
    """The episodes that an arm trains on; every arm gets the same number.

    Args:
        headers: of the store.
        tasks: to train on.
        arm: of :data:`ARMS`. ``counterfactual`` takes half of its episodes from the failures, or
            all failures where there are fewer.
        budget: episodes; 0 takes as many as succeed.
        seed: of the choice.

    Raises:
        ValueError: an unknown arm, or a budget of more episodes than succeed.
    """
    if arm not in ARMS:
        raise ValueError(f"world model: arm {arm!r}; there are {ARMS}")
    rng = np.random.default_rng([seed, 1])
    # By name: the order of a store depends on which worker was first.
    named = sorted((h.extra["cell"], i) for i, h in enumerate(headers) if task_of(h) in tasks)
    wins = [i for _, i in named if headers[i].success]
    losses = [i for _, i in named if not headers[i].success]
    if budget > len(wins) or not wins:
        raise ValueError(f"world model: a budget of {budget} episodes, and {len(wins)} succeed")
    budget = budget or len(wins)
    wins = [wins[i] for i in rng.permutation(len(wins))]
    losses = [losses[i] for i in rng.permutation(len(losses))]
    failing = min(budget // 2, len(losses)) if arm == "counterfactual" else 0
    return losses[:failing] + wins[: budget - failing]


@dataclass(frozen=True)
class Batch:
    """Stretches of episodes, each from some row to its end; rows past an end are padding.

    Attributes:
        pixels: the first row and the target rows, uint8 ``[B, 1 + J, cameras, H, W, 3]``.
        state: of the same rows ``[B, 1 + J, S]``.
        held: whether the goal held at those rows, float ``[B, 1 + J]``.
        target: chunks from the first row to each target ``[B, J]``, at least 1.
        actions: ``[B, T, stride, A]``.
        success: whether the goal holds after each chunk, float ``[B, T]``.
        real: which chunks are not padding, float ``[B, T]``.
    """

    pixels: Tensor
    state: Tensor
    held: Tensor
    target: Tensor
    actions: Tensor
    success: Tensor
    real: Tensor


class Rollouts:
    """Episodes of a store, held in memory.

    Args:
        store: with one row a frame.
        indices: episodes to hold.
        cameras: in this order.

    Attributes:
        headers: of the episodes.
        pixels: of each, uint8 ``[T, cameras, H, W, 3]``; and ``state``, ``actions``, ``success``.
    """

    def __init__(self, store: EpisodeStore, indices: Sequence[int], cameras: Sequence[str]) -> None:
        keys = [f"image/{camera}" for camera in cameras]
        episodes = [store.load(i, [*keys, "state", "action", "success"]) for i in indices]
        self.headers = [episode.header for episode in episodes]
        self.pixels = [np.stack([e.steps[key] for key in keys], axis=1) for e in episodes]
        self.state = [e.steps["state"].astype(np.float32) for e in episodes]
        self.actions = [e.steps["action"].astype(np.float32) for e in episodes]
        self.success = [e.steps["success"].astype(np.float32) for e in episodes]

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def frames(self) -> int:
        """Rows in all."""
        return sum(len(state) for state in self.state)

    def batch(self, size: int, targets: int, rng: np.random.Generator) -> Batch:
        """Random stretches; half of them begin where the episode does.

        Args:
            size: stretches (B).
            targets: rows of each, besides the first, with pictures (J).
            rng: where the choice comes from.
        """
        rows = []
        for i in rng.integers(len(self), size=size):
            last = len(self.state[i]) - 1
            first = 0 if rng.random() < 0.5 else int(rng.integers(last))
            picked = rng.integers(first + 1, last + 1, size=targets)
            rows.append((int(i), first, np.sort(np.append(picked[1:], last))))
        return self._gather(rows)

    def _gather(self, rows: Sequence[tuple[int, int, np.ndarray]]) -> Batch:
        at = [(i, np.append(first, picked)) for i, first, picked in rows]
        held = [np.append(0.0, self.success[i][:-1])[picked] for i, picked in at]
        return Batch(
            pixels=torch.from_numpy(np.stack([self.pixels[i][picked] for i, picked in at])),
            state=torch.from_numpy(np.stack([self.state[i][picked] for i, picked in at])),
            held=torch.from_numpy(np.stack(held).astype(np.float32)),
            target=torch.from_numpy(np.stack([picked - first for _, first, picked in rows])),
            actions=_padded([self.actions[i][first:] for i, first, _ in rows]),
            success=_padded([self.success[i][first:] for i, first, _ in rows]),
            real=_padded([np.ones(len(self.state[i]) - first, np.float32) for i, first, _ in rows]),
        )


def _padded(parts: Sequence[np.ndarray]) -> Tensor:
    """Arrays ``[t, ...]`` as one ``[B, T, ...]``, zeros where one is over."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(p) for p in parts], batch_first=True)
