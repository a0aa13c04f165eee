"""A world of one red square: it goes wrong where the square takes another colour."""

from __future__ import annotations

import numpy as np
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.relabel.diagnose.answer import SUCCESS, Diagnosis
from regrasp.relabel.diagnose.frames import FrameChoice, ask
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.relabel.diagnose.tiny import TinySize, build
from regrasp.relabel.diagnose.training import Example

COLOURS = {"turned_blue": (30, 30, 230), "turned_green": (30, 230, 30)}
TYPES = tuple(COLOURS)
STEPS, SIZE = 40, 32

#: Small enough that a test can train it.
CHOICE = FrameChoice(frames=8, size=SIZE)
TINY = TinySize(
    patch=8,
    shuffle=4,
    vision_width=64,
    vision_layers=1,
    text_width=64,
    text_layers=2,
    vocabulary=400,
)


def square_episode(seed: int, kind: str = "", change: int = 0) -> Episode:
    """A square at a place of its own; from step ``change`` on in the colour of ``kind``."""
    rng = np.random.default_rng(seed)
    steps = {}
    for camera in CHOICE.cameras:
        row, column = rng.integers(2, SIZE - 14, 2)
        images = np.full((STEPS, SIZE, SIZE, 3), 120, np.uint8)
        images[:, row : row + 12, column : column + 12] = (230, 30, 30)
        if kind:
            images[change:, row : row + 12, column : column + 12] = COLOURS[kind]
        steps[f"image/{camera}"] = images
    steps["action"] = np.zeros((STEPS, 7), np.float32)
    header = EpisodeHeader("squares", "red", "keep the square red", 0, seed, not kind)
    return Episode(header, steps)


def square_truth(kind: str = "", change: int = 0) -> Diagnosis:
    """What is true of :func:`square_episode`."""
    if not kind:
        return SUCCESS
    shift = 0.02 if kind == "turned_blue" else -0.02
    return Diagnosis(
        True,
        kind,
        change,
        change + 4,
        "keep it red",
        1 + change % 4,
        f"the square {kind.replace('_', ' ')}",
        "paint it red",
        (shift, 0, 0, 0, 0, 0, 1.0),
    )


#: Four failures and four successes, of the same length and in the same words.
KINDS = [(kind, change) for change in (12, 26) for kind in TYPES] + [("", 0)] * 4


def squares() -> tuple[list[Episode], list[Diagnosis]]:
    """Eight episodes and what is true of them."""
    episodes = [square_episode(i, *kind) for i, kind in enumerate(KINDS)]
    return episodes, [square_truth(*kind) for kind in KINDS]


def examples(model: DiagnosisModel) -> list[Example]:
    """The eight episodes as the model is shown them."""
    return [
        Example(model.question(episode), truth.text)
        for episode, truth in zip(*squares(), strict=True)
    ]


def small_model(choice: FrameChoice = CHOICE, seed: int = 0) -> DiagnosisModel:
    """An untrained model of the class that ships."""
    episodes, truths = squares()
    texts = [truth.text for truth in truths]
    for episode in episodes:
        texts += [part.get("text", "") for part in ask(episode, choice).content]
    return build(texts, TYPES, choice=choice, size=TINY, seed=seed)
