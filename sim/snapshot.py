"""The exact state of an environment, to branch from, rewind to, or send to another process."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

#: Model fields that perturbations, fixtures and LIBERO's visual changes write to.
MODEL_FIELDS = (
    "body_pos",
    "body_quat",
    "body_mass",
    "body_inertia",
    "body_subtreemass",
    "body_invweight0",
    "dof_invweight0",
    "geom_friction",
    "geom_rgba",
    "site_rgba",
    "cam_pos",
    "cam_quat",
    "cam_fovy",
    "light_diffuse",
    "dof_damping",
    "dof_frictionloss",
    "jnt_range",
    "actuator_forcerange",
    "opt.gravity",
)

_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION


@dataclass(frozen=True)
class Snapshot:
    """Everything that decides what happens next: physics, controller, model edits, counters.

    Attributes:
        now: MuJoCo's integration state.
        before: the integration state one substep earlier, from which the kinematics (contacts,
            success, pictures) that belong to ``now`` are recomputed; empty after an outside edit.
        control: the controller's state.
        model: the model fields of :data:`MODEL_FIELDS`.
        counters: int64 [steps, latched success, init state, seed].
    """

    now: np.ndarray
    before: np.ndarray
    control: np.ndarray
    model: dict[str, np.ndarray]
    counters: np.ndarray

    def to_bytes(self) -> bytes:
        """A portable copy (NumPy's npz, no pickle); :meth:`from_bytes` inverts it."""
        buffer = io.BytesIO()
        fields: dict[str, Any] = {f"model/{key}": value for key, value in self.model.items()}
        np.savez(
            buffer,
            now=self.now,
            before=self.before,
            control=self.control,
            counters=self.counters,
            **fields,
        )
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Snapshot:
        """Rebuild a snapshot from :meth:`to_bytes`."""
        with np.load(io.BytesIO(content), allow_pickle=False) as data:
            model = {key[6:]: data[key] for key in data.files if key.startswith("model/")}
            return cls(data["now"], data["before"], data["control"], model, data["counters"])


def capture_model(model: mujoco.MjModel) -> dict[str, np.ndarray]:
    """Copies of the model fields that may change at run time."""
    return {name: np.array(_field(model, name)) for name in MODEL_FIELDS}


def apply_model(model: mujoco.MjModel, fields: dict[str, np.ndarray]) -> None:
    """Write the fields of :func:`capture_model` back."""
    for name, value in fields.items():
        _field(model, name)[...] = value


def _field(model: mujoco.MjModel, name: str) -> np.ndarray:
    holder = model
    for part in name.split("."):
        holder = getattr(holder, part)
    return holder


def get_state(model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """MuJoCo's integration state (positions, velocities, controls, warm start, time)."""
    state = np.empty(mujoco.mj_stateSize(model, _INTEGRATION))
    mujoco.mj_getState(model, data, state, _INTEGRATION)
    return state


def set_state(
    model: mujoco.MjModel, data: mujoco.MjData, now: np.ndarray, before: np.ndarray
) -> None:
    """Restore ``now`` with the kinematics that one substep from ``before`` leaves behind."""
    mujoco.mj_setState(model, data, now, _INTEGRATION)
    if len(before):
        ctrl = data.ctrl.copy()
        mujoco.mj_setState(model, data, before, _INTEGRATION)
        mujoco.mj_step1(model, data)
        data.ctrl[:] = ctrl
        mujoco.mj_step2(model, data)
        mujoco.mj_setState(model, data, now, _INTEGRATION)
    else:
        mujoco.mj_forward(model, data)
