"""``regrasp curation collect``: good and defective demonstrations, their truth in the headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts.collect import execute_jobs
from regrasp.sim.cache import LastEnv
from rich.console import Console

#: The defect, as ``header.extra["defect"]`` names it; "" is a good demonstration.
DEFECT = "early_release"


@dataclass(frozen=True)
class Args:
    """Collect the testbed of curation metrics: pick-and-place, some of it let go early.

    Attributes:
        out: the episode store to write; an existing one is continued.
        suite: a LIBERO suite of pick-and-place tasks.
        tasks: task indices.
        demos: demonstrations a task.
        defective: share of them in which the hand opens while it carries.
        released: the hand opens after this share of the way, drawn between the two.
        image_size: pictures are this high and wide.
        seed: of the whole collection.
        workers: processes.
    """

    out: Path = Path("data/curation")
    suite: str = "libero_object"
    tasks: tuple[int, ...] = (0, 1)
    demos: int = 60
    defective: float = 0.5
    released: tuple[float, float] = (0.3, 0.9)
    image_size: int = 64
    seed: int = 0
    workers: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.defective < 1:
            raise ValueError(f"Args.defective: {self.defective} must lie between 0 and 1")


@dataclass(frozen=True)
class Job:
    """One demonstration; ``release`` is the share of the way, None for a good one."""

    out: str
    suite: str
    task: int
    number: int
    seed: int
    release: float | None
    image_size: int

    @property
    def key(self) -> str:
        """A name that is the same in every run of the same collection."""
        return f"{self.suite}/{self.task}/{self.number}/{self.seed}"


def plan(args: Args) -> list[Job]:
    """Every job; each task has exactly its share of defective ones, in an order drawn once."""
    jobs = []
    for task in args.tasks:
        rng = np.random.default_rng(np.random.SeedSequence([args.seed, task]))
        bad = np.zeros(args.demos, bool)
        bad[: round(args.defective * args.demos)] = True
        rng.shuffle(bad)
        shares = rng.uniform(*args.released, args.demos)
        seeds = rng.integers(2**31, size=args.demos)
        jobs += [
            Job(
                str(args.out),
                args.suite,
                task,
                number,
                int(seeds[number]),
                float(shares[number]) if bad[number] else None,
                args.image_size,
            )
            for number in range(args.demos)
        ]
    return jobs


_last_env = LastEnv()


def collect_one(job: Job) -> dict[str, Any]:
    """Run one job in a worker; append what it was to show. Returns a summary.

    A good demonstration must succeed, and a defective one must have let go. Disturbances are
    corrected, as in ``regrasp data collect``, so that good ones differ in length and smoothness.
    """
    from regrasp.sim import make_env
    from regrasp.sim.experts import NoiseConfig, make_expert, rollout_expert
    from regrasp.sim.experts.early_release import EarlyRelease, cut_after_leaving
    from regrasp.sim.protocol import TRAIN_STATES

    size = (job.image_size, job.image_size)
    cameras = {"agentview": size, "wrist": size}
    env = _last_env.get(scene_of(job), lambda: make_env(job.suite, job.task, cameras=cameras))
    state = TRAIN_STATES[job.number % len(TRAIN_STATES)]
    # A disturbance that opened the hand would be a defect of another kind.
    noise = NoiseConfig(gripper_share=0.0)
    truth: dict[str, Any] = {"job": job.key, "defect": "", "release_step": None}
    expert = make_expert(env)
    if job.release is None:
        episode = rollout_expert(env, expert, state, job.seed, noise)
        kept = episode.header.success
    else:
        early = EarlyRelease(expert, job.release)
        episode = cut_after_leaving(rollout_expert(env, early, state, job.seed, noise))
        kept = early.released is not None
        truth |= {"defect": DEFECT, "release_step": early.released, "released": job.release}
    episode.header.extra.update(truth)
    if kept:
        EpisodeStore.open(job.out).append(episode)
    return {"key": job.key, "success": episode.header.success, "kept": kept}


def scene_of(job: Job) -> Hashable:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task, job.image_size


def main(args: Args) -> None:
    """Collect what is missing and print what there is."""
    console = Console()
    attrs = {"curation": {"seed": args.seed, "suite": args.suite, "tasks": list(args.tasks)}}
    EpisodeStore.create(args.out, attrs=attrs, exist_ok=True)
    execute_jobs(console, args.out, plan(args), collect_one, scene_of, args.workers)
    store = EpisodeStore.open(args.out)
    kinds = Counter((h.extra["defect"] or "good", h.success) for h in store.headers)
    for (kind, success), count in sorted(kinds.items()):
        console.print(f"{kind}, {'success' if success else 'failure'}: {count}")
    console.print(f"{len(store)} demonstrations, {store.num_steps} steps in {args.out}")
