"""`regrasp bench store`: random training windows from our store and from LeRobotDataset.

Both hold the same episodes on the same disk and answer the same draws: two cameras and the state at
step t, actions t .. t + horizon - 1, in batches, timed in turns within one run. Both read warm
files, as training does after its first epoch, and both hand out uint8 pictures.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from regrasp.episodes.reader import WindowReader
from regrasp.episodes.results import Figure, bootstrap, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from rich.console import Console
from rich.table import Table

#: What is compared: name -> what it reads.
SIDES = {
    "store": "ours, from disk, one thread",
    "store_two_threads": "ours, from disk, two prefetching threads",
    "store_in_memory": "ours, decompressed in memory, one thread",
    "lerobot": "LeRobotDataset, video (its default), in process",
    "lerobot_two_workers": "LeRobotDataset, video, DataLoader with two worker processes",
    "lerobot_png": "LeRobotDataset, PNG in parquet, in process",
}


@dataclass(frozen=True)
class Args:
    """Measure the store against LeRobotDataset on the same episodes.

    Attributes:
        store: an episode store to measure on; default: synthetic episodes.
        episodes: episodes to make, or to take from the given store.
        steps: control steps of a synthetic episode.
        horizon: actions in a window.
        batch: windows in a batch.
        rounds: turns each side gets.
        round_batches: batches a slow side reads in one turn; fast sides read ten times as many.
        seed: of the synthetic episodes and the draws.
        results: directory for ``bench_store.json``.
    """

    store: Path | None = None
    episodes: int = 12
    steps: int = 150
    horizon: int = 16
    batch: int = 32
    rounds: int = 8
    round_batches: int = 3
    seed: int = 0
    results: Path = Path("docs/results")


def main(args: Args) -> None:
    """Run the comparison, print it and write ``bench_store.json``."""
    os.environ.setdefault("SVT_LOG", "1")  # or the video encoder prints a page an episode
    import av
    import datasets
    from regrasp.episodes.lerobot import export_lerobot

    av.logging.set_level(av.logging.ERROR)
    datasets.disable_progress_bars()
    scratch = Path(tempfile.mkdtemp(prefix="regrasp_bench_"))
    try:
        store = EpisodeStore.create(scratch / "store")
        source = EpisodeStore.open(args.store) if args.store else None
        count = min(args.episodes, len(source)) if source else args.episodes
        append_seconds = 0.0
        for i in range(count):
            episode = source[i] if source else synthetic_episode(args.seed + i, args.steps)
            start = time.perf_counter()
            store.append(_only_training_keys(episode))
            append_seconds += time.perf_counter() - start
        video = export_lerobot(store, scratch / "video", progress=True)
        png = export_lerobot(store, scratch / "png", use_videos=False, progress=True)
        rates = _measure(args, store, video, png)
        bytes_per_step = {
            "store": _size(scratch / "store") / store.num_steps,
            "lerobot": _size(video) / store.num_steps,
            "lerobot_png": _size(png) / store.num_steps,
        }
    finally:
        shutil.rmtree(scratch)
    figures = {name: Figure.mean(values, "windows/s") for name, values in rates.items()}
    figures |= {
        "windows_ratio": _ratio(rates["store"], rates["lerobot"]),
        "windows_ratio_two_workers": _ratio(
            rates["store_two_threads"], rates["lerobot_two_workers"]
        ),
        "windows_ratio_png": _ratio(rates["store"], rates["lerobot_png"]),
        "windows_ratio_in_memory": _ratio(rates["store_in_memory"], rates["lerobot"]),
        "append": Figure(count / append_seconds, n=count, unit="episodes/s"),
    }
    for name, value in bytes_per_step.items():
        figures[f"{name}_bytes"] = Figure(value, unit="bytes/step on disk")
    protocol = {
        "episodes": "given store" if args.store else "synthetic",
        "count": count,
        "steps": store.num_steps,
        "cameras": {k: list(a.row_shape) for k, a in store.steps.items() if k.startswith("image/")},
        "horizon": args.horizon,
        "history": 1,
        "batch": args.batch,
        "rounds": args.rounds,
        "cache": "warm",
        "sides": SIDES,
    }
    path = write_result("bench_store", _command(args), protocol, [args.seed], figures, args.results)
    _report(figures, path)


def synthetic_episode(seed: int, steps: int, size: int = 128) -> Episode:
    """An episode that compresses like a simulated one.

    ``image/agentview``: a still textured scene in which a textured arm and an object move.
    ``image/wrist``: a camera that pans over a textured table, so that every pixel changes.
    """
    rng = np.random.default_rng(seed)
    time_axis = np.arange(steps) / 20

    def texture(height: int, width: int) -> np.ndarray:
        """Grain on top of smooth shading, uint8 ``[height, width, 3]``."""
        y, x = np.mgrid[0:height, 0:width] / size
        a, b, c = rng.uniform(1, 4, 3)
        shade = 128 + 60 * np.sin(a * x + b * y) * np.cos(c * y)
        grain = np.repeat(np.repeat(rng.normal(0, 6, (height // 2, width // 2)), 2, 0), 2, 1)
        tint = rng.uniform(0.7, 1.1, 3)
        return np.clip((shade + grain)[..., None] * tint, 0, 255).astype(np.uint8)

    def path() -> np.ndarray:
        """A smooth walk within [0, 1], ``[steps]``."""
        f, g, p, q = rng.uniform(0.2, 0.9, 4)
        return 0.5 + 0.25 * np.sin(6 * f * time_axis + 6 * p) + 0.2 * np.sin(6 * g * time_axis + q)

    scene, arm, item = texture(size, size), texture(72, 32), texture(16, 16)
    table = texture(2 * size, 2 * size)
    agentview = np.repeat(scene[None], steps, axis=0)
    wrist = np.empty_like(agentview)
    moves = np.stack([path() for _ in range(4)], axis=1)
    for t, (u, v, w, z) in enumerate(moves):
        for picture, a, b in ((arm, u, v), (item, w, z)):
            row = int(a * (size - picture.shape[0]))
            column = int(b * (size - picture.shape[1]))
            agentview[t, row : row + picture.shape[0], column : column + picture.shape[1]] = picture
        row, column = int(u * size), int(v * size)
        wrist[t] = table[row : row + size, column : column + size]
    state = np.concatenate([moves, moves], axis=1).astype(np.float32)
    action = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    header = EpisodeHeader(
        "synthetic", f"task_{seed % 10}", f"move object {seed % 10}", 0, seed, True
    )
    return Episode(
        header,
        {"image/agentview": agentview, "image/wrist": wrist, "state": state, "action": action},
    )


def _only_training_keys(episode: Episode) -> Episode:
    keys = [k for k in episode.steps if k.startswith("image/") or k in ("state", "action")]
    return Episode(episode.header, {key: episode.steps[key] for key in keys})


def _measure(args: Args, store: EpisodeStore, video: Path, png: Path) -> dict[str, list[float]]:
    """Windows a second of every side, one value a round; the sides take turns."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torch.utils.data import DataLoader

    ahead = {"action": [h / store.control_hz for h in range(args.horizon)]}
    lerobot = {
        root: LeRobotDataset(
            "regrasp/episodes", root=root, delta_timestamps=ahead, return_uint8=True
        )
        for root in (video, png)
    }
    disk = WindowReader(store, horizon=args.horizon)
    memory = WindowReader(store, horizon=args.horizon, in_memory=True)

    def ours(reader: WindowReader) -> Callable[[np.ndarray], None]:
        def run(draws: np.ndarray) -> None:
            for windows in draws:
                reader.gather(windows)

        return run

    def ours_threaded(draws: np.ndarray) -> None:
        stream = disk.batches(args.batch, int(draws[0, 0]), workers=2)
        for _ in draws:
            next(stream)
        stream.close()

    def theirs(root: Path) -> Callable[[np.ndarray], None]:
        def run(draws: np.ndarray) -> None:
            for windows in draws:
                torch.utils.data.default_collate([lerobot[root][int(i)] for i in windows])

        return run

    # Spawned workers: forked ones would share open video files with this process. They persist,
    # so that only the first, untimed turn pays for starting them.
    batches: list[list[int]] = []
    loader = DataLoader(
        lerobot[video],
        batch_sampler=batches,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )

    def theirs_workers(draws: np.ndarray) -> None:
        batches[:] = draws.tolist()
        for _ in loader:
            pass

    sides: dict[str, Callable[[np.ndarray], None]] = {
        "store": ours(disk),
        "lerobot": theirs(video),
        "store_two_threads": ours_threaded,
        "lerobot_two_workers": theirs_workers,
        "store_in_memory": ours(memory),
        "lerobot_png": theirs(png),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    rng = np.random.default_rng(args.seed)
    for turn in range(args.rounds + 1):
        draws = rng.integers(store.num_steps, size=(10 * args.round_batches, args.batch))
        for name, run in sides.items():
            chosen = draws if name.startswith("store") else draws[: args.round_batches]
            begin = time.perf_counter()
            run(chosen)
            seconds = time.perf_counter() - begin
            if turn:  # the first turn warms caches and decoders
                rates[name].append(chosen.size / seconds)
    return rates


def _ratio(ours: list[float], theirs: list[float]) -> Figure:
    """Ratio of the mean rates; the interval resamples the rounds, whose pairs share a moment."""
    logs = np.log(np.array(ours) / np.array(theirs))
    low, high = bootstrap(logs)
    return Figure(
        float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(logs), "ratio"
    )


def _command(args: Args) -> str:
    """The command with every option that is not the default; of absolute paths the last part."""
    words = ["regrasp bench store"]
    for field in fields(args):
        value = getattr(args, field.name)
        if value != field.default and field.name != "results":
            shown = value.name if isinstance(value, Path) and value.is_absolute() else value
            words.append(f"--{field.name.replace('_', '-')} {shown}")
    return " ".join(words)


def _size(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def _report(figures: dict[str, Figure], path: Path) -> None:
    table = Table("figure", "value", "95 % interval", "unit")
    for name, figure in figures.items():
        interval = "" if figure.low is None else f"{figure.low:,.1f} to {figure.high:,.1f}"
        table.add_row(name, f"{figure.value:,.1f}", interval, figure.unit)
    console = Console()
    console.print(table)
    console.print(f"written to {path}")
