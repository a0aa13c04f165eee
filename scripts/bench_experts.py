"""``regrasp bench experts``: success of the scripted experts on the training initial states."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, write_result
from regrasp.scripts._jobs import run_missing
from regrasp.sim.cache import LastEnv
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Args:
    """Run every expert, without pictures; resumes where it was stopped.

    A task that no expert is written for counts in ``<suite>_tasks`` as not solved, and not in
    the suite's success.

    Attributes:
        suites: LIBERO suites.
        tasks: task indices in each suite; all when empty.
        init_states: the first this many initial states.
        protocol: a named protocol; its seed decides the fixtures' places.
        workers: processes.
        out: folder for the episodes' log; the same folder continues the same run.
        result: write docs/results/<result>.json; nothing is written when None.
    """

    suites: tuple[str, ...] = ("libero_object", "libero_spatial", "libero_goal", "libero_10")
    tasks: tuple[int, ...] = ()
    init_states: int = 30
    protocol: str = "openpi"
    workers: int = 2
    out: Path = Path("runs/bench_experts")
    result: str | None = "experts"


@dataclass(frozen=True)
class Job:
    """One episode."""

    protocol: str
    suite: str
    task: int
    init_state: int

    @property
    def key(self) -> str:
        """A name that is the same in every run."""
        return f"{self.suite}/{self.task}/{self.init_state}"


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


_last_env = LastEnv()


def run_one(job: Job) -> dict[str, Any]:
    """Run one episode in a worker; ``success`` is None where there is no expert."""
    from regrasp.sim import LiberoEnv, get_task
    from regrasp.sim.experts import Phase, make_expert
    from regrasp.sim.protocol import get_protocol

    protocol = get_protocol(job.protocol)
    env = _last_env.get(
        scene_of(job),
        lambda: LiberoEnv(get_task(job.suite, job.task), protocol.env_config(job.suite)),
    )
    env.reset(seed=protocol.seed, options={"init_state": job.init_state, "render": False})
    try:
        expert = make_expert(env)
    except ValueError as reason:
        return {"key": job.key, "success": None, "steps": 0, "phases": [], "reason": str(reason)}
    expert.reset()
    phases: list[str] = []
    while not (env.succeeded or env.truncated):
        env.step_chunk(expert.act(env)[None], render="none")
        name = Phase(expert.phase).name
        if not phases or phases[-1] != name:
            phases.append(name)
    return {
        "key": job.key,
        "success": bool(env.succeeded),
        "steps": int(env.steps),
        "phases": phases,
    }


def main(args: Args) -> None:
    """Run what is missing, print the table, write the result."""
    from regrasp.sim import task_names
    from regrasp.sim.protocol import get_protocol

    console = Console()
    protocol = get_protocol(args.protocol, init_states=tuple(range(args.init_states)))
    jobs = [
        Job(args.protocol, suite, task, init_state)
        for suite in args.suites
        for task in (args.tasks or range(len(task_names(suite))))
        for init_state in range(args.init_states)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    log = JsonLines(args.out / "episodes.jsonl")
    done = {row["key"]: row for row in log.read()}
    for row in run_missing(
        console,
        jobs,
        done,
        run_one,
        workers=args.workers,
        timeout_s=180.0,
        recycle_after=50,
        affinity=scene_of,
    ):
        done[row["key"]] = row
        log.append(row)
    rows = [done[job.key] for job in jobs]
    figures = _figures(rows)
    _print_table(console, rows)
    if args.result:
        command = "regrasp bench experts"
        if args.tasks or args.suites != Args.suites or args.init_states != Args.init_states:
            command += f" --suites {' '.join(args.suites)} --init-states {args.init_states}"
        path = write_result(args.result, command, protocol.record(), [protocol.seed], figures)
        console.print(f"wrote {path}")


def _by_task(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    groups: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        suite, task, _ = row["key"].split("/")
        if row["success"] is not None:
            groups[suite, int(task)].append(row)
    return groups


def _figures(rows: list[dict[str, Any]]) -> dict[str, Figure]:
    """Success and length of each suite over the tasks that have an expert."""
    figures: dict[str, Figure] = {}
    groups = _by_task(rows)
    for suite in dict.fromkeys(suite for suite, _ in groups):
        mine = {task: group for (s, task), group in groups.items() if s == suite}
        flat = [row for group in mine.values() for row in group]
        figures[suite] = Figure.rate(sum(row["success"] for row in flat), len(flat))
        solved = [row["steps"] for row in flat if row["success"]]
        if solved:
            figures[f"{suite}_steps"] = Figure.mean(solved, "control steps")
        figures[f"{suite}_tasks"] = Figure(len(mine), unit="tasks with an expert")
        worst = min(np.mean([row["success"] for row in group]) for group in mine.values())
        figures[f"{suite}_worst_task"] = Figure(float(worst), unit="success rate")
    return figures


def _print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("suite", "task", "success", "steps", title="scripted experts")
    for (suite, task), group in sorted(_by_task(rows).items()):
        solved = [row["steps"] for row in group if row["success"]]
        mean = f"{np.mean(solved):.0f}" if solved else "-"
        table.add_row(suite, str(task), f"{len(solved)}/{len(group)}", mean)
    console.print(table)
