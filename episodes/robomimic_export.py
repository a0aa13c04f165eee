"""Export of episodes to one robomimic HDF5 file.

Layout: ``data/demo_<i>`` with ``actions``, ``rewards``, ``dones``, ``obs/*``, ``next_obs/*``, the
attributes ``num_samples`` and the header as JSON, every other step array under its own name, and
filter keys in ``mask/*``: ``success``, ``failure``, and one for each failure label. MuJoCo states
are not kept by our stores, so robomimic trains on such a file but does not play it back.

Source: robomimic v0.3 dataset documentation.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .store import EpisodeStore
from .types import Episode

#: Our cameras by robosuite's names.
CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}


def export_robomimic(
    store: EpisodeStore, file: str | Path, episodes: Iterable[int] | None = None
) -> int:
    """Write episodes of a store to an HDF5 file.

    Pictures stay as they are (upright for policies, see the environment they come from). The
    orientation becomes a quaternion xyzw as robosuite has it.

    Args:
        store: with ``action`` and LIBERO's ``state``.
        file: a new file.
        episodes: which; all when None.

    Returns:
        How many demos were written.

    Raises:
        FileExistsError: the file exists.
        KeyError: the store lacks ``action`` or ``state``.
        ImportError: without h5py.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "h5py is needed to write robomimic files: pip install 'regrasp[train]'"
        ) from error
    missing = {"action", "state"} - set(store.steps)
    if missing:
        raise KeyError(f"export_robomimic: the store has no {sorted(missing)}")
    chosen = range(len(store)) if episodes is None else list(episodes)
    masks: dict[str, list[str]] = defaultdict(list)
    total = 0
    with h5py.File(file, "x") as handle:
        data = handle.create_group("data")
        for number, index in enumerate(chosen):
            episode = store.load(index)
            name = f"demo_{number}"
            _write_demo(data.create_group(name), episode)
            total += len(episode)
            header = episode.header
            masks["success" if header.success else "failure"].append(name)
            if header.failure_label:
                masks[header.failure_label].append(name)
        data.attrs["total"] = total
        data.attrs["env_args"] = json.dumps(
            {"env_name": "regrasp", "env_type": 1, "env_kwargs": {"control_freq": 20}}
        )
        for name, demos in masks.items():
            handle[f"mask/{name}"] = np.array(demos, dtype=h5py.string_dtype())
    return len(chosen)


def axis_angle_to_quaternion(axis_angle: np.ndarray) -> np.ndarray:
    """Axis times angle ``[..., 3]``, radians, to unit quaternions xyzw ``[..., 4]``."""
    vector = np.asarray(axis_angle, np.float64)
    angle = np.linalg.norm(vector, axis=-1, keepdims=True)
    scale = np.where(angle > 1e-12, np.sin(angle / 2) / np.maximum(angle, 1e-12), 0.5)
    return np.concatenate([vector * scale, np.cos(angle / 2)], axis=-1)


def _write_demo(group: Any, episode: Episode) -> None:
    """One demo; ``next_obs`` of the last step is its own observation."""
    steps = dict(episode.steps)
    state = steps.pop("state")
    observations = {
        CAMERAS.get(key.removeprefix("image/"), f"{key.removeprefix('image/')}_image"): steps.pop(
            key
        )
        for key in sorted(k for k in steps if k.startswith("image/"))
    }
    observations |= {
        "robot0_eef_pos": state[:, :3],
        "robot0_eef_quat": axis_angle_to_quaternion(state[:, 3:6]).astype(np.float32),
        "robot0_gripper_qpos": state[:, 6:],
    }
    length = len(episode)
    following = np.minimum(np.arange(length) + 1, length - 1)
    for name, value in observations.items():
        group.create_dataset(f"obs/{name}", data=value, compression="gzip", compression_opts=1)
        group.create_dataset(
            f"next_obs/{name}", data=value[following], compression="gzip", compression_opts=1
        )
    group["actions"] = steps.pop("action")
    success = steps.pop("success", np.zeros(length, bool))
    group["rewards"] = np.asarray(success, np.float64)
    done = np.zeros(length, np.int64)
    done[-1] = 1
    group["dones"] = done
    for key, value in steps.items():
        group[key] = value
    group.attrs["num_samples"] = length
    group.attrs["header"] = json.dumps(episode.header.to_json())
