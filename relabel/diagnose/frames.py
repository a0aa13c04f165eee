"""What a diagnosis model is shown of an episode, and what it is asked.

A few moments spread evenly over the episode, each with the pictures of every camera and a name, so
that the model can say when something happened. The name is the number of its control step, or, for
a model with a token of its own for each moment, ``m00``, ``m01`` and so on: choosing one of two
dozen tokens is easier for a small model than writing a number. Answers then name moments too;
:func:`to_moments` and :func:`to_steps` translate.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from regrasp.episodes.types import Episode

#: The answer's line that says when, in control steps and in moments.
_STEPS = re.compile(r"^steps: (\d+)-(\d+)$", re.MULTILINE)
_MOMENTS = re.compile(r"^steps: m(\d\d)-m(\d\d)$", re.MULTILINE)


@dataclass(frozen=True)
class FrameChoice:
    """What is shown.

    Attributes:
        frames: moments, from the first control step to the last.
        cameras: shown at each moment, in this order.
        size: pictures are resized to ``size`` x ``size`` pixels.
        blank: moments are named, but no picture is shown: the text-only baseline.
        count_by: ``step`` names a moment by its control step, ``moment`` by its number, as a token
            of its own.
        explain: describe the answer's form and name the types, as a model needs that was not
            trained to answer.
    """

    frames: int = 16
    cameras: tuple[str, ...] = ("agentview", "wrist")
    size: int = 96
    blank: bool = False
    count_by: str = "step"
    explain: bool = False

    def __post_init__(self) -> None:
        if self.count_by not in ("step", "moment"):
            raise ValueError(f"FrameChoice.count_by: {self.count_by!r}; 'step' or 'moment'")
        if self.count_by == "moment" and (self.explain or self.frames > 100):
            raise ValueError("FrameChoice: moments are for models trained on them, 100 at most")
        if self.frames < 2 or self.size < 8 or not self.cameras:
            raise ValueError(
                f"FrameChoice: {self.frames} frames of {self.size} pixels from {self.cameras}; "
                "at least 2 frames of 8 pixels from one camera are needed"
            )

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; :meth:`from_json` inverts it."""
        return {**asdict(self), "cameras": list(self.cameras)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FrameChoice:
        """Inverse of :meth:`to_json`; unknown keys raise TypeError."""
        return cls(**{**data, "cameras": tuple(data["cameras"])})


@dataclass(frozen=True)
class Question:
    """What a model is asked of one episode.

    Attributes:
        images: uint8 ``[size, size, 3]``, in the order in which the text shows them.
        content: parts of the user's chat message, as Hugging Face's chat templates take them:
            ``{"type": "text", "text": ...}`` or ``{"type": "image"}``.
        length: control steps of the episode.
        steps: control step of each moment, ascending.
    """

    images: tuple[np.ndarray, ...]
    content: tuple[dict[str, str], ...]
    length: int
    steps: tuple[int, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat, one message long."""
        return [{"role": "user", "content": list(self.content)}]


def choose_steps(length: int, frames: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Control steps to show, int64 ``[frames]``, first and last among them.

    Args:
        length: control steps of the episode; where it is shorter than ``frames``, some repeat.
        frames: how many.
        rng: moves the inner ones at random, by up to half the distance between two: the same
            episode then never looks quite the same in training.

    Raises:
        ValueError: if the episode is empty.
    """
    if length < 1:
        raise ValueError(f"choose_steps: length is {length}; at least one control step is needed")
    steps = np.linspace(0, length - 1, frames)
    if rng is not None:
        steps[1:-1] += rng.uniform(-0.5, 0.5, frames - 2) * (length - 1) / (frames - 1)
    return np.clip(np.round(steps), 0, length - 1).astype(np.int64)


def ask(
    episode: Episode,
    choice: FrameChoice,
    *,
    types: Collection[str] = (),
    rng: np.random.Generator | None = None,
) -> Question:
    """The question about an episode.

    Args:
        episode: with ``image/<camera>`` of every camera of ``choice``.
        choice: what is shown.
        types: failure types to name, where ``choice.explain`` is set.
        rng: see :func:`choose_steps`.

    Raises:
        ValueError: if a camera is missing, or ``explain`` has no types.
    """
    steps = choose_steps(len(episode), choice.frames, rng)
    cameras = () if choice.blank else choice.cameras
    shown = {camera: _pictures(episode, camera, steps, choice) for camera in cameras}
    images = tuple(shown[camera][i] for i in range(len(steps)) for camera in cameras)
    return pose(episode.header.instruction, len(episode), steps, images, choice, types=types)


def pose(
    instruction: str,
    length: int,
    steps: np.ndarray,
    images: tuple[np.ndarray, ...],
    choice: FrameChoice,
    *,
    types: Collection[str] = (),
) -> Question:
    """The question about pictures that are at hand; :func:`ask` takes them from an episode.

    Args:
        instruction: the task in words.
        length: control steps of the episode.
        steps: those shown, ascending, ``[frames]``.
        images: uint8 ``[size, size, 3]``; at each step, one of each camera of ``choice``. None
            where the choice is blank, or where only the text is needed.
        choice, types: as in :func:`ask`.
    """
    parts: list[dict[str, str]] = []
    intro = f"{instruction}. {length} steps, {' and '.join(choice.cameras)}:"
    shown = 0 if choice.blank else len(choice.cameras)
    for i, step in enumerate(steps):
        label = moment(i) if choice.count_by == "moment" else f"\n{step}:"
        parts.append({"type": "text", "text": label if i else intro + label})
        parts += [{"type": "image"}] * shown
    question = "\nWhat went wrong?"
    if choice.explain:
        question += f"\n{instructions(types)}"
    parts.append({"type": "text", "text": question})
    return Question(images, tuple(parts), length, tuple(int(step) for step in steps))


def moment(number: int) -> str:
    """The name of a moment: ``m07``."""
    return f"m{number:02d}"


def to_moments(answer: str, steps: Sequence[int]) -> str:
    """An answer in control steps as one in moments, each step the nearest moment's."""

    def named(found: re.Match[str]) -> str:
        near = [int(np.argmin(np.abs(np.asarray(steps) - int(step)))) for step in found.groups()]
        return "steps: " + "-".join(moment(number) for number in near)

    return _STEPS.sub(named, answer)


def to_steps(answer: str, steps: Sequence[int]) -> str:
    """An answer in moments as one in control steps; moments that there are not stay as they are."""

    def counted(found: re.Match[str]) -> str:
        numbers = [int(number) for number in found.groups()]
        if max(numbers) >= len(steps):
            return found.group()
        return "steps: " + "-".join(str(steps[number]) for number in numbers)

    return _MOMENTS.sub(counted, answer)


def instructions(types: Collection[str]) -> str:
    """The answer's form in words, for a model that was not trained on it."""
    if not types:
        raise ValueError("instructions: no failure types to name")
    return (
        "If the robot achieved its task in the end, answer 'failed: no' and nothing else. "
        "Otherwise answer with exactly these eight lines:\n"
        "failed: yes\n"
        f"type: one of {', '.join(types)}\n"
        "steps: first and last control step of what went wrong, like 37-60\n"
        "subtask: what the robot was at\n"
        "severity: 1 (mild) to 4 (severe)\n"
        "why: the cause, in one line\n"
        "do: what to do now, in one line\n"
        "delta: how to move the hand in the world frame, like "
        "+12 -30 +0 mm +0 +5 -10 deg close (or open, or keep)"
    )


def _pictures(
    episode: Episode, camera: str, steps: np.ndarray, choice: FrameChoice
) -> list[np.ndarray]:
    """Pictures of one camera at ``steps``, resized."""
    key = f"image/{camera}"
    if key not in episode.steps:
        there = sorted(k.removeprefix("image/") for k in episode.steps if k.startswith("image/"))
        raise ValueError(f"episode has no camera {camera!r}; it has {there}")
    return list(resize(episode.steps[key][steps], choice.size))


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Pictures uint8 ``[N, H, W, 3]`` as ``[N, size, size, 3]``, antialiased."""
    if images.shape[1:3] == (size, size):
        return images
    planes = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    small = torch.nn.functional.interpolate(
        planes, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return np.ascontiguousarray(small.numpy().transpose(0, 2, 3, 1))
