"""``regrasp data collect``: demonstrations of the scripted experts, into an episode store."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts._jobs import Keyed, run_missing
from regrasp.sim.cache import LastEnv
from regrasp.sim.render import RenderMode
from rich.console import Console
from rich.table import Table

#: Suites whose scenes hold other things that an instruction can mean.
OTHER_GOALS = ("libero_object", "libero_spatial")


@dataclass(frozen=True)
class Args:
    """Collect demonstrations on the training initial states, with disturbances that are corrected.

    Attributes:
        out: the episode store to write; an existing one is continued.
        suites: LIBERO suites.
        tasks: task indices in each suite; all when empty.
        init_states: the first this many initial states (0 to 29 are for training).
        repeats: episodes for each initial state, each with other disturbances and fixture places.
        other_goals: in libero_object and libero_spatial, the share of episodes whose goal is
            another object of the scene, so that a policy must listen to the instruction.
        fine: share of episodes whose pictures are drawn in ``fine`` and not in ``lite``, so
            that a policy also knows the stock picture's reflections and edges.
        image_size: pictures are this high and wide.
        noise: whether disturbances are injected (the label stays the expert's clean action).
        seed: of the whole collection; the same seed gives the same episodes on any number of
            workers.
        workers: processes.
    """

    out: Path = Path("data/demos")
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: tuple[int, ...] = ()
    init_states: int = 30
    repeats: int = 2
    other_goals: float = 0.3
    fine: float = 0.3
    image_size: int = 128
    noise: bool = True
    seed: int = 0
    workers: int = 2


@dataclass(frozen=True)
class Job:
    """One episode to collect; ``key`` names it in the store."""

    out: str
    suite: str
    task: int
    init_state: int
    repeat: int
    seed: int
    other_goal: bool
    image_size: int
    mode: RenderMode
    noise: bool

    @property
    def key(self) -> str:
        """A name that is the same in every run of the same collection."""
        return f"{self.suite}/{self.task}/{self.init_state}/{self.repeat}/{self.seed}"


@dataclass(frozen=True, match_args=False)  # so that frozen arguments of either command fit
class Plan(Protocol):
    """What :func:`plan` reads of a command's arguments."""

    out: Path
    suites: tuple[str, ...]
    tasks: tuple[int, ...]
    init_states: int
    repeats: int
    other_goals: float
    fine: float
    image_size: int
    seed: int


def plan(args: Plan, noise: bool = False) -> list[Job]:
    """Every job of a collection, ordered so that a part of it already covers every task."""
    from regrasp.sim import task_names

    jobs = []
    for repeat, suite in itertools.product(range(args.repeats), args.suites):
        tasks = args.tasks or tuple(range(len(task_names(suite))))
        for task, init_state in itertools.product(tasks, range(args.init_states)):
            entropy = [args.seed, repeat, _stable(suite), task, init_state]
            seed, goal_draw, mode_draw = np.random.SeedSequence(entropy).generate_state(3)
            other = suite in OTHER_GOALS and goal_draw / 2**32 < args.other_goals
            mode: RenderMode = "fine" if mode_draw / 2**32 < args.fine else "lite"
            jobs.append(
                Job(
                    str(args.out),
                    suite,
                    task,
                    init_state,
                    repeat,
                    int(seed) % 2**31,
                    other,
                    args.image_size,
                    mode,
                    noise,
                )
            )
    return jobs


def _stable(name: str) -> int:
    """A number for a name that is the same in every process (``hash`` is not)."""
    return int.from_bytes(name.encode()[-8:], "little")


def scene_of(job: Job) -> tuple[str, int, int, RenderMode]:
    """Jobs of one scene go to one worker, which then builds the scene once, repeat by repeat."""
    return job.suite, job.task, job.repeat, job.mode


_last_env = LastEnv()


def cached_env(job: Job) -> Any:
    """The job's environment; a worker keeps the one it used last."""
    from regrasp.sim import make_env

    size = (job.image_size, job.image_size)
    return _last_env.get(
        (job.suite, job.task, job.image_size, job.mode),
        lambda: make_env(
            job.suite, job.task, cameras={"agentview": size, "wrist": size}, mode=job.mode
        ),
    )


def choose_goal(job: Job, env: Any) -> tuple[list[Any] | None, str]:
    """The job's goal (None is the task's own) and instruction."""
    from regrasp.sim.experts import alternative_goals

    if not job.other_goal:
        return None, env.task.instruction
    goals = alternative_goals(env)
    return goals[np.random.default_rng(job.seed).integers(len(goals))]


def collect_one(job: Job) -> dict[str, Any]:
    """Run one job in a worker; append the episode when it succeeded. Returns a summary."""
    from regrasp.sim.experts import NoiseConfig, make_expert, rollout_expert

    store = EpisodeStore.open(job.out)
    if job.key in {header.extra.get("job") for header in store.headers}:
        return {"key": job.key, "success": True, "kept": True}
    env = cached_env(job)
    goal, instruction = choose_goal(job, env)
    episode = rollout_expert(
        env,
        make_expert(env, goal=goal),
        job.init_state,
        job.seed,
        noise=NoiseConfig() if job.noise else None,
        goal=goal,
        instruction=instruction,
    )
    episode.header.extra.update(job=job.key, mode=job.mode)
    if episode.header.success:
        store.append(episode)
    success = episode.header.success
    return {"key": job.key, "success": success, "kept": success}


def execute_jobs[AnyJob: Keyed](
    console: Console,
    out: Path,
    jobs: Sequence[AnyJob],
    function: Callable[[AnyJob], dict[str, Any]],
    affinity: Callable[[AnyJob], Hashable],
    workers: int,
) -> list[dict[str, Any]]:
    """Run the jobs that ``out`` does not have yet, with a progress bar.

    Jobs that ran but left nothing in the store are remembered in ``dropped.jsonl``.

    Returns:
        The results of all jobs that left something to tell: earlier drops and this run's.

    Raises:
        SystemExit: some jobs did not run; running the command again tries them.
    """
    log = JsonLines(out / "dropped.jsonl")
    results = log.read()
    have = {header.extra.get("job") for header in EpisodeStore.open(out).headers}
    have |= {result["key"] for result in results}
    for result in run_missing(
        console,
        jobs,
        have,
        function,
        workers=workers,
        timeout_s=300.0,
        recycle_after=300,
        affinity=affinity,
    ):
        results.append(result)
        if not result["kept"]:
            log.append(result)
    return results


def main(args: Args) -> None:
    """Collect what is missing and print the yield by task."""
    console = Console()
    attrs = {"collection": {"seed": args.seed, "suites": list(args.suites), "noise": args.noise}}
    EpisodeStore.create(args.out, attrs=attrs, exist_ok=True)
    jobs = plan(args, args.noise)
    execute_jobs(console, args.out, jobs, collect_one, scene_of, args.workers)
    dropped = JsonLines(args.out / "dropped.jsonl").read()
    _print_yield(console, EpisodeStore.open(args.out), dropped)


def _print_yield(console: Console, store: EpisodeStore, failed: list[dict[str, Any]]) -> None:
    kept = Counter((h.suite, h.task) for h in store.headers)
    lost = Counter(tuple(f["key"].split("/")[:2]) for f in failed)
    table = Table("suite", "task", "kept", title="demonstrations")
    for (suite, task), count in sorted(kept.items()):
        table.add_row(suite, task, str(count))
    console.print(table)
    console.print(
        f"{len(store)} episodes, {store.num_steps} steps kept; {len(failed)} failed "
        + ", ".join(f"{suite} task {task}: {n}" for (suite, task), n in sorted(lost.items()))
    )
