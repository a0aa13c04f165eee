"""``regrasp train world-model``: two world models, without failures and with, equal budgets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.world_model import WorldModel, WorldModelConfig
from regrasp.relabel.world_model_data import ARMS, Rollouts, Split, choose, split_tasks
from regrasp.relabel.world_model_training import WorldTrainer, WorldTraining
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Args:
    """Train on counterfactual sets; started again with the same arguments, it continues.

    Attributes:
        store: of ``regrasp failures counterfactuals``.
        out: folder of the run, one folder in it for each arm.
        arms: ``success_only`` and ``counterfactual``.
        budget: episodes of each arm; 0 takes as many as succeed in the training tasks.
        held_out: share of the tasks that are not trained on.
        training: settings of the training.
        width: channels of the model's first convolution.
        latent: dimensions of a latent.
    """

    store: Path = Path("data/counterfactuals")
    out: Path = Path("runs/world_model")
    arms: tuple[str, ...] = ARMS
    budget: int = 0
    held_out: float = 0.2
    training: WorldTraining = field(default_factory=WorldTraining)
    width: int = WorldModelConfig.width
    latent: int = WorldModelConfig.latent


def main(args: Args) -> None:
    """Train each arm, with a progress bar."""
    console = Console()
    store = EpisodeStore.open(args.store)
    split = split_tasks(store.headers, args.held_out, args.training.seed)
    model = sizes(store, args)
    for arm in args.arms:
        chosen = choose(store.headers, split.train, arm, args.budget, args.training.seed)
        rollouts = Rollouts(store, chosen, model.cameras)
        won = sum(header.success for header in rollouts.headers)
        console.print(
            f"{arm}: {won} successes and {len(rollouts) - won} failures of {len(split.train)} "
            f"tasks, {rollouts.frames:,} frames"
        )
        trainer = WorldTrainer(args.out / arm, lambda: WorldModel(model), rollouts, args.training)
        train(console, arm, trainer)
        record(args, split, arm, rollouts, trainer.seconds)


def train(console: Console, arm: str, trainer: WorldTrainer) -> None:
    """Run one arm's training to its end."""
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bars:
        bar = bars.add_task(arm, total=1.0)

        def report(*, progress: float, step: int, steps_per_second: float, **_: float) -> None:
            text = f"{arm}  step {step}  {steps_per_second:.1f} steps/s"
            bars.update(bar, completed=progress, description=text)

        trainer.run(report)


def sizes(store: EpisodeStore, args: Args) -> WorldModelConfig:
    """The model's sizes, those of the data as the store has them."""
    cameras = tuple(sorted(k.removeprefix("image/") for k in store.steps if k[:6] == "image/"))
    stride, action = store.steps["action"].row_shape
    return WorldModelConfig(
        cameras=cameras,
        size=store.steps[f"image/{cameras[0]}"].row_shape[0],
        state=store.steps["state"].row_shape[0],
        action=action,
        stride=stride,
        width=args.width,
        latent=args.latent,
    )


def record(args: Args, split: Split, arm: str, rollouts: Rollouts, seconds: float) -> None:
    """Write what an arm was trained on, for the evaluation."""
    about = {
        "arm": arm,
        "split": asdict(split),
        "training": asdict(args.training),
        "episodes": len(rollouts),
        "failures": sum(not header.success for header in rollouts.headers),
        "frames": rollouts.frames,
        "seconds": round(seconds, 1),
    }
    (args.out / arm / "arm.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
