"""Import of robomimic HDF5 files, and of the two layouts LIBERO writes in that family.

Three layouts are told apart by what is in them, not by their names:

- robomimic: ``data.attrs["env_args"]``, demos with ``actions``, ``obs/*``, ``rewards``, ``dones``,
  filter keys in ``mask/*``;
- LIBERO's datasets: the same with ``problem_info`` (the instruction) and their own names in
  ``obs``; pictures upside down where ``macros_image_convention`` is ``opengl``;
- raw demonstrations of robosuite and LIBERO: attributes ``env``, ``env_info``, demos with
  ``states`` and ``actions`` only.

Sources: robomimic v0.3 dataset documentation; LIBERO ``scripts/create_dataset.py``; robosuite
``scripts/collect_human_demonstrations.py``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from .store import EpisodeStore
from .types import Episode, EpisodeHeader

if TYPE_CHECKING:
    import h5py

#: Camera observations by their names there -> ours.
CAMERAS = {
    "agentview_rgb": "agentview",
    "agentview_image": "agentview",
    "eye_in_hand_rgb": "wrist",
    "robot0_eye_in_hand_image": "wrist",
}


def import_robomimic(
    file: str | Path,
    store: EpisodeStore,
    *,
    suite: str | None = None,
    filter_key: str | None = None,
    rotate: bool | None = None,
) -> list[int]:
    """Append the demos of one HDF5 file to a store.

    Step arrays made: ``action`` float32; ``sim_state`` (MuJoCo's flattened state),
    ``robot_states``, ``reward``, ``done`` where the file has them; ``image/<camera>`` uint8;
    ``state`` float32 ``[T, 8]`` in the layout ``LIBERO_STATE`` where end-effector pose and gripper
    are there; every other observation as ``obs/<name>``. The header's ``init_state`` is the demo's
    number, its ``extra`` holds file name, demo name, the filter keys it is in and the SHA-256 of
    its MuJoCo model.

    Args:
        file: the HDF5 file.
        store: where to; all its episodes have the same arrays, so one layout a store.
        suite: header's suite; default ``libero`` or ``robomimic``, by layout.
        filter_key: import only the demos of ``mask/<filter_key>`` ("train", "valid", ...).
        rotate: turn pictures by 180 degrees; default: only LIBERO's where they are upside down.

    Returns:
        The indices of the new episodes, in the order of the demos' numbers.

    Raises:
        ValueError: for a file without ``data`` or an unknown filter key.
        ImportError: without h5py.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "h5py is needed to read robomimic files: pip install 'regrasp[train]'"
        ) from error
    with h5py.File(file, "r") as handle:
        if "data" not in handle:
            raise ValueError(f"{file}: no group 'data'; it has {sorted(handle)}")
        data = handle["data"]
        attrs = {key: _text(value) for key, value in data.attrs.items()}
        masks = {
            name: {_text(demo) for demo in members[:]}
            for name, members in (handle["mask"].items() if "mask" in handle else ())
        }
        if filter_key is not None and filter_key not in masks:
            raise ValueError(f"{file}: no filter key {filter_key!r}; it has {sorted(masks)}")
        is_libero = "problem_info" in attrs
        if rotate is None:
            rotate = is_libero and attrs.get("macros_image_convention", "opengl") == "opengl"
        indices = []
        for name in sorted(data, key=_number):
            if filter_key is not None and name not in masks[filter_key]:
                continue
            header = EpisodeHeader(
                suite=suite or ("libero" if is_libero else "robomimic"),
                task=_task(attrs),
                instruction=_instruction(attrs),
                init_state=_number(name),
                seed=-1,
                success=_success(data[name]),
                extra={
                    "file": Path(file).name,
                    "demo": name,
                    "masks": sorted(mask for mask, members in masks.items() if name in members),
                    "model_sha256": _model_hash(data[name]),
                },
            )
            indices.append(store.append(Episode(header, _steps(data[name], rotate))))
    return indices


def quaternion_to_axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Unit quaternions xyzw ``[..., 4]`` to axis times angle ``[..., 3]``, radians.

    As robosuite's ``quat2axisangle``: the angle lies in [0, 2 pi), zero rotation gives zeros.
    """
    q = np.asarray(quaternion, np.float64)
    w = np.clip(q[..., 3:], -1.0, 1.0)
    sine = np.sqrt(1.0 - w * w)
    scale = np.where(sine > 1e-9, 2.0 * np.arccos(w) / np.maximum(sine, 1e-9), 0.0)
    return q[..., :3] * scale


def _steps(demo: h5py.Group, rotate: bool) -> dict[str, np.ndarray]:
    steps = {"action": demo["actions"][:].astype(np.float32)}
    names = {
        "states": "sim_state",
        "robot_states": "robot_states",
        "rewards": "reward",
        "dones": "done",
    }
    for theirs, ours in names.items():
        if theirs in demo:
            steps[ours] = demo[theirs][:]
    observations = {name: value[:] for name, value in demo["obs"].items()} if "obs" in demo else {}
    for name, value in observations.items():
        if value.dtype == np.uint8 and value.ndim == 4:
            camera = CAMERAS.get(name, name.removesuffix("_image").removesuffix("_rgb"))
            steps[f"image/{camera}"] = value[:, ::-1, ::-1].copy() if rotate else value
        else:
            steps[f"obs/{name}"] = value
    state = _state(observations)
    if state is not None:
        steps["state"] = state
    return steps


def _state(observations: dict[str, np.ndarray]) -> np.ndarray | None:
    """``LIBERO_STATE`` from either family's names; None where a part is missing."""
    if {"ee_states", "gripper_states"} <= set(observations):
        parts = [observations["ee_states"], observations["gripper_states"]]
    elif {"robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"} <= set(observations):
        parts = [
            observations["robot0_eef_pos"],
            quaternion_to_axis_angle(observations["robot0_eef_quat"]),
            observations["robot0_gripper_qpos"],
        ]
    else:
        return None
    state = np.concatenate(parts, axis=1).astype(np.float32)
    return state if state.shape[1] == 8 else None


def _success(demo: h5py.Group) -> bool:
    """Whether the demo ended in reward; a demo without rewards is taken for a success."""
    return bool(np.any(demo["rewards"][:] > 0)) if "rewards" in demo else True


def _task(attrs: dict[str, Any]) -> str:
    if "bddl_file_name" in attrs:
        return PurePosixPath(attrs["bddl_file_name"]).stem
    if "env_args" in attrs:
        return json.loads(attrs["env_args"])["env_name"]
    return attrs.get("env", "")


def _instruction(attrs: dict[str, Any]) -> str:
    """LIBERO's instruction; robomimic has none, so its task's name stands in."""
    if "problem_info" not in attrs:
        return _task(attrs)
    words = json.loads(attrs["problem_info"])["language_instruction"]
    # Older files hold it as a list of characters, and with the quotes of the BDDL file.
    return ("".join(words) if isinstance(words, list) else words).strip().strip('"')


def _model_hash(demo: h5py.Group) -> str:
    model = demo.attrs.get("model_file")
    return "" if model is None else hashlib.sha256(_text(model).encode()).hexdigest()


def _number(name: str) -> int:
    """``demo_12`` -> 12."""
    return int(name.rsplit("_", 1)[1])


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
