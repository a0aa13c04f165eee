"""The rollouts of the monitors' benchmark: a policy, watched by nobody, with and without failures.

A job is one episode. In every fold each task is visited on the fold's own initial states, so that
no state that trains, selects or calibrates a monitor ever tests one. An injected episode differs
from an unperturbed one in one injection of the failure generators (:mod:`regrasp.sim.failures`), or
in what the policy is told. An episode ends where the task's predicate first holds, as a deployment
would, or at the protocol's horizon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.results import library_versions
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.scripts._rollouts import load_policy
from regrasp.sim.cache import LastEnv

#: Injected types, by family. What a policy that looks shrugs off at any severity is left out.
FAMILIES: dict[str, tuple[str, ...]] = {
    "control": (
        "early_release",
        "carry_slip",
        "weak_grip",
        "offset_x",
        "offset_y",
        "place_offset",
        "oscillation",
        "freeze",
        "dropped_actions",
    ),
    "physics": ("slippery", "heavy", "shoved", "obstacle", "stuck_joint"),
    "perception": (
        "camera_moved",
        "camera_blurred",
        "camera_frozen",
        "camera_occluded",
        "camera_dark",
        "proprioception_biased",
    ),
    "semantic": ("distractor",),
    # A policy that does well what it was wrongly told looks like any other that does well: shown
    # apart from the others, as what no monitor of the policy can see.
    "instruction": ("wrong_instruction",),
}

#: How often each family is drawn.
SHARES = {"control": 4, "physics": 4, "perception": 4, "semantic": 2, "instruction": 1}

#: What an unperturbed episode is named by.
NONE = "none"

#: Of these the policy is told something else; nothing is done to the robot.
TOLD = "wrong_instruction"

SEVERITIES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Fold:
    """Which episodes of each task a purpose has.

    Attributes:
        states: initial states; 30 and above are held out.
        plain: unperturbed episodes of a task, each on another state.
        injected: of a task, on the same states.
    """

    states: tuple[int, ...]
    plain: int
    injected: int


#: ``train`` fits scores, with ``failures`` those that learn from failures; ``select`` chooses among
#: them, ``calibrate`` sets thresholds.
FOLDS: dict[str, Fold] = {
    "train": Fold(tuple(range(8)), 8, 8),
    "failures": Fold(tuple(range(8)), 1, 24),
    "select": Fold(tuple(range(8, 14)), 6, 12),
    "calibrate": Fold(tuple(range(14, 30)), 16, 0),
    "test": Fold(tuple(range(30, 50)), 10, 15),
}

#: Every suite's last tasks are not trained, selected or calibrated on: "unseen".
UNSEEN = 3


@dataclass(frozen=True)
class Job:
    """One episode."""

    out: str
    policy: str
    checkpoint: str
    protocol: str
    execute: int
    samples: int
    fold: str
    suite: str
    task: int
    init_state: int
    seed: int
    kind: str
    severity: float

    @property
    def key(self) -> str:
        """A name that is the same in every run of the same benchmark."""
        what = self.kind if self.kind == NONE else f"{self.kind}:{self.severity:g}"
        return f"{self.fold}/{self.suite}/{self.task}/{self.init_state}/{what}/{self.seed}"


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


def family_of(kind: str) -> str:
    """The family of an injected type; "none" for an unperturbed episode."""
    return next((name for name, kinds in FAMILIES.items() if kind in kinds), NONE)


def plan(
    out: Path,
    policy: str,
    checkpoint: Path | None,
    protocol: str,
    execute: int,
    samples: int,
    suites: Sequence[str],
    tasks: int,
    folds: dict[str, Fold],
    seed: int,
) -> list[Job]:
    """Every job; which injection an episode gets is drawn once."""
    jobs = []
    for name, fold in folds.items():
        for s, suite in enumerate(suites):
            seen = tasks if name == "test" else max(1, tasks - UNSEEN)
            for task in range(seen):
                where = [seed, int.from_bytes(name.encode()[:4], "little"), s, task]
                rng = np.random.default_rng(np.random.SeedSequence(where))
                order = rng.permutation(fold.states)
                whats = [(NONE, 0.0)] * fold.plain
                whats += [_injection(rng) for _ in range(fold.injected)]
                seeds = rng.integers(2**31, size=len(whats))
                for i, (kind, severity) in enumerate(whats):
                    j = i if i < fold.plain else i - fold.plain
                    jobs.append(
                        Job(
                            str(out),
                            policy,
                            "" if checkpoint is None else str(checkpoint),
                            protocol,
                            execute,
                            samples,
                            name,
                            suite,
                            task,
                            int(order[j % len(order)]),
                            int(seeds[i]),
                            kind,
                            severity,
                        )
                    )
    return jobs


def _injection(rng: np.random.Generator) -> tuple[str, float]:
    """A type and a severity; an instruction is wrong or it is not."""
    shares = np.array([SHARES[family] for family in FAMILIES], float)
    family = list(FAMILIES)[int(rng.choice(len(shares), p=shares / shares.sum()))]
    kinds = FAMILIES[family]
    kind = kinds[int(rng.integers(len(kinds)))]
    severity = float(SEVERITIES[int(rng.integers(len(SEVERITIES)))])
    return kind, 1.0 if kind == TOLD else severity


class Recorder:
    """A policy as :class:`regrasp.sim.failures.actors.ChunkedActor` asks it; keeps every answer.

    Attributes:
        rows: one dict an inference: ``samples``, ``embedding``.
    """

    def __init__(self, policy: Any, samples: int, seed: int) -> None:
        self.policy, self.samples = policy, samples
        self.rows: list[dict[str, np.ndarray]] = []
        policy.reset(seed)

    def __call__(self, seen: Any) -> np.ndarray:
        """The chunk that runs."""
        output = self.policy.infer([seen], self.samples)[0]
        # Half the bytes; a score reads them back as they are, live or stored.
        samples = output.samples.astype(np.float16).astype(np.float32)
        self.rows.append({"samples": samples, "embedding": output.embedding})
        return samples[0]


_last_env = LastEnv()
_POLICIES: dict[tuple[str, str], Any] = {}


def roll_out(job: Job) -> dict[str, Any]:
    """Run one episode in a worker and append it; returns what became of it."""
    store = EpisodeStore.open(job.out)
    for header in store.headers:
        if header.extra["job"] == job.key:  # a worker died after it had appended it
            return {"key": job.key, "success": header.success}
    episode = record(job)
    store.append(episode)
    return {"key": job.key, "success": episode.header.success}


def record(job: Job) -> Episode:
    """Run one episode.

    Returns:
        Steps: ``state``; ``action`` as the policy wanted it, which is what a monitor sees;
        ``executed``, after everything was done to it; ``stage`` (sum over goals, int8), ``phase``,
        ``success``. Chunks: ``step``, ``samples``, ``embedding``. The header's ``extra``: ``fold``,
        ``family``, ``severity``, ``injected_at`` (None where nothing began), ``horizon``.
    """
    from regrasp.sim import LiberoEnv, get_task
    from regrasp.sim.experts import make_expert
    from regrasp.sim.failures import INJECTIONS
    from regrasp.sim.failures.actors import ChunkedActor
    from regrasp.sim.failures.rollout import Robot, run
    from regrasp.sim.failures.stages import Progress

    which = job.policy, job.checkpoint
    if which not in _POLICIES:
        _POLICIES[which] = load_policy(job.policy, Path(job.checkpoint) if job.checkpoint else None)
    policy = _POLICIES[which]
    protocol = get_run_protocol(job, policy.spec)
    env = _last_env.get(
        (job.suite, job.task),
        lambda: LiberoEnv(get_task(job.suite, job.task), protocol.env_config(job.suite)),
    )
    injections = []
    if job.kind in INJECTIONS:
        injections = [INJECTIONS[job.kind](severity=job.severity)]
    robot = Robot(env, injections, job.seed)
    robot.reset(seed=protocol.seed, options={"init_state": job.init_state, "render": False})
    told = _told(env, job)
    recorder = Recorder(policy, job.samples, job.seed)
    actor = ChunkedActor(recorder, make_expert(env), job.execute, told)
    trace = run(robot, actor, env.horizon, Progress(env), until=lambda success: success[-1])
    begun = [event["step"] for event in trace.events]
    begun += [0] if told is not None else []
    header = EpisodeHeader(
        job.suite,
        env.task_name,
        env.instruction if told is None else told,
        job.init_state,
        job.seed,
        bool(trace.success[-1]),
        perturbation=job.kind,
        policy_hash=policy.hash(),
        protocol_hash=protocol.hash(),
        versions=library_versions(),
        extra={
            "job": job.key,
            "fold": job.fold,
            "task_index": job.task,
            "family": family_of(job.kind),
            "severity": job.severity,
            "injected_at": min(begun) if begun else None,
            "horizon": env.horizon,
            "plan": {k: v for k, v in asdict(job).items() if k != "out"},
        },
    )
    rows = recorder.rows
    return Episode(
        header,
        {
            "state": trace.state,
            "action": trace.wanted,
            "executed": trace.executed,
            "stage": trace.stage.sum(axis=1).astype(np.int8),
            "phase": trace.phase.astype(np.int8),
            "success": trace.success,
        },
        {
            "step": np.arange(len(rows)) * job.execute,
            "samples": np.stack([row["samples"] for row in rows]),
            "embedding": np.stack([row["embedding"] for row in rows]),
        },
    )


def get_run_protocol(job: Job, spec: Any) -> Any:
    """The protocol with the policy's camera and no list of initial states, which every fold has.

    Raises:
        ValueError: where the policy's cameras differ in size.
    """
    from regrasp.sim.protocol import get_protocol

    sizes = set(spec.cameras.values())
    if len(sizes) != 1:
        raise ValueError(f"spec.cameras: sizes {sorted(sizes)}; a protocol draws all alike")
    return get_protocol(job.protocol, replan=job.execute, init_states=(), camera=sizes.pop())


def _told(env: Any, job: Job) -> str | None:
    """What the policy is told in place of the instruction; None for the instruction."""
    from regrasp.sim.failures.semantic import wrong_plan

    if job.kind != TOLD:
        return None
    wrong = wrong_plan(env, TOLD, np.random.default_rng(job.seed))
    return None if wrong is None or not wrong.told else wrong.told
