"""A calibrated monitor: scores and thresholds in, alarms out; saved as JSON and safetensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.types import Episode, PolicyOutput
from regrasp.monitors.base import Score, lookup, score_episode, shown
from regrasp.monitors.conformal import Calibration, calibrate
from regrasp.monitors.scores import SCORES
from regrasp.monitors.thresholds import Constant, Threshold, from_json
from safetensors.numpy import load_file, save_file

FORMAT = "regrasp-monitor-2"


@dataclass(frozen=True)
class Reading:
    """What the monitor says after one inference.

    Attributes:
        scores: score name -> value.
        causes: names of the scores above their threshold.
        excess: the largest score in multiples of its threshold: above 1 in an alarm.
        thresholds: score name -> its threshold at this moment.
        step: control steps since the segment began.
        segment: how many recoveries there were in the episode.
    """

    scores: dict[str, float]
    causes: tuple[str, ...]
    excess: float
    thresholds: dict[str, float]
    step: int
    segment: int

    @property
    def alarm(self) -> bool:
        """Whether any score is above its threshold."""
        return bool(self.causes)


class Monitor:
    """Runs scores beside a policy and alarms when one exceeds its threshold.

    Args:
        scores: the scores, each with a different name.
        calibration: the record of how they were calibrated.
        thresholds: one a score; None: those of the calibration, constant over the episode.
        policy_hash: of the policy whose rollouts calibrated it.
        protocol_hash: of the evaluation protocol they ran under.
        spec: :func:`describe_spec` of that policy; None where it is not known, and not checked.
        provenance: JSON-serialisable notes on what made it (episodes, seeds, home pose, ...).
    """

    def __init__(
        self,
        scores: Sequence[Score],
        calibration: Calibration,
        *,
        policy_hash: str,
        protocol_hash: str,
        thresholds: Mapping[str, Threshold] | None = None,
        spec: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        names = [score.name for score in scores]
        if thresholds is None:
            share = calibration.alpha / calibration.segments
            if calibration.combine == "bonferroni":
                share /= max(len(names), 1)
            thresholds = {
                name: Constant(value, share, calibration.n)
                for name, value in calibration.thresholds.items()
            }
        if len(set(names)) != len(names) or set(names) != set(thresholds):
            raise ValueError(
                f"Monitor: scores are {names} but thresholds are for "
                f"{sorted(thresholds)}; give one threshold a score"
            )
        self.scores = tuple(scores)
        self.calibration = calibration
        self.thresholds = dict(thresholds)
        self.policy_hash = policy_hash
        self.protocol_hash = protocol_hash
        self.spec = None if spec is None else dict(spec)
        self.provenance = dict(provenance or {})
        self.reset()

    @property
    def samples(self) -> int:
        """Chunks that the policy must be asked for at each inference (``num_samples``)."""
        return max(score.samples for score in self.scores)

    def reset(self, *, group: str | None = None, segment: int = 0) -> None:
        """Start an episode, or a segment after a recovery: every window is emptied.

        Args:
            group: the task, for thresholds that differ between tasks.
            segment: how many recoveries there were in the episode.
        """
        for score in self.scores:
            score.reset()
        self._group, self._segment, self._step = group, int(segment), 0

    def update(self, output: PolicyOutput, executed: np.ndarray) -> Reading:
        """Score one inference; see :meth:`Score.update` for the arguments."""
        self._step += len(executed)
        values = {score.name: score.update(shown(score, output), executed) for score in self.scores}
        limits = {
            name: threshold.at(self._step, self._group, self._segment)
            for name, threshold in self.thresholds.items()
        }
        causes = tuple(name for name, value in values.items() if value > limits[name])
        excess = max(_multiple(value, limits[name]) for name, value in values.items())
        return Reading(values, causes, excess, limits, self._step, self._segment)

    def state(self) -> dict[str, np.ndarray]:
        """Every score's state, keys prefixed with its name; and where in the episode it is."""
        state = {f"{s.name}/{k}": v for s in self.scores for k, v in s.state().items()}
        group = np.frombuffer((self._group or "").encode(), np.uint8)
        return state | {"step": np.array([self._step, self._segment]), "group": group}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from :meth:`state`."""
        for score in self.scores:
            score.load_state(_strip(state, f"{score.name}/"))
        self._step, self._segment = (int(x) for x in state["step"])
        self._group = bytes(np.asarray(state["group"], np.uint8)).decode() or None

    def check_spec(self, spec: Any) -> None:
        """Raise ValueError where a policy takes or gives something else than the calibrated one."""
        theirs = describe_spec(spec)
        for field, mine in (self.spec or {}).items():
            if theirs.get(field) != mine:
                raise ValueError(
                    f"Monitor: spec.{field} is {mine!r}, this policy has {theirs.get(field)!r}; "
                    "recalibrate the monitor for it"
                )

    def check(self, *, policy_hash: str, protocol_hash: str) -> None:
        """Raise ValueError unless calibrated for this policy under this protocol."""
        for field, mine, theirs in (
            ("policy_hash", self.policy_hash, policy_hash),
            ("protocol_hash", self.protocol_hash, protocol_hash),
        ):
            if mine != theirs:
                raise ValueError(
                    f"Monitor: {field} is {mine!r}, this run has {theirs!r}; its false-alarm rate "
                    "is promised only for what it was calibrated on. Recalibrate it."
                )

    def save(self, folder: str | Path) -> Path:
        """Write ``monitor.json`` and ``monitor.safetensors``; each replaces the old one whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"{s.name}/{k}": v for s in self.scores for k, v in s.weights().items()}
        header = {
            "format": FORMAT,
            "scores": [{"name": s.name, "config": s.config()} for s in self.scores],
            "thresholds": {name: t.to_json() for name, t in self.thresholds.items()},
            "promise": {name: t.promise for name, t in self.thresholds.items()},
            "calibration": self.calibration.to_json(),
            "policy_hash": self.policy_hash,
            "protocol_hash": self.protocol_hash,
            "spec": self.spec,
            "provenance": self.provenance,
        }
        weights = folder / "monitor.safetensors"
        contiguous = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
        save_file(contiguous, weights.with_suffix(".part"))
        os.replace(weights.with_suffix(".part"), weights)
        path = folder / "monitor.json"
        path.with_suffix(".part").write_text(json.dumps(header, indent=1, allow_nan=False) + "\n")
        os.replace(path.with_suffix(".part"), path)
        return path

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        policy_hash: str | None = None,
        protocol_hash: str | None = None,
    ) -> Monitor:
        """Read an artifact; hashes given must be those it was calibrated for (ValueError)."""
        folder = Path(folder)
        header = json.loads((folder / "monitor.json").read_text())
        if header.get("format") != FORMAT:
            raise ValueError(
                f"Monitor.load: {folder}/monitor.json has format {header.get('format')!r}, "
                f"this version reads {FORMAT!r}; calibrate it again"
            )
        arrays = load_file(folder / "monitor.safetensors")
        scores = [
            lookup(SCORES, entry["name"], "Monitor.load: score").build(
                entry["config"], _strip(arrays, f"{entry['name']}/")
            )
            for entry in header["scores"]
        ]
        monitor = cls(
            scores,
            Calibration.from_json(header["calibration"]),
            policy_hash=header["policy_hash"],
            protocol_hash=header["protocol_hash"],
            thresholds={name: from_json(data) for name, data in header["thresholds"].items()},
            spec=header["spec"],
            provenance=header["provenance"],
        )
        monitor.check(
            policy_hash=monitor.policy_hash if policy_hash is None else policy_hash,
            protocol_hash=monitor.protocol_hash if protocol_hash is None else protocol_hash,
        )
        return monitor


def calibrate_monitor(
    scores: Sequence[Score],
    episodes: Sequence[Episode],
    alpha: float,
    *,
    combine: str = "bonferroni",
    scales: Mapping[str, float] | None = None,
    segments: int = 1,
    spec: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Monitor:
    """A monitor from calibration episodes; those that failed are left out.

    Episodes of different policies or protocols raise ValueError: they are not exchangeable.
    """
    successes = [e for e in episodes if e.header.success and len(e.chunks.get("step", ()))]
    if not successes:
        raise ValueError(
            f"calibrate_monitor: none of {len(episodes)} episodes succeeded with recorded chunks"
        )
    for field in ("policy_hash", "protocol_hash"):
        found = sorted({getattr(e.header, field) for e in successes})
        if len(found) > 1:
            raise ValueError(f"calibrate_monitor: episodes of several {field}: {found}")
    maxima = {
        score.name: np.array([score_episode(score, e).max() for e in successes]) for score in scores
    }
    for score in scores:
        score.reset()
    return Monitor(
        scores,
        calibrate(maxima, alpha, combine=combine, scales=scales, segments=segments),
        policy_hash=successes[0].header.policy_hash,
        protocol_hash=successes[0].header.protocol_hash,
        spec=spec,
        provenance=provenance,
    )


def describe_spec(spec: Any) -> dict[str, Any]:
    """What a monitor's artifact keeps of a ``PolicySpec``: all that a score's numbers depend on."""
    return {
        "cameras": {name: list(size) for name, size in spec.cameras.items()},
        "state": list(spec.state.names),
        "action": list(spec.action.names),
        "control_hz": float(spec.control_hz),
    }


def replay(monitor: Monitor, episode: Episode) -> Iterator[Reading]:
    """The readings of a stored episode, as a live run gave them; reset where a segment begins."""
    chunks, actions = episode.chunks, episode.steps["action"]
    segments = chunks.get("segment", np.zeros(len(chunks["step"]), np.int64))
    group = f"{episode.header.suite}/{episode.header.task}"
    last = 0
    for i, step in enumerate(chunks["step"]):
        if i == 0 or segments[i] != segments[i - 1]:
            monitor.reset(group=group, segment=int(segments[i]))
            last = int(step)
        output = PolicyOutput(chunks["samples"][i], chunks["embedding"][i])
        yield monitor.update(output, actions[last:step])
        last = int(step)


def _strip(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def _multiple(value: float, threshold: float) -> float:
    """How many times its threshold a score is; a threshold of 0 makes any alarm a clear one."""
    if threshold > 0:
        return value / threshold
    return math.inf if value > threshold else 0.0
