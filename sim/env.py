"""LIBERO tasks as Gymnasium environments: fast steps, pictures on demand, exact snapshots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import mujoco
import numpy as np
from regrasp.episodes.types import LIBERO_ACTION, LIBERO_STATE, Observation
from regrasp.sim.control import CompiledControl
from regrasp.sim.lite import LiteConfig
from regrasp.sim.render import Renderer, RenderMode, rotate_180
from regrasp.sim.scene import Scene
from regrasp.sim.snapshot import Snapshot, apply_model, capture_model, get_state, set_state
from regrasp.sim.tasks import LiberoTask, get_task

#: Our camera names -> MuJoCo's.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}


@dataclass(frozen=True)
class EnvConfig:
    """How an environment is built.

    Attributes:
        mode: ``lite`` (reduced meshes, no shadows) or ``full`` (the stock picture).
        cameras: camera name (``agentview``, ``wrist``) -> (height, width) in pixels.
        settle_steps: control steps without motion done inside ``reset``, not counted.
        settle_gripper: gripper command during them (-1 opens, as openpi does).
        horizon: control steps until truncation; the suite's own when None.
        exact: equal stock LIBERO bit for bit, at about half the speed. Otherwise the same physics
            up to the contact solver's tolerance (1e-8).
        lite: how far visual meshes are reduced in ``lite`` mode.
    """

    mode: RenderMode = "lite"
    cameras: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"agentview": (128, 128), "wrist": (128, 128)}
    )
    settle_steps: int = 10
    settle_gripper: float = -1.0
    horizon: int | None = None
    exact: bool = False
    lite: LiteConfig = field(default_factory=LiteConfig)

    def __post_init__(self) -> None:
        unknown = set(self.cameras) - set(CAMERAS)
        if unknown:
            raise ValueError(
                f"EnvConfig.cameras: unknown {sorted(unknown)}; LIBERO has {sorted(CAMERAS)}"
            )


@dataclass(frozen=True)
class ChunkResult:
    """What happened while a chunk of actions ran.

    Attributes:
        observations: one dict per rendered step (all, or the last one, or none).
        states: float32 ``[h, 8]``, proprioception after each executed step.
        rewards: float32 ``[h]``.
        executed: actions really executed, fewer than given when the episode ended inside.
        terminated, truncated: as of Gymnasium, after the last executed step.
    """

    observations: list[dict[str, np.ndarray]]
    states: np.ndarray
    rewards: np.ndarray
    executed: int
    terminated: bool
    truncated: bool


class LiberoEnv(gymnasium.Env):
    """One LIBERO task.

    Observations are dicts: each camera uint8 ``[H, W, 3]`` (rotated by 180 degrees, as every
    published LIBERO policy sees it) and ``state`` float32 ``[8]`` (:data:`LIBERO_STATE`). Actions
    are float32 ``[7]`` in [-1, 1] (:data:`LIBERO_ACTION`) at 20 Hz. The reward is 1 while the BDDL
    goal holds; the episode terminates at the first success and truncates at the horizon.

    Args:
        task: which task; see :func:`regrasp.sim.tasks.get_task`.
        config: how it is built.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - Gymnasium's API

    def __init__(self, task: LiberoTask, config: EnvConfig | None = None) -> None:
        self.config = config or EnvConfig()
        self.task = task
        self.horizon = self.config.horizon or task.horizon
        self.instruction = task.instruction
        self.render_mode = "rgb_array"
        self._scene = Scene(task, self.config.mode, self.config.lite)
        self._pristine = capture_model(self.model)
        self._init_states = task.init_states()
        robot = self.problem.robots[0]
        substeps = round(1 / 20 / self.model.opt.timestep)
        self._control = CompiledControl(robot, substeps, self.config.exact)
        self._site = self.model.site(robot.controller.eef_name).id
        self._hand = self.model.body(robot.robot_model.eef_name).id
        self._fingers = np.array(robot._ref_gripper_joint_pos_indexes)
        self._renderer: Renderer | None = None
        self._edited = True
        self._started = False
        self.init_state, self.seed_used, self.steps, self.succeeded = -1, 0, 0, False
        spaces = {
            name: gymnasium.spaces.Box(0, 255, (*size, 3), np.uint8)
            for name, size in self.config.cameras.items()
        }
        state = gymnasium.spaces.Box(-np.inf, np.inf, (len(LIBERO_STATE),), np.float32)
        self.observation_space = gymnasium.spaces.Dict({**spaces, "state": state})
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (len(LIBERO_ACTION),), np.float32)

    @property
    def model(self) -> mujoco.MjModel:
        """MuJoCo's model; call :meth:`edited` after changing it."""
        return self._scene.model

    @property
    def data(self) -> mujoco.MjData:
        """MuJoCo's data; call :meth:`edited` after changing it."""
        return self._scene.data

    @property
    def problem(self) -> Any:
        """LIBERO's own environment object on the same model and data (goals, objects, sites)."""
        return self._scene.problem

    @property
    def suite(self) -> str:
        """The task's suite."""
        return self.task.suite

    @property
    def task_name(self) -> str:
        """The task's name in the benchmark."""
        return self.task.name

    @property
    def num_init_states(self) -> int:
        """How many initial states the benchmark ships for this task."""
        return len(self._init_states)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode from one of the benchmark's initial states.

        Args:
            seed: decides the fixtures' places: trial k of seed s has those that stock LIBERO gives
                its k-th trial after ``env.seed(s)``. 7, openpi's, when None.
            options: ``init_state`` (0 when missing) and ``render`` (True when missing).

        Raises:
            IndexError: no such initial state.
            ValueError: an unknown option.
        """
        options = dict(options or {})
        index, render = int(options.pop("init_state", 0)), bool(options.pop("render", True))
        if options:
            raise ValueError(f"reset: unknown options {sorted(options)}; init_state, render exist")
        if not 0 <= index < self.num_init_states:
            raise IndexError(f"init_state {index}: {self.task_name} has {self.num_init_states}")
        super().reset(seed=seed)
        self.seed_used = 7 if seed is None else seed
        self.init_state = index
        apply_model(self.model, self._pristine)
        self._scene.place_fixtures(self.seed_used, index)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self._scene.reset_qpos
        mujoco.mj_forward(self.model, self.data)
        self._control.reset()
        self._scene.set_state(self._init_states[index])
        self.steps, self.succeeded, self._started = 0, False, True
        self._edited = True
        stay = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, self.config.settle_gripper])
        for _ in range(self.config.settle_steps):
            self._advance(stay)
        self.steps, self.succeeded = 0, False
        return self.observe(render), self._info()

    def step(
        self, action: np.ndarray, *, render: bool = True
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """One control step (0.05 s). Stepping on after the end is allowed and keeps its verdict."""
        reward = self._advance(action)
        return self.observe(render), reward, self.succeeded, self.truncated, self._info()

    def step_chunk(
        self, actions: np.ndarray, render: Literal["last", "all", "none"] = "last"
    ) -> ChunkResult:
        """Execute an action chunk ``[h, 7]``, stopping at the first success or the horizon.

        Args:
            actions: float ``[h, 7]``, h >= 1.
            render: which steps get pictures; the others cost none.
        """
        if render not in ("last", "all", "none"):
            raise ValueError(f"step_chunk: render is {render!r}; 'last', 'all' or 'none' is needed")
        if np.ndim(actions) != 2 or len(actions) == 0:
            raise ValueError(
                f"step_chunk: actions have shape {np.shape(actions)}; [h, 7] is needed"
            )
        observations, states, rewards = [], [], []
        for k, action in enumerate(actions):
            rewards.append(self._advance(action))
            states.append(self.state())
            ended = self.succeeded or self.truncated
            last = ended or k == len(actions) - 1
            if render == "all" or (render == "last" and last):
                observations.append(self.observe())
            if last:
                break
        return ChunkResult(
            observations,
            np.stack(states),
            np.array(rewards, np.float32),
            len(rewards),
            self.succeeded,
            self.truncated,
        )

    def _advance(self, action: np.ndarray) -> float:
        if not self._started:
            raise RuntimeError("step before reset: call reset(options={'init_state': i}) first")
        action = np.asarray(action, float)
        if action.shape != (7,) or not np.isfinite(action).all():
            raise ValueError(f"action {action!r}: 7 finite numbers are needed")
        self._control.step(action)
        self._edited = False
        self.steps += 1
        self.problem._post_process()
        success = self.success
        self.succeeded = self.succeeded or success
        return float(success)

    @property
    def success(self) -> bool:
        """Whether the BDDL goal holds now."""
        return bool(self.problem._check_success())

    @property
    def truncated(self) -> bool:
        """Whether the horizon is reached without success."""
        return self.steps >= self.horizon and not self.succeeded

    def state(self) -> np.ndarray:
        """Proprioception now, float32 ``[8]`` (:data:`LIBERO_STATE`), as openpi computes it."""
        position = self.data.site_xpos[self._site]
        rotation = quat_to_axis_angle(self.data.xquat[self._hand])
        fingers = self.data.qpos[self._fingers]
        return np.concatenate([position, rotation, fingers]).astype(np.float32)

    def eef_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """The grip site's position ``[3]`` (m) and rotation ``[3, 3]`` in the world."""
        site = self._site
        return self.data.site_xpos[site].copy(), self.data.site_xmat[site].reshape(3, 3).copy()

    def observe(self, render: bool = True) -> dict[str, np.ndarray]:
        """The observation now; without pictures when ``render`` is False."""
        observation = {"state": self.state()}
        if render:
            if self._renderer is None:
                sizes = {CAMERAS[name]: size for name, size in self.config.cameras.items()}
                self._renderer = Renderer(self.model, sizes, self.config.mode)
            pictures = self._renderer.render(self.data)
            for name in self.config.cameras:
                observation[name] = np.ascontiguousarray(rotate_180(pictures[CAMERAS[name]]))
        return observation

    def observation(self, render: bool = True) -> Observation:
        """The observation now, as a policy takes it."""
        now = self.observe(render)
        state = now.pop("state")
        return Observation(now, state, self.instruction, time.monotonic())

    def render(self) -> np.ndarray:
        """The first camera's picture, upright for people, uint8 ``[H, W, 3]``."""
        name = next(iter(self.config.cameras))
        return self.observe()[name]

    def edited(self) -> None:
        """Call after changing ``model`` or ``data`` from outside: recomputes the kinematics."""
        mujoco.mj_forward(self.model, self.data)
        self._edited = True

    def snapshot(self) -> Snapshot:
        """The exact state: restored, the same actions give the same states bit for bit."""
        before = np.empty(0) if self._edited else self._control.before.copy()
        counters = [self.steps, self.succeeded, self.init_state, self.seed_used]
        return Snapshot(
            get_state(self.model, self.data),
            before,
            self._control.state.copy(),
            capture_model(self.model),
            np.array(counters, np.int64),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of the same task, from this process or another."""
        apply_model(self.model, snapshot.model)
        set_state(self.model, self.data, snapshot.now, snapshot.before)
        self._control.state[:] = snapshot.control
        self._edited = len(snapshot.before) == 0
        if not self._edited:
            self._control.before[:] = snapshot.before
        steps, latch, self.init_state, self.seed_used = (int(x) for x in snapshot.counters)
        self.steps, self.succeeded, self._started = steps, bool(latch), True

    def _info(self) -> dict[str, Any]:
        return {
            "success": self.succeeded,
            "steps": self.steps,
            "init_state": self.init_state,
            "instruction": self.instruction,
        }

    def close(self) -> None:
        """Free the renderer; safe to call twice."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def quat_to_axis_angle(quat: np.ndarray) -> np.ndarray:
    """Axis-angle ``[3]`` (rad) of a (w, x, y, z) quaternion, with openpi's branch choice."""
    w = float(np.clip(quat[0], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return quat[1:] * 2.0 * np.arccos(w) / sine


def make_env(suite: str, task: int | str, **config: Any) -> LiberoEnv:
    """Build a LIBERO environment; keyword arguments are those of :class:`EnvConfig`."""
    return LiberoEnv(get_task(suite, task), EnvConfig(**config))
