"""The few types every part of regrasp shares: observation, action chunk, policy output, episode.

All arrays are NumPy. Poses are in the robot's base/world frame of the environment, metres and
radians, unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

#: An action chunk: float32 ``[H, A]`` in the environment's own units. Normalised nowhere but
#: inside a policy.
ActionChunk = np.ndarray


@dataclass(frozen=True)
class Observation:
    """What a policy sees at one moment.

    Attributes:
        images: camera name -> uint8 ``[H, W, 3]``, RGB, upright as the policy expects it.
        state: proprioception, float32 ``[S]``; the names and units of its fields are in the
            environment's :class:`StateLayout`.
        instruction: the task in words.
        t: monotonic seconds at which the newest part of it was measured.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    instruction: str
    t: float = 0.0


@dataclass(frozen=True)
class StateLayout:
    """Names and units of a state or action vector, one entry a dimension."""

    names: tuple[str, ...]
    units: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.units):
            raise ValueError(
                f"StateLayout: {len(self.names)} names but {len(self.units)} units; give one each"
            )

    def __len__(self) -> int:
        return len(self.names)


#: openpi's LIBERO state: end-effector position, axis-angle orientation, two finger joints.
LIBERO_STATE = StateLayout(
    ("eef_x", "eef_y", "eef_z", "eef_ax", "eef_ay", "eef_az", "finger_left", "finger_right"),
    ("m", "m", "m", "rad", "rad", "rad", "m", "m"),
)

#: robosuite's OSC_POSE deltas at 20 Hz: 1.0 is 0.05 m or 0.5 rad a control step; the gripper is
#: -1 to open and +1 to close.
LIBERO_ACTION = StateLayout(
    ("dx", "dy", "dz", "dax", "day", "daz", "gripper"),
    ("0.05 m", "0.05 m", "0.05 m", "0.5 rad", "0.5 rad", "0.5 rad", "open -1, close +1"),
)


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy answers to one observation.

    Attributes:
        samples: float32 ``[N, H, A]``, N >= 1, environment units; ``samples[0]`` is what runs.
        embedding: float32 ``[D]``, the policy's own summary of the observation.
        logprob: log-probability of ``samples[0]`` where the policy has one, else None.
    """

    samples: np.ndarray
    embedding: np.ndarray
    logprob: float | None = None


@dataclass(frozen=True)
class EpisodeHeader:
    """What is true of a whole episode. ``extra`` holds JSON-serialisable additions only."""

    suite: str
    task: str
    instruction: str
    init_state: int
    seed: int
    success: bool
    perturbation: str = "none"
    policy_hash: str = ""
    protocol_hash: str = ""
    failure_label: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    interventions: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The header as a JSON-serialisable dict; :meth:`from_json` inverts it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpisodeHeader:
        """Rebuild a header; unknown keys raise ValueError naming them."""
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"EpisodeHeader: unknown fields {sorted(unknown)}")
        return cls(**data)


@dataclass
class Episode:
    """One rollout.

    Attributes:
        header: what is true of the whole episode.
        steps: key -> array ``[T, ...]``, one row a control step. Common keys:
            ``image/<camera>`` uint8 ``[T, H, W, 3]`` (seen before the action of that row),
            ``state`` float32 ``[T, S]``, ``action`` float32 ``[T, A]`` (what was executed),
            ``expert_action`` (the label, where it differs), ``phase`` int64, ``success`` bool.
        chunks: key -> array ``[C, ...]``, one row a policy inference. Common keys: ``step`` int64
            (the control step it was inferred at), ``samples`` ``[C, N, H, A]``,
            ``embedding`` ``[C, D]``.
    """

    header: EpisodeHeader
    steps: dict[str, np.ndarray]
    chunks: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, group in (("steps", self.steps), ("chunks", self.chunks)):
            lengths = {key: len(value) for key, value in group.items()}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"Episode.{kind}: arrays of different lengths {lengths}")

    def __len__(self) -> int:
        return len(next(iter(self.steps.values()))) if self.steps else 0
