"""What is true at every moment of a clip, as far as the store knows it: teachers for the encoder.

One answer an episode is little to learn from: there are a few thousand episodes and only a few
hundred scenes. But of every moment the store knows where the hand is and how it is turned, how far
its fingers are open, where the thing lies that it is to take and where it shall go, how far the
task has come, and whether it has gone wrong by then. An encoder that can tell all that from the
pictures has what a diagnosis needs, and has it from a hundred thousand pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.diagnose.dataset import Clip
from regrasp.relabel.diagnose.labels import CLASSES, VISIBLE
from regrasp.relabel.diagnose.pictures import moments

#: Entries of :attr:`Dense.measures`: name -> how many. Positions in metres: of the hand in the
#: world, of the thing from the hand, of where it shall go from the hand.
MEASURES = {"hand": 3, "turned": 6, "fingers": 2, "thing": 3, "goal": 3, "progress": 1}

#: Phases of :class:`regrasp.sim.experts.base.Phase`.
PHASES = 14

#: Where nothing is known: left out of every loss.
UNKNOWN = -1

_KEYS = ("state", "points", "progress", "success", "phase")


@dataclass(frozen=True)
class Dense:
    """Truths of clips at their moments; ``N`` clips, ``M`` moments of :func:`moments` each.

    Attributes:
        measures: float32 ``[N, M, 18]``, see :data:`MEASURES`; orientation as the first two columns
            of its matrix.
        success: whether the goal holds, int64 ``[N, M]``.
        phase: int64 ``[N, M]``.
        wrong: whether it has gone wrong by then and is not being mended, int64 ``[N, M]``; unknown
            while it is mended.
        kind: index in :data:`CLASSES` of what has gone wrong, one more than the last where nothing
            has; unknown where ``wrong`` is.
    """

    measures: np.ndarray
    success: np.ndarray
    phase: np.ndarray
    wrong: np.ndarray
    kind: np.ndarray


def dense_of(clips: Sequence[Clip], frames: int) -> Dense:
    """Read the truths of clips.

    Args:
        clips: of stores made by ``regrasp failures generate``.
        frames: of the :class:`FrameChoice`.

    Raises:
        ValueError: a store lacks what is read.
    """
    count = 2 * frames - 1
    arrays = {name: np.zeros((len(clips), count), np.int64) for name in ("success", "phase")}
    wrong = np.zeros((len(clips), count), np.int64)
    kind = np.full((len(clips), count), len(CLASSES), np.int64)
    measures = np.zeros((len(clips), count, sum(MEASURES.values())), np.float32)
    stores = {path: EpisodeStore.open(path) for path in {clip.store for clip in clips}}
    for path, store in stores.items():
        missing = sorted(set(_KEYS) - set(store.steps))
        if missing:
            raise ValueError(f"dense_of: {path} has no {missing}; it was made by an older version")
    # All of it is small beside the pictures, and reading it in pieces takes minutes.
    known = {
        path: {key: store.steps[key].read(0, store.num_steps) for key in _KEYS}
        for path, store in stores.items()
    }
    names = list(CLASSES)
    for i, clip in enumerate(clips):
        store = stores[clip.store]
        shown = moments(clip.length, frames)
        rows = np.array([store.bounds(e)[0] + row for e, row in clip.rows(shown)])
        read = {key: array[rows] for key, array in known[clip.store].items()}
        measures[i] = _measures(read)
        for name, array in arrays.items():
            array[i] = read[name]
        effect, turn, of = _failure(store, clip)
        if effect is not None:
            after = shown >= effect
            wrong[i, after] = 1
            kind[i, after] = names.index(VISIBLE[of])
            mended = shown >= turn
            wrong[i, mended] = kind[i, mended] = UNKNOWN
            if clip.role == "recovery":
                # The end of a recovery is a success like any other.
                wrong[i, -1], kind[i, -1] = 0, len(CLASSES)
    return Dense(measures, arrays["success"], arrays["phase"], wrong, kind)


def _measures(read: dict[str, np.ndarray]) -> np.ndarray:
    """Rows of :attr:`Dense.measures`, ``[M, 18]``."""
    state, points = read["state"].astype(np.float64), read["points"].astype(np.float64)
    hand = state[:, :3]
    columns = _matrices(state[:, 3:6])[:, :, :2].reshape(len(state), 6)
    parts = (hand, columns, state[:, 6:8], points[:, :3] - hand, points[:, 3:] - hand)
    return np.concatenate([*parts, read["progress"][:, None]], axis=1).astype(np.float32)


def _matrices(turns: np.ndarray) -> np.ndarray:
    """Axis-angle ``[N, 3]`` as matrices ``[N, 3, 3]`` (Rodrigues)."""
    angle = np.linalg.norm(turns, axis=1)[:, None, None]
    axis = turns / np.maximum(angle[:, 0], 1e-9)
    cross = np.zeros((len(turns), 3, 3))
    cross[:, [0, 1, 2], [1, 2, 0]] = -axis[:, [2, 0, 1]]
    cross[:, [1, 2, 0], [0, 1, 2]] = axis[:, [2, 0, 1]]
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)


def _failure(store: EpisodeStore, clip: Clip) -> tuple[int | None, int, str]:
    """When a clip's failure shows (None: never), when its mending begins, and its type."""
    extra = store.headers[clip.parts[0].episode].extra
    if extra.get("role") != "failure":
        return None, clip.length, ""
    turn = clip.parts[0].stop if clip.role == "recovery" else clip.length
    return min(extra["first_effect_step"], extra["predicate_fail_step"]), turn, extra["type"]
