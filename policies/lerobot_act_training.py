"""Training LeRobot's ACT on regrasp's episode stores, with the small VLA's windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from regrasp.policies.data import NO_AUGMENTATION, Augmentation, Windows
from regrasp.policies.lerobot_act import (
    ACTION,
    LANGUAGE,
    LANGUAGE_SCALE,
    PICTURE,
    STATE,
    LeRobotAct,
    act_config,
    freeze,
    thaw,
)
from regrasp.policies.vla import Inputs, Labels, VLAConfig
from regrasp.training.run import Schedule, TrainingRun
from torch import Tensor


@dataclass(frozen=True)
class ActTraining(Schedule):
    """How ACT is trained; the rest is :class:`Schedule`.

    Attributes:
        batch: windows a step.
        chunk: actions a chunk.
        image_size: pixels a side.
        validation_every: every n-th episode is held out.
        seed: of initialisation, order and augmentation.
        augmentation: of pictures.
    """

    minutes: float = 30.0
    lr: float = 5e-4
    batch: int = 32
    chunk: int = 16
    image_size: int = 64
    validation_every: int = 25
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)


def unpacked(images: Tensor) -> Tensor:
    """Picture blocks ``[B, 12, h/2, w/2]`` in [-1, 1] as pictures ``[B, 3, h, w]`` in [0, 1]."""
    blocks = images.unflatten(1, (2, 2, 3)).permute(0, 3, 4, 1, 5, 2)
    batch, _, height, _, width, _ = blocks.shape
    return (blocks.reshape(batch, 3, 2 * height, 2 * width) + 1.0) / 2.0


def lerobot_batch(inputs: Inputs, labels: Labels, cameras: Sequence[str]) -> dict[str, Tensor]:
    """A batch of windows under LeRobot's names, before normalisation."""
    batch = {
        PICTURE.format(camera): unpacked(images)
        for camera, images in zip(cameras, inputs.images, strict=True)
    }
    mask = inputs.mask[..., None]
    mean = (inputs.tokens * mask).sum(1) / mask.sum(1)
    return batch | {
        STATE: inputs.state,
        LANGUAGE: LANGUAGE_SCALE * mean[inputs.index],
        ACTION: labels.action,
        "action_is_pad": ~labels.valid,
    }


def statistics(windows: Windows, cameras: Sequence[str], rng: np.random.Generator) -> dict:
    """LeRobot's ``dataset_stats`` of state and actions, from 4,096 windows; pictures as [-2, 2]."""
    inputs, labels = windows.batch(4096, rng, NO_AUGMENTATION)
    action = labels.action[labels.valid]
    found = {STATE: inputs.state, ACTION: action}
    stats = {key: {"mean": x.mean(0), "std": x.std(0).clamp_min(0.01)} for key, x in found.items()}
    stats[LANGUAGE] = {"mean": torch.zeros(1), "std": torch.ones(1)}
    picture = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25)}
    return stats | {PICTURE.format(camera): picture for camera in cameras}


class ActTrainer(TrainingRun):
    """Trains ACT in one folder; a new one in the same folder goes on where it was.

    Args:
        folder: of the run; the policy is in ``policy/``.
        stores: episode stores of demonstrations.
        config: settings.
        sizes: changes of the network, as :func:`act_config` takes them.
    """

    def __init__(
        self,
        folder: str | Path,
        stores: Sequence[str | Path],
        config: ActTraining,
        **sizes: object,
    ) -> None:
        from lerobot.policies.act.modeling_act import ACTPolicy
        from lerobot.policies.act.processor_act import make_act_pre_post_processors

        torch.manual_seed(config.seed)
        self.config = config
        layout = VLAConfig(image_size=config.image_size, chunk=config.chunk)
        self.cameras = layout.cameras
        self.windows = Windows(stores, layout, validation_every=config.validation_every)
        self.held_out = Windows(
            stores, layout, validation=True, validation_every=config.validation_every
        )
        act = act_config(self.cameras, config.image_size, config.chunk, **sizes)
        self.policy = ACTPolicy(act)
        thaw(self.policy.model.backbone)
        stats = statistics(self.windows, self.cameras, np.random.default_rng(config.seed))
        self.processors = make_act_pre_post_processors(act, dataset_stats=stats)
        buffers = {f"buffer.{n}": b for n, b in self.policy.named_buffers()}
        about = {
            "stores": [str(s) for s in stores],
            "seed": config.seed,
            "batch": config.batch,
            "chunk": config.chunk,
            "image_size": config.image_size,
        }
        super().__init__(folder, self.policy, config, about=about, extra=buffers)
        self._batches = self.windows.batches(
            config.batch, config.seed, config.augmentation, start=self.step
        )

    def train_step(self) -> dict[str, float]:
        """One step: ACT's own loss."""
        inputs, labels, waited = next(self._batches)
        self.policy.train()
        batch = self.processors[0](lerobot_batch(inputs, labels, self.cameras))
        with torch.autocast("cpu", torch.bfloat16):
            loss, parts = self.policy(batch)
        norm = self.update(loss)
        return {**{k: float(v) for k, v in parts.items()}, "norm": norm, "waited": waited}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean absolute error of held-out chunks, all dimensions and translation, action units."""
        self.policy.eval()
        errors = []
        for k in range(8):
            rng = np.random.default_rng((1, k))
            inputs, labels = self.held_out.batch(64, rng, NO_AUGMENTATION)
            batch = lerobot_batch(inputs, labels, self.cameras)
            del batch[ACTION], batch["action_is_pad"]
            chunk = self.processors[1](self.policy.predict_action_chunk(self.processors[0](batch)))
            off = (chunk - labels.action).abs()[labels.valid]
            errors.append([float(off.mean()), float(off[:, :3].mean())])
        whole, translation = np.mean(errors, axis=0)
        return {"held_out_error": whole, "held_out_translation": translation}

    def run(self, report: Callable[..., None] = lambda **_: None) -> LeRobotAct:
        """Train to the end; the policy is also in ``policy/``, its batch norms frozen."""
        self.loop(self.train_step, report, timers={120.0: self.validate})
        freeze(self.policy.model.backbone)
        trained = LeRobotAct(self.policy, *self.processors)
        trained.save(self.folder / "policy")
        return trained
