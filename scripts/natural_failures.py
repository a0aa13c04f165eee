"""``regrasp failures natural``: what the shipped policy does wrong by itself, with its onset."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import library_versions
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.scripts._jobs import run_missing
from regrasp.scripts.failures import small_vla_actor
from regrasp.sim.cache import LastEnv
from rich.console import Console

#: How an episode begins: as the benchmark has it, or with the arm elsewhere. Nothing is done to it
#: later.
STARTS = ("none", "initial_pose")


@dataclass(frozen=True)
class Args:
    """Roll the shipped policy out on training states and keep what fails; continues ``out``.

    An onset is found by execution: the last state from which an expert still brings the goal
    about; where it does from every state, the first one after which nothing more was achieved.

    Attributes:
        out: the episode store to write.
        count: failures, at least.
        suites: LIBERO suites that the policy was trained on.
        tasks: task indices in each suite; all when empty.
        init_states: the first this many initial states (0 to 29 are for training).
        successes: share of the successes that is kept, to be told from failures.
        most: rounds over all tasks after which it ends, enough or not.
        seed: of the whole run.
        workers: processes.
    """

    out: Path = Path("data/natural")
    count: int = 100
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: tuple[int, ...] = ()
    init_states: int = 30
    successes: float = 0.15
    most: int = 60
    seed: int = 0
    workers: int = 2


@dataclass(frozen=True)
class Job:
    """One episode of the policy."""

    out: str
    suite: str
    task: int
    init_state: int
    seed: int
    start: str
    keep: bool

    @property
    def key(self) -> str:
        """A name that is the same in every run with the same seed."""
        return f"{self.suite}/{self.task}/{self.init_state}/{self.seed}/{self.start}"


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


def jobs_of(args: Args, visit: int) -> list[Job]:
    """One round: every task once from each kind of start, on another initial state."""
    from regrasp.sim import task_names

    jobs = []
    for suite in args.suites:
        name = int.from_bytes(suite.encode()[-8:], "little")  # hash() differs between processes
        for task in args.tasks or range(len(task_names(suite))):
            order = np.random.default_rng([args.seed, name, task]).permutation(args.init_states)
            for i, start in enumerate(STARTS):
                rng = np.random.default_rng([args.seed, name, task, visit, i])
                state, seed = int(order[visit % args.init_states]), int(rng.integers(2**31))
                keep = bool(rng.random() < args.successes)
                jobs.append(Job(str(args.out), suite, task, state, seed, start, keep))
    return jobs


_last_env = LastEnv()


def robot_of(job: Job) -> tuple[Any, Any]:
    """The environment of a job with its perturbation, reset; and the policy that drives it."""
    from regrasp.sim import make_env
    from regrasp.sim.failures.rollout import Robot
    from regrasp.sim.perturb import InitialPose

    env = _last_env.get((job.suite, job.task), lambda: make_env(job.suite, job.task))
    robot = Robot(env, [InitialPose()] if job.start == "initial_pose" else [], job.seed)
    reset(robot, job)
    return robot, small_vla_actor(env, job.seed, None)


def reset(robot: Any, job: Job) -> None:
    """Go back to where the job's episode begins."""
    robot.reset(seed=job.seed, options={"init_state": job.init_state, "render": False})


def roll_out(job: Job) -> dict[str, Any]:
    """One episode in a worker; a failure is dated, drawn, appended. Returns what became of it."""
    from regrasp.sim.failures.natural import find_onset
    from regrasp.sim.failures.rollout import run, stayed
    from regrasp.sim.failures.stages import Progress

    began = time.perf_counter()
    robot, policy = robot_of(job)
    progress = Progress(robot.env)
    policy.reset()
    trace = run(robot, policy, robot.horizon, progress, 5, stayed(10))
    extra: dict[str, Any] = {}
    if trace.success[-1]:
        outcome = "success"
    elif trace.latched:
        outcome = "latched"  # it held for a moment: neither a success nor a failure
    else:
        onset = find_onset(robot, trace, progress)
        outcome = "unsolved" if onset is None else "failure"
        if onset is not None:
            extra = {"onset_step": onset.step, "no_return": onset.no_return}
            extra["stalled"] = onset.stalled
    if outcome == "failure" or (outcome == "success" and job.keep):
        reset(robot, job)
        _append(job, robot, trace, extra)
    took = round(time.perf_counter() - began, 2)
    return {"key": job.key, "outcome": outcome, "took": took, **extra}


def _append(job: Job, robot: Any, trace: Any, extra: dict[str, Any]) -> None:
    """Draw an episode and add it to the store, unless a killed run had."""
    from regrasp.sim.failures.rollout import draw
    from regrasp.sim.failures.wording import say_step

    store = EpisodeStore.open(job.out)
    if job.key in {header.extra["sample"] for header in store.headers}:
        return
    pictures = draw(robot, trace)
    at = extra.get("onset_step", 0)
    header = EpisodeHeader(
        job.suite,
        robot.env.task_name,
        robot.env.task.instruction,
        job.init_state,
        job.seed,
        bool(trace.success[-1]),
        perturbation=job.start,
        versions=library_versions(),
        extra={
            "role": "natural",
            "sample": job.key,
            "context": job.key,
            "task_index": job.task,
            "driver": "small_vla",
            "subtask": say_step(trace.subtask[at]),
            "job": asdict(job),
            **extra,
        },
    )
    steps = {f"image/{name}": frames for name, frames in pictures.items()}
    steps |= {
        "state": trace.state,
        "action": trace.executed,
        "phase": trace.phase.astype(np.int64),
        "success": trace.success,
        "points": trace.points.astype(np.float32),
    }
    store.append(Episode(header, steps))


def main(args: Args) -> None:
    """Run rounds until there are enough failures; print what became of all episodes."""
    console = Console()
    plan = {k: v for k, v in asdict(args).items() if k not in ("out", "workers", "count", "most")}
    plan = json.loads(json.dumps(plan))
    store = EpisodeStore.create(args.out, attrs={"natural": plan}, exist_ok=True)
    if store.attrs.get("natural") != plan:
        raise SystemExit(f"{args.out} was begun with other settings; choose another --out")
    log = JsonLines(args.out / "jobs.jsonl")
    done = {row["key"]: row for row in log.read()}
    found: Counter[str] = Counter()
    for visit in range(args.most):
        jobs = jobs_of(args, visit)
        console.print(f"round {visit}: {found['failure']} failures so far")
        for row in run_missing(
            console,
            jobs,
            done,
            roll_out,
            workers=args.workers,
            timeout_s=300.0,
            recycle_after=40,
            affinity=scene_of,
        ):
            done[row["key"]] = row
            log.append(row)
        found.update(done[job.key]["outcome"] for job in jobs)
        if found["failure"] >= args.count:
            break
    total = sum(found.values())
    for outcome, number in found.most_common():
        console.print(f"{outcome}: {number} of {total} episodes ({number / total:.0%})")
    dated = sum(row.get("no_return") is not None for row in done.values())
    console.print(f"{dated} failures could not be mended to their end")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
