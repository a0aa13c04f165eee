"""Export to and import from LeRobotDataset v3, through lerobot's own reader and writer.

An exported store is an ordinary LeRobotDataset: ``observation.images.<camera>``,
``observation.state``, ``action``, every other step array under its own name, the instruction as
the task. What that format has no place for (headers, arrays per inference, exact shapes and
dtypes) lies beside it in ``meta/regrasp/``, which lerobot ignores; with it the import gives back
the store, but for what the video encoder changed.

Source: LeRobotDataset v3.0, lerobot 0.6.1, ``lerobot/datasets/lerobot_dataset.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track

from .store import EpisodeStore
from .types import Episode, EpisodeHeader

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

SIDECAR = Path("meta") / "regrasp"
#: Columns lerobot writes itself.
RESERVED = ("timestamp", "frame_index", "episode_index", "index", "task_index", "task")


def export_lerobot(
    store: EpisodeStore,
    root: str | Path,
    *,
    repo_id: str = "regrasp/episodes",
    use_videos: bool = True,
    episodes: Sequence[int] | None = None,
    progress: bool = False,
) -> Path:
    """Write a store as a LeRobotDataset at the control rate.

    Args:
        store: what to export.
        root: directory to make; must not exist.
        repo_id: the dataset's name, ``owner/name``; nothing is uploaded.
        use_videos: pictures as video (lossy, small) or as PNG in parquet (exact, large).
        episodes: indices to export, in this order; default: all.
        progress: show a progress bar.

    Returns:
        ``root``.

    Raises:
        ValueError: for an empty selection, a control rate that is no whole number (the format's
            ``fps``), or a key that lerobot reserves.
        ImportError: without lerobot.
    """
    dataset_class = _lerobot()
    chosen = list(range(len(store))) if episodes is None else list(episodes)
    if not chosen:
        raise ValueError(f"export_lerobot: no episodes of {store.path} to export")
    if store.control_hz != round(store.control_hz):
        raise ValueError(
            f"export_lerobot: control_hz={store.control_hz}; LeRobot's fps must be a whole number"
        )
    layout = {
        key: {
            "feature": _feature_name(key),
            "dtype": array.dtype.str,
            "row_shape": list(array.row_shape),
        }
        for key, array in store.steps.items()
    }
    features = {
        entry["feature"]: _feature(key, entry, use_videos, store.attrs)
        for key, entry in layout.items()
    }
    if len(features) < len(layout) or set(features) & set(RESERVED):
        raise ValueError(
            f"export_lerobot: step arrays {sorted(layout)} become features {sorted(features)}; "
            f"rename those that collide with each other or with {RESERVED}"
        )
    root = Path(root)
    dataset = dataset_class.create(
        repo_id=repo_id,
        fps=round(store.control_hz),
        features=features,
        root=root,
        robot_type=store.attrs.get("robot_type", "panda"),
        use_videos=use_videos,
    )
    chunk_ends: list[int] = []
    chunk_rows: dict[str, list[np.ndarray]] = {key: [] for key in store.chunks}
    headers = []
    for index in track(chosen, "exporting", disable=not progress):
        episode = store[index]
        headers.append(episode.header.to_json())
        columns = {
            layout[key]["feature"]: rows.reshape(
                len(rows), *features[layout[key]["feature"]]["shape"]
            )
            for key, rows in episode.steps.items()
        }
        for t in range(len(episode)):
            frame: dict[str, Any] = {name: rows[t] for name, rows in columns.items()}
            dataset.add_frame({**frame, "task": episode.header.instruction})
        # One process: the encoder is threaded, and forking under loaded threads can deadlock.
        dataset.save_episode(parallel_encoding=False)
        count = len(next(iter(episode.chunks.values()))) if episode.chunks else 0
        chunk_ends.append((chunk_ends[-1] if chunk_ends else 0) + count)
        for key, rows in episode.chunks.items():
            chunk_rows[key].append(rows)
    dataset.finalize()  # without it the last parquet files lack their footers

    sidecar = root / SIDECAR
    sidecar.mkdir()
    (sidecar / "layout.json").write_text(json.dumps({"steps": layout, "attrs": store.attrs}))
    (sidecar / "headers.jsonl").write_text("".join(json.dumps(h) + "\n" for h in headers))
    arrays = {f"chunks/{k}": np.concatenate(v) for k, v in chunk_rows.items() if v}
    np.savez(sidecar / "chunks.npz", chunk_ends=np.array(chunk_ends, np.int64), **arrays)
    return root


def import_lerobot(
    root: str | Path,
    path: str | Path,
    *,
    repo_id: str = "regrasp/episodes",
    suite: str = "lerobot",
    success: bool = True,
    progress: bool = False,
) -> EpisodeStore:
    """Read a local LeRobotDataset into a new store.

    Args:
        root: the dataset's directory.
        path: directory of the store to make.
        repo_id: the dataset's name; nothing is downloaded.
        suite: header's suite, where the dataset was not exported by :func:`export_lerobot`.
        success: header's success likewise, unless the dataset has a ``next.success`` column.
        progress: show a progress bar.

    Returns:
        The store. For foreign datasets every numeric and image feature becomes a step array
        (``observation.images.x`` -> ``image/x``, ``observation.state`` -> ``state``); text and
        depth features are listed in ``store.attrs["skipped"]``.

    Raises:
        FileNotFoundError: where no dataset lies.
        ImportError: without lerobot.
    """
    root = Path(root)
    if not (root / "meta" / "info.json").exists():
        raise FileNotFoundError(f"no LeRobotDataset at {root}: meta/info.json is missing")
    dataset = _lerobot()(repo_id, root=root)
    features = dataset.meta.features
    sidecar = root / SIDECAR
    chunks: dict[str, np.ndarray] = {}
    if sidecar.exists():
        record = json.loads((sidecar / "layout.json").read_text())
        layout, attrs = record["steps"], record["attrs"]
        lines = (sidecar / "headers.jsonl").read_text().splitlines()
        headers = [EpisodeHeader.from_json(json.loads(line)) for line in lines]
        with np.load(sidecar / "chunks.npz") as archive:
            chunks = {key: archive[key] for key in archive.files}
    else:
        layout, skipped = _foreign_layout(dataset)
        attrs = {"skipped": skipped, "robot_type": dataset.meta.robot_type}
        headers = []
    store = EpisodeStore.create(path, control_hz=dataset.fps, attrs=attrs)
    table = dataset.hf_dataset.with_format(None)
    for index in track(range(dataset.num_episodes), "importing", disable=not progress):
        info = dataset.meta.episodes[index]
        start, stop = info["dataset_from_index"], info["dataset_to_index"]
        rows = table[start:stop]
        steps = {}
        for key, entry in layout.items():
            name = entry["feature"]
            if features[name]["dtype"] == "video":
                values = _video(dataset, index, name, rows["timestamp"])
            else:
                values = np.asarray([np.asarray(value) for value in rows[name]])
            steps[key] = values.reshape(stop - start, *entry["row_shape"]).astype(entry["dtype"])
        if sidecar.exists():
            header = headers[index]
            ends = chunks["chunk_ends"]
            first, last = (int(ends[index - 1]) if index else 0), int(ends[index])
        else:
            header = _foreign_header(info, index, rows, suite, success)
            first = last = 0
        per_inference = {
            key.removeprefix("chunks/"): value[first:last]
            for key, value in chunks.items()
            if key != "chunk_ends" and last > first
        }
        store.append(Episode(header, steps, per_inference))
    return store


def _lerobot() -> type[LeRobotDataset]:
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError as error:
        raise ImportError(
            "lerobot is needed to read and write LeRobotDataset: pip install 'regrasp[train]'"
        ) from error
    return LeRobotDataset


def _feature_name(key: str) -> str:
    if key.startswith("image/"):
        return "observation.images." + key.removeprefix("image/").replace("/", ".")
    return "observation.state" if key == "state" else key.replace("/", ".")


def _feature(key: str, entry: dict, use_videos: bool, attrs: dict) -> dict[str, Any]:
    """LeRobot's description of one step array; a scalar a step has shape (1,) there."""
    shape = tuple(entry["row_shape"]) or (1,)
    if key.startswith("image/"):
        names: Any = ["height", "width", "channels"]
        return {"dtype": "video" if use_videos else "image", "shape": shape, "names": names}
    names = attrs.get(f"{key}_names")
    return {"dtype": np.dtype(entry["dtype"]).name, "shape": shape, "names": names}


def _video(
    dataset: LeRobotDataset, index: int, name: str, timestamps: Sequence[float]
) -> np.ndarray:
    """All frames of one episode's video, uint8 ``[T, H, W, 3]``."""
    from lerobot.datasets.video_utils import decode_video_frames

    offset = dataset.meta.episodes[index][f"videos/{name}/from_timestamp"]
    frames = decode_video_frames(
        dataset.root / dataset.meta.get_video_file_path(index, name),
        [offset + t for t in timestamps],
        dataset.tolerance_s,
        return_uint8=True,
    )
    return frames.permute(0, 2, 3, 1).numpy()


def _foreign_layout(dataset: LeRobotDataset) -> tuple[dict[str, dict], list[str]]:
    """Step arrays of a dataset that regrasp did not write, and the features left out."""
    layout: dict[str, dict] = {}
    skipped = []
    for name, feature in dataset.meta.features.items():
        if name in RESERVED:
            continue
        dtype, shape = feature["dtype"], list(feature["shape"])
        if name in dataset.meta.depth_keys or dtype in ("string", "language"):
            skipped.append(name)
        elif dtype in ("video", "image"):
            camera = name.removeprefix("observation.").removeprefix("images.").replace(".", "/")
            if feature["names"] and feature["names"][0] in ("channel", "channels"):
                shape = [shape[1], shape[2], shape[0]]
            layout[f"image/{camera}"] = {"feature": name, "dtype": "|u1", "row_shape": shape}
        else:
            key = "state" if name == "observation.state" else name
            layout[key] = {"feature": name, "dtype": np.dtype(dtype).str, "row_shape": shape}
    return layout, skipped


def _foreign_header(
    info: dict[str, Any], index: int, rows: dict[str, list], suite: str, success: bool
) -> EpisodeHeader:
    """What a foreign dataset tells of an episode."""
    task = info["tasks"][0]
    if "next.success" in rows:
        success = bool(np.any(rows["next.success"]))
    return EpisodeHeader(
        suite=suite, task=task, instruction=task, init_state=-1, seed=index, success=success
    )
