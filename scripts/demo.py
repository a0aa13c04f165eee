"""`regrasp demo`: the same perturbed episodes without and with a supervisor, and a report of them.

The policy runs in real LIBERO on held-out initial states. A monitor, calibrated on successful
rollouts from the training states, watches; in the supervised arm an alarm sends the arm back and
starts the policy again. Unperturbed episodes show how often the monitor alarms for nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from regrasp.episodes.results import Figure, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.scripts._films import FPS, STRIDE, choose, make_films
from regrasp.scripts._rollouts import (
    Setup,
    load_policy,
    plan_calibration,
    plan_pairs,
    run_jobs,
    run_protocol,
)
from regrasp.scripts._summary import UNPERTURBED, Pair, Summary, pair_up, rewinds, summarise
from regrasp.scripts.report import KINDS, build_report
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

#: The monitor shipped for a policy lies in ``<this>/<policy>``.
SHIPPED = Path(__file__).parent.parent / "monitors" / "weights"


@dataclass(frozen=True)
class Counts:
    """Episodes of each kind, each run in both arms.

    Attributes:
        none: unperturbed, for false alarms.
        slip: the object slips from the hand.
        nudge: the object is moved as the hand comes near.
        action_noise: a burst throws the arm off.
        initial_pose: the arm starts elsewhere.
        camera_shift: the camera is knocked; no rewind can mend that.
    """

    none: int = 100
    slip: int = 24
    nudge: int = 24
    action_noise: int = 24
    initial_pose: int = 24
    camera_shift: int = 24


@dataclass(frozen=True)
class Args:
    """Run the demo; the same ``out`` continues a stopped run.

    Attributes:
        out: folder of the run.
        suites: LIBERO suites.
        tasks: tasks of each suite, the first ones.
        counts: episodes of each kind.
        tries: rewinds at most in an episode.
        execute: actions executed of each chunk; half of it when None.
        alpha: bound on false alarms an episode.
        policy: name of the policy.
        checkpoint: folder of its weights; the shipped ones when None.
        monitor: folder of a monitor artifact; the shipped one when None.
        recalibrate: run calibration episodes and set the monitor's thresholds anew from them.
        calibration_states: initial states of the training split that recalibration uses, the
            last ones; the first ones trained the shipped monitor's scores.
        protocol: evaluation protocol.
        seed: of everything.
        workers: processes.
        films: pairs of which the report keeps films.
        film_size: pixels.
        results: folder to write ``demo.json`` to besides the run's own.
    """

    out: Path = Path("runs/demo")
    suites: tuple[str, ...] = ("libero_object",)
    tasks: int = 10
    counts: Counts = field(default_factory=Counts)
    tries: int = 2
    execute: int | None = None
    alpha: float = 0.05
    policy: str = "small_vla"
    checkpoint: Path | None = None
    monitor: Path | None = None
    recalibrate: bool = False
    calibration_states: int = 15
    protocol: str = "openpi"
    seed: int = 0
    workers: int = 2
    films: int = 12
    film_size: int = 256
    results: Path | None = None


def main(args: Args) -> Summary:
    """Run, print the table, write the report and the result."""
    from regrasp.sim.protocol import HELD_OUT_STATES

    began = time.monotonic()
    console = Console()
    policy = load_policy(args.policy, args.checkpoint)
    folder = args.out / "monitor" if args.recalibrate else args.monitor or SHIPPED / args.policy
    setup = Setup(
        args.out / "store",
        args.protocol,
        args.policy,
        args.checkpoint,
        args.execute or policy.spec.chunk // 2,
        folder,
        args.tries,
    )
    policy_hash, protocol_hash = policy.hash(), run_protocol(setup).hash()
    stamp(args, policy_hash, protocol_hash)
    if args.recalibrate and not (folder / "monitor.json").exists():
        recalibrate(console, args, setup, folder)
    monitor = Monitor.load(folder, policy_hash=policy_hash, protocol_hash=protocol_hash)
    alpha = monitor.calibration.alpha
    if alpha != args.alpha:
        raise SystemExit(
            f"demo: the monitor in {folder} was calibrated for alpha {alpha:g}, not "
            f"{args.alpha:g}; add --recalibrate"
        )
    jobs = plan_pairs(args.suites, args.tasks, HELD_OUT_STATES, asdict(args.counts), args.seed)
    follow(console, "episodes", len(jobs), run_jobs(setup, jobs, args.workers))
    store = EpisodeStore.open(setup.store)
    pairs = pair_up(store.headers)
    compared, identical = check_pairing(store, pairs)
    summary = summarise(pairs, alpha, monitor.calibration.n)
    print_table(console, summary, identical, compared)
    chosen = choose(pairs, args.films)
    films = make_films(args.out, setup, chosen, args.film_size, args.workers)
    follow(console, "films", 2 * len(chosen), films)
    minutes = spent(args.out, (time.monotonic() - began) / 60)
    record = run_protocol(setup).record() | {
        "perturbations": asdict(args.counts),
        "init_states": list(HELD_OUT_STATES),
        "suites": list(args.suites),
        "tries": args.tries,
        "policy": policy_hash,
    }
    facts = {
        "command": command(args),
        "suites": ", ".join(args.suites),
        "alpha": alpha,
        "n_calibration": monitor.calibration.n,
        "thresholds": {k: v for k, v in monitor.calibration.thresholds.items() if v < np.inf},
        "policy_hash": policy_hash,
        "protocol_hash": protocol_hash,
        "protocol": record,
        "control_hz": policy.spec.control_hz,
        "video_fps": FPS,
        "video_stride": STRIDE,
        "minutes": minutes,
        "workers": args.workers,
        "evaluated_on": f"initial states {HELD_OUT_STATES[0]} to {HELD_OUT_STATES[-1]}, held out",
        "pairing": (
            f"both arms of {identical} of {compared} episodes are identical, action for action, "
            "until the first rewind"
        ),
    }
    (args.out / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    report = build_report(args.out)
    figures = summary.figures() | {"minutes": Figure(minutes, unit="minutes")}
    for where in filter(None, (args.out, args.results)):
        write_result("demo", command(args), record, [args.seed], figures, where)
    console.print(f"report: {report} ({report.stat().st_size / 1e6:.1f} MB)")
    return summary


def recalibrate(console: Console, args: Args, setup: Setup, folder: Path) -> None:
    """Roll the policy out on training states and set the thresholds from its successes."""
    from dataclasses import replace

    from regrasp.sim.protocol import TRAIN_STATES

    given = Monitor.load(args.monitor or SHIPPED / args.policy)
    states = TRAIN_STATES[-args.calibration_states :]
    jobs = plan_calibration(args.suites, args.tasks, states, args.seed)
    setup = replace(setup, store=args.out / "calibration", monitor=None)
    follow(console, "calibration", len(jobs), run_jobs(setup, jobs, args.workers))
    store = EpisodeStore.open(setup.store)
    episodes = [store.load(i, ["action"]) for i in range(len(store))]
    calibrate_monitor(
        given.scores,
        episodes,
        args.alpha,
        spec=given.spec,
        provenance={
            "scores": given.provenance,
            "suites": sorted({e.header.suite for e in episodes}),
            "calibration_states": list(states),
            "calibration_success": float(np.mean([e.header.success for e in episodes])),
            "seed": args.seed,
        },
    ).save(folder)


def stamp(args: Args, policy_hash: str, protocol_hash: str) -> None:
    """Refuse to continue a run with other settings; films and workers may change."""
    free = {"workers", "films", "film_size", "results"}
    record = {k: v for k, v in asdict(args).items() if k not in free}
    record |= {"policy_hash": policy_hash, "protocol_hash": protocol_hash}
    text = json.dumps(record, indent=1, sort_keys=True, default=str)
    path = args.out / "settings.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"demo: {args.out} holds a run with other settings; give another --out")
    path.write_text(text)


def spent(run: Path, minutes: float) -> float:
    """Minutes spent on this run so far, those before it was stopped included."""
    path = run / "minutes.json"
    before = json.loads(path.read_text()) if path.exists() else 0.0
    path.write_text(json.dumps(before + minutes))
    return before + minutes


def follow(console: Console, what: str, total: int, done: Iterator[int]) -> None:
    """Show progress while ``done`` counts."""
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(what, total=total)
        for count in done:
            progress.update(bar, completed=count)


def check_pairing(store: EpisodeStore, pairs: Sequence[Pair]) -> tuple[int, int]:
    """(pairs, pairs whose arms executed the same actions until the first rewind)."""
    index = {(h.extra["pair"], h.extra["arm"]): i for i, h in enumerate(store.headers)}
    same = 0
    for pair in pairs:
        arms = [
            store.load(index[pair.id, h.extra["arm"]], ["action"]).steps["action"]
            for h in (pair.base, pair.supervised)
        ]
        until = [r["step"] for r in rewinds(pair.supervised)][:1] or [max(map(len, arms))]
        first, second = (arm[: until[0]] for arm in arms)
        same += np.array_equal(first, second)
    return len(pairs), same


def print_table(console: Console, summary: Summary, identical: int, compared: int) -> None:
    """The rates with their intervals, then what happened by kind."""
    table = Table("", "value", "95 % interval", "n", title="without and with the supervisor")
    labels = {
        "success_base": "success, policy alone",
        "success_supervised": "success, supervised",
        "paired_difference": "paired difference (Newcombe)",
        "rescue_rate": "rescued, of the failures alone",
        "caught": "failures noticed, of those alone",
        "false_alarm_rate": "false alarms, unperturbed successes",
        "false_alarm_band": f"  where alpha = {summary.alpha:g} should put it",
        "false_alarm_band_with_calibration": "  the calibration set's luck included",
        "unperturbed_base": "unperturbed, policy alone",
        "unperturbed_supervised": "unperturbed, supervised",
    }
    figures = summary.figures()
    for key, label in labels.items():
        f = figures[key]
        table.add_row(label, f"{f.value:.3f}", f"{f.low:.3f} to {f.high:.3f}", str(f.n))
    console.print(table)
    kinds = Table(
        "perturbation", "n", "alone", "supervised", "rescued", "harmed", title="by perturbation"
    )
    rows = {**summary.kinds, UNPERTURBED: summary.unperturbed}
    for kind, p in rows.items():
        alone, supervised = (p.both + p.harmed) / p.n, (p.both + p.rescued) / p.n
        kinds.add_row(
            KINDS[kind],
            str(p.n),
            f"{alone:.2f}",
            f"{supervised:.2f}",
            str(p.rescued),
            str(p.harmed),
        )
    console.print(kinds)
    console.print(
        f"{summary.alarmed} of {summary.paired.n} perturbed episodes with an alarm, "
        f"{summary.rewinds} rewinds, {summary.paired.rescued} rescued, {summary.paired.harmed} "
        f"harmed; exact McNemar p = {summary.paired.p_value():.2g}. "
        f"{identical} of {compared} pairs identical until the first rewind."
    )


def command(args: Args) -> str:
    """The command that repeats this run."""
    default = Args()
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in (
            ("tries", args.tries),
            ("execute", args.execute),
            ("alpha", args.alpha),
            ("protocol", args.protocol),
            ("seed", args.seed),
            ("tasks", args.tasks),
        )
        if value != getattr(default, name)
    ]
    changed += [
        f"--counts.{name.replace('_', '-')} {value}"
        for name, value in asdict(args.counts).items()
        if value != getattr(default.counts, name)
    ]
    if args.suites != default.suites:
        changed.append("--suites " + " ".join(args.suites))
    if args.checkpoint:
        changed.append(f"--checkpoint {args.checkpoint}")
    if args.recalibrate:
        changed.append("--recalibrate")
    return " ".join(["regrasp demo", *changed])
