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

#: Prefixes of what is compared: the model's value, a success classifier, and the clock.
OURS, BINARY, TIME = "", "binary_", "time_linear_"


@dataclass(frozen=True)
class Args:
    """Evaluate the progress model where training did not look.

    Attributes:
        store: failure samples that the model was trained on; its held-out part is used.
        model: folder of the model.
        binary: folder of a success classifier, trained with ``--training.value-weight 0``; without
            one, the model's own second output stands for it.
        limit: rollouts at most of held-out tasks, and of held-out initial states; 0 takes all.
        seed: of that draw.
        threads: processor threads of torch.
        results: where ``reward.json`` is written.
    """

    store: Path = Path("data/failures")
    model: Path = Path("runs/reward/model")
    binary: Path | None = None
    limit: int = 0
    seed: int = 0
    threads: int = 2
    results: Path = Path("docs/results")


def main(args: Args) -> None:
    """Print and write the figures."""
    console = Console()
    torch.set_num_threads(args.threads)
    study = Study.open(args.store, args.model, args.limit, args.seed)
    alone = study
    if args.binary is not None:
        alone = Study.open(args.store, args.binary, args.limit, args.seed)
        if alone.split != study.split:
            raise ValueError(f"{args.binary}: trained with another split than {args.model}")
    length = usual_length(study.folds["train"])
    found: dict[str, Figure] = {}
    for fold, prefix in HELD_OUT.items():
        rollouts = study.folds[fold]
        if rollouts:
            ours = study.outputs(rollouts, console, f"held-out {fold}")
            binary = ours
            if alone is not study:
                binary = alone.outputs(rollouts, console, f"held-out {fold}, success classifier")
            found |= _compare(rollouts, ours, binary, prefix, length)
    protocol = {
        "store": str(args.store),
        "held_out": asdict(study.split),
        "model": {**asdict(study.model.config), "step": study.step},
        "binary": {
            "alone": args.binary is not None,
            "step": alone.step,
        },
        "rollouts": {fold: len(study.folds[fold]) for fold in HELD_OUT},
        "limit": args.limit,
        "time_linear_length": round(length, 3),
    }
    command = f"regrasp eval reward --store {args.store} --model {args.model}"
    command += f" --binary {args.binary}" if args.binary else ""
    command += f" --limit {args.limit}" if args.limit else ""
    path = write_result("reward", command, protocol, [args.seed], found, args.results)
    show(console, "Held-out tasks" if args.limit == 0 else "Held-out tasks, a sample", found)
    console.print(f"written: {path}")


def _compare(
    rollouts: list[Rollout],
    ours: list[np.ndarray],
    binary: list[np.ndarray],
    prefix: str,
    length: float,
) -> dict[str, Figure]:
    """Figures of the model and of both baselines over the same rollouts."""
    rated = {
        OURS: [valued(r, output[:, 0]) for r, output in zip(rollouts, ours, strict=True)],
        BINARY: [valued(r, output[:, 1]) for r, output in zip(rollouts, binary, strict=True)],
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
