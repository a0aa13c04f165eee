"""An environment with perturbations: applies them between control steps, records and undoes them.

The randomness of perturbation i of an episode comes from ``SeedSequence([seed, i])`` and nothing
else: not from how often the environment was rendered, nor from what the policy did. What happened
and when is in :attr:`PerturbedEnv.events`, for the episode's header.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from regrasp.episodes.types import Observation
from regrasp.sim.perturb import InitialPose, Perturbation, Scene


class PerturbedEnv:
    """An environment with perturbations; everything else is passed through.

    Args:
        env: a LIBERO environment (``regrasp.sim.make_env``).
        perturbations: in the order they are applied within a control step.
        seed: of the perturbations.

    Attributes:
        events: what has been applied: ``{"kind", "step", "end", "params", "drawn"}`` each.
    """

    def __init__(self, env: Any, perturbations: Sequence[Perturbation] = (), seed: int = 0) -> None:
        self.env = env
        self.perturbations = tuple(perturbations)
        self.seed = seed
        self.events: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset environment, model and perturbations; Gymnasium's ``(obs, info)``.

        An ``initial_pose`` perturbation moves the arm here.
        """
        out = self.env.reset(seed=seed, options=options)
        self.events = []
        self._drawn = [
            p.draw(np.random.default_rng(np.random.SeedSequence([self.seed, i])))
            for i, p in enumerate(self.perturbations)
        ]
        self._done = [0] * len(self.perturbations)
        self._begun: list[int | None] = [None] * len(self.perturbations)
        interest = self.env.problem.parsed_problem["obj_of_interest"]
        movable = [name for name in interest if name in self.env.problem.objects_dict]
        self.scene = Scene(self.env, movable[0] if movable else None)
        moved = False
        for i, perturbation in enumerate(self.perturbations):
            if isinstance(perturbation, InitialPose):
                self._begin(i)
                action = np.asarray(self._drawn[i]["action"], dtype=np.float32)
                self.env.step_chunk(np.tile(action, (perturbation.steps, 1)), render="none")
                self._end(i, perturbation.steps)
                moved = True
        if not moved:
            return self._seen(out[0]), out[1]
        render = (options or {}).get("render", True)
        return self.observe(render=render), out[1]

    def step(self, action: np.ndarray, *, render: bool = True) -> Any:
        """One control step under the perturbations; Gymnasium's five results."""
        out = self.env.step(self._before(np.asarray(action, dtype=np.float32)), render=render)
        return (self._seen(out[0]), *out[1:])

    def observe(self, render: bool = True) -> dict[str, np.ndarray]:
        """The observation now, as the perturbations let it be seen."""
        return self._seen(self.env.observe(render=render))

    def observation(self, render: bool = True) -> Observation:
        """The observation now, as a policy takes it."""
        now = self.observe(render)
        return Observation(now, now.pop("state"), self.env.instruction, time.monotonic())

    def step_chunk(self, actions: np.ndarray, render: str = "last") -> Any:
        """As the environment's, with the perturbations applied before every control step.

        A chunk of one step at a time gives what a whole chunk gives.
        """
        actions = np.asarray(actions, dtype=np.float32)
        if len(actions) == 1:
            part = self.env.step_chunk(self._before(actions[0])[None], render=render)
            return replace(part, observations=[self._seen(o) for o in part.observations])
        parts = []
        for i, action in enumerate(actions):
            last = render == "last" and i == len(actions) - 1
            each = render if render != "last" else ("last" if last else "none")
            parts.append(self.step_chunk(action[None], each))
            if parts[-1].terminated or parts[-1].truncated:
                break
        return _join(parts)

    def snapshot(self) -> Any:
        """The environment's snapshot with the perturbations' own progress."""
        progress = (list(self._done), list(self._begun), copy.deepcopy(self.events))
        scene = self.scene
        history = (scene.step, scene.phase, scene.in_phase, list(scene.wanted), dict(scene.memory))
        return self.env.snapshot(), progress, history

    def restore(self, snapshot: Any) -> None:
        """Continue from :meth:`snapshot`."""
        inner, (done, begun, events), (step, phase, in_phase, wanted, *memory) = snapshot
        self.env.restore(inner)
        self.scene.step, self.scene.wanted, self.scene.memory = step, list(wanted), dict(*memory)
        self.scene.phase, self.scene.in_phase = phase, in_phase
        self._done, self._begun = list(done), list(begun)
        self.events = copy.deepcopy(events)

    def _before(self, action: np.ndarray) -> np.ndarray:
        """Apply what is due before this control step; the action really executed."""
        self.scene.wanted.append(action)
        for i, perturbation in enumerate(self.perturbations):
            duration, done = perturbation.duration, self._done[i]
            if 0 < done <= duration and (done == duration or perturbation.over(self.scene)):
                perturbation.end(self.scene, self._drawn[i])
                self._done[i] = duration + 1
            if self._begun[i] is None and perturbation.when.fires(self.scene):
                self._begin(i)
            if self._begun[i] is not None and self._done[i] < duration:
                action = perturbation.act(self.scene, action, self._drawn[i], self._done[i])
                self._end(i, self._done[i] + 1)
        self.scene.step += 1
        return action

    def _seen(self, observation: dict[str, Any]) -> dict[str, Any]:
        for i, perturbation in enumerate(self.perturbations):
            if self._begun[i] is not None and self._done[i] < perturbation.duration:
                observation = perturbation.see(self.scene, observation, self._drawn[i])
        return observation

    def _begin(self, i: int) -> None:
        self._begun[i] = len(self.events)
        perturbation = self.perturbations[i]
        self.events.append(
            {
                "kind": perturbation.kind,
                "step": self.scene.step,
                "end": self.scene.step,
                "params": perturbation.to_json(),
                "drawn": self._drawn[i],
            }
        )
        perturbation.begin(self.scene, self._drawn[i])

    def _end(self, i: int, done: int) -> None:
        self._done[i] = done
        begun = self._begun[i]
        assert begun is not None
        self.events[begun]["end"] = self.scene.step + 1


def _join(parts: Sequence[Any]) -> Any:
    """One chunk result from those of its steps."""
    first = copy.copy(parts[0])
    last = parts[-1]
    values = {
        "observations": [o for part in parts for o in part.observations],
        "states": np.concatenate([part.states for part in parts]),
        "rewards": np.concatenate([part.rewards for part in parts]),
        "terminated": last.terminated,
        "truncated": last.truncated,
        "executed": sum(part.executed for part in parts),
    }
    return type(first)(**values)
