"""The compiled control step: robosuite's OSC_POSE and gripper between MuJoCo's half steps.

robosuite 1.4 refreshes the whole simulation (``mj_forward``) twice before each physics substep so
that its controller sees current kinematics. ``mj_step`` computes the same kinematics in its first
half, so the controller can sit between the halves: one pass instead of three, the same numbers.
The whole control step (25 substeps at 20 Hz) is one compiled call that calls MuJoCo's C functions
directly and holds no interpreter lock.

Stock's extra passes leave one trace: each solves the contacts once more under the previous torques
and so moves the point from which MuJoCo's iterative solver starts. Where contacts change, that
shows at the solver's tolerance. With ``exact`` those solves and robosuite's own compiled matrix
routines are kept (but not the repeated kinematics), and every number equals stock's bit for bit.

Equations: Khatib 1987, as in robosuite 1.4 ``controllers/osc.py`` (uncoupled position and
orientation, fixed impedance, null-space posture task). Inverses are Cholesky solves of the same
symmetric matrices that robosuite pseudo-inverts; a matrix that is not positive definite falls back
to the pseudo-inverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding
import mujoco
import numba
import numpy as np
from robosuite.utils.control_utils import (
    nullspace_torques,
    opspace_matrices,
    orientation_error,
)
from robosuite.utils.transform_utils import quat2mat

_LIBRARY = next(Path(mujoco.__file__).parent.glob("libmujoco.so*"))
llvmlite.binding.load_library_permanently(str(_LIBRARY))

_ADDRESS = numba.types.intp
_mj_step1 = numba.types.ExternalFunction("mj_step1", numba.types.void(_ADDRESS, _ADDRESS))
_mj_step2 = numba.types.ExternalFunction("mj_step2", numba.types.void(_ADDRESS, _ADDRESS))
_mj_fwd_actuation = numba.types.ExternalFunction(
    "mj_fwdActuation", numba.types.void(_ADDRESS, _ADDRESS)
)
_mj_fwd_acceleration = numba.types.ExternalFunction(
    "mj_fwdAcceleration", numba.types.void(_ADDRESS, _ADDRESS)
)
_mj_fwd_constraint = numba.types.ExternalFunction(
    "mj_fwdConstraint", numba.types.void(_ADDRESS, _ADDRESS)
)
_mj_jac_site = numba.types.ExternalFunction(
    "mj_jacSite",
    numba.types.void(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, numba.types.int32),
)
_mj_get_state = numba.types.ExternalFunction(
    "mj_getState", numba.types.void(_ADDRESS, _ADDRESS, _ADDRESS, numba.types.uint32)
)
_INTEGRATION = int(mujoco.mjtState.mjSTATE_INTEGRATION)

#: robosuite's null-space posture gain (``control_utils.nullspace_torques``).
_NULL_KP = 10.0

# Layout of the controller's state vector; all of it is part of a snapshot.
_GOAL_POS = slice(0, 3)
_GOAL_ORI = slice(3, 12)
_GRIPPER = slice(12, 14)
_REST = slice(14, 21)  # joint posture of the null-space task
_FRESH = 21  # 1.0: the cache below must be refreshed before use (robosuite's `new_update`)
_POS = slice(22, 25)
_ORI = slice(25, 34)
_VEL = slice(34, 40)
_Q = slice(40, 47)
_QD = slice(47, 54)
_JAC = slice(54, 96)
_MASS = slice(96, 145)
STATE_SIZE = 145


class _Arm(NamedTuple):
    """One arm and its simulation, as the compiled functions see them.

    ``qpos`` to ``q_m``, ``bias`` and the sites' poses are MuJoCo's own memory, so always current.
    """

    model: int  # address of the mjModel
    data: int  # address of the mjData
    qpos: np.ndarray
    qvel: np.ndarray
    ctrl: np.ndarray
    q_m: np.ndarray  # the whole model's mass matrix, sparse
    madr: np.ndarray  # where each degree of freedom's row of it begins
    parent: np.ndarray  # the degree of freedom before each in the tree, -1 at a root
    bias: np.ndarray  # gravity and Coriolis torques
    site: int  # of the hand
    site_xpos: np.ndarray
    site_xmat: np.ndarray
    qpos_index: np.ndarray  # of the seven joints, as the next two
    dof_index: np.ndarray
    arm_ctrl: np.ndarray
    grip_ctrl: np.ndarray  # of the two fingers
    kp: np.ndarray  # of the six axes, position then orientation
    kd: np.ndarray
    scale: np.ndarray  # metres and radians that an action of 1 asks for
    torque_low: np.ndarray  # N m
    torque_high: np.ndarray
    grip_speed: float
    grip_bias: np.ndarray
    grip_weight: np.ndarray
    jacp: np.ndarray  # scratch, as the next
    jacr: np.ndarray
    before: np.ndarray  # see CompiledControl


@numba.njit(cache=True, nogil=True)
def _cholesky(a: np.ndarray, n: int) -> bool:
    """Lower Cholesky factor of ``a[:n, :n]`` in place; False when not positive definite."""
    for i in range(n):
        for j in range(i + 1):
            s = a[i, j]
            for k in range(j):
                s -= a[i, k] * a[j, k]
            if i == j:
                if s <= 0.0:
                    return False
                a[i, i] = math.sqrt(s)
            else:
                a[i, j] = s / a[j, j]
    return True


@numba.njit(cache=True, nogil=True)
def _solve(low: np.ndarray, b: np.ndarray, n: int) -> None:
    """Solve ``L L^T x = b`` in place for the factor of :func:`_cholesky`."""
    for i in range(n):
        s = b[i]
        for k in range(i):
            s -= low[i, k] * b[k]
        b[i] = s / low[i, i]
    for i in range(n - 1, -1, -1):
        s = b[i]
        for k in range(i + 1, n):
            s -= low[k, i] * b[k]
        b[i] = s / low[i, i]


@numba.njit(cache=True, nogil=True)
def _apply_inverse(matrix: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``pinv(matrix) @ b`` for a symmetric positive semi-definite matrix."""
    n = b.shape[0]
    low = matrix.copy()
    x = b.copy()
    if _cholesky(low, n):
        _solve(low, x, n)
        return x
    return np.linalg.pinv(matrix) @ b


@numba.njit(cache=True, nogil=True)
def _rotation(delta: np.ndarray) -> np.ndarray:
    """Rotation matrix of an axis-angle vector, through robosuite's float32 quaternion."""
    angle = math.sqrt(np.dot(delta, delta))
    if angle == 0.0:
        return np.eye(3)
    q = np.empty(4)
    q[3] = math.cos(angle / 2.0)
    q[:3] = delta / angle * math.sin(angle / 2.0)
    return quat2mat(q)


@numba.njit(cache=True, nogil=True)
def _refresh(state, arm):
    """Read the arm's kinematics and mass matrix from MuJoCo into the controller's cache."""
    _mj_jac_site(arm.model, arm.data, arm.jacp.ctypes.data, arm.jacr.ctypes.data, arm.site)
    nv = arm.qvel.shape[0]
    state[_POS] = arm.site_xpos[arm.site]
    state[_ORI] = arm.site_xmat[arm.site]
    state[34:37] = np.dot(arm.jacp, arm.qvel)
    state[37:40] = np.dot(arm.jacr, arm.qvel)
    jac = state[_JAC].reshape(6, 7)
    mass = state[_MASS].reshape(7, 7)
    slot = -np.ones(nv, np.int64)
    for i in range(7):
        slot[arm.dof_index[i]] = i
    for i in range(7):
        state[40 + i] = arm.qpos[arm.qpos_index[i]]
        state[47 + i] = arm.qvel[arm.dof_index[i]]
        for r in range(3):
            jac[r, i] = arm.jacp[r, arm.dof_index[i]]
            jac[3 + r, i] = arm.jacr[r, arm.dof_index[i]]
    mass[:, :] = 0.0
    for i in range(7):
        adr = arm.madr[arm.dof_index[i]]
        j = arm.dof_index[i]
        while j >= 0:
            if slot[j] >= 0:
                mass[i, slot[j]] = arm.q_m[adr]
                mass[slot[j], i] = arm.q_m[adr]
            adr += 1
            j = arm.parent[j]
    state[_FRESH] = 0.0


@numba.njit(cache=True, nogil=True)
def _torques(state, kp, kd):
    """Operational-space torques [7] without gravity compensation, from the cached kinematics."""
    ori = state[_ORI].reshape(3, 3)
    goal = state[_GOAL_ORI].reshape(3, 3)
    force = np.empty(3)
    torque = np.empty(3)
    error = np.zeros(3)
    for c in range(3):
        error[0] += ori[1, c] * goal[2, c] - ori[2, c] * goal[1, c]
        error[1] += ori[2, c] * goal[0, c] - ori[0, c] * goal[2, c]
        error[2] += ori[0, c] * goal[1, c] - ori[1, c] * goal[0, c]
    for r in range(3):
        force[r] = (state[r] - state[22 + r]) * kp[r] - state[34 + r] * kd[r]
        torque[r] = 0.5 * error[r] * kp[3 + r] - state[37 + r] * kd[3 + r]
    jac = state[_JAC].reshape(6, 7)
    mass = state[_MASS].reshape(7, 7)
    low = mass.copy()
    if not _cholesky(low, 7):
        raise ValueError("the arm's mass matrix is not positive definite")
    minv_jt = np.empty((6, 7))
    for r in range(6):
        column = jac[r].copy()
        _solve(low, column, 7)
        minv_jt[r] = column
    lam_inv = jac @ minv_jt.T
    wrench = np.empty(6)
    wrench[:3] = _apply_inverse(lam_inv[:3, :3].copy(), force)
    wrench[3:] = _apply_inverse(lam_inv[3:, 3:].copy(), torque)
    posture = np.empty(7)
    kv = 2.0 * math.sqrt(_NULL_KP)
    for i in range(7):
        posture[i] = _NULL_KP * (state[14 + i] - state[40 + i]) - kv * state[47 + i]
    # N^T M v = M v - J^T Lambda J v, with v the posture task's joint acceleration.
    held = _apply_inverse(lam_inv, jac @ posture)
    return jac.T @ (wrench - held) + mass @ posture


@numba.njit(cache=True, nogil=True)
def _exact_torques(state, kp, kd):
    """:func:`_torques` by robosuite's own routines, in its order of operations and layouts."""
    error = orientation_error(state[_GOAL_ORI].reshape(3, 3), state[_ORI].reshape(3, 3))
    force = (state[_GOAL_POS] - state[_POS]) * kp[:3] - state[34:37] * kd[:3]
    torque = error * kp[3:] - state[37:40] * kd[3:]
    jac = np.asfortranarray(state[_JAC].reshape(6, 7))
    mass = state[_MASS].reshape(7, 7).T
    _, lambda_pos, lambda_ori, null = opspace_matrices(
        mass, jac, np.asfortranarray(jac[:3]), np.asfortranarray(jac[3:])
    )
    wrench = np.empty(6)
    wrench[:3] = np.dot(lambda_pos, force)
    wrench[3:] = np.dot(lambda_ori, torque)
    posture = nullspace_torques(
        mass, null, state[_REST].copy(), state[_Q].copy(), state[_QD].copy()
    )
    return np.dot(jac.T, wrench), posture


@numba.njit(cache=True, nogil=True)
def _control_step(action, state, arm, substeps, exact):
    for i in range(substeps):
        if i == substeps - 1:
            _mj_get_state(arm.model, arm.data, arm.before.ctypes.data, _INTEGRATION)
        _mj_step1(arm.model, arm.data)
        if exact:
            # robosuite's two forward passes; only one before its controller refreshes again.
            for _ in range(1 + int(state[_FRESH])):
                _mj_fwd_actuation(arm.model, arm.data)
                _mj_fwd_acceleration(arm.model, arm.data)
                _mj_fwd_constraint(arm.model, arm.data)
        if state[_FRESH] == 1.0:
            _refresh(state, arm)
        if i == 0:
            delta = np.empty(6)
            for k in range(6):
                delta[k] = min(max(action[k], -1.0), 1.0) * arm.scale[k]
            if delta[3] != 0.0 or delta[4] != 0.0 or delta[5] != 0.0:
                goal = np.dot(_rotation(delta[3:].copy()), state[_ORI].reshape(3, 3))
                state[_GOAL_ORI] = goal.ravel()
            for k in range(3):
                state[k] = state[22 + k] + delta[k]
        if exact:
            tau, posture = _exact_torques(state, arm.kp, arm.kd)
        else:
            tau = _torques(state, arm.kp, arm.kd)
        state[_FRESH] = 1.0
        for k in range(7):
            total = tau[k] + arm.bias[arm.dof_index[k]]
            if exact:
                total += posture[k]
            arm.ctrl[arm.arm_ctrl[k]] = min(max(total, arm.torque_low[k]), arm.torque_high[k])
        sign = 0.0
        if action[6] > 0.0:
            sign = 1.0
        elif action[6] < 0.0:
            sign = -1.0
        for k in range(2):
            direction = -1.0 if k == 0 else 1.0
            value = min(max(state[12 + k] + direction * arm.grip_speed * sign, -1.0), 1.0)
            state[12 + k] = value
            arm.ctrl[arm.grip_ctrl[k]] = arm.grip_bias[k] + arm.grip_weight[k] * value
        _mj_step2(arm.model, arm.data)


def choose_options(model: mujoco.MjModel, exact: bool) -> None:
    """MuJoCo's options for speed: no sensors (nothing here reads them), sparse constraints.

    A LIBERO contact involves a dozen of some forty degrees of freedom, fewer than MuJoCo's own
    threshold for sparse algebra, yet sparse is faster. It adds in another order: the last digits
    change, so with ``exact`` stock's choice stays.
    """
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
    choice = mujoco.mjtJacobian.mjJAC_AUTO if exact else mujoco.mjtJacobian.mjJAC_SPARSE
    model.opt.jacobian = int(choice)


@dataclass
class CompiledControl:
    """One arm's compiled controller, bound to a robosuite robot and its simulation.

    Args:
        robot: a robosuite 1.4 ``SingleArm`` with an OSC_POSE controller and a Panda gripper, just
            after a reset.
        substeps: physics substeps in a control step.
        exact: whether to equal stock bit for bit, at about half the speed.

    Raises:
        ValueError: the controller or gripper is one that this file does not reproduce.

    Attributes:
        state: everything the controller remembers, float64 ``[STATE_SIZE]``.
        before: MuJoCo's integration state at the start of the last substep. As in stock, the
            kinematics left after a step (and so contacts, success and pictures) are of that
            moment; whoever restores a state replays one substep from here to get them back.
    """

    robot: Any
    substeps: int
    exact: bool = False
    state: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        robot, controller = self.robot, self.robot.controller
        problem = None
        if controller.name != "OSC_POSE":
            problem = f"controller {controller.name!r}; OSC_POSE is needed"
        elif controller.impedance_mode != "fixed" or not controller.use_delta:
            problem = "impedance or absolute control; fixed impedance and deltas are needed"
        elif not controller.uncoupling or controller.interpolator_pos is not None:
            problem = "coupled or interpolated control; uncoupled, uninterpolated is needed"
        elif controller.position_limits is not None or controller.orientation_limits is not None:
            problem = "goal limits; none are supported"
        elif type(robot.gripper).__name__ != "PandaGripper":
            problem = f"gripper {type(robot.gripper).__name__!r}; PandaGripper is needed"
        if problem:
            raise ValueError(f"CompiledControl cannot reproduce {problem}")
        model, data = robot.sim.model._model, robot.sim.data._data
        self._model, self._data = model, data  # keeps the addresses below alive
        low, high = robot.torque_limits
        grip = np.asarray(robot._ref_joint_gripper_actuator_indexes, np.int64)
        ctrl_range = model.actuator_ctrlrange[grip]
        scale = np.abs(controller.output_max - controller.output_min) / np.abs(
            controller.input_max - controller.input_min
        )
        self.state = np.zeros(STATE_SIZE)
        self.before = np.zeros(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        self._arm = _Arm(
            model=model._address,
            data=data._address,
            qpos=data.qpos,
            qvel=data.qvel,
            ctrl=data.ctrl,
            q_m=data.qM,
            madr=model.dof_Madr.astype(np.int64),
            parent=model.dof_parentid.astype(np.int64),
            bias=data.qfrc_bias,
            site=model.site(controller.eef_name).id,
            site_xpos=data.site_xpos,
            site_xmat=data.site_xmat,
            qpos_index=np.asarray(controller.qpos_index, np.int64),
            dof_index=np.asarray(controller.qvel_index, np.int64),
            arm_ctrl=np.asarray(robot._ref_joint_actuator_indexes, np.int64),
            grip_ctrl=grip,
            kp=np.asarray(controller.kp, float),
            kd=np.asarray(controller.kd, float),
            scale=np.asarray(scale, float),
            torque_low=np.asarray(low, float),
            torque_high=np.asarray(high, float),
            grip_speed=float(robot.gripper.speed),
            grip_bias=0.5 * (ctrl_range[:, 1] + ctrl_range[:, 0]),
            grip_weight=0.5 * (ctrl_range[:, 1] - ctrl_range[:, 0]),
            jacp=np.zeros((3, model.nv)),
            jacr=np.zeros((3, model.nv)),
            before=self.before,
        )
        self.reset()

    def reset(self, mass: np.ndarray | None = None) -> None:
        """Start as robosuite does after a reset: goal at the present pose, gripper command 0.

        Call it with the simulation at the reset pose and kinematics current. As in robosuite,
        the kinematics read here are used once more by the first substep after a state is set
        from outside (its ``new_update`` flag is still clear), so that step matches stock too.

        Args:
            mass: the arm's mass matrix ``[7, 7]`` that robosuite's controller holds, where it was
                read in another pose of the fingers; the present one when None.
        """
        state = self.state
        state[:] = 0.0
        _refresh(state, self._arm)
        state[_GOAL_POS] = state[_POS]
        state[_GOAL_ORI] = state[_ORI]
        state[_REST] = state[_Q]
        if mass is not None:
            state[_MASS] = mass.ravel()

    def step(self, action: np.ndarray) -> None:
        """Advance one control step under ``action`` float64 ``[7]``, clipped to [-1, 1]."""
        _control_step(action, self.state, self._arm, self.substeps, self.exact)
