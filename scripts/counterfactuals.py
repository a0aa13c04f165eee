"""``regrasp failures counterfactuals``: sets of executions that share a beginning, into a store.

A job is one nominal rollout: its beginnings, and the whole severity grid from each. The same seed
gives the same episodes on any number of workers, and a stopped run goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts._jobs import run_missing
from regrasp.sim.cache import LastEnv
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Args:
    """Execute counterfactual sets on the training initial states; the same ``out`` is continued.

    Attributes:
        out: the episode store to write.
        suites: LIBERO suites; in these two the goal can be told from the picture.
        tasks: task indices in each suite; all when empty.
        states: nominal rollouts of each task, each from another initial state (0 to 29).
        severities: of each family; 0 is executed once for all.
        families: CureWM's names; all six when empty.
        stride: control steps a frame.
        size: side of the pictures, pixels.
        seed: of the whole run.
        workers: processes.
    """

    out: Path = Path("data/counterfactuals")
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: tuple[int, ...] = ()
    states: int = 5
    severities: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    families: tuple[str, ...] = ()
    stride: int = 4
    size: int = 64
    seed: int = 0
    workers: int = 2

    def __post_init__(self) -> None:
        for name in ("states", "stride", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"counterfactuals: {name} is {getattr(self, name)}; at least 1")
        if self.states > 30:
            raise ValueError(f"counterfactuals: states is {self.states}; 30 are for training")


@dataclass(frozen=True)
class Job:
    """One nominal rollout and the grid of its beginnings."""

    out: str
    suite: str
    task: int
    init_state: int
    seed: int
    size: int
    grid: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A name that is the same in every run with the same seed."""
        return f"{self.suite}/{self.task}/{self.init_state}/{self.seed}"


def jobs_of(args: Args) -> list[Job]:
    """One job a task and initial state; the states in an order of the task's own."""
    from regrasp.sim import task_names

    grid: dict[str, Any] = {"severities": args.severities, "stride": args.stride}
    if args.families:
        grid["families"] = args.families
    jobs = []
    for suite in args.suites:
        name = int.from_bytes(suite.encode()[-8:], "little")  # hash() differs between processes
        for task in args.tasks or range(len(task_names(suite))):
            rng = np.random.default_rng([args.seed, name, task])
            for state in rng.permutation(30)[: args.states]:
                seed = int(rng.integers(2**31))
                jobs.append(Job(str(args.out), suite, task, int(state), seed, args.size, grid))
    return jobs


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


_last_env = LastEnv()


def execute_job(job: Job) -> dict[str, Any]:
    """Execute one job in a worker and append its episodes. Returns counts."""
    from regrasp.sim import make_env
    from regrasp.sim.failures.counterfactuals import Grid, contexts, episode, execute_all

    began, grid = time.perf_counter(), Grid(**job.grid)
    cameras = dict.fromkeys(("agentview", "wrist"), (job.size, job.size))
    env = _last_env.get(scene_of(job), lambda: make_env(job.suite, job.task, cameras=cameras))
    store = EpisodeStore.open(job.out)
    have = {header.extra["cell"] for header in store.headers}
    row: dict[str, Any] = {"key": job.key, "contexts": {}, "cells": []}
    for context in contexts(env, job.init_state, job.seed, grid):
        executions, useless = execute_all(env, context, grid)
        row["contexts"][context.name] = useless
        for execution in executions:
            made = episode(env, execution, grid)
            if made.header.extra["cell"] not in have:  # a job killed in its middle runs again
                store.append(made)
            row["cells"].append([execution.family, execution.severity, execution.success])
    return {**row, "took": round(time.perf_counter() - began, 3)}


def main(args: Args) -> None:
    """Run what is missing; print what failed at which severity, and what it cost."""
    console = Console()
    open_store(args)
    log = JsonLines(args.out / "jobs.jsonl")
    done = {row["key"]: row for row in log.read()}
    jobs = jobs_of(args)
    for row in run_missing(
        console,
        jobs,
        done,
        execute_job,
        workers=args.workers,
        timeout_s=900.0,
        recycle_after=40,
        affinity=scene_of,
    ):
        done[row["key"]] = row
        log.append(row)
    _print(console, [done[job.key] for job in jobs])


def open_store(args: Args) -> EpisodeStore:
    """The store of a run, made if missing.

    Raises:
        SystemExit: it is another run's; two would be mixed. More tasks or states may be added.
    """
    fixed = ("severities", "families", "stride", "size", "seed")
    plan = json.loads(json.dumps({k: v for k, v in asdict(args).items() if k in fixed}))
    attrs = {"counterfactuals": plan}
    store = EpisodeStore.create(args.out, control_hz=20.0 / args.stride, attrs=attrs, exist_ok=True)
    old = store.attrs.get("counterfactuals", {})
    other = ", ".join(f"{key} {old.get(key)!r}" for key in plan if old.get(key) != plan[key])
    if other:
        raise SystemExit(f"{args.out} was begun with {other}; choose another --out or the same")
    return store


def _print(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Failure rate of each family over the severities, and whether it falls anywhere."""
    tried: Counter[tuple[str, float]] = Counter()
    failed: Counter[tuple[str, float]] = Counter()
    for row in rows:
        for family, severity, success in row["cells"]:
            tried[family, severity] += 1
            failed[family, severity] += not success
    levels = sorted({severity for _, severity in tried})
    table = Table("family", *(f"{s:g}" for s in levels), "falls", title="failure rate by severity")
    for family in dict.fromkeys(family for family, _ in tried):
        rates = [failed[family, s] / tried[family, s] if tried[family, s] else None for s in levels]
        known = [rate for rate in rates if rate is not None]
        falls = "yes" if any(b < a for a, b in pairwise(known)) else "no"
        cells = ["-" if rate is None else f"{rate:.0%}" for rate in rates]
        table.add_row(family, *cells, falls)
    console.print(table)
    fates = Counter(why or "kept" for row in rows for why in row["contexts"].values())
    fates["nominal rollout fails"] = sum(not row["contexts"] for row in rows)
    console.print("beginnings: " + ", ".join(f"{n} {why}" for why, n in fates.items() if n))
    took = sum(row["took"] for row in rows)
    console.print(f"{sum(tried.values())} executions, {took / 60:.1f} worker minutes")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
