"""Evaluation protocols: everything that makes two success rates comparable, and a hash of it.

Published LIBERO numbers differ in settle steps, horizons, cameras and seeds. A protocol here is a
frozen record of all of them; two figures with different hashes never share a table. The default is
openpi's (``examples/libero/main.py``), which most published figures use.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass, replace

from regrasp.sim.env import EnvConfig
from regrasp.sim.tasks import HORIZONS, LiberoTask

#: Initial states that training, calibration and RL may use; the others are held out.
TRAIN_STATES = tuple(range(30))
HELD_OUT_STATES = tuple(range(30, 50))


@dataclass(frozen=True)
class Protocol:
    """How success is measured.

    Attributes:
        name: which published protocol it follows.
        settle_steps: control steps before the policy sees anything, not counted.
        settle_gripper: gripper command while settling (openpi: -1, open; LIBERO's own: 0).
        horizons: suite -> control steps; PRO variants take their base suite's.
        seed: of the environment; decides the fixtures' places with the trial's number.
        camera: (height, width) that the simulator renders.
        render: ``lite`` or ``full`` pictures.
        replan: actions executed of each chunk.
        success: what counts; always the first step at which the BDDL goal holds.
        init_states: the initial states run.
    """

    name: str
    settle_steps: int
    settle_gripper: float
    horizons: dict[str, int]
    seed: int
    camera: tuple[int, int]
    render: str = "lite"
    replan: int = 5
    success: str = "first done"
    init_states: tuple[int, ...] = HELD_OUT_STATES

    def record(self, task: LiberoTask | None = None) -> dict[str, object]:
        """A JSON-serialisable record, with the instruction's source when a task is given."""
        record = {**asdict(self), "init_states": list(self.init_states)}
        if task is not None:
            record["instruction_source"] = task.instruction_source
        return record

    def hash(self, task: LiberoTask | None = None) -> str:
        """Twelve hex digits of :meth:`record`."""
        text = json.dumps(self.record(task), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def horizon(self, suite: str) -> int:
        """Control steps allowed in a suite."""
        base = suite if suite in self.horizons else suite.rpartition("_")[0]
        return self.horizons[base]

    def env_config(self, suite: str) -> EnvConfig:
        """The environment that this protocol asks for."""
        return EnvConfig(
            mode=self.render,  # type: ignore[arg-type]
            cameras={"agentview": self.camera, "wrist": self.camera},
            settle_steps=self.settle_steps,
            settle_gripper=self.settle_gripper,
            horizon=self.horizon(suite),
        )


PROTOCOLS: dict[str, Protocol] = {
    # openpi examples/libero/main.py, at the camera size this repository's policy is trained for.
    "openpi": Protocol("openpi", 10, -1.0, HORIZONS, 7, (128, 128)),
    # LIBERO's own evaluation (libero/lifelong/metric.py).
    "libero": Protocol("libero", 5, 0.0, dict.fromkeys(HORIZONS, 600), 0, (128, 128)),
    # LeRobot's libero environment: openpi's, with 280 steps on libero_spatial.
    "lerobot": Protocol("lerobot", 10, -1.0, {**HORIZONS, "libero_spatial": 280}, 7, (128, 128)),
    # RLinf's short setting: 15 settle steps.
    "rlinf": Protocol(
        "rlinf",
        15,
        -1.0,
        {**HORIZONS, "libero_spatial": 240, "libero_goal": 320},
        7,
        (128, 128),
    ),
}


def get_protocol(name: str, **changes: object) -> Protocol:
    """A named protocol, with fields replaced (which changes its hash).

    Raises:
        KeyError: no such protocol; the message names the nearest.
    """
    if name not in PROTOCOLS:
        near = difflib.get_close_matches(name, PROTOCOLS, n=2, cutoff=0.0)
        raise KeyError(f"unknown protocol {name!r}; nearest: {', '.join(near)}")
    return replace(PROTOCOLS[name], **changes)  # type: ignore[arg-type]
