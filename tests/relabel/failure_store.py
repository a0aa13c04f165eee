"""A store like that of ``regrasp failures generate``, made of noise in no time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader

#: (task, initial state, types of its failures): two contexts to train on, and one of each held-out
#: kind.
CONTEXTS = (
    (0, 0, ("early_release", "offset_x", "carry_slip")),
    (1, 2, ("freeze", "wrong_object", "camera_dark")),
    (6, 0, ("early_release", "offset_y")),
    (0, 9, ("wrist_tilt", "shoved")),
    (2, 1, ("carry_slip", "obstacle", "weak_grip")),
)
NOMINAL, FAILURE, RECOVERY, TURN, SIZE = 40, 50, 30, 35, 24


def write_store(path: Path) -> Path:
    """Write it; every second failure has a way out."""
    store = EpisodeStore.create(path)
    for number, (task, state, kinds) in enumerate(CONTEXTS):
        context = f"libero_object/task_{task}/{state}/7"
        start = {"context": context, "driver": "expert", "task_index": task, "start": 0}
        store.append(_episode(number, state, NOMINAL, True, {"role": "nominal", **start}))
        for i, kind in enumerate(kinds):
            link = {**start, "sample": f"{context}/{kind}/0.5"}
            store.append(_failure(10 * number + i, state, kind, i % 2 == 0, link))
            if i % 2 == 0:
                link |= {"role": "recovery", "start": TURN}
                store.append(_episode(i, state, RECOVERY, True, link))
    return path


def _failure(seed: int, state: int, kind: str, mended: bool, link: dict) -> Episode:
    correction = {"delta": [0.01, -0.02, 0.05, 0.0, 0.0, 0.1, 1.0]} if mended else None
    extra = {
        **link,
        "role": "failure",
        "type": kind,
        "level": 2,
        "subtask": "pick and place the milk",
        "first_effect_step": 10 + seed % 5,
        "predicate_fail_step": 20 + seed % 7,
        "explanation": f"Something like {kind} happened.",
        "correction_text": "Move up." if mended else "Ask for help.",
        "correction": correction,
    }
    return _episode(seed, state, FAILURE, False, extra)


def _episode(seed: int, state: int, length: int, success: bool, extra: dict) -> Episode:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2, length, SIZE, SIZE, 3), dtype=np.uint8)
    steps = {f"image/{camera}": images[i] for i, camera in enumerate(("agentview", "wrist"))}
    steps |= {
        "state": rng.normal(size=(length, 8)).astype(np.float32),
        "points": rng.normal(size=(length, 6)).astype(np.float32),
        "progress": np.linspace(0, 1, length, dtype=np.float32),
        "phase": np.arange(length, dtype=np.int64) % 14,
        "success": np.arange(length) >= (length - 10 if success else length),
    }
    header = EpisodeHeader(
        "libero_object", "task", "pick up the milk", state, 7, success, extra=extra
    )
    return Episode(header, steps)
