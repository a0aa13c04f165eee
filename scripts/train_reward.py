"""``regrasp train reward``: train the frame-level progress model on a store of failure samples."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from regrasp.relabel.reward import RewardConfig
from regrasp.relabel.reward_training import RewardTrainer, RewardTraining
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Args:
    """Train the progress model; started again with the same arguments, it continues.

    Attributes:
        store: failure samples, from ``regrasp failures generate``.
        out: folder of the run: checkpoints, TensorBoard events, frames, and the model in
            ``model/``.
        training: settings of the training.
        model: sizes of the network.
    """

    store: Path = Path("data/failures")
    out: Path = Path("runs/reward")
    training: RewardTraining = field(default_factory=RewardTraining)
    model: RewardConfig = field(default_factory=RewardConfig)


def main(args: Args) -> None:
    """Run the training with a progress bar; prints what was held out as JSON."""
    console = Console()
    with console.status("reading the store and making its frames small (once)"):
        trainer = RewardTrainer(args.out, args.store, model=args.model, training=args.training)
    count = sum(p.numel() for p in trainer.model.parameters())
    console.print(
        f"{len(trainer.clips.rollouts):,} rollouts, {count / 1e6:.2f} M parameters; "
        f"from step {trainer.step}"
    )
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bars:
        bar = bars.add_task("starting", total=1.0)

        def report(
            *, step: int, progress: float, frames_per_second: float, **losses: float
        ) -> None:
            text = f"step {step}  {frames_per_second:.0f} frames/s"
            text += "  " + " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k != "norm")
            bars.update(bar, completed=progress, description=text)

        trainer.run(report)
    split = {"tasks": trainer.split.tasks, "states": trainer.split.states}
    console.print_json(json.dumps({"model": str(args.out / "model"), "held_out": split}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
