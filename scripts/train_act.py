"""``regrasp train act``: LeRobot's ACT on episode stores, in LeRobot's own format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from regrasp.policies.lerobot_act_training import ActTrainer, ActTraining
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Args:
    """Train ACT; started again with the same arguments, it continues.

    Attributes:
        stores: episode stores of demonstrations.
        out: folder of the run; the policy is in ``policy/``.
        training: settings.
    """

    stores: tuple[Path, ...] = (Path("data/demos"),)
    out: Path = Path("runs/act")
    training: ActTraining = field(default_factory=ActTraining)


def main(args: Args) -> None:
    """Run the training with a progress bar."""
    console = Console()
    trainer = ActTrainer(args.out, args.stores, args.training)
    count = sum(p.numel() for p in trainer.policy.parameters())
    about = f"{len(trainer.windows):,} windows, {count / 1e6:.1f} M parameters"
    console.print(f"{about}; from step {trainer.step}")
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("starting", total=1.0)

        def report(*, step: int, progress: float, **row: float) -> None:
            text = f"step {step}  {row['steps_per_second']:.1f} steps/s  l1 {row['l1_loss']:.3f}"
            bars.update(bar, completed=progress, description=text)

        bars = progress
        policy = trainer.run(report)
    console.print(f"{args.out / 'policy'}: {policy.hash()}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
