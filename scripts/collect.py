"""``regrasp data collect``: demonstrations of the scripted experts, into an episode store."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.store import EpisodeStore
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


@dataclass(frozen=True)
class Args:
    """Collect demonstrations on the training initial states, with disturbances that are corrected.

    Attributes:
        out: the episode store to write; an existing one is continued.
        suites: LIBERO suites.
        tasks: task indices in each suite; all when empty.
        init_states: the first this many initial states (0 to 29 are for training).
        repeats: episodes for each initial state, each with other disturbances and fixture places.
        other_goals: in libero_object, the share of episodes whose goal is another object of the
            scene, so that a policy must listen to the instruction.
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
    noise: bool

    @property
    def key(self) -> str:
        """A name that is the same in every run of the same collection."""
        return f"{self.suite}/{self.task}/{self.init_state}/{self.repeat}/{self.seed}"


def plan(args: Args) -> list[Job]:
    """Every job of a collection, ordered so that a part of it already covers every task."""
    from regrasp.sim import task_names

    jobs = []
    for repeat, suite in itertools.product(range(args.repeats), args.suites):
        tasks = args.tasks or tuple(range(len(task_names(suite))))
        for task, init_state in itertools.product(tasks, range(args.init_states)):
            entropy = [args.seed, repeat, _stable(suite), task, init_state]
            seed, draw = np.random.SeedSequence(entropy).generate_state(2)
            other = suite == "libero_object" and draw / 2**32 < args.other_goals
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
                    args.noise,
                )
            )
    return jobs


def _stable(name: str) -> int:
    """A number for a name that is the same in every process (``hash`` is not)."""
    return int.from_bytes(name.encode()[-8:], "little")


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


_ENVS: dict[tuple[str, int, int], Any] = {}


def collect_one(job: Job) -> dict[str, Any]:
    """Run one job in a worker; append the episode when it succeeded. Returns a summary."""
    from regrasp.sim import make_env
    from regrasp.sim.experts import NoiseConfig, alternative_goals, make_expert, rollout_expert

    store = EpisodeStore.open(job.out)
    if job.key in {header.extra.get("job") for header in store.headers}:
        return {"key": job.key, "success": True, "steps": 0}
    scene = (job.suite, job.task, job.image_size)
    if scene not in _ENVS:
        for env in _ENVS.values():
            env.close()
        _ENVS.clear()
        size = (job.image_size, job.image_size)
        _ENVS[scene] = make_env(job.suite, job.task, cameras={"agentview": size, "wrist": size})
    env = _ENVS[scene]
    rng = np.random.default_rng(job.seed)
    goal, instruction = None, env.task.instruction
    if job.other_goal:
        goals = alternative_goals(env)
        goal, instruction = goals[rng.integers(len(goals))]
    episode = rollout_expert(
        env,
        make_expert(env, goal=goal),
        job.init_state,
        job.seed,
        noise=NoiseConfig() if job.noise else None,
        goal=goal,
        instruction=instruction,
    )
    episode.header.extra["job"] = job.key
    if episode.header.success:
        store.append(episode)
    return {"key": job.key, "success": episode.header.success, "steps": len(episode)}


def main(args: Args) -> None:
    """Collect what is missing and print the yield by task."""
    from regrasp.sim.workers import EpisodeError, run_episodes

    console = Console()
    attrs = {"collection": {"seed": args.seed, "suites": list(args.suites), "noise": args.noise}}
    store = EpisodeStore.create(args.out, attrs=attrs, exist_ok=True)
    failed_file = args.out / "failed.jsonl"
    failed = (
        [json.loads(line) for line in failed_file.read_text().splitlines()]
        if (failed_file.exists())
        else []
    )
    have = {header.extra.get("job") for header in store.headers} | {f["key"] for f in failed}
    jobs = [job for job in plan(args) if job.key not in have]
    console.print(f"{len(have)} episodes done before, {len(jobs)} to go")
    errors: Counter[str] = Counter()
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, failed_file.open("a") as log:
        bar = progress.add_task("episodes", total=len(jobs))
        for index, result in run_episodes(
            jobs,
            collect_one,
            workers=args.workers,
            timeout_s=300.0,
            recycle_after=300,
            affinity=scene_of,
        ):
            progress.advance(bar)
            if isinstance(result, EpisodeError):
                errors[str(result)] += 1
                console.print(f"[red]{jobs[index].key}: {result}")
            elif not result["success"]:
                log.write(json.dumps(result) + "\n")
                log.flush()
                failed.append(result)
    store.refresh()
    _print_yield(console, store, failed)
    if errors:
        raise SystemExit(f"{sum(errors.values())} jobs did not run; run the command again")


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
