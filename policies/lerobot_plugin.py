"""The small VLA as a LeRobot policy: ``--policy.type=regrasp_vla``.

LeRobot 0.6 finds the policy class and the processor factory in the module of the configuration, by
name: ``RegraspVLAConfig``, ``RegraspVLAPolicy``, ``make_regrasp_vla_pre_post_processors``. The
distribution ``lerobot_policy_regrasp`` (in this repository) imports this module where LeRobot looks
for plugins.

Normalisation lives inside the network, set from the data set's statistics when a policy is made for
one, so the processors only add a batch axis and move tensors. There is no auxiliary supervision
here, since LeRobot data sets carry no such labels; :mod:`regrasp.policies.bc` learns faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.optim import AdamWConfig, CosineDecayWithWarmupSchedulerConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import make_default_policy_processor_steps, make_policy_processor_pipelines
from lerobot.utils.constants import (
    ACTION,
    OBS_STATE,
    POLICY_POSTPROCESSOR_DEFAULT_NAME,
    POLICY_PREPROCESSOR_DEFAULT_NAME,
)
from regrasp.policies.small_vla import SmallVLA
from regrasp.policies.text import embed_batch, embed_instruction
from regrasp.policies.trunk import prepare_image
from regrasp.policies.vla import VLA, Inputs, Labels, VLAConfig
from torch import Tensor

#: Camera names of LeRobot's LIBERO environment and data sets, in the order of ours.
LIBERO_CAMERAS = {"agentview": "observation.images.image", "wrist": "observation.images.image2"}


@PreTrainedConfig.register_subclass("regrasp_vla")
@dataclass
class RegraspVLAConfig(PreTrainedConfig):
    """Settings of the small VLA in LeRobot.

    Attributes:
        chunk_size: actions predicted at once.
        n_action_steps: of these, how many are run before the policy looks again.
        flow_steps: Euler steps from noise to action.
        draws: noise levels drawn for each training sample.
        image_size: pictures are resized to this many pixels a side.
        keypoints, dim, layers, heads, patch, phases: sizes of the network; see VLAConfig.
        width, blocks: of the camera trunks; ``blocks`` empty means 2 and then 1 a camera.
        direct_weight: weight of the regression loss beside the flow's.
        optimizer_lr, optimizer_weight_decay, scheduler_warmup_steps, scheduler_decay_steps:
            training presets.
    """

    chunk_size: int = 16
    n_action_steps: int = 8
    flow_steps: int = 5
    draws: int = 2
    image_size: int = 128
    keypoints: int = 8
    dim: int = 192
    layers: int = 4
    heads: int = 4
    patch: int = 2
    phases: int = 16
    width: tuple[int, int] = (32, 64)
    blocks: tuple[int, ...] = ()
    direct_weight: float = 0.5
    optimizer_lr: float = 1e-3
    optimizer_weight_decay: float = 0.02
    scheduler_warmup_steps: int = 100
    scheduler_decay_steps: int = 10_000
    push_to_hub: bool = False
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(
            ("VISUAL", "STATE", "ACTION"), NormalizationMode.IDENTITY
        )
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise ValueError(
                f"RegraspVLAConfig.n_action_steps: {self.n_action_steps} must be within 1 and "
                f"chunk_size={self.chunk_size}"
            )

    def get_optimizer_preset(self) -> AdamWConfig:
        """AdamW as in behaviour cloning."""
        return AdamWConfig(
            lr=self.optimizer_lr,
            weight_decay=self.optimizer_weight_decay,
            betas=(0.9, 0.99),
            grad_clip_norm=1.0,
        )

    def get_scheduler_preset(self) -> CosineDecayWithWarmupSchedulerConfig:
        """Linear warm-up, then a cosine."""
        return CosineDecayWithWarmupSchedulerConfig(
            peak_lr=self.optimizer_lr,
            decay_lr=self.optimizer_lr * 0.02,
            num_warmup_steps=self.scheduler_warmup_steps,
            num_decay_steps=self.scheduler_decay_steps,
        )

    def validate_features(self) -> None:
        """Raise ValueError unless there are cameras, a state and an action."""
        if not self.image_features or not self.robot_state_feature or not self.action_feature:
            raise ValueError(
                f"RegraspVLAConfig: inputs {sorted(self.input_features or {})} and outputs "
                f"{sorted(self.output_features or {})}; needs at least one picture, {OBS_STATE!r} "
                f"and {ACTION!r}"
            )

    @property
    def observation_delta_indices(self) -> None:
        """Only the present observation."""
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        """The chunk."""
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        """No rewards."""
        return None

    def network(self) -> VLAConfig:
        """Sizes of the network for these features."""
        self.validate_features()
        cameras = tuple(self.image_features)
        return VLAConfig(
            cameras=cameras,
            image_size=self.image_size,
            state_dim=self.robot_state_feature.shape[0],
            action_dim=self.action_feature.shape[0],
            chunk=self.chunk_size,
            patch=self.patch,
            width=(self.width[0], self.width[1]),
            blocks=tuple(self.blocks) or (2, *(1,) * (len(cameras) - 1)),
            keypoints=self.keypoints,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            phases=self.phases,
        )


class RegraspVLAPolicy(PreTrainedPolicy):
    """LeRobot's interface around :class:`regrasp.policies.vla.VLA`."""

    config_class = RegraspVLAConfig
    name = "regrasp_vla"

    def __init__(
        self,
        config: RegraspVLAConfig,
        dataset_stats: dict[str, dict[str, Any]] | None = None,
        dataset_meta: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """A fresh network; its statistics come from the data set where one is given."""
        super().__init__(config)
        # LeRobot saves AdamW's moments as they lie; safetensors refuses channels-last ones.
        self.model = VLA(config.network()).to(memory_format=torch.contiguous_format)
        if dataset_stats is not None and dataset_meta is not None:
            instructions = [str(task) for task in dataset_meta.tasks.index]
            _set_statistics(self.model, dataset_stats, instructions)
        self.reset()

    def get_optim_params(self) -> list[dict]:
        """Weight decay on matrices and kernels only."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def reset(self) -> None:
        """Drop what is left of the chunk."""
        self._queue: deque[Tensor] = deque()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Loss of a training batch, padded actions left out of the mean."""
        action = batch[ACTION]
        padded = batch.get(f"{ACTION}_is_pad")
        valid = torch.ones(action.shape[:2], dtype=torch.bool) if padded is None else ~padded
        self.model.check_statistics()
        labels = Labels(action, valid.to(action.device))
        losses, _ = self.model.losses(self._inputs(batch), labels, self.config.draws, None)
        total = losses["flow"] + self.config.direct_weight * losses["direct"]
        return total, {name: value.item() for name, value in losses.items()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
        """A chunk ``[B, chunk_size, A]`` in environment units."""
        self.eval()
        encoded = self.model.encode(self._inputs(batch))
        return self.model.sample(encoded, 1, self.config.flow_steps, None)[:, 0]

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
        """The next action ``[B, A]``; looks again after ``n_action_steps``."""
        if not self._queue:
            chunk = self.predict_action_chunk(batch)[:, : self.config.n_action_steps]
            self._queue.extend(chunk.transpose(0, 1))
        return self._queue.popleft()

    def _inputs(self, batch: dict[str, Any]) -> Inputs:
        """LeRobot's batch (pictures float ``[B, 3, h, w]`` in 0..1) to ours."""
        size = self.config.image_size
        images = []
        for key in self.config.image_features:
            image = batch[key]
            if image.shape[-2:] != (size, size):
                image = torch.nn.functional.interpolate(
                    image, size=(size, size), mode="bilinear", antialias=True
                )
            image = (image * 255).round().clamp(0, 255).to(torch.uint8)
            images.append(prepare_image(image.permute(0, 2, 3, 1).contiguous()))
        state = batch[OBS_STATE]
        tasks = batch.get("task")
        if isinstance(tasks, str):
            tasks = [tasks] * len(state)
        if not tasks or len(tasks) != len(state):
            raise ValueError(
                f"batch['task']: {tasks!r}; one instruction for each of {len(state)} observations"
            )
        text = embed_batch(list(tasks))
        tokens, mask, index = (
            torch.from_numpy(a).to(state.device) for a in (text.tokens, text.mask, text.index)
        )
        return Inputs(tuple(images), state.float(), tokens, mask, index)


def make_regrasp_vla_pre_post_processors(
    config: RegraspVLAConfig, dataset_stats: dict[str, dict[str, Tensor]] | None = None
) -> tuple[Any, Any]:
    """Processors that rename, add a batch axis and move tensors; the network normalises itself."""
    steps = make_default_policy_processor_steps(config, dataset_stats)
    return make_policy_processor_pipelines(
        input_steps=[steps.rename_observations, steps.add_batch_dim, steps.to_device],
        output_steps=[steps.to_cpu],
    )


def export_to_lerobot(
    policy: SmallVLA, folder: str | Path, cameras: dict[str, str] | None = None
) -> None:
    """Write a trained policy as a LeRobot checkpoint, for ``lerobot-eval --policy.path``.

    Args:
        policy: the policy.
        folder: where to.
        cameras: our camera name -> LeRobot's feature; default LIBERO's in LeRobot.
    """
    cameras = cameras or LIBERO_CAMERAS
    size = policy.model.config
    picture = PolicyFeature(FeatureType.VISUAL, (3, size.image_size, size.image_size))
    inputs = {cameras[name]: picture for name in size.cameras}
    inputs[OBS_STATE] = PolicyFeature(FeatureType.STATE, (size.state_dim,))
    config = RegraspVLAConfig(
        input_features=inputs,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (size.action_dim,))},
        device="cpu",
        chunk_size=size.chunk,
        n_action_steps=policy.spec.chunk,
        flow_steps=policy.flow_steps,
        image_size=size.image_size,
        keypoints=size.keypoints,
        dim=size.dim,
        layers=size.layers,
        heads=size.heads,
        patch=size.patch,
        phases=size.phases,
        width=size.width,
        blocks=size.blocks,
    )
    exported = RegraspVLAPolicy(config)
    exported.model.load_state_dict(policy.model.state_dict())
    exported.save_pretrained(folder)
    before, after = make_regrasp_vla_pre_post_processors(config)
    before.save_pretrained(folder, config_filename=f"{POLICY_PREPROCESSOR_DEFAULT_NAME}.json")
    after.save_pretrained(folder, config_filename=f"{POLICY_POSTPROCESSOR_DEFAULT_NAME}.json")


def _set_statistics(model: VLA, stats: dict[str, dict[str, Any]], instructions: list[str]) -> None:
    """Statistics of a LeRobot data set to those of the network."""

    def get(key: str, *names: str) -> Tensor:
        for name in names:
            if name in stats.get(key, {}):
                return torch.as_tensor(np.asarray(stats[key][name]), dtype=torch.float32).flatten()
        raise ValueError(f"data set statistics of {key!r}: none of {names}; recompute them")

    low, high = get(ACTION, "q01", "min"), get(ACTION, "q99", "max")
    mean, std = get(OBS_STATE, "mean"), get(OBS_STATE, "std")
    center = torch.zeros_like(model.state_center)
    scale = torch.ones_like(model.state_scale)
    # Position and what follows the orientation by their statistics; sines, cosines and rotation
    # matrices are within -1 and 1 by themselves.
    center[:3], scale[:3] = mean[:3], std[:3].clamp_min(0.05)
    center[30:], scale[30:] = mean[6:], std[6:].clamp_min(0.01)
    pooled = torch.tensor(np.stack([embed_instruction(i).mean(axis=0) for i in instructions]))
    spread = pooled.std(dim=0, correction=0)
    model.set_statistics(
        action=((low + high) / 2, (high - low).clamp_min(0.1) / 2),
        state=(center, scale),
        text=(pooled.mean(dim=0), spread + 0.3 * spread.mean() + 1e-3),
    )
