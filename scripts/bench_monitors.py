"""``regrasp monitors bench``: every failure score on the same rollouts, calibrated and compared."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from regrasp.episodes.results import Figure, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.monitors.base import Score
from regrasp.monitors.conformal import Calibration, conformal_rank
from regrasp.monitors.metrics import lead_fractions
from regrasp.monitors.runtime import Monitor, describe_spec
from regrasp.scripts._bench_choose import Candidate, Chooser, Folds
from regrasp.scripts._bench_data import Rollout, load, of_fold
from regrasp.scripts._bench_measure import (
    Entry,
    by_kind,
    differences,
    judged,
    measure,
    promises,
)
from regrasp.scripts._bench_report import (
    COLUMNS,
    plot_delay,
    plot_leaderboard,
    plot_promise,
    ranked,
)
from regrasp.scripts._bench_rollouts import FOLDS, Fold, plan, roll_out, scene_of
from regrasp.scripts._bench_scores import FITS, cost, fit_all, read_all, training_of
from regrasp.scripts._jobs import run_missing
from rich.console import Console
from rich.table import Table

#: What decides which rollouts there are; the rest may change between runs.
SETTINGS = (
    "policy", "checkpoint", "suites", "tasks", "protocol", "execute", "samples", "shrink", "seed"
)  # fmt: skip

#: Monitors that the default must beat, and FIPER's: both of its legs above their thresholds.
BASELINES = ("clock", "tide", "fiper")
FIPER = ("rnd_oe", "ace")


@dataclass(frozen=True)
class Args:
    """Roll a policy out with and without failures and compare all monitors on it; continues.

    Attributes:
        out: folder; a store of rollouts a policy, and what was computed from it.
        policy: which of the policies that ``regrasp demo`` knows.
        checkpoint: its folder; none is the shipped one.
        suites: LIBERO suites.
        tasks: the first this many tasks of each suite; the last three are "unseen".
        protocol: evaluation protocol.
        execute: actions executed of each chunk.
        samples: chunks sampled at each inference.
        alpha: false alarms promised.
        shrink: divides every fold's episodes, for a trial.
        seed: of the rollouts and of everything trained on them.
        workers: processes.
        ship: folder to save the default monitor in; none is ``out``'s.
        results: folder for the figures and, beside it, the plots.
    """

    out: Path = Path("data/monitors")
    policy: str = "small_vla"
    checkpoint: Path | None = None
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: int = 10
    protocol: str = "openpi"
    execute: int = 8
    samples: int = 16
    alpha: float = 0.05
    shrink: int = 1
    seed: int = 0
    workers: int = 2
    ship: Path | None = None
    results: Path = Path("docs/results")

    @property
    def store(self) -> Path:
        """Where this policy's rollouts are."""
        return self.out / self.policy / "store"


def folds(shrink: int) -> dict[str, Fold]:
    """Every fold, with a part of its episodes."""
    return {
        name: Fold(fold.states, max(1, fold.plain // shrink), fold.injected // shrink)
        for name, fold in FOLDS.items()
    }


def collect(args: Args, console: Console) -> EpisodeStore:
    """Run what is missing of the rollouts.

    Raises:
        SystemExit: when the store was begun with other settings, or an episode did not run.
    """
    settings = {k: v for k, v in asdict(args).items() if k in SETTINGS}
    settings = json.loads(json.dumps(settings, default=str))
    store = EpisodeStore.create(args.store, attrs={"bench": settings}, exist_ok=True)
    if store.attrs.get("bench") != settings:
        raise SystemExit(f"{args.store} was begun with other settings; choose another --out")
    jobs = plan(
        args.store,
        args.policy,
        args.checkpoint,
        args.protocol,
        args.execute,
        args.samples,
        args.suites,
        args.tasks,
        folds(args.shrink),
        args.seed,
    )
    done = {header.extra["job"] for header in store.headers}
    for _ in run_missing(
        console,
        jobs,
        done,
        roll_out,
        workers=args.workers,
        timeout_s=300.0,
        recycle_after=60,
        affinity=scene_of,
    ):
        pass
    return store.refresh()


def choose(chooser: Chooser, scores: dict[str, Score], costs: dict[str, np.ndarray]) -> list[Entry]:
    """Every score with its own window and style, FIPER's pair, and the default.

    The default is the best on the select fold of: single scores, and pairs of the five best of
    them, that need one sample of the policy and cost at most a millisecond.
    """
    singles = {name: chooser.best_single(name) for name in scores}
    entries = {
        name: Entry(name, candidate, scores[name].samples, costs[name])
        for name, candidate in singles.items()
    }
    fiper = chooser.best_pair(*FIPER, rules=("and",))
    entries["fiper"] = Entry("fiper", fiper, *_together(fiper, scores, costs))
    cheap = [
        name
        for name in sorted(singles, key=lambda n: -chooser.worth(singles[n]))
        if scores[name].samples == 1 and np.quantile(costs[name], 0.99) <= 1.0
    ]
    pairs = [
        Candidate(pair, tuple(singles[leg].windows[0] for leg in pair), rule)
        for pair in itertools.combinations(cheap[:5], 2)
        for rule in ("or", "and", "sum")
    ]
    affordable = [p for p in pairs if np.quantile(_together(p, scores, costs)[1], 0.99) <= 1.0]
    default = chooser.best([*(singles[name] for name in cheap), *affordable])
    entries["default"] = Entry("default", default, *_together(default, scores, costs))
    return list(entries.values())


def _together(
    candidate: Candidate, scores: dict[str, Score], costs: dict[str, np.ndarray]
) -> tuple[int, np.ndarray]:
    """Samples and cost of several legs: costs of the same inferences add up."""
    samples = max(scores[leg].samples for leg in candidate.legs)
    shortest = min(len(costs[leg]) for leg in candidate.legs)
    return samples, np.sum([costs[leg][:shortest] for leg in candidate.legs], axis=0)


def monitor_of(
    chooser: Chooser, default: Entry, scores: dict[str, Score], rollouts: list[Rollout]
) -> Monitor:
    """The default as an artifact, its thresholds from the calibration fold."""
    from regrasp.monitors.scores.combined import Combined
    from regrasp.scripts._rollouts import load_policy

    candidate, good = default.candidate, chooser.folds.calibrate
    legs = []
    for leg, window in zip(candidate.legs, candidate.windows, strict=True):
        built = type(scores[leg]).build(
            scores[leg].config() | ({} if leg == "clock" else {"window": window}),
            scores[leg].weights(),
        )
        legs.append(built)
    score = legs[0]
    if candidate.rule != "single":
        score = Combined(legs, chooser.sizes(candidate), candidate.rule)
    threshold = chooser.threshold(candidate, good)
    header = good[0].episode.header
    plan_ = header.extra["plan"]
    policy = load_policy(
        plan_["policy"], Path(plan_["checkpoint"]) if plan_["checkpoint"] else None
    )
    if policy.hash() != header.policy_hash:
        raise SystemExit(
            f"the rollouts are of policy {header.policy_hash}, this one is {policy.hash()}"
        )
    return Monitor(
        [score],
        Calibration(
            {score.name: threshold.at(0)},
            chooser.alpha,
            len(good),
            conformal_rank(len(good), chooser.alpha),
            "bonferroni",
        ),
        policy_hash=header.policy_hash,
        protocol_hash=header.protocol_hash,
        thresholds={score.name: threshold},
        spec=describe_spec(policy.spec),
        provenance={
            "chosen": candidate.name,
            "suites": sorted({r.episode.header.suite for r in good}),
            "training_episodes": len(of_fold(rollouts, "train", "failures")),
            "training_states": list(FOLDS["train"].states),
            "calibration_states": list(FOLDS["calibrate"].states),
        },
    )


def main(args: Args) -> dict[str, Figure]:
    """Collect the rollouts, train, choose, calibrate, measure; print and write the results."""
    console = Console()
    store = collect(args, console)
    failed = sum(not header.success for header in store.headers)
    console.print(f"{len(store)} episodes, {failed} of them failures")
    rollouts = load(args.store, args.tasks)
    began = time.perf_counter()
    scores = fit_all(training_of(rollouts, args.seed))
    console.print(f"{len(FITS)} scores trained in {time.perf_counter() - began:.0f} s")
    folds = Folds.of(rollouts)
    chooser = Chooser(folds, read_all(scores, rollouts), args.alpha)
    costs = {name: cost(score, of_fold(rollouts, "select")) for name, score in scores.items()}
    entries = choose(chooser, scores, costs)
    by_key = {entry.key: entry for entry in entries}
    default = by_key["default"]
    console.print(f"default: {default.candidate.name}")
    figures = measure(chooser, entries)
    figures |= differences(chooser, by_key, BASELINES)
    figures |= by_kind(chooser, default.candidate)
    print_leaderboard(console, figures, by_key)
    monitor_of(chooser, default, scores, rollouts).save(
        args.ship or args.out / args.policy / "monitor"
    )
    write(args, chooser, by_key, figures)
    return figures


def write(
    args: Args, chooser: Chooser, entries: dict[str, Entry], figures: dict[str, Figure]
) -> None:
    """The result file and the three plots."""
    name = "monitors" if args.policy == "small_vla" else f"monitors_{args.policy}"
    folds = chooser.folds
    header = folds.seen[0].episode.header
    record = {
        "policy": args.policy,
        "policy_hash": header.policy_hash,
        "rollout_protocol_hash": header.protocol_hash,
        "suites": list(args.suites),
        "folds": {fold: asdict(f) for fold, f in FOLDS.items()},
        "alpha": args.alpha,
        "chosen": {key: entry.candidate.name for key, entry in entries.items()},
        "failures": {
            "seen": sum(r.failed for r in folds.seen),
            "seen_episodes": len(folds.seen),
            "unseen": sum(r.failed for r in folds.unseen),
            "unseen_episodes": len(folds.unseen),
        },
    }
    where = args.results.parent
    command = "regrasp monitors bench"
    if args.policy != "small_vla":
        command += f" --policy {args.policy} --checkpoint {args.checkpoint}"
    write_result(name, command, record, [args.seed], figures, args.results)
    plot_leaderboard(figures, where / f"{name}_leaderboard.png")
    shown = {key: entries[key].candidate for key in ("default", *BASELINES)}
    plot_promise(
        {key: promises(chooser, c) for key, c in shown.items()}, where / f"{name}_promise.png"
    )
    lead = {key: lead_fractions(judged(chooser, c, folds.seen)) for key, c in shown.items()}
    plot_delay(lead, where / f"{name}_delay.png")


def print_leaderboard(
    console: Console, figures: dict[str, Figure], entries: dict[str, Entry]
) -> None:
    """The main columns, seen tasks."""
    columns = [*COLUMNS][:5]
    table = Table("monitor", "chosen", *columns, title="held-out episodes of seen tasks")
    for key in ranked(figures):
        cells = [f"{figures[f'{key}.{column}'].value:.3f}" for column in columns]
        table.add_row(key, entries[key].candidate.name, *cells)
    console.print(table)
    for prefix in ("", "unseen."):
        for baseline in BASELINES:
            f = figures[f"{prefix}default_minus_{baseline}.twa_length_matched"]
            console.print(
                f"{prefix}default minus {baseline}: {f.value:+.3f} ({f.low:+.3f} to {f.high:+.3f})"
            )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
