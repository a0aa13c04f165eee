"""``regrasp train diffusion``: LeRobot's Diffusion Policy on stores, in LeRobot's own format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import LIBERO_ACTION, LIBERO_STATE
from regrasp.policies.data import NO_AUGMENTATION, Augmentation, Windows
from regrasp.policies.lerobot_act import ACTION, LANGUAGE, PICTURE, STATE
from regrasp.policies.lerobot_act_training import lerobot_batch
from regrasp.policies.lerobot_diffusion import LeRobotDiffusion
from regrasp.policies.text import TEXT_DIM
from regrasp.policies.vla import Inputs, Labels, VLAConfig
from regrasp.training.run import Schedule, TrainingRun
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class DiffusionSizes:
    """Sizes of the network; what is not here is LeRobot's default.

    Attributes:
        chunk: actions a chunk, a multiple of 2 to the number of ``down_dims``.
        down_dims: channels of each level of the action U-Net.
        keypoints: of the spatial softmax, a camera.
        train_steps: noise levels of training.
        inference_steps: denoising steps (DDIM) of an answer.
    """

    chunk: int = 16
    down_dims: tuple[int, ...] = (128, 256)
    keypoints: int = 32
    train_steps: int = 100
    inference_steps: int = 10


@dataclass(frozen=True)
class DiffusionTraining(Schedule):
    """How it is trained; the rest is :class:`Schedule`.

    Attributes:
        batch: windows a step.
        validation_every: every n-th episode is held out.
        validate_seconds: seconds between validations.
        validation_windows: held-out windows each time, the same ones.
        seed: of initialisation, noise, order and augmentation.
        augmentation: of pictures; half the small VLA's shift, for pictures half as wide.
    """

    minutes: float = 60.0
    lr: float = 5e-4
    weight_decay: float = 0.02
    ema: float = 0.998
    batch: int = 32
    validation_every: int = 25
    validate_seconds: float = 240.0
    validation_windows: int = 512
    seed: int = 0
    augmentation: Augmentation = field(default_factory=lambda: Augmentation(shift=2))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("batch", "validation_windows")


@dataclass(frozen=True)
class Args:
    """Train a diffusion policy; started again with the same arguments, it continues.

    Attributes:
        stores: episode stores of demonstrations, all of one picture size.
        out: folder of the run; the policy is in ``policy/``.
        training: settings.
        model: sizes.
    """

    stores: tuple[Path, ...] = (Path("data/demos"),)
    out: Path = Path("runs/diffusion")
    training: DiffusionTraining = field(default_factory=DiffusionTraining)
    model: DiffusionSizes = field(default_factory=DiffusionSizes)


def picture_size(stores: Sequence[str | Path], cameras: Sequence[str]) -> int:
    """Pixels a side of the stores' pictures.

    Raises:
        ValueError: they are not square, or not all alike.
    """
    found = set()
    for path in stores:
        store = EpisodeStore.open(path)
        found |= {store.steps[f"image/{c}"].read(0, 1).shape[1:3] for c in cameras}
    if len(found) != 1 or len(set(next(iter(found)))) != 1:
        raise ValueError(f"stores: pictures of sizes {sorted(found)}; must be square and all alike")
    return int(next(iter(found))[0])


def diffusion_config(cameras: Sequence[str], image_size: int, sizes: DiffusionSizes) -> Any:
    """LeRobot's ``DiffusionConfig`` for LIBERO, one moment in, its picture encoders untrained."""
    from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    picture = PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size))
    inputs = {PICTURE.format(camera): picture for camera in cameras}
    inputs[STATE] = PolicyFeature(FeatureType.STATE, (len(LIBERO_STATE),))
    inputs[LANGUAGE] = PolicyFeature(FeatureType.ENV, (TEXT_DIM,))
    return DiffusionConfig(
        input_features=inputs,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (len(LIBERO_ACTION),))},
        device="cpu",
        n_obs_steps=1,
        horizon=sizes.chunk,
        n_action_steps=sizes.chunk,
        drop_n_last_frames=0,
        # Actions within -1 and 1, since denoising clips there.
        normalization_mapping={
            "VISUAL": NormalizationMode.MEAN_STD,
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MIN_MAX,
        },
        pretrained_backbone_weights=None,
        use_group_norm=True,
        spatial_softmax_num_keypoints=sizes.keypoints,
        down_dims=sizes.down_dims,
        noise_scheduler_type="DDIM",
        num_train_timesteps=sizes.train_steps,
        num_inference_steps=sizes.inference_steps,
        do_mask_loss_for_padding=True,
    )


def statistics(windows: Windows, cameras: Sequence[str], rng: np.random.Generator) -> dict:
    """LeRobot's ``dataset_stats`` from 4,096 windows; each action's range at least 0.2 wide."""
    inputs, labels = windows.batch(4096, rng, NO_AUGMENTATION)
    action = labels.action[labels.valid]
    low, high = action.amin(0), action.amax(0)
    widen = (0.2 - (high - low)).clamp_min(0) / 2
    picture = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25)}
    state = inputs.state
    return {
        STATE: {"mean": state.mean(0), "std": state.std(0).clamp_min(0.01)},
        ACTION: {"min": low - widen, "max": high + widen},
        **{PICTURE.format(camera): picture for camera in cameras},
    }


class DiffusionTrainer(TrainingRun):
    """Trains the policy in one folder; a new one in the same folder goes on where it was.

    Attributes:
        config: settings.
        windows: where batches come from.
        policy: LeRobot's, in training.
        processors: its two pipelines.
    """

    def __init__(
        self,
        folder: str | Path,
        stores: Sequence[str | Path],
        config: DiffusionTraining,
        sizes: DiffusionSizes | None = None,
    ) -> None:
        """Prepare, or resume where the folder holds a checkpoint.

        Raises:
            ValueError: pictures of several sizes, no held-out episodes, or another run's folder.
        """
        from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
        from lerobot.policies.diffusion.processor_diffusion import (
            make_diffusion_pre_post_processors,
        )

        torch.manual_seed(config.seed)
        self.config, sizes = config, sizes or DiffusionSizes()
        self._cameras = VLAConfig().cameras
        image_size = picture_size(stores, self._cameras)
        layout = VLAConfig(image_size=image_size, chunk=sizes.chunk)
        every = config.validation_every
        self.windows = Windows(stores, layout, validation_every=every)
        held_out = Windows(stores, layout, validation=True, validation_every=every, memory_gb=0.0)
        self._held_out = [
            held_out.batch(64, np.random.default_rng((config.seed, 2, k)), NO_AUGMENTATION)
            for k in range(-(-config.validation_windows // 64))
        ]
        network = diffusion_config(self._cameras, image_size, sizes)
        self.policy = DiffusionPolicy(network)
        stats = statistics(self.windows, self._cameras, np.random.default_rng(config.seed))
        self.processors = make_diffusion_pre_post_processors(network, dataset_stats=stats)
        about = {
            "stores": [str(s) for s in stores],
            "seed": config.seed,
            "batch": config.batch,
            "sizes": vars(sizes),
        }
        # Noise is drawn by LeRobot from torch's own stream.
        extra = {"noise": torch.default_generator}
        super().__init__(folder, self.policy, config, about=about, extra=extra)
        self.policy.train()

    def _batch(self, inputs: Inputs, labels: Labels) -> dict[str, Any]:
        """A normalised batch; inputs are a history, here of one moment."""
        batch = self.processors[0](lerobot_batch(inputs, labels, self._cameras))
        return {k: v[:, None] if k in (STATE, LANGUAGE) else v for k, v in batch.items()}

    def train_step(self, inputs: Inputs, labels: Labels) -> dict[str, float]:
        """One step down LeRobot's own loss."""
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = self.policy(self._batch(inputs, labels))
        norm = self.update(loss)
        return {"loss": loss.item(), "norm": norm}

    def averaged_policy(self) -> LeRobotDiffusion:
        """A policy of its own with the averaged weights."""
        policy = type(self.policy)(self.policy.config)
        policy.load_state_dict(self.averaged())
        return LeRobotDiffusion(policy, *self.processors)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean absolute error of sampled held-out chunks, environment units, averaged weights."""
        policy = self.averaged_policy().policy
        errors = []
        for k, (inputs, labels) in enumerate(self._held_out):
            batch = self._batch(inputs, labels)
            del batch[ACTION], batch["action_is_pad"]
            shape = (len(labels.action), policy.config.horizon, len(LIBERO_ACTION))
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(k))
            chunk = self.processors[1](policy.predict_action_chunk(batch, noise=noise))
            off = (chunk - labels.action).abs()[labels.valid]
            errors.append([float(off.mean()), float(off[:, :3].mean())])
        whole, translation = np.mean(errors, axis=0)
        return {"held_out_error": float(whole), "held_out_translation": float(translation)}

    def run(self, report: Callable[..., None] = lambda **_: None) -> LeRobotDiffusion:
        """Train to the end; the policy is also in ``policy/``, written anew at each checkpoint."""
        c = self.config
        batches = self.windows.batches(c.batch, c.seed, c.augmentation, start=self.step)

        def step() -> dict[str, float]:
            inputs, labels, waited = next(batches)
            return {**self.train_step(inputs, labels), "wait_seconds": waited}

        def export() -> None:
            self.averaged_policy().save(self.folder / "policy")

        try:
            self.loop(step, report, timers={c.validate_seconds: self.validate}, saved=export)
        finally:
            batches.close()
        return self.averaged_policy()


def main(args: Args) -> None:
    """Run the training with a progress bar."""
    console = Console()
    trainer = DiffusionTrainer(args.out, args.stores, args.training, args.model)
    count = sum(p.numel() for p in trainer.policy.parameters())
    about = f"{len(trainer.windows):,} windows, {count / 1e6:.1f} M parameters"
    console.print(f"{about}; from step {trainer.step}")
    columns = (TextColumn("{task.percentage:>3.0f}%"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("starting", total=1.0)

        def report(*, step: int, progress: float, **row: float) -> None:
            text = f"step {step}  {row['steps_per_second']:.1f} steps/s  loss {row['loss']:.3f}"
            bars.update(bar, completed=progress, description=text)

        bars = progress
        policy = trainer.run(report)
    console.print(f"{args.out / 'policy'}: {policy.hash()}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
