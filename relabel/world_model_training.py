"""Training of the world model: one file, top to bottom.

A stretch of an episode is encoded at its first row and imagined to its end; the imagined latents
must be those of the pictures that came (consistency, no gradient into the target, as in TD-MPC2,
Hansen et al. 2024), and give small pictures, the hand's pose and whether the goal holds; the
encoded latents must give the same, which keeps them from collapsing. AdamW, warm-up, cosine over
steps: two models get the same number of steps, whatever their data.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from regrasp.episodes.jsonlines import JsonLines
from regrasp.relabel.world_model import WorldModel
from regrasp.relabel.world_model_data import Batch, Rollouts
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss


@dataclass(frozen=True)
class WorldTraining:
    """Settings of a training run.

    Attributes:
        steps: optimiser steps.
        batch: stretches a step.
        targets: rows of each with pictures, besides the first.
        lr: peak learning rate.
        warmup: steps of linear warm-up.
        weight_decay: AdamW's.
        clip: largest norm of the gradient.
        consistency, picture, hand, goal: weights of the loss's terms.
        checkpoint_seconds: seconds between checkpoints.
        threads: processor threads of torch.
        seed: of the weights and the batches.
    """

    steps: int = 3000
    batch: int = 32
    targets: int = 3
    lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    consistency: float = 1.0
    picture: float = 10.0
    hand: float = 0.2
    goal: float = 1.0
    checkpoint_seconds: float = 60.0
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "targets", "warmup", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"WorldTraining.{name}: {getattr(self, name)}; at least 1")


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


class WorldTrainer:
    """One training run in one folder: ``model/``, a checkpoint to resume from, and a log.

    Attributes:
        model: in training.
        step: optimiser steps done.
        seconds: spent training.
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
        """
        self.folder, self.config = Path(folder), config or WorldTraining()
        self.rollouts = rollouts
        torch.set_num_threads(self.config.threads)
        torch.manual_seed(self.config.seed)
        self.model = model()
        states = torch.from_numpy(np.concatenate(rollouts.state))
        self.model.state_mean.copy_(states.mean(0))
        self.model.state_std.copy_(states.std(0).clamp(min=1e-3))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.config.lr, weight_decay=self.config.weight_decay
        )
        self.step, self.seconds = 0, 0.0
        if self._checkpoint.exists():
            self._restore()

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then a cosine to a fiftieth."""
        c = self.config
        cosine = 0.5 * (1 + math.cos(math.pi * self.step / c.steps))
        return c.lr * min(1.0, (self.step + 1) / c.warmup) * (0.02 + 0.98 * cosine)

    def train_step(self) -> dict[str, float]:
        """One optimiser step; returns the loss's terms.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        c = self.config
        # A resumed run sees the batches that an unbroken one sees.
        batch = self.rollouts.batch(c.batch, c.targets, np.random.default_rng([c.seed, self.step]))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        terms = losses(self.model, batch, c)
        self.optimizer.zero_grad(set_to_none=True)
        sum(getattr(c, name) * term for name, term in terms.items()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: gradient norm {norm.item()}")
        self.optimizer.step()
        self.step += 1
        return {name: term.item() for name, term in terms.items()}

    def run(
        self, track: Callable[[Iterable[int]], Iterable[int]] = lambda steps: steps
    ) -> WorldModel:
        """Train to the end; returns the model.

        Args:
            track: is given the steps to go and passes them on, to show progress.
        """
        from torch.utils.tensorboard import SummaryWriter

        c, log = self.config, JsonLines(self.folder / "log.jsonl")
        self.folder.mkdir(parents=True, exist_ok=True)
        saved, recent = time.perf_counter(), []
        with SummaryWriter(str(self.folder)) as writer:
            for _ in track(range(self.step, c.steps)):
                began = time.perf_counter()
                recent.append(self.train_step())
                now = time.perf_counter()
                self.seconds += now - began
                if self.step % 25 == 0 or self.step == c.steps:
                    row = {k: float(np.mean([r[k] for r in recent])) for k in recent[0]}
                    for name, value in row.items():
                        writer.add_scalar(name, value, self.step)
                    log.append({"step": self.step, "seconds": round(self.seconds, 1), **row})
                    recent = []
                if now - saved > c.checkpoint_seconds:
                    self.save()
                    saved = time.perf_counter()
        self.save()
        self.model.save(self.folder / "model")
        return self.model.eval()

    def save(self) -> None:
        """Write the checkpoint, under another name first: a kill leaves a whole one."""
        tensors = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value.clone()
        about = {"step": self.step, "seconds": self.seconds, "config": asdict(self.config)}
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._checkpoint.with_suffix(".part")
        save_file(tensors, part, {"about": json.dumps(about)})
        part.replace(self._checkpoint)

    def _restore(self) -> None:
        """Take up everything :meth:`save` wrote.

        Raises:
            ValueError: it was begun with other settings, which would mix two runs.
        """
        from safetensors import safe_open

        with safe_open(self._checkpoint, "pt") as file:
            about = json.loads(file.metadata()["about"])
        now, free = asdict(self.config), ("checkpoint_seconds", "threads")
        other = {k: v for k, v in about["config"].items() if v != now[k] and k not in free}
        if other:
            raise ValueError(f"{self.folder} was begun with {other}; choose another folder")
        tensors = load_file(self._checkpoint)
        mine = {k[6:]: v for k, v in tensors.items() if k.startswith("model.")}
        self.model.load_state_dict(mine)
        parameters = dict(self.model.named_parameters())
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                self.optimizer.state[parameters[name]][kind] = value
        self.step, self.seconds = about["step"], about["seconds"]
