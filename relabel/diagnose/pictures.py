"""The pictures of many clips in one file, small and ready, so that training never waits for them.

Each clip keeps its ``2 * frames - 1`` evenly spaced moments: those that are shown when the model is
asked, and the ones halfway between, among which training varies. A clip with 24 moments of two
cameras at 96 pixels takes 2.6 MB; the file is mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.diagnose.dataset import Clip
from regrasp.relabel.diagnose.frames import (
    FrameChoice,
    Question,
    choose_steps,
    pose,
    resize,
    to_moments,
)
from regrasp.relabel.diagnose.training import Example, shuffled


class Pictures:
    """Questions about clips, from a cache.

    Attributes:
        clips: what they are about.
        choice: what is shown.
    """

    def __init__(
        self,
        file: str | Path,
        clips: Sequence[Clip],
        choice: FrameChoice,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Open the cache of these clips, or make it; one that is of others is made anew.

        Args:
            file: its name ends in ``.npy``; a ``.json`` beside it says what it holds.
            clips: what questions are about.
            choice: what is shown; where it is blank, no file is made.
            report: called with clips done and all of them.
        """
        self.clips, self.choice = list(clips), choice
        self._images: np.ndarray | None = None
        if not choice.blank:
            self._images = _opened(Path(file), self.clips, choice, report)

    def __len__(self) -> int:
        return len(self.clips)

    def chosen(self, index: int, rng: np.random.Generator | None = None) -> np.ndarray:
        """Which of a clip's :func:`moments` are shown, int64 ``[frames]``, ascending.

        Args:
            index: of the clip; all have the same.
            rng: moves the inner ones by one at random, for training.
        """
        frames = self.choice.frames
        chosen = 2 * np.arange(frames)
        if rng is not None:
            chosen[1:-1] += rng.integers(-1, 2, frames - 2)
            chosen = np.sort(chosen)
        return chosen

    def question(self, index: int, rng: np.random.Generator | None = None) -> Question:
        """The question about clip ``index``; with ``rng``, inner moments vary, for training."""
        chosen = self.chosen(index, rng)
        images: tuple[np.ndarray, ...] = ()
        if self._images is not None:
            shown = self._images[index, chosen]
            images = tuple(shown.reshape(-1, *shown.shape[2:]))
        return self.pose(index, chosen, images)

    def pose(self, index: int, chosen: np.ndarray, images: tuple[np.ndarray, ...]) -> Question:
        """The question about clip ``index`` at ``chosen`` moments, with pictures or without."""
        clip = self.clips[index]
        steps = moments(clip.length, self.choice.frames)[chosen]
        return pose(clip.instruction, clip.length, steps, images, self.choice)

    def answer(self, index: int, steps: Sequence[int]) -> str:
        """The right answer about clip ``index`` in the words asked for."""
        text = self.clips[index].truth.text
        return to_moments(text, steps) if self.choice.count_by == "moment" else text

    @property
    def images(self) -> np.ndarray:
        """All pictures, uint8 ``[clips, moments, cameras, size, size, 3]``, mapped.

        Raises:
            ValueError: the choice is blank.
        """
        if self._images is None:
            raise ValueError("Pictures.images: the choice is blank; there are none")
        return self._images

    def examples(self, rows: Sequence[int], seed: int, start: int = 0) -> Iterator[Example]:
        """Training examples for ever: clips ``rows``, each epoch in another order.

        Args:
            rows: indices of clips; one that is named twice comes twice as often.
            seed: of orders and moments.
            start: how many to pass over.
        """
        for number, row in enumerate(shuffled(rows, seed, start), start):
            question = self.question(row, np.random.default_rng((seed, number)))
            yield Example(question, self.answer(row, question.steps))


def moments(length: int, frames: int) -> np.ndarray:
    """The control steps that a cache keeps of a clip, int64 ``[2 * frames - 1]``."""
    return choose_steps(length, 2 * frames - 1)


def _opened(
    file: Path, clips: list[Clip], choice: FrameChoice, report: Callable[[int, int], None]
) -> np.ndarray:
    """The mapped file, made if it is missing or of something else."""
    about = {
        "clips": len(clips),
        "choice": choice.to_json(),
        "digest": hashlib.sha256(json.dumps([asdict(c) for c in clips]).encode()).hexdigest(),
    }
    note = file.with_suffix(".json")
    if not (note.exists() and json.loads(note.read_text()) == about):
        note.unlink(missing_ok=True)  # the note is written last: with it, the file is whole
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another file in its place: who has mapped the old one goes on seeing that.
        part = file.with_name(f".part-{file.name}")
        _fill(part, clips, choice, report)
        part.replace(file)
        note.write_text(json.dumps(about))
    return np.load(file, mmap_mode="r")


def _fill(
    file: Path, clips: list[Clip], choice: FrameChoice, report: Callable[[int, int], None]
) -> None:
    """Write every clip's moments, ``[clips, moments, cameras, size, size, 3]``."""
    count, cameras, size = 2 * choice.frames - 1, choice.cameras, choice.size
    shape = (len(clips), count, len(cameras), size, size, 3)
    images = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
    stores = {path: EpisodeStore.open(path) for path in {clip.store for clip in clips}}
    # Clips of one episode one after the other: its pictures are read once.
    order = sorted(range(len(clips)), key=lambda i: (clips[i].store, clips[i].parts[0].episode))
    kept: dict[tuple[str, int], list[np.ndarray]] = {}
    for done, i in enumerate(order):
        clip = clips[i]
        needed = {(clip.store, part.episode) for part in clip.parts}
        kept = {key: value for key, value in kept.items() if key in needed}
        for key in needed - set(kept):
            kept[key] = _read(stores[clip.store], key[1], cameras)
        rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for m, (episode, row) in enumerate(clip.rows(moments(clip.length, choice.frames))):
            rows[episode].append((m, row))
        for episode, pairs in rows.items():
            where, which = [m for m, _ in pairs], [row for _, row in pairs]
            for c, frames in enumerate(kept[clip.store, episode]):
                images[i, where, c] = resize(frames[which], size)
        report(done + 1, len(clips))
    images.flush()


def _read(store: EpisodeStore, index: int, cameras: Sequence[str]) -> list[np.ndarray]:
    """One episode's pictures, uint8 ``[T, H, W, 3]`` a camera."""
    keys = [f"image/{camera}" for camera in cameras]
    episode = store.load(index, keys)
    return [episode.steps[key] for key in keys]
