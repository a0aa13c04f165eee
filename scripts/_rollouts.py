"""The episodes of a demo: planned once, run by a few processes, kept as they finish.

A job is one episode in one arm. Everything random in it comes from the job's own seed, so that
the same plan gives the same episodes on any number of workers, and a stopped run goes on where it
was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.results import library_versions
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.monitors.base import lookup
from regrasp.monitors.runtime import Monitor
from regrasp.recovery.rewind import RewindConfig
from regrasp.recovery.supervisor import Supervisor, SupervisorConfig
from regrasp.scripts._summary import BASE, SUPERVISED, UNPERTURBED
from regrasp.sim.cache import LastEnv

#: Entries of a stored ``qpos`` row; tasks have fewer and are padded with zeros.
QPOS = 128

#: LIBERO's arm lags behind its commands by friction, which a gain of one would leave as an error.
REWIND = RewindConfig(gain=2.0)

#: See SupervisorConfig: the first alarm is acted on. Chosen on perturbed episodes from the training
#: states, where every longer patience rescued fewer and harmed no fewer.
PATIENCE = 1.0


def _small_vla(path: Path | None) -> Any:
    import torch
    from regrasp.policies.small_vla import SmallVLA

    torch.set_num_threads(1)  # the workers share the cores among themselves
    policy = SmallVLA.load(path)
    # Whole chunks: what is not executed is what the next chunk is compared with.
    policy.set_execute(policy.model.config.chunk)
    return policy


def _act(path: Path | None) -> Any:
    import torch
    from regrasp.policies.lerobot_act import LeRobotAct

    if path is None:
        raise ValueError("policy act: none is shipped; give --checkpoint, see regrasp train act")
    torch.set_num_threads(1)
    return LeRobotAct.load(path)


def _diffusion(path: Path | None) -> Any:
    import torch
    from regrasp.policies.lerobot_diffusion import LeRobotDiffusion

    if path is None:
        raise ValueError(
            "policy diffusion: none is shipped; give --checkpoint, see regrasp train diffusion"
        )
    torch.set_num_threads(1)
    return LeRobotDiffusion.load(path)


#: Policies a run can name; each value loads one, from a checkpoint folder or as shipped (None).
POLICIES: dict[str, Callable[[Path | None], Any]] = {
    "small_vla": _small_vla,
    "act": _act,
    "diffusion": _diffusion,
}


@dataclass(frozen=True)
class Job:
    """One episode in one arm."""

    pair: str
    arm: str
    kind: str
    suite: str
    task: int
    init_state: int
    seed: int


@dataclass(frozen=True)
class Setup:
    """What every worker is told.

    Attributes:
        store: the episode store, made before the workers start.
        protocol: name of the evaluation protocol.
        policy: a key of :data:`POLICIES`.
        checkpoint: its folder; None for the shipped weights.
        execute: actions executed of each chunk.
        monitor: folder of the monitor artifact; None to record without scores.
        tries: rewinds at most in the supervised arm.
    """

    store: Path
    protocol: str
    policy: str
    checkpoint: Path | None
    execute: int
    monitor: Path | None
    tries: int


def run_protocol(setup: Setup) -> Any:
    """The protocol without its list of initial states: calibration and evaluation share it."""
    from regrasp.sim.protocol import get_protocol

    return get_protocol(setup.protocol, replan=setup.execute, init_states=())


def load_policy(name: str, checkpoint: Path | None) -> Any:
    """A policy by name; unknown names raise KeyError with the nearest."""
    return lookup(POLICIES, name, "policy")(checkpoint)


def perturbations(kind: str) -> list[Any]:
    """What each kind of perturbed episode does."""
    from regrasp.sim.perturb import ActionNoise, CameraShift, InitialPose, Nudge, Slip

    kinds: dict[str, list[Any]] = {
        UNPERTURBED: [],
        "slip": [Slip()],
        "nudge": [Nudge()],
        "action_noise": [ActionNoise()],
        "initial_pose": [InitialPose()],
        "camera_shift": [CameraShift()],
    }
    return lookup(kinds, kind, "perturbation kind")


def episode_seed(seed: int, index: int) -> int:
    """Seed of episode ``index`` of a run."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def plan_pairs(
    suites: Sequence[str],
    tasks: int,
    states: Sequence[int],
    counts: Mapping[str, int],
    seed: int,
) -> list[Job]:
    """Both arms of every episode: each kind spread evenly over tasks and initial states."""
    jobs: list[Job] = []
    index = 0
    for kind, count in counts.items():
        # Another kind starts elsewhere in the list of states, so that a few episodes of each
        # kind do not all use the first ones.
        rng = np.random.default_rng(np.random.SeedSequence([seed, len(jobs)]))
        order = [int(s) for s in rng.permutation(states)]
        where = itertools.cycle(itertools.product(order, suites, range(tasks)))
        for state, suite, task in itertools.islice(where, count):
            pair = f"{kind}/{suite}/{task}/{state}/{index}"
            for arm in (BASE, SUPERVISED):
                jobs.append(Job(pair, arm, kind, suite, task, state, episode_seed(seed, index)))
            index += 1
    return jobs


def plan_calibration(
    suites: Sequence[str], tasks: int, states: Sequence[int], seed: int
) -> list[Job]:
    """One unperturbed, unsupervised episode of every task and state."""
    cells = itertools.product(suites, range(tasks), states)
    return [
        Job(f"calibration/{s}/{t}/{i}", BASE, UNPERTURBED, s, t, i, episode_seed(seed, n))
        for n, (s, t, i) in enumerate(cells)
    ]


def remaining(jobs: Iterable[Job], store: EpisodeStore) -> list[Job]:
    """Jobs whose episode the store does not hold yet."""
    done = {(h.extra["pair"], h.extra["arm"]) for h in store.refresh().headers}
    return [job for job in jobs if (job.pair, job.arm) not in done]


class Runner:
    """Runs jobs in this process; keeps the policy, the monitor and the last environment."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.protocol = run_protocol(setup)
        self.policy = load_policy(setup.policy, setup.checkpoint)
        self.hash = self.policy.hash()
        self.monitor = None
        if setup.monitor is not None:
            self.monitor = Monitor.load(
                setup.monitor, policy_hash=self.hash, protocol_hash=self.protocol.hash()
            )
        self.store = EpisodeStore.open(setup.store)
        self._last_env = LastEnv()

    def env(self, suite: str, task: int) -> Any:
        """The environment of a task; the last one is kept, jobs come grouped by task."""
        from regrasp.sim import LiberoEnv, get_task

        return self._last_env.get(
            (suite, task),
            lambda: LiberoEnv(get_task(suite, task), self.protocol.env_config(suite)),
        )

    def run(self, job: Job) -> Episode:
        """Run one job."""
        from regrasp.sim.perturbed import PerturbedEnv

        env = self.env(job.suite, job.task)
        # The nominal pose, known before anything is perturbed, is what a robot calls home.
        env.reset(options={"init_state": job.init_state, "render": False}, seed=self.protocol.seed)
        home = env.state()[:6]
        robot = PerturbedEnv(env, perturbations(job.kind), job.seed)
        robot.reset(
            options={"init_state": job.init_state, "render": False}, seed=self.protocol.seed
        )
        header = EpisodeHeader(
            suite=job.suite,
            task=env.task_name,
            instruction=env.instruction,
            init_state=job.init_state,
            seed=job.seed,
            success=False,
            perturbation=job.kind,
            policy_hash=self.hash,
            protocol_hash=self.protocol.hash(),
            versions=library_versions(),
            extra={"pair": job.pair, "arm": job.arm, "kind": job.kind, "task_index": job.task},
        )
        config = SupervisorConfig(
            tries=self.setup.tries if job.arm == SUPERVISED else 0,
            execute=self.protocol.replan,
            patience=PATIENCE,
            max_steps=env.horizon,
            rewind=REWIND,
        )
        supervisor = Supervisor(
            self.policy,
            self.monitor,
            config,
            verify=lambda: hand_empty_object_at_rest(robot),
            record=lambda: {"qpos": padded(env.data.qpos)},
        )
        episode = supervisor.run(robot, header, home=home)
        episode.header.extra["events"] = robot.events
        return episode


def hand_empty_object_at_rest(robot: Any) -> str | None:
    """A checkpoint's predicate: open hand, well above the object, the object still on its place.

    From privileged state, as a perception system would give it on a robot.
    """
    scene = robot.scene
    if scene.target is None:
        return None
    state = robot.state()
    if abs(state[6]) + abs(state[7]) < 0.07:
        return None
    height = scene.hand()[2] - scene.position()[2]
    still = abs(scene.position()[2] - scene.rest[2]) < 0.01
    return "hand empty above the resting object" if height > 0.08 and still else None


def padded(qpos: np.ndarray) -> np.ndarray:
    """``qpos`` as a row of one length for every task, float64 ``[QPOS]``."""
    if len(qpos) > QPOS:
        raise ValueError(f"qpos has {len(qpos)} entries; the store keeps {QPOS}, raise QPOS")
    return np.pad(qpos, (0, QPOS - len(qpos)))


_RUNNERS: dict[Setup, Runner] = {}


def run_one(work: tuple[Setup, Job]) -> str:
    """Run one job in a worker and append its episode to the store; returns the pair's id."""
    setup, job = work
    if setup not in _RUNNERS:
        _RUNNERS.clear()
        _RUNNERS[setup] = Runner(setup)
    runner = _RUNNERS[setup]
    # A job that is run again because its worker died after the append is not stored twice.
    if remaining([job], runner.store):
        runner.store.append(runner.run(job))
    return job.pair


def scene_of(work: tuple[Setup, Job]) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return work[1].suite, work[1].task


def run_jobs(setup: Setup, jobs: Sequence[Job], workers: int) -> Iterator[int]:
    """Run what the store lacks; yields how many of ``jobs`` are done, the first time at once.

    Raises RuntimeError at the end if any job failed; what is finished stays in the store.
    """
    from regrasp.sim.workers import EpisodeError, run_episodes

    store = EpisodeStore.create(setup.store, exist_ok=True)
    todo = [(setup, job) for job in remaining(jobs, store)]
    done = len(jobs) - len(todo)
    yield done
    errors = []
    for index, result in run_episodes(
        todo, run_one, workers=workers, timeout_s=300.0, recycle_after=150, affinity=scene_of
    ):
        if isinstance(result, EpisodeError):
            errors.append(f"{todo[index][1].pair}: {result.reason}")
        done += 1
        yield done
    if errors:
        raise RuntimeError(f"{len(errors)} episodes did not run; the first: {errors[0]}")
