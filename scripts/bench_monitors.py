"""``regrasp monitors bench``: every failure score on the same rollouts, calibrated and compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from regrasp.episodes.store import EpisodeStore
from regrasp.scripts._bench_rollouts import FOLDS, Fold, plan, roll_out, scene_of
from regrasp.scripts._jobs import run_missing
from rich.console import Console


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
        shrink: divides every fold's episodes, for a trial.
        seed: of the rollouts and of everything trained on them.
        workers: processes.
    """

    out: Path = Path("data/monitors")
    policy: str = "small_vla"
    checkpoint: Path | None = None
    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    tasks: int = 10
    protocol: str = "openpi"
    execute: int = 8
    samples: int = 16
    shrink: int = 1
    seed: int = 0
    workers: int = 2

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
    settings = {k: v for k, v in asdict(args).items() if k not in ("out", "workers")}
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


def main(args: Args) -> None:
    """Collect the rollouts."""
    console = Console()
    store = collect(args, console)
    failed = sum(not header.success for header in store.headers)
    console.print(f"{len(store.headers)} episodes, {failed} of them failures")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
