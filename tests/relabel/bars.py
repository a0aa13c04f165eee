"""A world of one bright bar: how far right it stands is how far its task is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader

SIZE = 32
CAMERAS = ("agentview", "wrist")
#: Steps at which a nominal rollout comes to each stage, and at which it ends.
STAGES, END = (15, 25, 30, 45, 52), 62
SUITE = "bars"


def stairs(length: int, at: tuple[int, ...] = STAGES) -> np.ndarray:
    """Progress that rises by 0.2 at each of ``at``."""
    return np.sum([np.arange(length) >= step for step in at], axis=0).astype(np.float32) / 5


def episode(progress: np.ndarray, task: int, state: int, seed: int, **extra: object) -> Episode:
    """Pictures and arrays of one rollout; the bar moves on between stages as a hand would."""
    rng = np.random.default_rng([task, state, seed])
    length = len(progress)
    place = np.convolve(np.pad(progress, 4, mode="edge"), np.ones(9) / 9, mode="valid")
    ground = rng.integers(20, 80, 3)
    images = np.broadcast_to(ground, (length, SIZE, SIZE, 3)).astype(np.uint8)
    for t, x in enumerate(place):
        column = 2 + round(24 * float(x))
        images[t, :, column : column + 4] = 230
    state_array = np.zeros((length, 8), np.float32)
    state_array[:, 0] = 0.01 * np.arange(length)
    action = np.full((length, 7), 0.2, np.float32)
    steps = {f"image/{camera}": images for camera in CAMERAS}
    steps |= {
        "state": state_array,
        "action": action,
        "nominal_action": action,
        "phase": np.zeros(length, np.int64),
        "progress": progress.astype(np.float32),
        "success": progress == 1,
    }
    context = f"{SUITE}/{task}/{state}/{seed}"
    failed = extra["role"] == "failure"
    label = "pushed" if failed else ""
    header = EpisodeHeader(
        SUITE,
        str(task),
        f"move the bar to place {task}",
        state,
        seed,
        not failed,
        failure_label=label,
        extra={"context": context, **extra},
    )
    return Episode(header, steps)


def sample(task: int, state: int, seed: int) -> list[Episode]:
    """A nominal rollout, a failure of it, and the recovery from that."""
    rng = np.random.default_rng([7, task, state, seed])
    effect = int(rng.integers(27, 44))
    failed, back = effect + 3, effect + 12
    lost = stairs(END + 20)
    lost[failed:] = 0
    name = f"{SUITE}/{task}/{state}/{seed}/pushed/1"
    facts = {
        "sample": name,
        "injection_step": effect - 2,
        "first_effect_step": effect,
        "predicate_fail_step": failed,
        "recovery": {"from_step": back, "mends": True},
    }
    return [
        episode(stairs(END), task, state, seed, role="nominal"),
        episode(lost, task, state, seed, role="failure", **facts),
        episode(
            stairs(END - 10, (8, 15, 20, 35, 42)), task, state, seed, role="recovery", sample=name
        ),
    ]


def make_store(path: Path, tasks: int = 4, states: int = 4) -> EpisodeStore:
    """A store of failure samples, ``tasks`` times ``states`` of them."""
    store = EpisodeStore.create(path)
    for task in range(tasks):
        for state in range(states):
            for made in sample(task, state, 0):
                store.append(made)
    return store
