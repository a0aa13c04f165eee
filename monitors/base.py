"""What a failure score is, and how a stored episode is scored exactly as a live one was."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from regrasp.episodes.types import Episode, PolicyOutput


class Score(ABC):
    """A number after each policy inference, larger the likelier a failure.

    A score sees what a robot's computer sees: what the policy just answered and what was
    executed since its last answer. It never sees success, simulator state or the future.

    Attributes:
        name: the key of the score in a monitor's readings and artifact.
        samples: chunks it needs of one ``infer`` (``num_samples``). It is shown the first this
            many, so that its value does not depend on what other scores asked for.
    """

    name: str
    samples: int = 1

    @abstractmethod
    def reset(self) -> None:
        """Forget the episode (or the segment before a rewind); learned weights stay."""

    @abstractmethod
    def update(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """The score after one inference.

        Args:
            output: the policy's answer now.
            executed: float ``[k, A]``, the actions executed since the last inference, in order;
                ``[0, A]`` at the first one after a reset.
        """

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """What :meth:`reset` forgets, small and serialisable."""

    @abstractmethod
    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a :meth:`state`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Constructor arguments that JSON can hold."""

    def weights(self) -> dict[str, np.ndarray]:
        """Learned arrays; none unless the score is trained."""
        return {}

    @classmethod
    def build(cls, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Score:
        """Invert :meth:`config` and :meth:`weights`."""
        if weights:
            raise ValueError(f"{cls.__name__}: takes no weights, got {sorted(weights)}")
        return cls(**config)


class WindowedScore(Score):
    """The mean of the last ``window`` raw readings: an alarm then needs more than one bad moment.

    Subclasses implement :meth:`raw`, and :meth:`forget`, :meth:`memory` and :meth:`recall` where
    they remember more than the window. Before the first raw reading the score is 0.0, so a raw
    reading is never negative.

    Args:
        window: readings averaged (1: the newest alone).
    """

    def __init__(self, window: int = 1) -> None:
        if window < 1:
            raise ValueError(f"{type(self).__name__}: window is {window}; it must be at least 1")
        self.window = int(window)
        self.reset()

    @abstractmethod
    def raw(self, output: PolicyOutput, executed: np.ndarray) -> float | None:
        """One reading, at least 0; None where there is nothing to say yet."""

    def forget(self) -> None:
        """Forget what is remembered besides the window."""

    def memory(self) -> dict[str, np.ndarray]:
        """What :meth:`forget` forgets."""
        return {}

    def recall(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a :meth:`memory`; called after :meth:`forget`."""

    def reset(self) -> None:
        """Empty the window and forget."""
        self._recent: deque[float] = deque(maxlen=self.window)
        self.forget()

    def update(self, output: PolicyOutput, executed: np.ndarray) -> float:
        """See :class:`Score`."""
        reading = self.raw(output, executed)
        if reading is not None:
            self._recent.append(float(reading))
        return float(np.mean(self._recent)) if self._recent else 0.0

    def state(self) -> dict[str, np.ndarray]:
        """The window and the :meth:`memory`."""
        return {"recent": np.asarray(self._recent, dtype=np.float64), **self.memory()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`state`."""
        self.reset()
        self._recent.extend(float(value) for value in state["recent"])
        self.recall(state)

    def config(self) -> dict[str, Any]:
        """The window."""
        return {"window": self.window}


def shown(score: Score, output: PolicyOutput) -> PolicyOutput:
    """The part of the policy's answer that a score is shown: its first ``samples`` chunks.

    Raises:
        ValueError: where the policy was asked for fewer than the score needs.
    """
    given = len(output.samples)
    if given < score.samples:
        raise ValueError(
            f"{score.name}: needs {score.samples} samples of the policy, got {given}; call "
            f"infer(observations, num_samples={score.samples})"
        )
    if given == score.samples:
        return output
    return replace(output, samples=output.samples[: score.samples])


def lookup(registry: Mapping[str, Any], key: str, what: str) -> Any:
    """``registry[key]``; an unknown key raises KeyError naming the nearest ones."""
    if key in registry:
        return registry[key]
    near = difflib.get_close_matches(key, registry, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "none is near it."
    raise KeyError(f"{what}: no {key!r}; {hint} There are {', '.join(sorted(registry))}.")


def score_episode(score: Score, episode: Episode) -> np.ndarray:
    """Score a stored episode chunk by chunk: the numbers a live run gave, float64 ``[C]``.

    The episode's ``chunks`` need ``step``, ``samples`` and ``embedding``; where ``segment`` is
    stored, the score is reset whenever it changes, as the supervisor does after a rewind.
    """
    missing = {"step", "samples", "embedding"} - set(episode.chunks)
    if missing:
        raise ValueError(
            f"score_episode: episode.chunks lacks {sorted(missing)}; it has "
            f"{sorted(episode.chunks)}. Record the rollout with its chunks."
        )
    chunks = episode.chunks
    steps = np.asarray(chunks["step"], dtype=np.int64)
    segments = np.asarray(chunks.get("segment", np.zeros_like(steps)))
    actions = episode.steps["action"]
    values = np.empty(len(steps), dtype=np.float64)
    for i, step in enumerate(steps):
        fresh = i == 0 or segments[i] != segments[i - 1]
        if fresh:
            score.reset()
        executed = actions[step:step] if fresh else actions[steps[i - 1] : step]
        output = PolicyOutput(samples=chunks["samples"][i], embedding=chunks["embedding"][i])
        values[i] = score.update(shown(score, output), executed)
    return values
