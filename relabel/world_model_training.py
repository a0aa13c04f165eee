"""Training of the world model: one file, top to bottom.

A stretch of an episode is encoded at its first row and imagined to its end; the imagined latents
must be those of the pictures that came (consistency, no gradient into the target, as in TD-MPC2,
Hansen et al. 2024), and give small pictures, the hand's pose and whether the goal holds; the
encoded latents must give the same, which keeps them from collapsing. Two models get the same number
of steps, whatever their data; :mod:`regrasp.training.run` takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from regrasp.relabel.world_model import WorldModel
from regrasp.relabel.world_model_data import Batch, Rollouts
from regrasp.training.run import Schedule, TrainingRun
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss


@dataclass(frozen=True)
class WorldTraining(Schedule):
    """Settings of a training run, beside those of its schedule, which is in steps alone.

    Attributes:
        batch: stretches a step.
        targets: rows of each with pictures, besides the first.
        consistency, picture, hand, goal: weights of the loss's terms.
        seed: of the weights and the batches.
    """

    steps: int = 3000
    batch: int = 32
    targets: int = 3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    consistency: float = 1.0
    picture: float = 10.0
    hand: float = 0.2
    goal: float = 1.0
    checkpoint_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("steps", "batch", "targets")
        if self.minutes:
            raise ValueError(
                f"WorldTraining.minutes: {self.minutes} must be 0; models are compared after the "
                "same number of steps"
            )


def losses(model: WorldModel, batch: Batch, config: WorldTraining) -> dict[str, Tensor]:
    """The loss's terms, unweighted: ``consistency``, ``picture``, ``hand``, ``goal``."""
    pixels, state = batch.pixels.flatten(0, 1), batch.state.flatten(0, 1)
    seen = model.encode(pixels, state).unflatten(0, (len(batch.target), -1))
    imagined = model.imagine(seen[:, 0], batch.actions)
    # The latent after k chunks is in row k - 1.
    there = (batch.target - 1)[..., None].expand(-1, -1, imagined.shape[-1])
    met = imagined.gather(1, there)
    both = model.read(torch.cat([seen, met], dim=1))
    pictures = model.thumbnails(pixels).unflatten(0, batch.pixels.shape[:2])
    hands = model.normalised(batch.state)
    goals = model.success(imagined).squeeze(-1)
    wrong = binary_cross_entropy_with_logits(goals, batch.success, reduction="none")
    count = seen.shape[1]
    encoded = binary_cross_entropy_with_logits(both.success[:, :count], batch.held)
    return {
        "consistency": mse_loss(met, seen[:, 1:].detach()),
        "picture": mse_loss(both.thumbnails, torch.cat([pictures, pictures[:, 1:]], dim=1)),
        "hand": mse_loss(both.state, torch.cat([hands, hands[:, 1:]], dim=1)),
        "goal": (wrong * batch.real).sum() / batch.real.sum() + encoded,
    }


class WorldTrainer(TrainingRun):
    """One training run in one folder: checkpoints, TensorBoard events and the model.

    The folder afterwards holds ``model/`` (for :meth:`WorldModel.load`), ``step-<n>/`` (to resume),
    ``log.jsonl`` and TensorBoard's event files.

    Attributes:
        config: settings.
        rollouts: what it is trained on.
        model: in training.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Callable[[], WorldModel],
        rollouts: Rollouts,
        config: WorldTraining | None = None,
    ) -> None:
        """Prepare, or resume where the folder holds a checkpoint.

        Args:
            folder: of this run.
            model: makes an untrained one.
            rollouts: to train on.
            config: settings.

        Raises:
            ValueError: the checkpoint is of another network, or was begun with other settings,
                which would mix two runs.
        """
        self.config = config or WorldTraining()
        self.rollouts = rollouts
        torch.manual_seed(self.config.seed)
        self.model = model()
        states = torch.from_numpy(np.concatenate(rollouts.state))
        self.model.state_mean.copy_(states.mean(0))
        self.model.state_std.copy_(states.std(0).clamp(min=1e-3))
        free = ("checkpoint_seconds", "threads")
        super().__init__(
            folder,
            self.model,
            self.config,
            about={k: v for k, v in asdict(self.config).items() if k not in free},
            # A store may have grown since: the weights go on with the statistics they know.
            extra=dict(self.model.named_buffers()),
        )

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns the loss's terms.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        c = self.config
        # A resumed run sees the batches that an unbroken one sees.
        batch = self.rollouts.batch(c.batch, c.targets, np.random.default_rng([c.seed, self.step]))
        terms = losses(self.model, batch, c)
        self.update(sum(getattr(c, name) * term for name, term in terms.items()))
        return {name: term.item() for name, term in terms.items()}

    def run(self, report: Callable[..., None] = lambda **_: None) -> WorldModel:
        """Train to the end; returns the model, which is also in ``model/``.

        Args:
            report: as :meth:`TrainingRun.loop` calls it, every 25 steps.
        """
        self.loop(self.train_step, report, every=25)
        self.model.load_state_dict(self.averaged())
        self.model.save(self.folder / "model")
        return self.model.eval()
