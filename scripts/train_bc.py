"""``regrasp train bc``: train the small VLA on episode stores by behaviour cloning."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from regrasp.policies.bc import BCConfig, Trainer
from regrasp.policies.vla import VLAConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Args:
    """Train the small VLA; started again with the same arguments, it continues.

    Attributes:
        stores: episode stores to train on.
        out: folder of the run: checkpoints, TensorBoard events, and the policy in ``policy/``.
        weights: share of each store in a batch; default: by its number of windows.
        init: a saved policy to start from (for example ``runs/bc/policy``).
        training: settings of the training.
        model: sizes of a new network.
    """

    stores: tuple[Path, ...] = (Path("data/demos"),)
    out: Path = Path("runs/bc")
    weights: tuple[float, ...] = ()
    init: Path | None = None
    training: BCConfig = field(default_factory=BCConfig)
    model: VLAConfig = field(default_factory=VLAConfig)


def main(args: Args) -> None:
    """Run the training with a progress bar; prints the last validation as JSON."""
    console = Console()
    trainer = Trainer(
        args.out,
        args.stores,
        model=args.model,
        config=args.training,
        weights=args.weights or None,
        init=args.init,
    )
    count = sum(p.numel() for p in trainer.model.parameters())
    console.print(
        f"{len(trainer.windows):,} windows, {len(trainer.windows.instructions)} instructions, "
        f"{count / 1e6:.2f} M parameters; from step {trainer.step}"
    )
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("starting", total=1.0)

        def report(
            *,
            step: int,
            progress: float,
            losses: dict[str, float],
            samples_per_second: float,
            wait_fraction: float,
            validation: dict[str, float],
        ) -> None:
            text = f"step {step}  {samples_per_second:.0f} windows/s  waiting {wait_fraction:.0%}"
            text += "  " + " ".join(f"{k} {v:.3f}" for k, v in losses.items() if k != "norm")
            if "target_cm" in validation:
                text += f"  held-out target {validation['target_cm']:.1f} cm"
            bars.update(bar, completed=progress, description=text)

        bars = progress
        validation = trainer.run(report)
    console.print_json(json.dumps({"policy": str(args.out / "policy"), **validation}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
