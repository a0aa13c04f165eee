"""``regrasp certify``: the fastest variant of a policy that is certified to break few successes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, bootstrap, write_result
from regrasp.monitors.base import lookup
from regrasp.monitors.certify import REFERENCE, Certificate, Design, Tested, Trial, certify
from regrasp.scripts._jobs import run_missing
from regrasp.sim.cache import LastEnv
from rich.console import Console
from rich.table import Table

#: Actions executed of each chunk by the reference, and its flow steps.
EXECUTE, FLOW_STEPS = 8, 5


@dataclass(frozen=True)
class Args:
    """Certify faster variants of a policy against it, and deploy the fastest; continues.

    Attributes:
        suites: LIBERO suites.
        tasks: the first this many tasks of each suite.
        policy: a checkpoint folder; the shipped policy when None.
        candidates: names in policies/accelerate.py; all of them when empty.
        eps: failures induced a trial that are accepted: the reference succeeds and the variant,
            from the same state with the same noise, does not.
        delta: the chance that anything promised is false.
        max_rounds: rounds, of one trial a task, that a candidate gets.
        reference_rounds: rounds on which the reference always runs.
        batch: rounds run at a time; more keeps many workers busier and wastes a few rollouts.
        check: then run the deployed variant and the reference this often a task on held-out
            initial states.
        protocol: a named protocol.
        seed: of the trials.
        workers: processes.
        out: folder of the log; the same folder continues the same run.
        result: also write docs/results/<result>.json.
    """

    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: int = 10
    policy: Path | None = None
    candidates: tuple[str, ...] = ()
    eps: float = 0.15
    delta: float = 0.05
    max_rounds: int = 15
    reference_rounds: int = 5
    batch: int = 2
    check: int = 0
    protocol: str = "openpi"
    seed: int = 0
    workers: int = 2
    out: Path = Path("runs/certify")
    result: str | None = None


@dataclass(frozen=True)
class Job:
    """One trial of one policy, and of the reference too where that is wanted on failure."""

    policy: str | None
    name: str
    trial: Trial
    want_reference: bool
    protocol: str
    again: int = 0

    @property
    def key(self) -> str:
        """A name that is the same in every run."""
        return rollout_key(self.name, self.trial, self.again)


def rollout_key(name: str, trial: Trial, again: int = 0) -> str:
    """Key of one rollout in the log."""
    key = f"{name}/{trial.task}/{trial.state}/{trial.seed}"
    return f"{key}/again{again}" if again else key


def scene_of(job: Job) -> str:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.trial.task


_policies: dict[tuple[str | None, str], Any] = {}
_last_env = LastEnv()


def _folder(args: Args) -> str | None:
    """The policy's folder as jobs carry it."""
    return None if args.policy is None else str(args.policy)


def load_variant(policy: str | None, name: str) -> Any:
    """The reference or a variant of it, by name."""
    from regrasp.policies.accelerate import CANDIDATES
    from regrasp.policies.small_vla import SmallVLA

    reference = SmallVLA.load(policy, flow_steps=FLOW_STEPS, execute=EXECUTE)
    if name == REFERENCE:
        return reference
    return lookup({c.name: c for c in CANDIDATES}, name, "candidate").apply(reference)


def run_pair(job: Job) -> list[dict[str, Any]]:
    """Run one job in a worker; one row a rollout."""
    rows = [_roll_out(job, job.name)]
    if job.want_reference and not rows[0]["success"]:
        rows.append(_roll_out(job, REFERENCE))
    return rows


def _roll_out(job: Job, name: str) -> dict[str, Any]:
    """One episode to its first success or its horizon."""
    import torch
    from regrasp.sim.protocol import get_protocol

    torch.set_num_threads(1)
    if (job.policy, name) not in _policies:
        _policies[job.policy, name] = load_variant(job.policy, name)
    policy, protocol = _policies[job.policy, name], get_protocol(job.protocol)
    env = _env(job.trial.task, job.protocol)
    env.reset(seed=protocol.seed, options={"init_state": job.trial.state, "render": False})
    policy.reset(job.trial.seed)
    while not (env.succeeded or env.truncated):
        chunk = policy.infer([env.observation()])[0].samples[0]
        env.step_chunk(np.clip(chunk, -1.0, 1.0), render="none")
    again = job.again if name == job.name else 0
    return {
        "key": rollout_key(name, job.trial, again),
        "success": bool(env.succeeded),
        "steps": int(env.steps),
    }


def _env(task: str, protocol: str) -> Any:
    """The environment of ``suite/number``."""
    from regrasp.sim import LiberoEnv, get_task
    from regrasp.sim.protocol import get_protocol

    suite, _, number = task.rpartition("/")
    return _last_env.get(
        (protocol, task),
        lambda: LiberoEnv(get_task(suite, int(number)), get_protocol(protocol).env_config(suite)),
    )


class RealRollouts:
    """Runs what the log lacks in worker processes; a :data:`regrasp.monitors.certify.Runner`."""

    def __init__(self, args: Args, console: Console, log: JsonLines) -> None:
        self.args, self.console, self.log = args, console, log
        self.done: dict[str, dict[str, Any]] = {row["key"]: row for row in log.read()}

    def __call__(
        self, name: str, trials: Sequence[Trial], want_reference: Sequence[bool]
    ) -> list[tuple[bool, bool | None]]:
        """See :data:`regrasp.monitors.certify.Runner`."""
        jobs = [self._job(name, t, w) for t, w in zip(trials, want_reference, strict=True)]
        self.run(name, jobs)
        # A run that was stopped may have kept the candidate's row and not the reference's.
        missed = [
            self._job(REFERENCE, job.trial, False)
            for job in jobs
            if job.want_reference and not self.done[job.key]["success"]
        ]
        self.run(REFERENCE, missed)
        answers: list[tuple[bool, bool | None]] = []
        for job in jobs:
            row = self.done.get(rollout_key(REFERENCE, job.trial))
            known = bool(row["success"]) if row and name != REFERENCE else None
            answers.append((bool(self.done[job.key]["success"]), known))
        return answers

    def _job(self, name: str, trial: Trial, want: bool, again: int = 0) -> Job:
        policy = str(self.args.policy) if self.args.policy else None
        return Job(policy, name, trial, want, self.args.protocol, again)

    def run(self, title: str, jobs: Sequence[Job]) -> None:
        """Run those that the log lacks; SystemExit when some did not run."""
        todo = [job for job in jobs if job.key not in self.done]
        if not todo:
            return
        self.console.print(title)
        for rows in run_missing(
            self.console,
            todo,
            self.done,
            run_pair,
            workers=self.args.workers,
            timeout_s=600.0,
            recycle_after=200,
            affinity=scene_of,
        ):
            for row in rows:
                self.done[row["key"]] = row
                self.log.append(row)

    def check_identical(self, trials: Sequence[Trial]) -> None:
        """The A/A floor: the reference against itself, from the same seeds, must not differ.

        Were the noise not the same in both, a policy that succeeds with probability p would seem
        to break p (1 - p) of the trials that it solves.

        Raises:
            SystemExit: naming the trials that differ.
        """
        once = [self._job(REFERENCE, trial, False) for trial in trials]
        twice = [self._job(REFERENCE, trial, False, again=1) for trial in trials]
        self.run("A/A", [*once, *twice])
        fields = ("success", "steps")
        differ = [
            a.key
            for a, b in zip(once, twice, strict=True)
            if any(self.done[a.key][f] != self.done[b.key][f] for f in fields)
        ]
        if differ:
            raise SystemExit(f"the reference differs from itself on {differ}; nothing is certified")


def measure_speed(args: Args, names: Sequence[str]) -> dict[str, Figure]:
    """How many times cheaper a control step of each candidate is decided, side by side."""
    from regrasp.policies.accelerate import decision_costs

    task = f"{args.suites[0]}/0"
    env = _env(task, args.protocol)
    env.reset(seed=0, options={"init_state": 0, "render": False})
    policies = {name: load_variant(_folder(args), name) for name in (REFERENCE, *names)}
    costs = decision_costs(policies, env.observation())
    _last_env.close()
    speeds = {}
    for name in names:
        ratios = np.log(costs[REFERENCE] / costs[name])
        low, high = (math.exp(end) for end in bootstrap(ratios))
        value = math.exp(float(ratios.mean()))
        speeds[name] = Figure(value, low, high, len(ratios), "ratio of decision cost")
    return speeds


def speeds_once(args: Args, names: Sequence[str]) -> dict[str, Figure]:
    """:func:`measure_speed`, kept in the run's folder: the order must not change on resuming."""
    path = args.out / "speed.json"
    if not path.exists():
        speeds = {name: asdict(figure) for name, figure in measure_speed(args, names).items()}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(speeds, indent=1) + "\n")
        part.replace(path)
    return {name: Figure(**data) for name, data in json.loads(path.read_text()).items()}


def main(args: Args) -> None:
    """Measure speeds, certify, print, check when asked, write the result when asked."""
    from regrasp.policies.small_vla import SmallVLA
    from regrasp.sim.protocol import TRAIN_STATES, get_protocol

    names = chosen(args.candidates)
    console = Console()
    tasks = tuple(f"{suite}/{k}" for suite in args.suites for k in range(args.tasks))
    design = Design(
        tasks=tasks,
        states=TRAIN_STATES,
        eps=args.eps,
        delta=args.delta,
        max_rounds=args.max_rounds,
        reference_rounds=args.reference_rounds,
        batch=args.batch,
        seed=args.seed,
    )
    protocol = get_protocol(args.protocol, replan=EXECUTE, init_states=TRAIN_STATES)
    record: dict[str, Any] = {
        "policy": SmallVLA.load(args.policy).hash(),
        "protocol": protocol.record(),
        "design": asdict(design),
        "candidates": names,
        "reference": {"execute": EXECUTE, "flow_steps": FLOW_STEPS},
    }
    rollouts = RealRollouts(args, console, _resume(args.out, record))
    speeds = speeds_once(args, names)
    # Candidates that are not faster have nothing to offer; known before any outcome is.
    order = sorted((n for n in names if speeds[n].value > 1.0), key=lambda n: -speeds[n].value)
    if not order:
        raise SystemExit(f"none of {names} decides faster than the reference")
    rollouts.check_identical(design.round(0))
    certificate = certify(order, design, rollouts)
    figures = certificate_figures(certificate, speeds, aa=len(tasks))
    _print(console, certificate, order, speeds)
    if args.check:
        figures |= check(rollouts, certificate.deployed, tasks, args)
        for name in [n for n in figures if n.startswith("check.")]:
            console.print(f"{name}: {figures[name].value:.3f}")
    if args.result:
        record["check"] = args.check
        command = f"regrasp certify --check {args.check} --result {args.result}"
        path = write_result(args.result, command, record, [protocol.seed, args.seed], figures)
        console.print(f"wrote {path}")


def chosen(candidates: Sequence[str]) -> list[str]:
    """The candidates' names; all when none is given; KeyError with the nearest for another."""
    from regrasp.policies.accelerate import CANDIDATES

    known = {candidate.name: candidate for candidate in CANDIDATES}
    return [lookup(known, name, "candidate").name for name in candidates] or list(known)


def _resume(out: Path, record: dict[str, Any]) -> JsonLines:
    """The log of rollouts of the same run; refuses to mix."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, sort_keys=True)
    stamp = out / "protocol.json"
    if stamp.exists() and stamp.read_text() != text:
        raise SystemExit(f"{out} holds a run of another policy or design; give another --out")
    stamp.write_text(text)
    return JsonLines(out / "rollouts.jsonl")


def certificate_figures(
    certificate: Certificate, speeds: dict[str, Figure], aa: int
) -> dict[str, Figure]:
    """The figures of the result.

    Args:
        certificate: what was found.
        speeds: of the candidates.
        aa: rollouts of the A/A comparison beyond those of the certificate.
    """
    spent = certificate.rollouts + aa
    solved, trials = certificate.reference_successes, certificate.reference_trials
    figures = {
        "speedup": speeds.get(certificate.deployed, Figure(1.0, unit="ratio of decision cost")),
        "confidence": Figure(certificate.confidence, unit="probability"),
        "preserved": Figure(certificate.preserved, unit="lower bound at that confidence"),
        "risk": Figure(certificate.risk, unit="upper bound at that confidence"),
        "reference_success": Figure.rate(solved, trials),
        "rollouts": Figure(spent, unit="rollouts, A/A included"),
        "rollouts_exhaustive": Figure(certificate.exhaustive, unit="rollouts"),
        "rollouts_saved": Figure(1 - spent / certificate.exhaustive, unit="share"),
    }
    for name, speed in speeds.items():
        figures[f"{name}.speedup"] = speed
    for test in certificate.tested:
        figures |= _tested_figures(test)
    return figures


def _tested_figures(test: Tested) -> dict[str, Figure]:
    return {
        f"{test.name}.aif": Figure.rate(test.failures, test.trials, "induced failures"),
        f"{test.name}.bound": Figure(test.bound, unit=f"upper bound at {test.delta:.2g}"),
        f"{test.name}.rollouts": Figure(test.rollouts, unit="rollouts"),
        f"{test.name}.certified": Figure(float(test.certified), unit="1 is yes"),
    }


def check(
    rollouts: RealRollouts, deployed: str, tasks: Sequence[str], args: Args
) -> dict[str, Figure]:
    """Both policies on held-out initial states: what the certificate says nothing of."""
    from regrasp.sim.protocol import HELD_OUT_STATES

    rng = np.random.default_rng(np.random.SeedSequence([args.seed, 2**31]))
    trials = [
        Trial(task, state, int(rng.integers(2**31)))
        for task in tasks
        for state in HELD_OUT_STATES[: args.check]
    ]
    none = [False] * len(trials)
    reference = np.array([success for success, _ in rollouts(REFERENCE, trials, none)])
    fast = reference
    if deployed != REFERENCE:
        fast = np.array([success for success, _ in rollouts(deployed, trials, none)])
    n, solved = len(trials), int(reference.sum())
    broken = int((reference & ~fast).sum())
    figures = {
        "check.reference_success": Figure.rate(solved, n),
        "check.deployed_success": Figure.rate(int(fast.sum()), n),
        "check.aif": Figure.rate(broken, n, "induced failures"),
    }
    if solved:
        figures["check.preserved"] = Figure.rate(solved - broken, solved, "share of solved")
    return figures


def _print(
    console: Console, certificate: Certificate, order: Sequence[str], speeds: dict[str, Figure]
) -> None:
    table = Table("candidate", "speed-up", "AIF", "bound", "trials", "rollouts", "outcome")
    tested = {test.name: test for test in certificate.tested}
    for name in order:
        cells = ["", "", "", "", "not needed"]
        if name in tested:
            t = tested[name]
            cells = [f"{t.estimate:.3f}", f"{t.bound:.3f}", str(t.trials), str(t.rollouts)]
            cells.append(t.reason)
        table.add_row(name, f"{speeds[name].value:.2f}", *cells)
    console.print(table)
    speed = speeds[certificate.deployed].value if certificate.deployed != REFERENCE else 1.0
    console.print(
        f"deployed: {certificate.deployed}, {speed:.2f} times as fast. With confidence "
        f"{certificate.confidence:.2f} at least {certificate.preserved:.3f} of what the reference "
        f"solves is preserved. {certificate.rollouts} rollouts of the {certificate.exhaustive} "
        "that all candidates on all rounds would take."
    )
