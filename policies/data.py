"""Batches for behaviour cloning: windows of one or several stores, augmented, ready as tensors.

Batch k depends on ``(seed, k)`` alone, so a training run that was killed and resumed sees what it
would have seen. Reading and augmenting run in a thread beside the training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.reader import WindowReader
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import EpisodeHeader
from regrasp.policies.keypoints import label_pixels
from regrasp.policies.text import embed_batch
from regrasp.policies.trunk import prepare_image
from regrasp.policies.vla import Inputs, Labels, VLAConfig


@dataclass(frozen=True)
class Augmentation:
    """Image augmentation of one training batch.

    Attributes:
        shift: largest shift, pixels, of each picture on its own. Keypoints are reported in the
            coordinates before the shift, so positions stay true to the millimetre.
        gain: largest relative change of contrast, common to the channels.
        tint: largest relative change of one channel.
        offset: largest change of brightness, in half ranges.
    """

    shift: int = 4
    gain: float = 0.15
    tint: float = 0.05
    offset: float = 0.1


NO_AUGMENTATION = Augmentation(0, 0.0, 0.0, 0.0)


class Windows:
    """Training windows of several stores, each drawn in proportion to its weight.

    Attributes:
        readers: one :class:`~regrasp.episodes.reader.WindowReader` a store.
        weights: share of each in a batch, summing to 1.
        label: what the actions are labels of, ``expert_action`` where all stores have it.
    """

    def __init__(
        self,
        stores: Sequence[str | Path],
        config: VLAConfig,
        *,
        weights: Sequence[float] | None = None,
        validation: bool = False,
        validation_every: int = 25,
        memory_gb: float = 8.0,
    ) -> None:
        """Open the stores.

        Args:
            stores: folders of episode stores.
            config: sizes of the network, for the cameras and the chunk.
            weights: one a store; default: its number of windows.
            validation: read the held-out episodes (every ``validation_every``-th) and not the rest.
            validation_every: see above; the first episode held out is number ``every - 1``.
            memory_gb: hold a store's pictures in memory while all together stay below this.

        Raises:
            ValueError: where weights do not fit the stores or nothing is left to read.
            KeyError: where a store lacks a camera, the state or the actions.
        """
        if weights is not None and (len(weights) != len(stores) or min(weights) <= 0):
            raise ValueError(f"weights: {list(weights)}; one above 0 for each of {len(stores)}")
        self.config = config
        self.readers: list[WindowReader] = []
        self.suites: list[str] = []
        self._label_keys: list[str] = []
        left = memory_gb * 1e9
        for path in stores:
            store = EpisodeStore.open(path)
            chosen = [
                i
                for i in range(len(store))
                if (i % validation_every == validation_every - 1) == validation
            ]
            if not chosen:
                continue
            keys = [f"image/{camera}" for camera in config.cameras] + ["state"]
            keys += [key for key in ("aux", "phase", "expert_chunk") if key in store.steps]
            label = label_key(store)
            actions: tuple[str, ...] = () if label == "expert_chunk" else (label,)
            if "segment" in store.steps:
                actions += ("segment",)
            bounds = [store.bounds(i) for i in chosen]
            size = sum(b - a for a, b in bounds) * 3 * config.image_size**2 * len(config.cameras)
            reader = WindowReader(
                store,
                horizon=config.chunk,
                observation_keys=keys,
                action_keys=actions,
                episodes=chosen,
                in_memory=size <= left,
            )
            left -= size if size <= left else 0
            self.readers.append(reader)
            self._label_keys.append(label)
        if not self.readers:
            raise ValueError(
                f"stores: no {'validation' if validation else 'training'} episodes in "
                f"{[str(s) for s in stores]}; collect more, or lower validation_every"
            )
        if validation or weights is None:
            weights = [len(reader) for reader in self.readers]
        self.weights = np.array(weights, float) / np.sum(weights)

    def __len__(self) -> int:
        """Windows in all."""
        return sum(map(len, self.readers))

    @property
    def instructions(self) -> list[str]:
        """The distinct instructions, in order of appearance."""
        headers = (header for reader in self.readers for header in reader.headers)
        return list(dict.fromkeys(header.instruction for header in headers))

    def sample(self, batch: int, rng: np.random.Generator) -> list[dict[str, Any]]:
        """Raw windows, one dict a store that got any, with ``instruction`` and ``suite`` lists."""
        parts = []
        counts = rng.multinomial(batch, self.weights)
        for reader, label, count in zip(self.readers, self._label_keys, counts, strict=True):
            if count:
                part: dict[str, Any] = reader.sample(int(count), rng)
                part["label"] = part.pop(label)
                if label == "expert_chunk":
                    # Each step has a whole chunk of its own, and no other step's may follow it.
                    part["label"] = part["label"][:, -1]
                    part["mask"][:] = True
                if "segment" in part:
                    # Behind a disturbance the actions answer what this observation cannot show.
                    part["mask"] &= part["segment"] == part["segment"][:, :1]
                part["header"] = [reader.headers[i] for i in part["episode"]]
                parts.append(part)
        return parts

    def batch(
        self, size: int, rng: np.random.Generator, augmentation: Augmentation
    ) -> tuple[Inputs, Labels]:
        """One augmented batch as tensors."""
        parts = self.sample(size, rng)
        headers = [header for part in parts for header in part["header"]]
        state = np.concatenate([part["state"][:, -1] for part in parts]).astype(np.float32)
        cameras = len(self.config.cameras)
        pixel = 2.0 / self.config.image_size
        moves = rng.integers(-augmentation.shift, augmentation.shift + 1, (size, cameras, 2))
        images = []
        for i, camera in enumerate(self.config.cameras):
            frames = np.concatenate([part[f"image/{camera}"][:, -1] for part in parts])
            frames = torch.from_numpy(_shifted(frames, moves[:, i]))
            gain = 1 + rng.uniform(-1, 1, (size, 1)) * augmentation.gain
            gain = gain + rng.uniform(-1, 1, (size, 3)) * augmentation.tint
            offset = rng.uniform(-1, 1, (size, 1)) * augmentation.offset + np.zeros((1, 3))
            jitter = [torch.from_numpy(a.astype(np.float32)) for a in (gain, offset)]
            images.append(prepare_image(frames, *jitter))
        shift = moves.astype(np.float32) * pixel
        offsets, pixels, phase = self._auxiliary(parts, headers, state, shift)
        text = embed_batch([header.instruction for header in headers])
        inputs = Inputs(
            tuple(images),
            torch.from_numpy(state),
            torch.from_numpy(text.tokens),
            torch.from_numpy(text.mask),
            torch.from_numpy(text.index),
            torch.from_numpy(shift) if augmentation.shift else None,
        )
        action = np.concatenate([part["label"] for part in parts]).astype(np.float32)
        valid = np.concatenate([part["mask"] for part in parts])
        labels = Labels(torch.from_numpy(action), torch.from_numpy(valid), offsets, pixels, phase)
        return inputs, labels

    def _auxiliary(
        self,
        parts: Sequence[dict[str, Any]],
        headers: Sequence[EpisodeHeader],
        state: np.ndarray,
        shift: np.ndarray,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Offsets, pixels and phase; each None where no store of the batch has them."""
        size = len(state)
        points = np.full((size, 2, 3), np.nan, np.float32)
        phase = np.full(size, -100, np.int64)  # cross_entropy's ignored class
        row = 0
        for part in parts:
            rows = slice(row, row + len(part["mask"]))
            row = rows.stop
            if "aux" in part:
                points[rows] = part["aux"][:, -1, :6].reshape(-1, 2, 3)
            if "phase" in part:
                phase[rows] = part["phase"][:, -1].reshape(-1)
        pixels = np.full((size, len(self.config.cameras), 2, 2), np.nan, np.float32)
        suites = np.array([_known_cameras(header) for header in headers])
        for suite in np.unique(suites):
            own = suites == suite
            pixels[own] = label_pixels(suite, self.config.cameras, points[own], state[own])
        pixels -= shift[:, :, None]  # where they are in the picture as shown
        offsets = (points - state[:, None, :3]).reshape(size, 6)
        return (
            torch.from_numpy(offsets) if np.isfinite(points).any() else None,
            torch.from_numpy(pixels) if np.isfinite(pixels).any() else None,
            torch.from_numpy(phase) if (phase >= 0).any() else None,
        )

    def batches(
        self, size: int, seed: int, augmentation: Augmentation, *, start: int = 0, depth: int = 3
    ) -> Generator[tuple[Inputs, Labels, float], None, None]:
        """Endless batches prepared ahead in a thread, each with the seconds it was waited for."""

        def make(k: int) -> tuple[Inputs, Labels]:
            return self.batch(size, np.random.default_rng((seed, k)), augmentation)

        with ThreadPoolExecutor(1) as pool:
            ahead = deque(pool.submit(make, k) for k in range(start, start + depth))
            k = start + depth
            while True:
                began = time.perf_counter()
                inputs, labels = ahead.popleft().result()
                waited = time.perf_counter() - began
                ahead.append(pool.submit(make, k))
                k += 1
                yield inputs, labels, waited


def _known_cameras(header: EpisodeHeader) -> str:
    """The suite whose cameras an episode was seen by; empty where a perturbation moved them."""
    return "" if "camera" in header.perturbation.lower() else header.suite


def _shifted(frames: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Crops of edge-padded pictures: pixel (x, y) of the result was (x + dx, y + dy).

    Args:
        frames: uint8 ``[B, h, w, 3]``.
        moves: int ``[B, 2]``, (dx, dy) pixels.
    """
    if not moves.any():
        return frames
    height, width = frames.shape[1:3]
    rows = np.clip(np.arange(height) + moves[:, 1:2], 0, height - 1)
    columns = np.clip(np.arange(width) + moves[:, 0:1], 0, width - 1)
    out = np.empty_like(frames)
    for source, row, column, target in zip(frames, rows, columns, out, strict=True):
        np.take(source[row], column, axis=1, out=target)
    return out


def label_key(store: EpisodeStore) -> str:
    """The array that holds what to imitate: whole chunks, else the expert's, else the executed."""
    return next(k for k in ("expert_chunk", "expert_action", "action") if k in store.steps)
