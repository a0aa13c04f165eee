"""The supervisor: run a policy under a monitor; on alarm rewind, restart it clean, try again.

One loop serves both arms of a comparison. With ``tries=0`` it only watches: the episode is the
policy's own, with scores and alarms recorded beside it. With ``tries>0`` the episode is the same,
action for action, until the first alarm that is acted on.

What an alarm does, in order: the queue of unexecuted actions is dropped; the arm is driven to the
latest verified checkpoint (the first time) or to the start pose (afterwards), see ``rewind.py``;
the policy is reset with a new seed derived from the episode's; the monitor's windows are emptied.
Control steps spent rewinding count against the episode's horizon.

On false alarms: the chance that an episode which would have succeeded alone is ever interrupted
is the chance of an alarm in its first segment, so the calibration's alpha. Later segments start
elsewhere than calibration episodes did; alpha holds for each as far as it resembles them (see
``monitors/conformal.py``), and ``tries`` bounds how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.monitors.runtime import Monitor, Reading
from regrasp.recovery.protocols import ChunkPolicy, Robot
from regrasp.recovery.rewind import Checkpoint, Rewind, RewindConfig, holds, plan_rewind

#: Values of the ``mode`` row of an episode's steps.
POLICY, REWIND = 0, 1


@dataclass(frozen=True)
class SupervisorConfig:
    """How the supervisor runs.

    Attributes:
        tries: rewinds at most; 0 watches without acting.
        execute: actions executed of each inferred chunk.
        patience: an alarm is acted on once the excesses (score over threshold) of successive
            alarming inferences add up to this: with 12, twelve times the threshold is acted on at
            once and an alarm just above it after twelve inferences, so that a policy about to
            recover by itself is left alone. 1 acts on the first alarm. Each rewind multiplies it
            (twice, three times, ...): the scene may look odd for good by then.
        holding: multiplies the patience while the hand holds something: to put it back undoes
            what has been achieved.
        max_steps: control steps at most, rewinding included.
        rewind: how a rewind moves.
    """

    tries: int = 2
    execute: int = 8
    patience: float = 1.0
    holding: float = 3.0
    max_steps: int = 600
    rewind: RewindConfig = field(default_factory=RewindConfig)


def segment_seed(seed: int, segment: int) -> int:
    """The policy's seed in a segment: the episode's own at first, then one derived from it."""
    if segment == 0:
        return seed
    return int(np.random.SeedSequence([seed, segment]).generate_state(1)[0])


class Supervisor:
    """Runs episodes.

    Args:
        policy: the policy.
        monitor: its calibrated monitor, or None to run without scores.
        config: how.
        verify: called before each action of the policy; a label where the present pose is safe to
            be sent back to (hand empty, object at rest, ...), else None.
        record: called before each action; more rows for ``Episode.steps``.
    """

    def __init__(
        self,
        policy: ChunkPolicy,
        monitor: Monitor | None,
        config: SupervisorConfig | None = None,
        *,
        verify: Callable[[], str | None] | None = None,
        record: Callable[[], dict[str, np.ndarray]] | None = None,
    ) -> None:
        self.policy, self.monitor = policy, monitor
        self.config = SupervisorConfig() if config is None else config
        self.verify = verify or (lambda: None)
        self.record = record or dict
        if self.config.tries and monitor is None:
            raise ValueError("Supervisor: tries > 0 needs a monitor to raise the alarms")

    def run(self, robot: Robot, header: EpisodeHeader, home: np.ndarray | None = None) -> Episode:
        """Run one episode on a robot that has been reset.

        Args:
            robot: the arm at its task.
            header: what is known of the episode; its seed seeds the policy. The returned
                episode's header adds success and interventions.
            home: float ``[6]``, the pose that counts as the start; None: where the arm is now.

        Returns:
            Episode with steps ``state``, ``action``, ``mode`` (0 policy, 1 rewind), ``segment``
            and what ``record`` gave; chunks ``step``, ``samples``, ``embedding``, ``segment``,
            ``alarm`` and ``score/<name>``.
        """
        run = _Run(self, robot, header, home)
        return run.episode()


class _Run:
    """One episode in progress."""

    def __init__(
        self, supervisor: Supervisor, robot: Robot, header: EpisodeHeader, home: np.ndarray | None
    ) -> None:
        self.s, self.robot, self.header = supervisor, robot, header
        self.steps: dict[str, list[np.ndarray]] = {}
        self.chunks: dict[str, list[np.ndarray]] = {}
        self.interventions: list[dict[str, Any]] = []
        self.state = np.asarray(robot.observation(render=False).state, dtype=np.float32)
        pose = self.state[:6] if home is None else np.asarray(home, dtype=np.float64)
        self.start = Checkpoint(0, pose, "start")
        self.latest = self.start
        self.step, self.segment, self.used = 0, 0, 0
        self.success, self.over = False, False

    def episode(self) -> Episode:
        while not self.over:
            reading = self._segment()
            if reading is not None:
                self._rewind(reading)
        header = EpisodeHeader.from_json(
            self.header.to_json() | {"success": self.success, "interventions": self.interventions}
        )
        return Episode(
            header,
            {key: np.stack(rows) for key, rows in self.steps.items()},
            {key: np.stack(rows) for key, rows in self.chunks.items()},
        )

    def _segment(self) -> Reading | None:
        """Run the policy until the episode ends (None) or an alarm is to be acted on."""
        config, policy, monitor = self.s.config, self.s.policy, self.s.monitor
        policy.reset(segment_seed(self.header.seed, self.segment))
        if monitor is not None:
            monitor.reset(group=f"{self.header.suite}/{self.header.task}", segment=self.segment)
        samples = 1 if monitor is None else monitor.samples
        self.trace = [self.state]
        self.grippers: list[float] = []
        executed = np.zeros((0, 0), dtype=np.float32)
        evidence, alarmed = 0.0, False
        # A pose becomes a checkpoint once the monitor has looked at it and kept calm: an arm that
        # was just thrown off may well hang, empty, above an object at rest.
        candidate: Checkpoint | None = None
        while not self.over:
            output = policy.infer([self.robot.observation()], samples)[0]
            row: dict[str, Any] = {
                "step": np.int64(self.step),
                "samples": output.samples,
                "embedding": output.embedding,
                "segment": np.int64(self.segment),
            }
            if monitor is not None:
                reading = monitor.update(output, executed)
                row["alarm"] = np.bool_(reading.alarm)
                row |= {f"score/{k}": np.float64(v) for k, v in reading.scores.items()}
            _append(self.chunks, row)
            calm = monitor is None or not reading.alarm
            if calm and candidate is not None:
                self.latest = candidate
            candidate = None
            if monitor is not None:
                evidence = 0.0 if calm else evidence + reading.excess
            if evidence > 0:
                act = self.used < config.tries and evidence >= self._patience()
                if act or not alarmed:
                    self._log("alarm", causes=list(reading.causes), acted=act)
                alarmed = True
                if act:
                    return reading
            # An arm clips what lies outside the action's limits; record what it really does.
            executed = np.clip(output.samples[0][: config.execute], -1.0, 1.0).astype(np.float32)
            for action in executed:
                label = self.s.verify()
                if label is not None:
                    candidate = Checkpoint(self.step, self.state[:6].copy(), label)
                if not self._step(action, POLICY):
                    break
        return None

    def _patience(self) -> float:
        config = self.s.config
        holding = bool(self.grippers) and holds(self.state, self.grippers[-1], config.rewind)
        return config.patience * (1 + self.used) * (config.holding if holding else 1.0)

    def _rewind(self, reading: Reading) -> None:
        """Drive back, and start the next segment."""
        target = self.latest if self.used == 0 else self.start
        self.used += 1
        config = self.s.config.rewind
        waypoints = plan_rewind(
            np.stack(self.trace), np.array(self.grippers), target, config, self.start.pose[2]
        )
        rewind = Rewind(waypoints, config)
        began = self.step
        entry = self._log(
            "rewind",
            causes=list(reading.causes),
            checkpoint=target.label,
            checkpoint_step=target.step,
            steps=0,
            skipped_waypoints=0,
        )
        while (action := rewind.action(self.state)) is not None:
            if not self._step(action, REWIND):
                break
        entry |= {"steps": self.step - began, "skipped_waypoints": rewind.skipped}
        self.segment += 1
        self.latest = self.start

    def _step(self, action: np.ndarray, mode: int) -> bool:
        """Execute one action; False once the episode is over."""
        row = self.s.record()
        result = self.robot.step_chunk(action[None], render="none")
        _append(
            self.steps,
            row
            | {
                "state": self.state,
                "action": action,
                "mode": np.int64(mode),
                "segment": np.int64(self.segment),
            },
        )
        self.step += 1
        self.grippers.append(float(action[-1]))
        if result.executed:
            self.state = np.asarray(result.states[-1], dtype=np.float32)
        self.trace.append(self.state)
        self.success = bool(result.terminated)
        self.over = self.success or bool(result.truncated) or self.step >= self.s.config.max_steps
        return not self.over

    def _log(self, kind: str, **more: Any) -> dict[str, Any]:
        entry = {"kind": kind, "step": self.step, "segment": self.segment, **more}
        self.interventions.append(entry)
        return entry


def _append(columns: dict[str, list[np.ndarray]], row: dict[str, Any]) -> None:
    if columns and set(row) != set(columns):
        raise ValueError(
            f"Supervisor: record() gave {sorted(row)} after {sorted(columns)}; give the same keys "
            "at every step"
        )
    for key, value in row.items():
        columns.setdefault(key, []).append(np.asarray(value))
