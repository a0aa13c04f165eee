"""``regrasp data correct``: let a policy drive, and label each of its looks with the expert."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.results import wilson
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts.collect import (
    Job,
    cached_env,
    choose_goal,
    execute_jobs,
    plan,
    scene_of,
)
from rich.console import Console


@dataclass(frozen=True)
class Args:
    """One round of DAgger on the training initial states.

    Attributes:
        policy: a checkpoint folder of ``regrasp train bc``; the shipped policy when None.
        out: the episode store to write (one row a look, with ``expert_chunk``); continued if there.
        suites: LIBERO suites.
        tasks: task indices in each suite; all when empty.
        init_states: the first this many initial states.
        repeats: episodes for each initial state.
        other_goals: share of episodes with another object of the scene as goal.
        fine: share of episodes whose pictures are drawn in ``fine``.
        image_size: pictures are this high and wide.
        execute: actions executed of each of the policy's chunks.
        seed: of the whole round.
        workers: processes.
    """

    policy: Path | None = None
    out: Path = Path("data/corrections")
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: tuple[int, ...] = ()
    init_states: int = 30
    repeats: int = 1
    other_goals: float = 0.3
    fine: float = 0.3
    image_size: int = 128
    execute: int = 8
    seed: int = 1
    workers: int = 2


@dataclass(frozen=True)
class CorrectionJob:
    """A job of :mod:`regrasp.scripts.collect` with the policy that drives."""

    job: Job
    policy: str | None
    execute: int

    @property
    def key(self) -> str:
        """The name of the collection's job."""
        return self.job.key


_POLICIES: dict[str | None, Any] = {}


def correct_one(task: CorrectionJob) -> dict[str, Any]:
    """Run one job in a worker; append its labelled looks. Returns a summary."""
    import torch
    from regrasp.policies.small_vla import SmallVLA
    from regrasp.sim.experts import make_expert
    from regrasp.sim.experts.correct import label_rollout

    torch.set_num_threads(1)
    job = task.job
    store = EpisodeStore.open(job.out)
    for header in store.headers:
        if header.extra.get("job") == job.key:
            return {"key": job.key, "success": header.success, "kept": True}
    if task.policy not in _POLICIES:
        _POLICIES[task.policy] = SmallVLA.load(task.policy)
    policy = _POLICIES[task.policy]
    env = cached_env(job)
    goal, instruction = choose_goal(job, env)
    episode = label_rollout(
        env,
        make_expert(env, goal=goal),
        policy,
        job.init_state,
        job.seed,
        policy.model.config.chunk,
        task.execute,
        goal=goal,
        instruction=instruction,
    )
    episode.header.extra["job"] = job.key
    if len(episode):
        store.append(episode)
    return {"key": job.key, "success": episode.header.success, "kept": len(episode) > 0}


def correction_scene(task: CorrectionJob) -> Hashable:
    """Jobs of one scene go to one worker."""
    return scene_of(task.job)


def main(args: Args) -> None:
    """Collect what is missing; print the policy's own success on the way."""
    console = Console()
    policy = str(args.policy) if args.policy else None
    attrs = {"corrections": {"seed": args.seed, "policy": policy}}
    EpisodeStore.create(args.out, attrs=attrs, exist_ok=True)
    jobs = [CorrectionJob(job, policy, args.execute) for job in plan(args)]
    results = execute_jobs(console, args.out, jobs, correct_one, correction_scene, args.workers)
    store = EpisodeStore.open(args.out)
    wins = sum(result["success"] for result in results)
    if results:
        low, high = wilson(wins, len(results))
        console.print(
            f"the policy itself succeeded in {wins} of {len(results)} training episodes "
            f"({low:.2f} to {high:.2f}); {store.num_steps} labelled looks in {len(store)} episodes"
        )
    for suite in args.suites:
        headers = [h for h in store.headers if h.suite == suite]
        seeds = np.array([h.success for h in headers])
        console.print(f"{suite}: {int(seeds.sum())} of {len(seeds)} kept episodes succeeded")
