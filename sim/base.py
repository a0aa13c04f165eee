"""What every simulated environment shares: fast steps, pictures on demand, exact snapshots.

An environment of this package is a robosuite problem (LIBERO's are robosuite problems too), stepped
by :class:`regrasp.sim.control.CompiledControl` and drawn by :class:`regrasp.sim.render.Renderer`.
What differs from family to family, how an episode begins, is in the subclasses.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import mujoco
import numpy as np
from regrasp.episodes.types import LIBERO_ACTION, LIBERO_STATE, Observation
from regrasp.sim.control import CompiledControl, choose_options
from regrasp.sim.lite import LiteConfig
from regrasp.sim.render import Renderer, RenderMode
from regrasp.sim.snapshot import Snapshot, apply_model, capture_model, get_state, set_state
from regrasp.sim.transforms import quat_to_axis_angle

#: Our camera names -> MuJoCo's.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}


@dataclass(frozen=True)
class EnvConfig:
    """How an environment is built.

    Attributes:
        mode: ``full`` (the stock picture), ``fine`` (reduced meshes) or ``lite`` (reduced meshes
            without reflections and multisampling).
        cameras: camera name (``agentview``, ``wrist``) -> (height, width) in pixels.
        settle_steps: control steps without motion done inside ``reset``, not counted.
        settle_gripper: gripper command during them (-1 opens, as openpi does).
        horizon: control steps until truncation; the suite's own when None.
        exact: equal stock LIBERO bit for bit, at about half the speed. Otherwise the same physics
            up to the contact solver's tolerance (1e-8).
        lite: how far visual meshes are reduced in ``lite`` and ``fine``.
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


class SimEnv(gymnasium.Env):
    """A robosuite problem with one Panda arm under OSC_POSE at 20 Hz.

    Observations are dicts: each camera uint8 ``[H, W, 3]`` and ``state`` float32 ``[8]``
    (:data:`LIBERO_STATE`). Actions are float32 ``[7]`` in [-1, 1] (:data:`LIBERO_ACTION`). The
    reward is 1 while the goal holds; the episode terminates at the first success and truncates at
    the horizon.

    Args:
        problem: a robosuite environment that was just reset, without a renderer of its own.
        suite, task_name: which task it is.
        instruction: the task in words.
        horizon: control steps until truncation where the configuration names none.
        num_init_states: how many beginnings ``reset`` knows.
        config: how it is built.
        default_seed: of ``reset`` without a seed.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - Gymnasium's API

    def __init__(
        self,
        problem: Any,
        *,
        suite: str,
        task_name: str,
        instruction: str,
        horizon: int,
        num_init_states: int,
        config: EnvConfig,
        default_seed: int,
    ) -> None:
        self.config = config
        self.problem = problem
        self.suite, self.task_name, self.instruction = suite, task_name, instruction
        self.horizon = config.horizon or horizon
        self.num_init_states = num_init_states
        self.render_mode = "rgb_array"
        self.model: mujoco.MjModel = problem.sim.model._model
        self.data: mujoco.MjData = problem.sim.data._data
        choose_options(self.model, config.exact)
        self._default_seed = default_seed
        self._pristine = capture_model(self.model)
        robot = problem.robots[0]
        substeps = round(1 / 20 / self.model.opt.timestep)
        self._control = CompiledControl(robot, substeps, config.exact)
        self._site = self.model.site(robot.controller.eef_name).id
        self._hand = self.model.body(robot.robot_model.eef_name).id
        self._fingers = np.array(robot._ref_gripper_joint_pos_indexes)
        self._renderer: Renderer | None = None
        self._edited = True
        self._started = False
        self.init_state, self.seed_used, self.steps, self.succeeded = -1, 0, 0, False
        spaces = {
            name: gymnasium.spaces.Box(0, 255, (*size, 3), np.uint8)
            for name, size in config.cameras.items()
        }
        state = gymnasium.spaces.Box(-np.inf, np.inf, (len(LIBERO_STATE),), np.float32)
        self.observation_space = gymnasium.spaces.Dict({**spaces, "state": state})
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (len(LIBERO_ACTION),), np.float32)

    def _begin(self, seed: int, index: int) -> None:
        """Put physics and controller at the beginning ``index`` of ``seed``, before settling."""
        raise NotImplementedError

    def _orient(self, picture: np.ndarray) -> np.ndarray:
        """A renderer's picture (bottom row first) as the family's policies see it."""
        raise NotImplementedError

    def _update(self) -> None:
        """Whatever the problem does after each control step."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: with ``init_state``, decides everything; the family's default when None.
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
        self.seed_used = self._default_seed if seed is None else seed
        self.init_state = index
        apply_model(self.model, self._pristine)
        self._begin(self.seed_used, index)
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
        self._update()
        success = self.success
        self.succeeded = self.succeeded or success
        return float(success)

    @property
    def success(self) -> bool:
        """Whether the goal holds now."""
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
                observation[name] = np.ascontiguousarray(self._orient(pictures[CAMERAS[name]]))
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
