"""Films of stored episodes, drawn afterwards from the recorded positions: no physics is rerun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.scripts._rollouts import Setup, run_protocol
from regrasp.scripts._summary import BASE, SUPERVISED, UNPERTURBED, Pair, alarmed
from regrasp.scripts.report import encode_video, video_path
from regrasp.sim.cache import LastEnv

#: Control steps between two frames, and frames a second: films run at the speed of the episode.
STRIDE, FPS = 2, 10.0


@dataclass(frozen=True)
class Film:
    """One film to make."""

    run: Path
    setup: Setup
    pair: str
    arm: str
    suite: str
    task: int
    size: int


def choose(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """Episodes worth seeing: harm first, then rescues and failures in turn over the kinds."""
    ranks = {"harmed": 0, "rescued": 1, "neither": 2, "both": 3}

    def interest(pair: Pair) -> int:
        if pair.kind == UNPERTURBED:
            return 2 if alarmed(pair.base) and pair.base.success else 5
        return ranks[pair.outcome] + (pair.outcome == "both" and not alarmed(pair.supervised))

    seen: dict[tuple[int, str], int] = {}
    order: list[tuple[float, int, Pair]] = []
    # In the order they were planned, which goes round the tasks.
    for pair in sorted(pairs, key=lambda pair: int(pair.id.rsplit("/", 1)[1])):
        key = (interest(pair), pair.kind)
        seen[key] = seen.get(key, 0) + 1
        # Every further episode of the same sort waits a little longer.
        order.append((key[0] + 0.7 * (seen[key] - 1), len(order), pair))
    return [pair for _, _, pair in sorted(order, key=lambda item: item[:2])[:count]]


def make_films(
    run: Path, setup: Setup, pairs: Sequence[Pair], size: int, workers: int
) -> Iterator[int]:
    """Draw what is missing of both arms of ``pairs``; yields how many films are done."""
    from regrasp.sim.workers import EpisodeError, run_episodes

    films = [
        Film(run, setup, p.id, arm, p.base.suite, p.base.extra["task_index"], size)
        for p in pairs
        for arm in (BASE, SUPERVISED)
        if not video_path(run, p.id, arm).exists()
    ]
    yield 2 * len(pairs) - len(films)
    for n, (index, result) in enumerate(
        run_episodes(films, draw, workers=workers, timeout_s=300.0, affinity=scene_of)
    ):
        if isinstance(result, EpisodeError):
            raise RuntimeError(f"film of {films[index].pair}: {result.reason}")
        yield 2 * len(pairs) - len(films) + n + 1


def scene_of(film: Film) -> tuple[str, int]:
    """Films of one scene go to one worker, which then builds the scene once."""
    return film.suite, film.task


_last_env = LastEnv()


def draw(film: Film) -> str:
    """Draw one film in a worker."""
    from regrasp.sim import LiberoEnv, get_task

    protocol = run_protocol(film.setup)
    env = _last_env.get(
        scene_of(film),
        lambda: LiberoEnv(get_task(film.suite, film.task), protocol.env_config(film.suite)),
    )
    store = EpisodeStore.open(film.setup.store)
    index = next(
        i
        for i, h in enumerate(store.headers)
        if h.extra["pair"] == film.pair and h.extra["arm"] == film.arm
    )
    episode = store.load(index, ["qpos"])
    frames = draw_frames(env, episode, protocol.seed, film.size)
    encode_video(video_path(film.run, film.pair, film.arm), frames, FPS)
    return film.pair


def draw_frames(env: Any, episode: Episode, seed: int, size: int) -> np.ndarray:
    """Frames uint8 ``[T / STRIDE, size, size, 3]`` of the front camera."""
    from regrasp.sim.env import CAMERAS
    from regrasp.sim.perturb import CameraShift, Scene, from_json
    from regrasp.sim.render import Renderer
    from regrasp.sim.transforms import rotate_180

    env.reset(options={"init_state": episode.header.init_state, "render": False}, seed=seed)
    shifts = [e for e in episode.header.extra["events"] if e["kind"] == CameraShift.kind]
    camera = CAMERAS["agentview"]
    renderer = Renderer(env.model, {camera: (size, size)}, env.config.mode)
    frames = []
    try:
        for step in range(0, len(episode), STRIDE):
            while shifts and shifts[0]["step"] <= step:
                event = shifts.pop(0)
                from_json(event["params"]).begin(Scene(env, None), event["drawn"])
            env.data.qpos[:] = episode.steps["qpos"][step][: env.model.nq]
            env.edited()
            frames.append(rotate_180(renderer.render(env.data)[camera]))
    finally:
        renderer.close()
    return np.stack(frames)
