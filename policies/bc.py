"""Behaviour cloning of the small VLA from episode stores: one file, top to bottom.

AdamW, cosine schedule with warm-up over a number of steps or a number of minutes, a moving average
of the weights (which is what is validated and saved), gradient clipping, TensorBoard, resume.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.policies.checkpoint import latest_training, load_training, save_training
from regrasp.policies.data import NO_AUGMENTATION, Augmentation, Windows, label_key
from regrasp.policies.small_vla import load_model, save_model
from regrasp.policies.text import embed_instruction
from regrasp.policies.vla import VLA, Inputs, Labels, VLAConfig, state_features
from torch import Tensor

#: How much each loss counts.
LOSS_WEIGHTS = {"flow": 1.0, "direct": 0.5, "offsets": 1.0, "pixels": 0.1, "phase": 0.1}


@dataclass(frozen=True)
class BCConfig:
    """Settings of a training run.

    Attributes:
        minutes: end after this many minutes of training (checkpoints and validation included);
            0 means by ``steps`` alone. The schedule follows whichever is nearer its end.
        steps: end after this many optimiser steps; 0 means by ``minutes`` alone.
        batch: windows a step.
        draws: noise levels drawn for each encoded window.
        lr: peak learning rate.
        final_lr: where the cosine ends, as a fraction of ``lr``.
        warmup: steps of linear warm-up.
        weight_decay: AdamW's, on matrices and kernels only.
        clip: largest norm of the gradient.
        ema: decay of the moving average (lower in the first steps).
        augmentation: of the pictures.
        freeze_encoder: train the action expert alone.
        validation_every: every n-th episode is held out.
        validate_seconds: seconds between validations.
        validation_windows: held-out windows each time, the same ones.
        checkpoint_seconds: seconds between checkpoints.
        memory_gb: pictures held in memory.
        threads: processor threads of torch.
        seed: of initialisation, data order, augmentation and noise.
    """

    minutes: float = 60.0
    steps: int = 0
    batch: int = 64
    draws: int = 2
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: int = 100
    weight_decay: float = 0.02
    clip: float = 1.0
    ema: float = 0.998
    augmentation: Augmentation = field(default_factory=Augmentation)
    freeze_encoder: bool = False
    validation_every: int = 25
    validate_seconds: float = 240.0
    validation_windows: int = 512
    checkpoint_seconds: float = 120.0
    memory_gb: float = 8.0
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0 and self.steps <= 0:
            raise ValueError("BCConfig: minutes and steps are both 0; give one of them")
        for name in ("batch", "draws", "validation_windows", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"BCConfig.{name}: {getattr(self, name)} must be at least 1")


def fit_statistics(model: VLA, stores: Sequence[str | Path], instructions: Sequence[str]) -> None:
    """Set the network's normalisation from data.

    Actions: the middle and half the width of the 1 % to 99 % range, at least 0.1 wide so that a
    direction that is hardly used is not blown up. States: mean and deviation of their features,
    with a floor. Instructions: mean and deviation of the pooled embeddings, shrunk to their mean.
    """
    actions, states = [], []
    for path in stores:
        store = EpisodeStore.open(path)
        label = store.steps[label_key(store)].read(0, store.num_steps)
        actions.append(label.reshape(-1, label.shape[-1]))
        states.append(store.steps["state"].read(0, store.num_steps))
    action = np.concatenate(actions).astype(np.float32)
    low, high = np.quantile(action, [0.01, 0.99], axis=0)
    features = state_features(torch.from_numpy(np.concatenate(states).astype(np.float32)))
    floor = torch.full((features.shape[1],), 0.1)
    floor[:3] = 0.05
    floor[30:] = 0.01
    pooled = torch.tensor(np.stack([embed_instruction(i).mean(axis=0) for i in instructions]))
    spread = pooled.std(dim=0, correction=0)
    # One instruction alone has no spread; any scale then gives zero, which is right.
    shrunk = spread + 0.3 * spread.mean() + 1e-3
    model.set_statistics(
        action=(
            torch.from_numpy((low + high) / 2).float(),
            torch.from_numpy(np.maximum(high - low, 0.1) / 2).float(),
        ),
        state=(features.mean(dim=0), torch.maximum(features.std(dim=0), floor)),
        text=(pooled.mean(dim=0), shrunk),
    )


@torch.no_grad()
def validate(model: VLA, batches: Sequence[tuple[Inputs, Labels]], seed: int = 0) -> dict:
    """Losses and plain errors on held-out windows.

    Returns:
        every loss by name, and where labels allow ``target_cm`` (median distance of the predicted
        from the true target), ``near_cm`` (the same where the gripper is within 10 cm),
        ``goal_cm``, ``phase_accuracy``, ``action_error`` (mean absolute error of a sampled chunk,
        environment units).
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, float] = {}
    distances, reach, hits, errors = [], [], [], []
    for inputs, labels in batches:
        losses, encoded = model.losses(inputs, labels, 2, generator)
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value.item() / len(batches)
        chunk = model.sample(encoded, 1, 5, generator)[:, 0]
        errors.append((chunk - labels.action).abs().mean(dim=-1)[labels.valid])
        if labels.offsets is not None:
            distances.append((encoded.offsets - labels.offsets).view(-1, 2, 3).norm(dim=-1))
            reach.append(labels.offsets[:, :3].norm(dim=-1))
        if labels.phase is not None:
            hits.append((encoded.phase.argmax(dim=-1) == labels.phase)[labels.phase >= 0].float())
    sums["action_error"] = torch.cat(errors).mean().item()
    if distances:
        distance, close = torch.cat(distances) * 100, torch.cat(reach) < 0.1
        known = torch.isfinite(distance).all(dim=-1)
        sums["target_cm"] = distance[known, 0].median().item()
        sums["goal_cm"] = distance[known, 1].median().item()
        if (known & close).any():
            sums["near_cm"] = distance[known & close, 0].median().item()
    if hits:
        sums["phase_accuracy"] = torch.cat(hits).mean().item()
    model.train()
    return sums


class Trainer:
    """One training run in one folder: checkpoints, TensorBoard events and the policy.

    The folder afterwards holds ``policy/`` (moving average, fp32; load it with
    :meth:`regrasp.policies.small_vla.SmallVLA.load`), ``step-<n>/`` (to resume), ``log.jsonl`` and
    TensorBoard's event files.
    """

    def __init__(
        self,
        folder: str | Path,
        stores: Sequence[str | Path],
        *,
        model: VLAConfig | None = None,
        config: BCConfig | None = None,
        weights: Sequence[float] | None = None,
        init: str | Path | None = None,
    ) -> None:
        """Prepare, or resume where the folder holds a checkpoint.

        Args:
            folder: of this run.
            stores: folders of episode stores.
            model: sizes of a new network; ignored with ``init``.
            config: settings.
            weights: share of each store in a batch.
            init: folder of a saved policy to start from; its statistics are kept.
        """
        self.folder, self.config = Path(folder), config or BCConfig()
        self.stores = [str(s) for s in stores]
        c = self.config
        torch.set_num_threads(c.threads)
        torch.manual_seed(c.seed)
        self.generator = torch.Generator().manual_seed(c.seed + 1)
        self.model = load_model(init)[0] if init is not None else VLA(model or VLAConfig())
        size = self.model.config
        self.windows = Windows(
            stores,
            size,
            weights=weights,
            validation_every=c.validation_every,
            memory_gb=c.memory_gb,
        )
        held_out = Windows(
            stores, size, validation=True, validation_every=c.validation_every, memory_gb=0.0
        )
        self.validation = [
            held_out.batch(64, np.random.default_rng((c.seed, 2, k)), NO_AUGMENTATION)
            for k in range(math.ceil(c.validation_windows / 64))
        ]
        if init is None:
            fit_statistics(self.model, stores, self.windows.instructions)
        if c.freeze_encoder:
            self.model.encoder.requires_grad_(False)
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        decayed = [p for _, p in named if p.ndim > 1]
        plain = [p for _, p in named if p.ndim <= 1]
        self.parameters = [p for _, p in named]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": c.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=c.lr,
            betas=(0.9, 0.99),
            fused=True,
        )
        self.average = {n: p.detach().clone() for n, p in named}
        self.step, self.seconds = 0, 0.0
        checkpoint = latest_training(self.folder)
        if checkpoint is not None:
            state = load_training(
                checkpoint, self.model, self.average, self.optimizer, self.generator
            )
            if state["stores"] != self.stores:
                raise ValueError(
                    f"{checkpoint}: trained on {state['stores']}, now asked for {self.stores}; "
                    "use another folder with init=.../policy to train on"
                )
            self.step, self.seconds = state["step"], state["seconds"]
        self.model.train()

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        by_time = self.seconds / 60 / self.config.minutes if self.config.minutes > 0 else 0.0
        by_step = self.step / self.config.steps if self.config.steps > 0 else 0.0
        return min(1.0, max(by_time, by_step))

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then a cosine to ``final_lr``."""
        c = self.config
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return (
            c.lr * min(1.0, (self.step + 1) / c.warmup) * (c.final_lr + (1 - c.final_lr) * cosine)
        )

    def train_step(self, inputs: Inputs, labels: Labels) -> dict[str, Tensor]:
        """One optimiser step; returns the losses, detached."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        losses, _ = self.model.losses(inputs, labels, self.config.draws, self.generator)
        total = sum(LOSS_WEIGHTS[name] * value for name, value in losses.items())
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: gradient norm {norm.item()}")
        self.optimizer.step()
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.values()), self.parameters, 1 - decay)
        self.step += 1
        return {"total": total.detach(), "norm": norm, **{k: v.detach() for k, v in losses.items()}}

    def averaged(self) -> VLA:
        """A copy of the network with the averaged weights."""
        model = VLA(self.model.config)
        model.load_state_dict(self.model.state_dict() | self.average)
        return model

    def validate(self) -> dict[str, float]:
        """Errors of the averaged network on held-out windows; see :func:`validate`."""
        return validate(self.averaged(), self.validation)

    def save(self, **extra: object) -> None:
        """Write the checkpoint and the policy of this moment."""
        settings = json.loads(json.dumps(asdict(self.config)))
        state = {"seconds": self.seconds, "stores": self.stores, "config": settings}
        save_training(
            self.folder,
            self.step,
            self.model,
            self.average,
            self.optimizer,
            self.generator,
            state,
        )
        meta = {"step": self.step, "windows": self.step * self.config.batch, **state, **extra}
        save_model(self.folder / "policy", self.averaged(), meta=meta)

    def run(self, report: Callable[..., None] = lambda **_: None) -> dict[str, float]:
        """Train to the end; returns the last validation.

        Args:
            report: called every 10 steps with ``step``, ``progress``, ``losses`` (means since the
                last call), ``samples_per_second``, ``wait_fraction``, ``validation`` (the newest).
        """
        from torch.utils.tensorboard import SummaryWriter

        c = self.config
        writer = SummaryWriter(str(self.folder))
        log = JsonLines(self.folder / "log.jsonl")
        batches = self.windows.batches(c.batch, c.seed, c.augmentation, start=self.step)
        validated = saved = time.perf_counter()
        validation: dict[str, float] = {}
        window: list[dict[str, Tensor]] = []
        waited_in_window, window_began = 0.0, time.perf_counter()
        try:
            while self.progress < 1:
                began = time.perf_counter()
                inputs, labels, waited = next(batches)
                window.append(self.train_step(inputs, labels))
                waited_in_window += waited
                now = time.perf_counter()
                if now - validated > c.validate_seconds:
                    validation = self.validate()
                    validated = time.perf_counter()
                    self._log(writer, log, "validation", validation)
                if now - saved > c.checkpoint_seconds:
                    self.save(validation=validation)
                    saved = time.perf_counter()
                if self.step % 10 == 0:
                    took = time.perf_counter() - window_began
                    losses = {k: sum(w[k].item() for w in window) / len(window) for k in window[0]}
                    speed = len(window) * c.batch / took
                    extra = {"samples_per_second": speed, "wait_fraction": waited_in_window / took}
                    self._log(writer, log, "train", {**losses, **extra, "lr": self.learning_rate()})
                    report(
                        step=self.step,
                        progress=self.progress,
                        losses=losses,
                        validation=validation,
                        **extra,
                    )
                    window, waited_in_window, window_began = [], 0.0, time.perf_counter()
                self.seconds += time.perf_counter() - began
            validation = self.validate()
            self._log(writer, log, "validation", validation)
            self.save(validation=validation)
        finally:
            batches.close()
            writer.close()
        return validation

    def _log(self, writer: Any, log: JsonLines, kind: str, values: dict[str, float]) -> None:
        """To TensorBoard and, one line of JSON, to ``log.jsonl``."""
        for name, value in values.items():
            writer.add_scalar(f"{kind}/{name}", value, self.step)
        line = {"kind": kind, "step": self.step, "seconds": round(self.seconds, 1)}
        log.append(line | {k: float(f"{v:.5g}") for k, v in values.items()})


__all__ = ["BCConfig", "Trainer", "fit_statistics", "validate"]
