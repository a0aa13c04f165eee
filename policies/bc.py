"""Behaviour cloning of the small VLA from episode stores: one file, top to bottom.

What is validated and saved is the moving average of the weights; :mod:`regrasp.training.run` keeps
it, with the schedule, the checkpoints and the log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from regrasp.episodes.store import EpisodeStore
from regrasp.policies.data import NO_AUGMENTATION, Augmentation, Windows, label_key
from regrasp.policies.small_vla import load_model, save_model
from regrasp.policies.text import embed_instruction
from regrasp.policies.vla import VLA, Inputs, Labels, VLAConfig, state_features
from regrasp.training.run import Schedule, TrainingRun

#: How much each loss counts.
LOSS_WEIGHTS = {"flow": 1.0, "direct": 0.5, "offsets": 1.0, "pixels": 0.1, "phase": 0.1}


@dataclass(frozen=True)
class BCConfig(Schedule):
    """Settings of a training run, beside those of its schedule.

    Attributes:
        batch: windows a step.
        draws: noise levels drawn for each encoded window.
        augmentation: of the pictures.
        freeze_encoder: train the action expert alone.
        validation_every: every n-th episode is held out.
        validate_seconds: seconds between validations.
        validation_windows: held-out windows each time, the same ones.
        memory_gb: pictures held in memory.
        seed: of initialisation, data order, augmentation and noise.
    """

    minutes: float = 60.0
    batch: int = 64
    draws: int = 2
    weight_decay: float = 0.02
    ema: float = 0.998
    augmentation: Augmentation = field(default_factory=Augmentation)
    freeze_encoder: bool = False
    validation_every: int = 25
    validate_seconds: float = 240.0
    validation_windows: int = 512
    memory_gb: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("batch", "draws", "validation_windows")


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


class Trainer(TrainingRun):
    """One training run in one folder: checkpoints, TensorBoard events and the policy.

    The folder afterwards holds ``policy/`` (moving average, fp32; load it with
    :meth:`regrasp.policies.small_vla.SmallVLA.load`), ``step-<n>/`` (to resume), ``log.jsonl`` and
    TensorBoard's event files.

    Attributes:
        config: settings.
        stores: folders of what it is trained on.
        model: in training.
        windows: where batches come from.
        validation: held-out batches.
        errors: of the last validation, as :func:`validate` gives them; empty before the first.
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

        Raises:
            ValueError: the checkpoint is of another network, or was trained on other stores. To
                go on from it with others, give another folder, and its policy as ``init``.
        """
        self.config = c = config or BCConfig()
        self.stores = [str(s) for s in stores]
        self.errors: dict[str, float] = {}
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
        super().__init__(
            folder,
            self.model,
            c,
            about={"stores": self.stores, "init": None if init is None else str(init)},
            # A store may have grown since: the weights go on with the statistics they know.
            extra={"noise": self.generator, **dict(self.model.named_buffers())},
        )
        self.model.train()

    def train_step(self, inputs: Inputs, labels: Labels) -> dict[str, float]:
        """One optimiser step; returns the losses, their sum and the gradient's norm."""
        losses, _ = self.model.losses(inputs, labels, self.config.draws, self.generator)
        total = sum(LOSS_WEIGHTS[name] * value for name, value in losses.items())
        norm = self.update(total)
        return {"total": total.item(), "norm": norm, **{k: v.item() for k, v in losses.items()}}

    def averaged_model(self) -> VLA:
        """A copy of the network with the averaged weights."""
        model = VLA(self.model.config)
        model.load_state_dict(self.averaged())
        return model

    def validate(self) -> dict[str, float]:
        """Errors of the averaged network on held-out windows; see :func:`validate`."""
        self.errors = validate(self.averaged_model(), self.validation)
        return self.errors

    def run(self, report: Callable[..., None] = lambda **_: None) -> dict[str, float]:
        """Train to the end; returns the last validation.

        Args:
            report: called every 10 steps with ``step``, ``progress``, ``losses`` (means since the
                last call), ``samples_per_second``, ``wait_fraction``, ``validation`` (the newest).
        """
        c = self.config
        batches = self.windows.batches(c.batch, c.seed, c.augmentation, start=self.step)

        def step() -> dict[str, float]:
            inputs, labels, waited = next(batches)
            return {**self.train_step(inputs, labels), "wait_seconds": waited}

        def validated() -> dict[str, float]:
            return {f"validation/{name}": value for name, value in self.validate().items()}

        def told(
            *,
            step: int,
            progress: float,
            steps_per_second: float,
            wait_seconds: float,
            lr: float,
            **losses: float,
        ) -> None:
            report(
                step=step,
                progress=progress,
                losses=losses,
                samples_per_second=steps_per_second * c.batch,
                wait_fraction=wait_seconds * steps_per_second,
                validation=self.errors,
            )

        try:
            self.loop(step, told, timers={c.validate_seconds: validated}, saved=self._export)
        finally:
            batches.close()
        return self.errors

    def _export(self) -> None:
        """Write the policy of this moment."""
        meta = {
            "step": self.step,
            "windows": self.step * self.config.batch,
            "seconds": self.seconds,
            "stores": self.stores,
            "config": json.loads(json.dumps(asdict(self.config))),
            "validation": self.errors,
        }
        save_model(self.folder / "policy", self.averaged_model(), meta=meta)


__all__ = ["BCConfig", "Trainer", "fit_statistics", "validate"]
