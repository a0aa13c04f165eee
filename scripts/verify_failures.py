"""``regrasp failures verify``: kept samples go through their gates again, in other processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts._jobs import run_missing
from regrasp.scripts.failures import examiner_of, figures_of
from rich.console import Console


@dataclass(frozen=True)
class Args:
    """Replay a random choice of samples from nothing but their seeds, and compare everything.

    A sample passes when its cell gives the same nominal, the same verdict at every severity, the
    same steps, the same recovery and the same outcome of every replay, bit for bit.

    Attributes:
        store: made by ``regrasp failures generate``.
        count: samples drawn; all when there are fewer.
        seed: of the choice.
        workers: processes.
        result: also write docs/results/<result>.json, with the run's own figures.
    """

    store: Path = Path("data/failures")
    count: int = 100
    seed: int = 0
    workers: int = 2
    result: str | None = None


@dataclass(frozen=True)
class Job:
    """One sample to be replayed."""

    sample: str
    suite: str
    task: int
    init_state: int
    seed: int
    driver: str
    kind: str
    per_cell: int
    digest: str

    @property
    def key(self) -> str:
        """The sample's name."""
        return self.sample


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


def verify_one(job: Job) -> dict[str, Any]:
    """Examine the sample's cell afresh in a worker."""
    from regrasp.sim.failures import INJECTIONS

    _, examiner = examiner_of(job.suite, job.task, job.driver, job.seed, job.per_cell)
    result = examiner.examine(job.init_state, job.seed, INJECTIONS.get(job.kind, job.kind))
    return {"sample": job.sample, "passed": result.digest() == job.digest}


def main(args: Args) -> None:
    """Replay, print, and write the result."""
    console = Console()
    store = EpisodeStore.open(args.store)
    plan = store.attrs["failures"]
    failed = [h for h in store.headers if h.extra.get("role") == "failure"]
    rng = np.random.default_rng(args.seed)
    chosen = rng.choice(len(failed), min(args.count, len(failed)), replace=False)
    jobs = [
        Job(
            h.extra["sample"],
            h.suite,
            h.extra["task_index"],
            h.init_state,
            h.seed,
            h.extra["driver"],
            h.failure_label,
            plan["per_cell"],
            h.extra["gates"]["digest"],
        )
        for h in (failed[i] for i in sorted(chosen))
    ]
    passed: Counter[bool] = Counter()
    for row in run_missing(
        console,
        jobs,
        set(),
        verify_one,
        workers=args.workers,
        timeout_s=600.0,
        recycle_after=40,
        affinity=scene_of,
    ):
        passed[row["passed"]] += 1
        if not row["passed"]:
            console.print(f"[red]not the same again: {row['sample']}")
    console.print(f"{passed[True]} of {len(jobs)} samples passed their gates again")
    if args.result:
        rows = JsonLines(args.store / "jobs.jsonl").read()
        figures = figures_of(rows, workers=2)
        figures["gate_replay_pass"] = Figure.rate(passed[True], len(jobs))
        command = "regrasp failures generate && regrasp failures verify"
        path = write_result(args.result, command, plan, [plan["seed"], args.seed], figures)
        console.print(f"wrote {path}")
    if passed[False]:
        raise SystemExit(1)
