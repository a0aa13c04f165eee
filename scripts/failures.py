"""``regrasp failures generate``: failures on purpose, verified by execution, into an episode store.

A job is one context: a task, an initial state, a seed, who drives, and a few types of failure that
share its nominal rollout. Jobs run in rounds over all tasks; of the last round, as many contexts
run as it takes, and which ones depends on what those before gave alone: so the same seed gives the
same samples on any number of workers.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts._jobs import run_missing
from regrasp.sim.cache import LastEnv
from regrasp.sim.failures import taxonomy
from rich.console import Console
from rich.table import Table

#: Who drives: an expert and then its follower, or the shipped policy, which looks for itself.
DRIVERS = ("expert", "small_vla")

#: Tasks of libero_10 that no expert solves.
_UNSOLVED = {("libero_10", 5), ("libero_10", 9)}


@dataclass(frozen=True)
class Args:
    """Generate failure samples on the training initial states; the same ``out`` is continued.

    Attributes:
        out: the episode store to write.
        count: samples, at least.
        suites: LIBERO suites.
        tasks: task indices in each suite; all when empty.
        types: types of failure; all of the taxonomy when empty.
        policy_suites: suites in which the shipped policy drives too.
        policy_share: share of their contexts in which it does.
        init_states: the first this many initial states (0 to 29 are for training).
        states_per_round: contexts of each task in a round.
        types_per_context: types of failure tried in a context.
        per_cell: failures kept of a type in a context; 0 keeps every severity that passes.
        seed: of the whole run.
        workers: processes.
    """

    out: Path = Path("data/failures")
    count: int = 2000
    suites: tuple[str, ...] = ("libero_object", "libero_spatial", "libero_goal", "libero_10")
    tasks: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    policy_suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    policy_share: float = 0.25
    init_states: int = 30
    states_per_round: int = 2
    types_per_context: int = 8
    per_cell: int = 1
    seed: int = 0
    workers: int = 2

    def __post_init__(self) -> None:
        for name in ("count", "states_per_round", "types_per_context", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"failures generate: {name} is {getattr(self, name)}; at least 1")
        unknown = set(self.types) - set(taxonomy.TAXONOMY)
        if unknown:
            known = sorted(taxonomy.TAXONOMY)
            raise ValueError(f"failures generate: unknown types {sorted(unknown)}; {known} exist")


@dataclass(frozen=True)
class Job:
    """One context and what goes wrong in it."""

    out: str
    suite: str
    task: int
    init_state: int
    seed: int
    driver: str
    kinds: tuple[str, ...]
    per_cell: int

    @property
    def key(self) -> str:
        """A name that is the same in every run with the same seed."""
        return f"{self.suite}/{self.task}/{self.init_state}/{self.seed}/{self.driver}"


def rounds(args: Args) -> Iterator[list[Job]]:
    """Rounds of jobs without end: each visits every task, with other states and types."""
    from regrasp.sim import task_names

    tasks = [(s, k) for s in args.suites for k in args.tasks or range(len(task_names(s)))]
    tasks = [task for task in tasks if task not in _UNSOLVED]
    number = 0
    while True:
        jobs = []
        for suite, task in tasks:
            for visit in range(
                number * args.states_per_round, (number + 1) * args.states_per_round
            ):
                jobs.append(_job(args, suite, task, visit))
        yield jobs
        number += 1


def portion(jobs: Sequence[Job], rows: Sequence[dict[str, Any]], count: int) -> int:
    """How many of a round's jobs to run before counting again: all, unless fewer will do.

    Args:
        jobs: what is left of the round.
        rows: of all jobs so far.
        count: samples wanted.
    """
    if not _samples(rows):
        return len(jobs)
    needed = (count - _samples(rows)) / (_samples(rows) / len(rows))
    return min(len(jobs), max(1, math.ceil(needed)))


def _job(args: Args, suite: str, task: int, visit: int) -> Job:
    """The ``visit``-th context of a task: initial states in turn, in an order of the task's own."""
    name = int.from_bytes(suite.encode()[-8:], "little")  # hash() differs from process to process
    order = np.random.default_rng([args.seed, name, task]).permutation(args.init_states)
    rng = np.random.default_rng([args.seed, name, task, visit])
    driver = DRIVERS[int(suite in args.policy_suites and rng.random() < args.policy_share)]
    kinds = [
        kind
        for kind, row in taxonomy.TAXONOMY.items()
        if kind in (args.types or taxonomy.TAXONOMY)
        # An expert and its follower do not look at pictures.
        and (driver != "expert" or row.family != "perception")
    ]
    chosen = rng.choice(len(kinds), min(args.types_per_context, len(kinds)), replace=False)
    return Job(
        str(args.out),
        suite,
        task,
        int(order[visit % args.init_states]),
        int(rng.integers(2**31)),
        driver,
        tuple(kinds[i] for i in sorted(chosen)),
        args.per_cell,
    )


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


_last_env = LastEnv()


def generate_one(job: Job) -> dict[str, Any]:
    """Examine one context in a worker; append its samples. Returns counts."""
    from regrasp.sim.failures import INJECTIONS
    from regrasp.sim.failures.sample import failure_episodes, nominal_episode, sample_id

    env, examiner = examiner_of(job.suite, job.task, job.driver, job.seed, job.per_cell)
    store = EpisodeStore.open(job.out)
    have = {(h.extra.get("sample"), h.extra.get("role"), h.extra.get("job")) for h in store.headers}
    began = time.perf_counter()
    kept: list[dict[str, Any]] = []
    seconds: dict[str, float] = defaultdict(float)
    rejected: Counter[str] = Counter()
    tried: Counter[str] = Counter()

    def append(episode: Any) -> None:
        episode.header.extra.update(job=job.key, driver=job.driver)
        key = (episode.header.extra.get("sample"), episode.header.extra["role"], job.key)
        if key not in have:  # a job that was killed in its middle runs again
            store.append(episode)

    for kind in job.kinds:
        result = examiner.examine(job.init_state, job.seed, INJECTIONS.get(kind, kind))
        for part, value in result.seconds.items():
            seconds[part] += value
        tried[kind] += len(result.attempts)
        rejected.update(f"{kind}/{reason}" for reason in result.rejections.elements())
        drawing = time.perf_counter()
        for failure in result.failures:
            if not kept:
                append(nominal_episode(env, result))
            for episode in failure_episodes(env, result, failure):
                append(episode)
            recovery = failure.recovery
            kept.append(
                {
                    "sample": sample_id(result, failure),
                    "type": kind,
                    "severity": failure.severity,
                    "outcome": str(recovery.outcome),
                    "mends": recovery.mends,
                    "replays": list(recovery.replays),
                    "retries": list(recovery.retries),
                    "digest": result.digest(),
                }
            )
        seconds["draw"] += time.perf_counter() - drawing
    return {
        "key": job.key,
        "job": asdict(job),
        "kept": kept,
        "tried": dict(tried),
        "rejected": dict(rejected),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "took": round(time.perf_counter() - began, 3),
    }


def examiner_of(suite: str, task: int, driver: str, seed: int, per_cell: int) -> tuple[Any, Any]:
    """A task's environment (the worker's last one is kept) and a new examiner of it."""
    from regrasp.sim import make_env
    from regrasp.sim.failures.gates import Examiner, GateConfig

    env = _last_env.get((suite, task), lambda: make_env(suite, task))
    policy = (lambda told: small_vla_actor(env, seed, told)) if driver != "expert" else None
    return env, Examiner(env, GateConfig(per_cell=per_cell), policy)


def small_vla_actor(env: Any, seed: int, told: str | None) -> Any:
    """The shipped policy as an actor, with an expert that says which phase this is."""
    import torch
    from regrasp.policies.small_vla import SmallVLA
    from regrasp.sim.experts import make_expert
    from regrasp.sim.failures.actors import ChunkedActor

    torch.set_num_threads(1)
    if not _POLICY:
        _POLICY.append(SmallVLA.load())
    policy = _POLICY[0]

    def infer(seen: Any) -> np.ndarray:
        policy.reset(seed)  # the same look gives the same chunk, whatever came before
        return policy.infer([seen])[0].samples[0]

    return ChunkedActor(infer, make_expert(env), execute=8, instruction=told)


_POLICY: list[Any] = []


def main(args: Args) -> None:
    """Run rounds until there are enough samples; print what they cost and yielded."""
    console = Console()
    open_store(args)
    log = JsonLines(args.out / "jobs.jsonl")
    done = {row["key"]: row for row in log.read()}
    rows: list[dict[str, Any]] = []
    for number, jobs in enumerate(rounds(args)):
        # Of a round that is cut short, all suites have their share.
        order = np.random.default_rng([args.seed, number]).permutation(len(jobs))
        left = [jobs[i] for i in order]
        while left and _samples(rows) < args.count:
            now = portion(left, rows, args.count)
            some, left = left[:now], left[now:]
            told = f"round {number}: {len(some)} contexts, {_samples(rows)} samples so far"
            console.print(told)
            for row in _run(console, args, some, done):
                done[row["key"]] = row
                log.append(row)
            rows += [done[job.key] for job in some]
        if _samples(rows) >= args.count:
            break
    _print(console, rows)


def _run(
    console: Console, args: Args, jobs: Sequence[Job], done: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows of the jobs that are not done, as they come."""
    return run_missing(
        console,
        jobs,
        done,
        generate_one,
        workers=args.workers,
        timeout_s=900.0,
        recycle_after=40,
        affinity=scene_of,
    )


def open_store(args: Args) -> EpisodeStore:
    """The store of a run, made if missing.

    Raises:
        SystemExit: it is another run's; two would be mixed.
    """
    plan = {k: v for k, v in asdict(args).items() if k not in ("out", "workers", "count")}
    plan = json.loads(json.dumps(plan))
    store = EpisodeStore.create(args.out, attrs={"failures": plan}, exist_ok=True)
    old = store.attrs.get("failures", {})
    other = sorted(key for key in plan if old.get(key) != plan[key])
    if other:
        said = ", ".join(f"{key} {old.get(key)!r}" for key in other)
        raise SystemExit(f"{args.out} was begun with {said}; choose another --out or the same")
    return store


def _samples(rows: Sequence[dict[str, Any]]) -> int:
    return sum(len(row["kept"]) for row in rows)


def figures_of(rows: Sequence[dict[str, Any]], workers: int) -> dict[str, Figure]:
    """Yield, cost, and what recoveries and retries are worth."""
    kept = [sample for row in rows for sample in row["kept"]]
    tried = sum(sum(row["tried"].values()) for row in rows)
    hours = sum(row["took"] for row in rows) / 3600 / workers
    found = [s for s in kept if s["replays"]]
    figures = {
        "samples": Figure(len(kept), unit="samples"),
        "samples_per_hour": Figure(len(kept) / max(hours, 1e-9), unit=f"on {workers} workers"),
        "types": Figure(len({s["type"] for s in kept}), unit="types"),
        "levels": Figure(len({s["severity"] for s in kept}), unit="severities"),
        "tasks": Figure(
            len({row["key"].rsplit("/", 3)[0] for row in rows if row["kept"]}), unit="tasks"
        ),
        "way_found": Figure.rate(len(found), len(kept)),
        "mended": Figure.rate(sum(s["mends"] for s in kept), len(kept)),
        "recovery_success": _mean_rate([s["replays"] for s in found]),
        "retry_success": _mean_rate([s["retries"] for s in found]),
    }
    for reason, count in sorted(_reasons(rows).items()):
        figures[f"rejected.{reason}"] = Figure.rate(count, tried, "of attempts")
    return figures


def _mean_rate(verdicts: Sequence[Sequence[bool]]) -> Figure:
    """Mean success over samples; each sample's K tries are one observation."""
    return Figure.mean([float(np.mean(v)) for v in verdicts] or [0.0], "success rate")


def _reasons(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    """How many attempts each gate rejected; those that rejected none are there too."""
    from regrasp.sim.failures.verdicts import Reason

    reasons: Counter[str] = Counter({str(reason): 0 for reason in Reason})
    for row in rows:
        for name, count in row["rejected"].items():
            reasons[name.partition("/")[2]] += count
    return reasons


def _print(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    tried: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for row in rows:
        for kind, count in row["tried"].items():
            tried[taxonomy.TAXONOMY[kind].family] += count
        kept.update(taxonomy.TAXONOMY[sample["type"]].family for sample in row["kept"])
    table = Table("family", "attempts", "kept", "yield", title="failures")
    for family in sorted(tried):
        share = kept[family] / tried[family] if tried[family] else 0.0
        table.add_row(family, str(tried[family]), str(kept[family]), f"{share:.0%}")
    console.print(table)
    attempts = sum(tried.values())
    for reason, count in _reasons(rows).most_common():
        console.print(
            f"rejected, {reason}: {count} of {attempts} attempts ({count / attempts:.0%})"
        )
    seconds: Counter[str] = Counter()
    for row in rows:
        seconds.update(row["seconds"])
    took = sum(row["took"] for row in rows)
    shares = ", ".join(f"{name} {value / took:.0%}" for name, value in seconds.most_common())
    console.print(f"time of the workers: {shares}")
