"""Small deterministic episodes for the tests of the store and its exports."""

import numpy as np
from regrasp.episodes.types import Episode, EpisodeHeader


def make_episode(
    seed: int, *, steps: int | None = None, size: int = 32, chunks: bool = True
) -> Episode:
    """An episode whose every array follows from ``seed``; pictures are smooth, as video needs."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(5, 40)) if steps is None else steps
    y, x = np.mgrid[0:size, 0:size] / size
    phase = rng.random(2) * 6

    def video(speed: float) -> np.ndarray:
        t = np.arange(length)[:, None, None] * speed
        channels = [np.sin(3 * x + t + phase[0]), np.cos(3 * y - t + phase[1]), np.sin(x + y + t)]
        return (127 + 100 * np.stack(channels, axis=-1)).astype(np.uint8)

    every = 5
    count = -(-length // every)
    return Episode(
        header=EpisodeHeader(
            suite="libero_object",
            task=f"task_{seed % 3}",
            instruction=f"pick up object {seed % 3} and place it in the basket",
            init_state=seed % 50,
            seed=seed,
            success=bool(rng.random() < 0.5),
            perturbation="nudge",
            versions={"mujoco": "3.3.2"},
            interventions=[{"step": 3, "kind": "rewind"}],
            extra={"grasp_offset": [0.1, -0.2], "note": "umlaut ü"},
        ),
        steps={
            "image/agentview": video(0.05),
            "image/wrist": video(0.1),
            "state": rng.standard_normal((length, 8)).astype(np.float32),
            "action": rng.uniform(-1, 1, (length, 7)).astype(np.float32),
            "phase": rng.integers(0, 6, length),
            "success": np.arange(length) == length - 1,
        },
        chunks={
            "step": np.arange(0, length, every),
            "samples": rng.standard_normal((count, 2, 8, 7)).astype(np.float32),
            "embedding": rng.standard_normal((count, 16)).astype(np.float32),
        }
        if chunks
        else {},
    )


def assert_equal(a: Episode, b: Episode, *, skip: tuple[str, ...] = ()) -> None:
    """Headers, keys, dtypes and values equal; ``skip`` names step keys compared elsewhere."""
    assert a.header == b.header
    for kind in ("steps", "chunks"):
        left, right = getattr(a, kind), getattr(b, kind)
        assert set(left) == set(right), kind
        for key in set(left) - set(skip):
            assert left[key].dtype == right[key].dtype, key
            np.testing.assert_array_equal(left[key], right[key], err_msg=key)
