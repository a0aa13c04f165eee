"""Demonstrations worth imitating: experts that are disturbed, and labelled with what they wanted.

Behaviour cloning fails where its copies drift; DART (Laskey et al. 2017) disturbs the demonstrator
instead, and records the clean action at each disturbed state. Two kinds of disturbance run here:
small Gaussian noise all along, and rare bursts that throw the hand centimetres off, turn it, or
open and close the fingers, so that the episode shows how one comes back.

A burst cannot be foreseen from the observation before it, so a chunk of actions must not reach
across one. Every step carries a ``segment`` number; a training window may use the actions of its
first step's segment only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.sim.experts.base import CLOSE, OPEN, Expert
from regrasp.sim.experts.tasks import Goal
from regrasp.sim.tasks import twin_instructions

#: Control steps recorded after success, so that a policy learns to stay.
_STAY = 6


@dataclass(frozen=True)
class NoiseConfig:
    """How a demonstration is disturbed; amounts are in action units (1.0 is 0.05 m or 0.5 rad).

    Attributes:
        sigma_pos, sigma_rot: standard deviation of the Gaussian noise on each component.
        start_burst: probability of a burst at the very start (another starting pose).
        burst_rate: probability a step that a burst begins.
        burst_steps: shortest and longest burst.
        burst_pos, burst_rot: largest components during a burst.
        gripper_share: share of bursts that flip the fingers instead of moving the hand.
    """

    sigma_pos: float = 0.08
    sigma_rot: float = 0.02
    start_burst: float = 0.5
    burst_rate: float = 0.02
    burst_steps: tuple[int, int] = (3, 10)
    burst_pos: float = 0.9
    burst_rot: float = 0.15
    gripper_share: float = 0.1


class Disturbance:
    """Turns clean actions into disturbed ones; says when a burst is on.

    Args:
        config: the amounts; None disturbs nothing.
        seed: of the draws.
    """

    def __init__(self, config: NoiseConfig | None, seed: int) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._left = 0
        self._offset: np.ndarray = np.zeros(6)
        self._flip = False
        if config is not None and self._rng.random() < config.start_burst:
            self._begin(config, longest=2 * config.burst_steps[1], flips=False)

    @property
    def bursting(self) -> bool:
        """Whether the next action will be disturbed by a burst."""
        return self._left > 0

    def _begin(self, config: NoiseConfig, longest: int, flips: bool = True) -> None:
        rng = self._rng
        self._left = int(rng.integers(config.burst_steps[0], longest + 1))
        self._flip = flips and rng.random() < config.gripper_share
        if self._flip:
            self._left = max(self._left, 10)  # the fingers take eight steps to let go
            self._offset = np.zeros(6)
            return
        direction = rng.normal(size=3)
        direction /= np.linalg.norm(direction)
        direction[2] = max(direction[2], -0.3)  # a hand driven down only breaks the scene
        turn = rng.uniform(-1.0, 1.0, 3) * config.burst_rot
        self._offset = np.concatenate([direction * config.burst_pos * rng.uniform(0.3, 1.0), turn])

    def apply(self, action: np.ndarray) -> np.ndarray:
        """The disturbed version of a clean action float ``[7]``, clipped to [-1, 1]."""
        config = self._config
        if config is None:
            return action
        noisy = action.astype(float)
        noisy[:3] += self._rng.normal(0.0, config.sigma_pos, 3)
        noisy[3:6] += self._rng.normal(0.0, config.sigma_rot, 3)
        if self._left > 0:
            self._left -= 1
            if self._flip:
                noisy[6] = OPEN if action[6] > 0 else CLOSE
            else:
                noisy[:6] = self._offset
        elif self._rng.random() < config.burst_rate:
            self._begin(config, longest=config.burst_steps[1])
        return np.clip(noisy, -1.0, 1.0).astype(np.float32)


def rollout_expert(
    env: Any,
    expert: Expert,
    init_state: int,
    seed: int,
    noise: NoiseConfig | None = None,
    goal: Sequence[Goal] | None = None,
    instruction: str | None = None,
) -> Episode:
    """Run an expert to its goal under disturbance and record everything training needs.

    Args:
        env: a LIBERO environment.
        expert: the expert of ``goal``.
        init_state: which of the benchmark's initial states.
        seed: of the disturbance and of the fixtures' places.
        noise: how to disturb; None records a clean demonstration.
        goal: predicates that count as success; the task's own when None.
        instruction: what the demonstration is said to do; the task's own when None.

    Returns:
        An episode with, per control step: ``image/<camera>`` (before the action), ``state``,
        ``action`` (executed), ``expert_action`` (the clean label), ``phase``, ``segment`` (see the
        module), ``aux`` float32 ``[T, 9]`` (world positions, metres: what is being manipulated,
        where it shall go, the grip site) and ``success``. The header says whether the goal held at
        the end.
    """
    observation, _ = env.reset(seed=seed, options={"init_state": init_state})
    expert.reset()
    disturbance = Disturbance(noise, seed)
    rows: dict[str, list[Any]] = {}
    segment, was_bursting, stayed = 0, False, 0
    for _ in range(env.horizon):
        wanted = expert.act(env)
        bursting = disturbance.bursting
        segment += bursting or was_bursting
        executed = wanted if stayed else disturbance.apply(wanted)
        row = {f"image/{name}": observation[name] for name in env.config.cameras}
        row |= {
            "state": observation["state"],
            "action": executed,
            "expert_action": wanted,
            "phase": np.int64(expert.phase),
            "segment": np.int64(segment),
            "aux": np.concatenate(
                [expert.target_pos, expert.goal_pos, env.eef_pose()[0]], dtype=np.float32
            ),
        }
        observation, _, _, _, _ = env.step(executed)
        achieved = env.success if goal is None else all(expert.scene.holds(g) for g in goal)
        row["success"] = np.bool_(achieved)
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
        was_bursting = bursting
        stayed = stayed + 1 if achieved and expert.done else 0
        if stayed > _STAY:
            break
    header = EpisodeHeader(
        suite=env.suite,
        task=str(env.task.index),
        instruction=instruction or env.task.instruction,
        init_state=init_state,
        seed=seed,
        success=bool(rows["success"][-1]),
        extra={"expert": True, "noise": asdict(noise) if noise else None},
    )
    if goal is not None:
        header.extra["goal"] = [list(predicate) for predicate in goal]
    return Episode(header, {key: np.stack(values) for key, values in rows.items()})


def alternative_goals(env: Any) -> list[tuple[list[Goal], str]]:
    """Other tasks of the same scene, in the benchmark's wording.

    In libero_object each other object into the basket; in libero_spatial the other bowl onto the
    plate, called by its place.

    Returns:
        (goal, instruction) of each.

    Raises:
        ValueError: the scene is of another kind.
    """
    own = {name for state in env.problem.parsed_problem["goal_state"] for name in state}
    basket = "basket_1_contain_region"
    if basket in env.problem.object_sites_dict:
        goals: list[tuple[list[Goal], str]] = []
        for name in sorted(env.problem.objects_dict):
            if name not in own and not name.startswith("basket"):
                words = name.rpartition("_")[0].replace("_", " ")
                told = f"pick up the {words} and place it in the basket"
                goals.append(([("in", name, basket)], told))
        return goals
    twins = twin_instructions(env.task) if env.suite == "libero_spatial" else {}
    if not twins:
        raise ValueError(
            f"alternative_goals: {env.suite}/{env.task_name} has no basket and no twin"
        )
    return [([("on", name, "plate_1")], told) for name, told in twins.items()]
