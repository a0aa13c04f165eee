"""``regrasp eval``: a policy's success in LIBERO under a recorded protocol, with intervals."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, write_result
from regrasp.scripts._jobs import run_missing
from regrasp.sim.cache import LastEnv
from rich.console import Console
from rich.table import Table

#: What differs between the conditions: pictures and instruction.
CONDITIONS = {
    "lite": ("lite", "right"),
    "full": ("full", "right"),
    "wrong_instruction": ("lite", "wrong"),
}


@dataclass(frozen=True)
class Args:
    """Evaluate a policy on held-out initial states; resumes where it was stopped.

    Attributes:
        policy: a checkpoint folder of ``regrasp train bc``; the shipped policy when None.
        suites: LIBERO suites (PRO variants by their own names).
        conditions: of ``lite``, ``full`` (the stock picture) and ``wrong_instruction`` (another
            task's instruction in the same scene).
        protocol: a named protocol.
        episodes: episodes a task in the first condition, on initial states from 30 on.
        other_episodes: episodes a task in the other conditions.
        replan: actions executed of each chunk; the policy's default when None.
        flow_steps: denoising steps; the policy's default when None.
        seed: of the policy's own noise.
        workers: processes.
        out: folder for the episodes' log; the same folder continues the same evaluation.
        result: also write docs/results/<result>.json.
    """

    policy: Path | None = None
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    conditions: tuple[str, ...] = ("lite", "full", "wrong_instruction")
    protocol: str = "openpi"
    episodes: int = 20
    other_episodes: int = 5
    replan: int | None = None
    flow_steps: int | None = None
    seed: int = 0
    workers: int = 2
    out: Path = Path("runs/eval")
    result: str | None = None


@dataclass(frozen=True)
class Job:
    """One episode to evaluate."""

    policy: str | None
    flow_steps: int | None
    protocol: str
    condition: str
    suite: str
    task: int
    init_state: int
    replan: int
    seed: int

    @property
    def key(self) -> str:
        """A name that is the same in every run of the same evaluation."""
        return f"{self.condition}/{self.suite}/{self.task}/{self.init_state}"


def scene_of(job: Job) -> tuple[str, str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return CONDITIONS[job.condition][0], job.suite, job.task


def wrong_instruction(suite: str, task: int, init_state: int) -> str:
    """Another instruction of the suite that makes sense in this task's scene.

    In libero_object it means another object of the scene, in libero_spatial the scene's other
    bowl. Elsewhere it is any other task's; in libero_goal all tasks share one scene.
    """
    from regrasp.sim import get_task, task_names
    from regrasp.sim.tasks import scene_objects, twin_instructions

    own = get_task(suite, task)
    if suite == "libero_spatial":
        told = list(twin_instructions(own).values())
    else:
        others = [get_task(suite, k) for k in range(len(task_names(suite))) if k != task]
        if suite.startswith("libero_object"):
            here = scene_objects(own)
            others = [other for other in others if scene_objects(other)[0] in here]
        told = [other.instruction for other in others]
    return told[zlib.crc32(f"{suite}/{task}/{init_state}".encode()) % len(told)]


_POLICIES: dict[tuple[str | None, int | None], Any] = {}


_last_env = LastEnv()


def evaluate_one(job: Job) -> dict[str, Any]:
    """Run one episode in a worker."""
    import torch
    from regrasp.policies.small_vla import SmallVLA
    from regrasp.sim import LiberoEnv, get_task
    from regrasp.sim.protocol import get_protocol

    torch.set_num_threads(1)
    key = (job.policy, job.flow_steps)
    if key not in _POLICIES:
        options = {} if job.flow_steps is None else {"flow_steps": job.flow_steps}
        _POLICIES[key] = SmallVLA.load(job.policy, **options)
    policy = _POLICIES[key]
    render, told = CONDITIONS[job.condition]
    env = _last_env.get(
        (render, job.suite, job.task),
        lambda: LiberoEnv(
            get_task(job.suite, job.task),
            get_protocol(job.protocol, render=render).env_config(job.suite),
        ),
    )
    instruction = env.task.instruction
    if told == "wrong":
        instruction = wrong_instruction(job.suite, job.task, job.init_state)
    steps = roll_out(env, policy, instruction, job)
    return {"key": job.key, "success": env.succeeded, "steps": steps, "instruction": instruction}


def roll_out(env: Any, policy: Any, instruction: str, job: Job) -> int:
    """Run one episode to its first success or its horizon; returns its control steps."""
    from dataclasses import replace

    from regrasp.sim.protocol import get_protocol

    env.reset(
        seed=get_protocol(job.protocol).seed,
        options={"init_state": job.init_state, "render": False},
    )
    episode_seed = np.random.SeedSequence([job.seed, job.task, job.init_state])
    policy.reset(int(episode_seed.generate_state(1)[0]))
    while not (env.succeeded or env.truncated):
        observation = replace(env.observation(), instruction=instruction)
        chunk = policy.infer([observation])[0].samples[0]
        env.step_chunk(np.clip(chunk[: job.replan], -1.0, 1.0), render="none")
    return int(env.steps)


def main(args: Args) -> None:
    """Run what is missing, print the table, write the result when asked to."""
    from regrasp.sim import task_names
    from regrasp.sim.protocol import HELD_OUT_STATES, get_protocol

    unknown = set(args.conditions) - set(CONDITIONS)
    if unknown:
        raise SystemExit(f"unknown conditions {sorted(unknown)}; there are {sorted(CONDITIONS)}")
    console = Console()
    policy_hash, replan = _policy_facts(args)
    protocol = get_protocol(args.protocol, replan=replan)
    plan = [
        (condition, args.episodes if k == 0 else args.other_episodes)
        for k, condition in enumerate(args.conditions)
    ]
    jobs = [
        Job(
            str(args.policy) if args.policy else None,
            args.flow_steps,
            args.protocol,
            condition,
            suite,
            task,
            HELD_OUT_STATES[k],
            replan,
            args.seed,
        )
        for condition, count in plan
        for suite in args.suites
        for task in range(len(task_names(suite)))
        for k in range(count)
    ]
    record = {"policy": policy_hash, "protocol": protocol.record(), **_settings(args)}
    log = _resume(args.out, record)
    done = {result["key"]: result for result in log.read()}
    for result in run_missing(
        console,
        jobs,
        done,
        evaluate_one,
        workers=args.workers,
        timeout_s=600.0,
        recycle_after=200,
        affinity=scene_of,
    ):
        done[result["key"]] = result
        log.append(result)
    figures = summarise(args.suites, args.conditions, {job.key: done[job.key] for job in jobs})
    _print(console, figures)
    if args.result:
        command = f"regrasp eval --result {args.result}"
        if args.policy:
            command += f" --policy {args.policy}"
        path = write_result(args.result, command, record, [protocol.seed, args.seed], figures)
        console.print(f"wrote {path}")


def _policy_facts(args: Args) -> tuple[str, int]:
    from regrasp.policies.small_vla import SmallVLA

    policy = SmallVLA.load(args.policy)
    return policy.hash(), args.replan or policy.spec.chunk


def _settings(args: Args) -> dict[str, Any]:
    names = ("suites", "conditions", "episodes", "other_episodes", "flow_steps", "seed")
    return {name: asdict(args)[name] for name in names}


def _resume(out: Path, record: dict[str, Any]) -> JsonLines:
    """The log of episodes under the same policy and protocol; refuses to mix."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, sort_keys=True, default=list)
    stamp = out / "protocol.json"
    if stamp.exists() and stamp.read_text() != text:
        raise SystemExit(
            f"{out} holds an evaluation of another policy or protocol; give another --out"
        )
    stamp.write_text(text)
    return JsonLines(out / "episodes.jsonl")


def summarise(
    suites: Sequence[str], conditions: Sequence[str], done: dict[str, dict[str, Any]]
) -> dict[str, Figure]:
    """Success by suite (first condition), by task, and the conditions' differences, paired."""
    outcomes: dict[str, dict[str, bool]] = defaultdict(dict)
    for key, result in done.items():
        condition, rest = key.split("/", 1)
        outcomes[condition][rest] = result["success"]
    figures = {}
    base = outcomes[conditions[0]]
    for suite in suites:
        own = {key: value for key, value in base.items() if key.startswith(f"{suite}/")}
        figures[suite] = Figure.rate(sum(own.values()), len(own))
        for task in sorted({int(key.split("/")[1]) for key in own}):
            these = [v for k, v in own.items() if k.startswith(f"{suite}/{task}/")]
            figures[f"{suite}.{task}"] = Figure.rate(sum(these), len(these))
    for condition in conditions[1:]:
        other = outcomes[condition]
        if condition == "wrong_instruction":
            figures[condition] = Figure.rate(sum(other.values()), len(other))
        keys = sorted(set(other) & set(base))
        if keys:
            figures[f"{condition}_minus_{conditions[0]}"] = Figure.paired(
                [other[key] for key in keys], [base[key] for key in keys], "success rate"
            )
    return figures


def _print(console: Console, figures: dict[str, Figure]) -> None:
    table = Table("figure", "value", "95 % interval", "n", title="success")
    for name, figure in figures.items():
        interval = f"{figure.low:.3f} to {figure.high:.3f}"
        table.add_row(name, f"{figure.value:.3f}", interval, str(figure.n))
    console.print(table)
