"""These LIBERO environments in LeRobot: ``lerobot-eval --env.type=regrasp_libero``.

LeRobot's own LIBERO environment needs assets from a hub and stock LIBERO's speed; this one gives
the same observation keys (``observation.images.image``, ``observation.images.image2``,
``observation.state``) from :mod:`regrasp.sim`. Episodes are indexed by initial state:
sub-environment k of n starts at ``first_init_state + k`` and goes on in strides of n, at each new
rollout and at no other reset, so that no state is skipped or run twice (lerobot#4152, PR2832). The
distribution ``lerobot_policy_regrasp`` in this repository registers it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import NEW_ROLLOUT_OPTION, freeze_after_episode_end
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

#: Our cameras -> the names of LeRobot's LIBERO data sets.
PICTURES = {"agentview": "image", "wrist": "image2"}


@EnvConfig.register_subclass("regrasp_libero")
@dataclass
class RegraspLiberoConfig(EnvConfig):
    """LIBERO and LIBERO-PRO suites for ``lerobot-eval`` and ``lerobot-train``.

    Attributes:
        task: the suite.
        task_ids: which of its tasks; all when None.
        fps: the control rate; LIBERO has 20 and no other.
        mode: ``lite`` or ``full`` pictures.
        image_size: pictures are this high and wide.
        first_init_state: of each task; 30 and on are held out from our demonstrations.
        seed: of the fixtures' places (openpi's 7), whatever seeds LeRobot passes.
    """

    task: str | None = "libero_object"
    task_ids: list[int] | None = None
    fps: int = 20
    mode: str = "lite"
    image_size: int = 128
    first_init_state: int = 30
    seed: int = 7
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fps != 20:
            raise ValueError(f"RegraspLiberoConfig.fps: {self.fps}; LIBERO's control rate is 20")
        size = self.image_size
        self.features[ACTION] = PolicyFeature(type=FeatureType.ACTION, shape=(7,))
        self.features_map[ACTION] = ACTION
        self.features["agent_pos"] = PolicyFeature(type=FeatureType.STATE, shape=(8,))
        self.features_map["agent_pos"] = OBS_STATE
        for name in PICTURES.values():
            key = f"pixels/{name}"
            self.features[key] = PolicyFeature(type=FeatureType.VISUAL, shape=(size, size, 3))
            self.features_map[key] = f"{OBS_IMAGES}.{name}"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Arguments of :class:`LeRobotLibero` that are the same for every task."""
        return {
            "mode": self.mode,
            "image_size": self.image_size,
            "first_init_state": self.first_init_state,
            "seed": self.seed,
        }

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, gymnasium.vector.VectorEnv]]:
        """Suite -> task index -> vector environment."""
        from regrasp.sim.tasks import task_names

        suite = str(self.task)
        tasks = range(len(task_names(suite))) if self.task_ids is None else self.task_ids
        many = use_async_envs and n_envs > 1
        options: dict[str, Any] = {"context": "spawn"} if many else {}
        kind = gymnasium.vector.AsyncVectorEnv if many else gymnasium.vector.SyncVectorEnv

        def make(task: int, k: int) -> Any:
            env = functools.partial(LeRobotLibero, suite, task, k, n_envs, **self.gym_kwargs)
            return freeze_after_episode_end(env)

        return {
            suite: {task: kind([make(task, k) for k in range(n_envs)], **options) for task in tasks}
        }


class LeRobotLibero(gymnasium.Env):
    """One LIBERO task with LeRobot's observation layout.

    Observations: ``{"pixels": {"image", "image2"}, "agent_pos"}``; the simulator is built at the
    first reset, in the process that uses it.

    Args:
        suite: LIBERO suite.
        task: index of the task.
        index: which of the vector environment's sub-environments this is.
        stride: how many there are.
        mode, image_size, first_init_state, seed: see :class:`RegraspLiberoConfig`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - Gymnasium's API

    def __init__(
        self,
        suite: str,
        task: int,
        index: int,
        stride: int,
        *,
        mode: str,
        image_size: int,
        first_init_state: int,
        seed: int,
    ) -> None:
        from regrasp.sim.tasks import get_task

        found = get_task(suite, task)
        self.task, self.task_description = found.name, found.instruction
        self._max_episode_steps = found.horizon
        self.render_mode = "rgb_array"
        self._task, self._mode, self._size, self._seed = found, mode, image_size, seed
        self._next, self._stride = first_init_state + index, stride
        self._env: Any = None
        picture = gymnasium.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Dict(dict.fromkeys(PICTURES.values(), picture)),
                "agent_pos": gymnasium.spaces.Box(-np.inf, np.inf, (8,), np.float32),
            }
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self.init_state = self._next

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the next initial state on a new rollout; the same one again on any other reset."""
        from regrasp.sim.env import EnvConfig as SimConfig
        from regrasp.sim.env import LiberoEnv

        super().reset(seed=seed)
        if self._env is None:
            size = (self._size, self._size)
            config = SimConfig(mode=self._mode, cameras=dict.fromkeys(PICTURES, size))  # type: ignore[arg-type]
            self._env = LiberoEnv(self._task, config)
        if (options or {}).get(NEW_ROLLOUT_OPTION):
            self.init_state = self._next % self._env.num_init_states
            self._next += self._stride
        observation, _ = self._env.reset(seed=self._seed, options={"init_state": self.init_state})
        return _layout(observation), {"is_success": False, "init_state": self.init_state}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step; actions outside [-1, 1] are clipped, as the controller would."""
        action = np.clip(action, -1.0, 1.0)
        observation, reward, terminated, truncated, info = self._env.step(action)
        info |= {"is_success": terminated}
        return _layout(observation), reward, terminated, truncated, info

    def render(self) -> np.ndarray:
        """The first camera's picture, uint8 ``[H, W, 3]``."""
        return self._env.render()

    def close(self) -> None:
        """Free the simulator; safe to call twice."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _layout(observation: dict[str, np.ndarray]) -> dict[str, Any]:
    pixels = {name: observation[camera] for camera, name in PICTURES.items()}
    return {"pixels": pixels, "agent_pos": observation["state"]}
