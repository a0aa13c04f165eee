"""A policy and its monitor as one policy: whatever drives the robot needs to know nothing more."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from regrasp.episodes.types import Observation, PolicyOutput
from regrasp.monitors.runtime import Monitor, Reading


class MonitoredPolicy(Protocol):
    """The part of ``regrasp.policies.Policy`` that is wrapped."""

    @property
    def spec(self) -> Any:
        """What it needs and gives."""

    def reset(self, seed: int) -> None:
        """Forget the episode."""

    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """One output an observation."""
        ...

    def hash(self) -> str:
        """What the monitor's artifact knows it by."""
        ...


class MonitorRuntime:
    """Wraps any policy; itself a policy, for one robot at a time.

    The driver's loop stays what it was, with one line more: what was really executed.

        runtime = MonitorRuntime(policy, Monitor.load(folder), protocol_hash=protocol.hash())
        runtime.reset(seed)
        while running:
            output = runtime.infer([robot.observation()])[0]
            if runtime.reading.alarm:
                ...
            runtime.executed(robot.run(output.samples[0][:8]))

    Args:
        policy: the policy.
        monitor: its monitor; one of another policy, protocol or specification is refused with a
            ValueError.
        protocol_hash: of the protocol under which the robot runs.
        listen: called after each inference with what ``regrasp monitors watch`` reads, a
            JSON-serialisable dict; :func:`reading_to_json`.
    """

    def __init__(
        self,
        policy: MonitoredPolicy,
        monitor: Monitor,
        *,
        protocol_hash: str,
        listen: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        monitor.check(policy_hash=policy.hash(), protocol_hash=protocol_hash)
        monitor.check_spec(policy.spec)
        self.policy, self.monitor = policy, monitor
        self._listen = listen
        self.overhead_ms: deque[float] = deque(maxlen=10_000)
        self.reset(0)

    @property
    def spec(self) -> Any:
        """The policy's."""
        return self.policy.spec

    @property
    def reading(self) -> Reading:
        """What the monitor said after the last inference."""
        if self._reading is None:
            raise ValueError("MonitorRuntime.reading: nothing was inferred since the last reset")
        return self._reading

    def hash(self) -> str:
        """The policy's: a monitor changes no answer."""
        return self.policy.hash()

    def reset(self, seed: int, *, group: str | None = None, segment: int = 0) -> None:
        """Start an episode, or a segment of one after a recovery.

        Args:
            seed: of the policy.
            group: the task's name, for thresholds that differ between tasks.
            segment: how many recoveries there were in this episode.
        """
        self.policy.reset(seed)
        self.monitor.reset(group=group, segment=segment)
        self._reading: Reading | None = None
        self._executed: np.ndarray | None = None

    def executed(self, actions: np.ndarray) -> None:
        """Tell what the robot did since the last inference, float ``[k, A]``; may be said in parts.

        What was asked for is not enough: a robot clips, and a planner may drop the rest of a chunk.
        """
        actions = np.asarray(actions, dtype=np.float32)
        if actions.ndim != 2:
            raise ValueError(
                f"MonitorRuntime.executed: actions have shape {actions.shape}; give [k, A]"
            )
        before = self._executed
        self._executed = actions if before is None else np.concatenate([before, actions])

    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """The policy's answer, unchanged; :attr:`reading` is the monitor's to it.

        The policy is asked for ``monitor.samples`` chunks where that is more, and the first
        ``num_samples`` are handed out. One that draws noise for each chunk then goes on from
        another place of its random stream than it would alone: other actions of the same
        distribution. With a monitor of one sample a run is the policy's own, action for action.

        Raises:
            ValueError: for more than one observation, or where :meth:`executed` was not told what
                became of the last answer.
        """
        if len(observations) != 1:
            raise ValueError(
                f"MonitorRuntime.infer: {len(observations)} observations; a monitor follows one "
                "robot: give one, and another robot a runtime of its own"
            )
        if self._reading is not None and self._executed is None:
            raise ValueError(
                "MonitorRuntime.infer: call executed(actions) after each inference; scores compare "
                "plans at the same moments and must know how many have passed"
            )
        output = self.policy.infer(observations, max(num_samples, self.monitor.samples))[0]
        executed = self._executed
        if executed is None:
            executed = np.zeros((0, output.samples.shape[-1]), dtype=np.float32)
        begun = time.perf_counter()
        self._reading = self.monitor.update(output, executed)
        self.overhead_ms.append(1e3 * (time.perf_counter() - begun))
        self._executed = None
        if self._listen is not None:
            self._listen(reading_to_json(self._reading))
        return [PolicyOutput(output.samples[:num_samples], output.embedding, output.logprob)]


def reading_to_json(reading: Reading) -> dict[str, Any]:
    """A line of a log that ``regrasp monitors watch`` follows."""
    return {
        "step": reading.step,
        "segment": reading.segment,
        "scores": reading.scores,
        "thresholds": {k: v if math.isfinite(v) else None for k, v in reading.thresholds.items()},
        "causes": list(reading.causes),
    }
