"""``regrasp eval reward``: the progress model on what was held out, beside baselines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from regrasp.episodes.results import Figure, write_result
from regrasp.relabel.reward_metrics import figures, time_linear, usual_length, valued
from regrasp.relabel.rollouts import Rollout
from regrasp.scripts._rewards import HELD_OUT, Study
from rich.console import Console
from rich.table import Table

#: Prefixes of what is compared: the model's value, its success output, and the clock.
OURS, BINARY, TIME = "", "binary_", "time_linear_"


@dataclass(frozen=True)
class Args:
    """Evaluate the progress model where training did not look.

    Attributes:
        store: failure samples that the model was trained on; its held-out part is used.
        model: folder of the model.
        limit: rollouts at most of held-out tasks, and of held-out initial states; 0 takes all.
        seed: of that draw.
        threads: processor threads of torch.
        results: where ``reward.json`` is written.
    """

    store: Path = Path("data/failures")
    model: Path = Path("runs/reward/model")
    limit: int = 0
    seed: int = 0
    threads: int = 2
    results: Path = Path("docs/results")


def main(args: Args) -> None:
    """Print and write the figures."""
    console = Console()
    torch.set_num_threads(args.threads)
    study = Study.open(args.store, args.model, args.limit, args.seed)
    length = usual_length(study.folds["train"])
    found: dict[str, Figure] = {}
    for fold, prefix in HELD_OUT.items():
        rollouts = study.folds[fold]
        if rollouts:
            both = study.outputs(rollouts, console, f"held-out {fold}")
            found |= _compare(rollouts, both, prefix, length)
    protocol = {
        "store": str(args.store),
        "held_out": asdict(study.split),
        "model": {**asdict(study.model.config), "step": study.step},
        "rollouts": {fold: len(study.folds[fold]) for fold in HELD_OUT},
        "limit": args.limit,
        "time_linear_length": round(length, 3),
    }
    command = f"regrasp eval reward --store {args.store} --model {args.model}"
    command += f" --limit {args.limit}" if args.limit else ""
    path = write_result("reward", command, protocol, [args.seed], found, args.results)
    show(console, "Held-out tasks" if args.limit == 0 else "Held-out tasks, a sample", found)
    console.print(f"written: {path}")


def _compare(
    rollouts: list[Rollout], both: list[np.ndarray], prefix: str, length: float
) -> dict[str, Figure]:
    """Figures of the model and of both baselines over the same rollouts."""
    pairs = list(zip(rollouts, both, strict=True))
    rated = {
        OURS: [valued(rollout, output[:, 0]) for rollout, output in pairs],
        BINARY: [valued(rollout, output[:, 1]) for rollout, output in pairs],
        TIME: [valued(rollout, time_linear(rollout, length)) for rollout in rollouts],
    }
    found: dict[str, Figure] = {}
    for name, some in rated.items():
        found |= figures(some, prefix + name)
    return found


def show(console: Console, title: str, found: dict[str, Figure]) -> None:
    """The figures as a table."""
    table = Table("figure", "value", "95 %", "n", title=title)
    for name, figure in found.items():
        interval = "" if figure.low is None else f"{figure.low:.3f} to {figure.high:.3f}"
        table.add_row(name, f"{figure.value:.3f}", interval, str(figure.n))
    console.print(table)
