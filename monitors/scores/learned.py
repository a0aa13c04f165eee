"""What the scores learned from labelled episodes share: their inputs live, their training.

Inference is NumPy; training needs torch, imported only then. Every network is trained on the
episodes cut to comparable lengths (:mod:`regrasp.monitors.scores.labelled`), with noise on its
inputs, dropout and weight decay, and keeps the weights of the epoch with the least loss on episodes
held out for that. Members of an ensemble differ in their seed and in the episodes held out.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore
from regrasp.monitors.scores.labelled import (
    CLIP,
    Inputs,
    LabelledEpisodes,
    Projection,
    action_features,
    check_inputs,
)

#: A torch tensor, module, ...: torch is not imported to name its types.
Torch = Any


@dataclass(frozen=True)
class Training:
    """How a network is fitted.

    Attributes:
        epochs: at most.
        batch: episodes a step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        noise: standard deviation of the noise on standardised inputs.
        dropout: on inputs and on the hidden layer.
        late: share of training episodes that are entered at a random inference, as after a rewind;
            what time it is then says little.
        held_out: share of episodes whose loss chooses the epoch.
        patience: epochs without improvement before training stops.
    """

    epochs: int = 80
    batch: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    noise: float = 0.3
    dropout: float = 0.3
    late: float = 0.5
    held_out: float = 0.2
    patience: int = 12

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"Training.{name}: {getattr(self, name)} must be at least 1")
        for name in ("dropout", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"Training.{name}: {getattr(self, name)} must be in [0, 1)")


@dataclass(frozen=True)
class Batch:
    """Episodes padded to one length; arrays of NumPy, or of torch in training.

    Attributes:
        x: ``[E, T, K]``, zero after an episode's end.
        mask: ``[E, T]``, 1 where there is an inference.
        failed: ``[E]``, 1 for a failed episode.
        weight: ``[E]``, class weights: failures and successes count the same in all; mean 1.
        begun: ``[E, T]``, 1 from the failure's onset on.
        dated: ``[E, T]``, 1 where ``begun`` is known: everywhere, but in a failed episode of
            unknown onset only at its last inference, by when it has surely failed.
    """

    x: Any
    mask: Any
    failed: Any
    weight: Any
    begun: Any
    dated: Any

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """Every array changed alike."""
        return Batch(*(change(getattr(self, field.name)) for field in fields(self)))


def class_weights(failed: np.ndarray) -> np.ndarray:
    """Weights ``[E]`` that give each class half of the total E; ValueError where one is missing."""
    failed = np.asarray(failed, dtype=bool)
    counts = np.array([np.sum(~failed), np.sum(failed)])
    if not counts.all():
        raise ValueError(
            f"class_weights: {counts[1]} failed and {counts[0]} successful episodes; give both"
        )
    return (len(failed) / (2.0 * counts))[failed.astype(np.int64)].astype(np.float32)


def pad(data: LabelledEpisodes, inputs: list[np.ndarray]) -> Batch:
    """A NumPy batch of all episodes, ``inputs`` being ``[C_i, K]`` each."""
    count, longest = len(data), max(len(x) for x in inputs)
    x = np.zeros((count, longest, inputs[0].shape[1]), dtype=np.float32)
    mask, begun, dated = (np.zeros((count, longest), dtype=np.float32) for _ in range(3))
    for i, rows in enumerate(inputs):
        last = len(rows)
        x[i, :last], mask[i, :last] = rows, 1.0
        onset = None if data.onset is None else data.onset[i]
        if not data.failed[i]:
            dated[i, :last] = 1.0
        elif onset is not None:
            dated[i, :last], begun[i, onset:last] = 1.0, 1.0
        else:
            dated[i, last - 1], begun[i, last - 1] = 1.0, 1.0
    failed = np.asarray(data.failed, dtype=np.float32)
    return Batch(x, mask, failed, class_weights(data.failed), begun, dated)


def prepare(data: LabelledEpisodes, inputs: Inputs, components: int) -> tuple[Projection, Batch]:
    """The projection fitted to the episodes, cut, and what a network then trains on."""
    check_inputs(inputs)
    data = data.cut()
    actions = data.actions if inputs == "embedding+action" else None
    if inputs == "embedding+action" and actions is None:
        raise ValueError(
            "train: inputs is 'embedding+action' but the episodes have no actions; make data with "
            "LabelledEpisodes.from_episodes, or let inputs be 'embedding'"
        )
    projection = Projection.fit(
        np.concatenate(list(data.embeddings)),
        None if actions is None else np.concatenate(list(actions)),
        components,
    )
    rows = [
        np.clip(projection(x, None if actions is None else actions[i]), -CLIP, CLIP)
        for i, x in enumerate(data.embeddings)
    ]
    return projection, pad(data, rows)


def samples_needed(data: LabelledEpisodes, inputs: Inputs) -> int:
    """Chunks of an inference that a score trained on ``data`` must be shown."""
    return data.samples if inputs == "embedding+action" else 1


def import_torch() -> Torch:
    """The module; ImportError says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"training a score needs {error.name!r}; install it with: pip install 'regrasp[train]'"
        ) from error
    return torch


def fit(
    make: Callable[[], Torch],
    loss: Callable[[Torch, Batch], Torch],
    data: Batch,
    training: Training,
    seed: int,
) -> dict[str, np.ndarray]:
    """Train a network and return its parameters by name, float32.

    Args:
        make: a module that maps ``[B, T, K]`` to logits ``[B, T]``.
        loss: of logits ``[B, T]`` and the batch they belong to.
        data: all episodes, in NumPy.
        training: how.
        seed: of the initial weights, the episodes held out, the order, noise and dropout. The same
            seed gives the same weights on the same number of threads.
    """
    torch = import_torch()
    rng = np.random.default_rng(seed)
    train, held = split(data.failed, training.held_out, rng)
    tensors = data.map(lambda array: torch.from_numpy(array))
    choose = tensors.map(lambda t: t[torch.from_numpy(held)]) if len(held) else tensors
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        network = make()
        optimiser = torch.optim.AdamW(
            network.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay
        )
        best, best_loss, best_epoch = copy.deepcopy(network.state_dict()), np.inf, -1
        for epoch in range(training.epochs):
            network.train()
            for rows in minibatches(data.failed, train, training.batch, rng):
                index = torch.from_numpy(rows)
                chosen = tensors.map(partial(_rows, index))
                batch = _enter_late(torch, chosen, training.late, rng)
                x = batch.x + training.noise * torch.randn_like(batch.x)
                value = loss(network(x), batch)
                optimiser.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimiser.step()
            network.eval()
            with torch.no_grad():
                held_loss = float(loss(network(choose.x), choose))
            if held_loss < best_loss:
                best, best_loss, best_epoch = copy.deepcopy(network.state_dict()), held_loss, epoch
            elif epoch - best_epoch >= training.patience:
                break
    return {key: value.numpy() for key, value in best.items()}


def split(
    failed: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and held-out episodes; of each class ``share`` is held out, at least one.

    With ``share`` 0 nothing is. A class of fewer than two episodes raises ValueError.
    """
    train, held = [], []
    for kind in (False, True):
        rows = rng.permutation(np.flatnonzero(np.asarray(failed, dtype=bool) == kind))
        count = max(1, round(share * len(rows))) if share > 0 else 0
        if len(rows) <= count:
            raise ValueError(
                f"train: {len(rows)} {'failed' if kind else 'successful'} episodes; at least "
                f"{count + 1} are needed to train on some and hold out others"
            )
        held.append(rows[:count])
        train.append(rows[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(held))


def minibatches(
    failed: np.ndarray, rows: np.ndarray, batch: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """``rows`` in random order in batches of about ``batch``, both classes in each."""
    kinds = [
        rng.permutation(rows[np.asarray(failed[rows], dtype=bool) == kind])
        for kind in (False, True)
    ]
    count = max(1, min(round(len(rows) / batch), *(len(kind) for kind in kinds)))
    for parts in zip(*(np.array_split(kind, count) for kind in kinds), strict=True):
        yield np.concatenate(parts)


def _enter_late(torch: Torch, batch: Batch, share: float, rng: np.random.Generator) -> Batch:
    """Some episodes shifted to begin at a random inference of their first half."""
    length = batch.mask.sum(dim=1).long()
    late = rng.random(len(length)) < share
    begin = torch.from_numpy(np.where(late, rng.random(len(length)) / 2, 0.0)) * length
    index = begin.long()[:, None] + torch.arange(batch.mask.shape[1])
    inside = (index < length[:, None]).float()
    index = index.clamp(max=batch.mask.shape[1] - 1)
    rows = torch.arange(len(length))[:, None]
    return Batch(
        batch.x[rows, index] * inside[..., None],
        inside,
        batch.failed,
        batch.weight,
        batch.begun[rows, index] * inside,
        batch.dated[rows, index] * inside,
    )


def member_seeds(seed: int, members: int) -> list[int]:
    """A seed for each network of an ensemble."""
    if members < 1:
        raise ValueError(f"train: members is {members}; it must be at least 1")
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(members)]


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), without overflow."""
    return float(0.5 * (1.0 + np.tanh(0.5 * np.float64(logit))))


def _rows(index: Torch, tensor: Torch) -> Torch:
    return tensor[index]


class LearnedScore(WindowedScore):
    """A score that reads the projected embedding and, if asked, :func:`action_features`.

    Subclasses implement :meth:`read`, and extend :meth:`forget`, :meth:`memory` and :meth:`recall`.

    Args:
        projection: what it was trained behind.
        inputs: what it reads.
        window: the score is the mean of the last ``window`` readings.
        samples: chunks it needs of an inference: as many as its action features were trained on.
    """

    _previous: np.ndarray | None

    def __init__(
        self,
        projection: Projection,
        inputs: Inputs = "embedding",
        window: int = 1,
        samples: int = 1,
    ) -> None:
        check_inputs(inputs)
        if samples < 1 or (samples > 1 and inputs == "embedding"):
            raise ValueError(
                f"{type(self).__name__}: samples is {samples} with inputs {inputs!r}; it must be "
                "at least 1, and 1 where no action is read"
            )
        self.projection, self.inputs = projection, inputs
        self.samples = int(samples)
        super().__init__(window)

    @abstractmethod
    def read(self, x: np.ndarray) -> float:
        """One reading from standardised inputs, float32 ``[K]``."""

    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`WindowedScore`."""
        dims = len(self.projection.components)
        if output.embedding.shape != (dims,):
            raise ValueError(
                f"{type(self).__name__}: embedding has shape {output.embedding.shape}, this score "
                f"was trained on ({dims},); retrain it for this policy"
            )
        actions = None
        if self.inputs == "embedding+action":
            actions = action_features(output, executed, self._previous)
            self._previous = np.array(output.samples[0], dtype=np.float32)
        return self.read(np.clip(self.projection(output.embedding, actions), -CLIP, CLIP))

    def forget(self) -> None:
        """Forget the previous chunk."""
        self._previous = None

    def memory(self) -> dict[str, np.ndarray]:
        """The previous chunk; absent before the first and where no action is read."""
        return {} if self._previous is None else {"previous": self._previous.copy()}

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`memory`."""
        if "previous" in state:
            self._previous = np.array(state["previous"], dtype=np.float32)

    def weights(self) -> dict[str, np.ndarray]:
        """The projection's arrays; subclasses add their networks'."""
        return self.projection.weights()

    def config(self) -> dict[str, Any]:
        """Constructor arguments that JSON can hold."""
        return {"inputs": self.inputs, "samples": self.samples, **super().config()}
