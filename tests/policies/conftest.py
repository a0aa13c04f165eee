"""A toy world seen by LIBERO's own camera: coloured balls, and an instruction that names one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader, Observation
from regrasp.policies.keypoints import label_pixels
from regrasp.policies.vla import VLAConfig

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220)}
SIZE = 64

#: A network small enough that a test can train it.
TINY = VLAConfig(
    image_size=SIZE, chunk=4, width=(16, 32), blocks=(1, 1), keypoints=4, dim=64, layers=2
)


def picture(points: np.ndarray, state: np.ndarray, camera: int) -> np.ndarray:
    """Balls at world points ``[3, 3]`` (red, green, blue) as a camera sees them."""
    image = np.full((SIZE, SIZE, 3), 120, np.uint8)
    pixels = label_pixels("libero_object", ("agentview", "wrist"), points[None], state[None])
    y, x = np.mgrid[:SIZE, :SIZE]
    for (u, v), colour in zip(pixels[0, camera], COLOURS.values(), strict=True):
        if np.isfinite(u):
            centre = (np.array([u, v]) + 1) * SIZE / 2 - 0.5
            image[(x - centre[0]) ** 2 + (y - centre[1]) ** 2 < 9] = colour
    return image


def toy_episode(rng: np.random.Generator, steps: int = 12) -> Episode:
    """Reach for the ball that the instruction names, with a proportional controller."""
    names = list(COLOURS)
    goal = int(rng.integers(3))
    points = np.zeros((3, 3), np.float32)
    points[:, :2] = rng.uniform(-0.2, 0.2, (3, 2))
    state = np.array([-0.1, 0.0, 0.25, 3.14, 0, 0, 0.04, -0.04], np.float32)
    rows: dict[str, list] = {}
    for _ in range(steps):
        error = points[goal] - state[:3]
        action = np.zeros(7, np.float32)
        action[:3] = np.clip(error * 10, -1, 1)
        action[6] = 1.0 if np.linalg.norm(error) < 0.05 else -1.0
        row = {f"image/{c}": picture(points, state, i) for i, c in enumerate(TINY.cameras)}
        row |= {"state": state.copy(), "action": action, "phase": np.int64(action[6] > 0)}
        row["aux"] = np.concatenate([points[goal], points[(goal + 1) % 3], state[:3]])
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
        state[:3] += 0.05 * action[:3]
    header = EpisodeHeader(
        "libero_object", names[goal], f"reach for the {names[goal]} ball", 0, 0, True
    )
    return Episode(header, {key: np.stack(values) for key, values in rows.items()})


@pytest.fixture(scope="session")
def toy_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 toy episodes."""
    path = tmp_path_factory.mktemp("toy") / "store"
    store = EpisodeStore.create(path)
    rng = np.random.default_rng(0)
    for _ in range(100):
        store.append(toy_episode(rng))
    return path


@pytest.fixture
def toy_observation() -> Observation:
    """The first moment of a toy episode."""
    episode = toy_episode(np.random.default_rng(5))
    images = {c: episode.steps[f"image/{c}"][0] for c in TINY.cameras}
    return Observation(images, episode.steps["state"][0], episode.header.instruction)


@pytest.fixture(scope="session")
def tiny() -> VLAConfig:
    """Sizes of a network that a test can train."""
    return TINY
