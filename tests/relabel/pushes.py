"""A world of two tasks in which one action decides: a square that is pushed reaches the side."""

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader

ROWS, STRIDE, SIZE = 5, 2, 16


def frame(x, task):
    picture = np.full((SIZE, SIZE, 3), 40 * task, np.uint8)
    picture[6:10, x : x + 4, 1] = 255
    return picture


def execution(task, context, severity, rng):
    """A push as hard as the severity is low; the goal is the right side."""
    success = severity < 0.5
    actions = np.zeros((ROWS, STRIDE, 7), np.float32)
    actions[:, :, 0] = (1.0 - severity) + rng.normal(0, 0.02, (ROWS, STRIDE))
    speed = 3 if success else 1
    places = [min(speed * row, 12) for row in range(ROWS)]
    pictures = np.stack([frame(x, task) for x in places])
    header = EpisodeHeader(
        "toy",
        f"push_{task}",
        "push the square",
        0,
        0,
        success,
        extra={
            "cell": f"{task}/{context}/{severity}",
            "context": f"{task}/{context}",
            "severity": severity,
        },
    )
    state = np.zeros((ROWS, 8), np.float32)
    state[:, 0] = places
    held = np.zeros(ROWS, bool)
    held[-2:] = success
    steps = {"image/agentview": pictures, "image/wrist": pictures, "state": state}
    return Episode(header, {**steps, "action": actions, "success": held})


def fill(path, contexts=6):
    """A store of two tasks with some beginnings each, every one with three ways on."""
    store, rng = EpisodeStore.create(path), np.random.default_rng(0)
    for task in range(2):
        for context in range(contexts):
            for severity in (0.0, 0.2, 0.8, 1.0):
                store.append(execution(task, context, severity, rng))
    return EpisodeStore.open(path)
