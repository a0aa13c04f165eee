"""LeRobot's ACT behind regrasp's ``Policy`` protocol; trained by ``regrasp train act``.

The folder is LeRobot's own format (``config.json``, ``model.safetensors``, the two processors) and
is read by LeRobot's own code; LeRobot loads it too. ACT knows no language: the instruction enters
as ``observation.environment_state``, the mean MiniLM token of its words. Its picture encoder has
frozen batch norms, which is right for pretrained weights and leaves an untrained one untrainable:
``thaw`` makes them ordinary ones for training, ``freeze`` turns them back with what they learned,
the same function in evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.types import LIBERO_ACTION, LIBERO_STATE, Observation, PolicyOutput
from regrasp.policies.protocol import PolicySpec, stack_pictures, stack_states
from regrasp.policies.text import TEXT_DIM, embed_instruction
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

#: Our cameras as LeRobot names them.
PICTURE = "observation.images.{}"
STATE, LANGUAGE, ACTION = "observation.state", "observation.environment_state", "action"
#: MiniLM's mean token has entries of about a third.
LANGUAGE_SCALE = 3.0


def act_config(cameras: Sequence[str], image_size: int, chunk: int, **changes: Any) -> Any:
    """LeRobot's ``ACTConfig`` for LIBERO at a size that a processor trains within the hour."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig

    picture = PolicyFeature(FeatureType.VISUAL, (3, image_size, image_size))
    inputs = {PICTURE.format(camera): picture for camera in cameras}
    inputs[STATE] = PolicyFeature(FeatureType.STATE, (len(LIBERO_STATE),))
    inputs[LANGUAGE] = PolicyFeature(FeatureType.ENV, (TEXT_DIM,))
    sizes: dict[str, Any] = {
        "dim_model": 256,
        "n_heads": 4,
        "dim_feedforward": 768,
        "latent_dim": 8,
        "n_vae_encoder_layers": 2,
        "dropout": 0.0,
        "pre_norm": True,
    }
    return ACTConfig(
        input_features=inputs,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (len(LIBERO_ACTION),))},
        device="cpu",
        chunk_size=chunk,
        n_action_steps=chunk,
        pretrained_backbone_weights=None,
        **(sizes | changes),
    )


def language(instructions: Sequence[str]) -> np.ndarray:
    """``observation.environment_state`` of some instructions, float32 ``[B, 384]``."""
    return np.stack(
        [LANGUAGE_SCALE * embed_instruction(text).mean(axis=0) for text in instructions]
    )


def thaw(root: nn.Module) -> None:
    """Frozen batch norms become ordinary ones, in place."""
    for name, child in list(root.named_children()):
        if isinstance(child, FrozenBatchNorm2d):
            norm = nn.BatchNorm2d(child.weight.numel(), eps=child.eps)
            norm.load_state_dict(child.state_dict(), strict=False)
            setattr(root, name, norm)
        else:
            thaw(child)


def freeze(root: nn.Module) -> None:
    """Invert :func:`thaw`, keeping what was learned."""
    for name, child in list(root.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, eps=child.eps)
            known = child.state_dict()
            frozen.load_state_dict({k: known[k] for k in frozen.state_dict()})
            setattr(root, name, frozen)
        else:
            freeze(child)


class LeRobotAct:
    """A LeRobot ACT as a :class:`~regrasp.policies.protocol.Policy`.

    The first of several samples is ACT's own answer, its latent 0; the others draw the latent from
    its prior.

    Args:
        policy: LeRobot's ``ACTPolicy``.
        preprocessor: its pipeline, which normalises.
        postprocessor: its pipeline, which undoes that for actions.
        control_hz: actions a second.
    """

    def __init__(
        self, policy: Any, preprocessor: Any, postprocessor: Any, *, control_hz: float = 20.0
    ) -> None:
        self.policy = policy.eval().requires_grad_(False)
        self._before, self._after = preprocessor, postprocessor
        config = policy.config
        stem = PICTURE.format("")
        cameras = {}
        for name, feature in config.image_features.items():
            if not name.startswith(stem):
                raise ValueError(f"LeRobotAct: picture {name!r}; it must begin with {stem!r}")
            cameras[name.removeprefix(stem)] = tuple(feature.shape[1:])
        for key, size in ((STATE, len(LIBERO_STATE)), (LANGUAGE, TEXT_DIM)):
            feature = config.input_features.get(key)
            if feature is None or tuple(feature.shape) != (size,):
                raise ValueError(
                    f"LeRobotAct: input {key!r} is {feature}; it must have shape ({size},)"
                )
        self.spec = PolicySpec(
            cameras=cameras,
            state=LIBERO_STATE,
            action=LIBERO_ACTION,
            chunk=config.chunk_size,
            control_hz=control_hz,
        )
        self._latent: Tensor | None = None
        self._seen: Tensor | None = None
        self._copies = 1
        model = policy.model
        # Pictures are encoded once for all samples of an observation.
        model.backbone.register_forward_pre_hook(
            lambda module, args: (args[0][:: self._copies], *args[1:])
        )
        model.backbone.register_forward_hook(
            lambda module, args, output: {
                name: maps.repeat_interleave(self._copies, dim=0) for name, maps in output.items()
            }
        )
        model.encoder_latent_input_proj.register_forward_pre_hook(
            lambda module, args: args if self._latent is None else (self._latent,)
        )
        model.encoder.register_forward_hook(self._keep)
        self.reset(0)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._seen = output

    def reset(self, seed: int) -> None:
        """Forget the episode; the same seed and observations then give the same actions."""
        self._generator = torch.Generator().manual_seed(int(seed) % 2**63)

    @torch.inference_mode()
    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """One output an observation.

        Returns:
            ``samples`` ``[num_samples, chunk, 7]``, environment units, not clipped; ``embedding``
            ``[D]``, the mean token of the transformer's encoder at latent 0.

        Raises:
            ValueError: for a missing camera, a wrong shape or type, or ``num_samples`` below 1.
        """
        if num_samples < 1:
            raise ValueError(f"LeRobotAct.infer: num_samples={num_samples} must be at least 1")
        if not observations:
            return []
        batch = self._before(self._batch(observations))
        count = len(observations)
        repeated = {
            key: value.repeat_interleave(num_samples, dim=0)
            if isinstance(value, Tensor) and len(value) == count
            else value
            for key, value in batch.items()
        }
        latent = torch.randn(
            (count, num_samples, self.policy.config.latent_dim), generator=self._generator
        )
        latent[:, 0] = 0.0
        self._latent, self._copies = latent.flatten(0, 1), num_samples
        chunks = self._after(self.policy.predict_action_chunk(repeated))
        self._latent, self._copies = None, 1
        assert self._seen is not None
        tokens = self._seen.mean(dim=0).unflatten(0, (count, num_samples))[:, 0]
        samples = chunks.unflatten(0, (count, num_samples))
        return [
            PolicyOutput(samples=s.float().numpy().copy(), embedding=e.float().numpy().copy())
            for s, e in zip(samples, tokens, strict=True)
        ]

    def _batch(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """Check the observations against the specification and stack them."""
        batch = {}
        for camera in self.spec.cameras:
            pictures = torch.from_numpy(stack_pictures(self.spec, observations, camera))
            batch[PICTURE.format(camera)] = pictures.permute(0, 3, 1, 2).float() / 255.0
        batch[STATE] = torch.from_numpy(stack_states(self.spec, observations))
        batch[LANGUAGE] = torch.from_numpy(language([o.instruction for o in observations]))
        return batch

    def hash(self) -> str:
        """sha256 of what it sees, weights and normalisation (16 hexadecimal digits)."""
        digest = hashlib.sha256()
        sizes = {**self.spec.cameras, "chunk": self.spec.chunk}
        digest.update(json.dumps(sizes, sort_keys=True).encode())
        tensors = dict(self.policy.state_dict())
        for pipeline in (self._before, self._after):
            for step in pipeline.steps:
                known = step.state_dict() if hasattr(step, "state_dict") else {}
                tensors |= {f"{type(step).__name__}.{k}": v for k, v in known.items()}
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write LeRobot's files."""
        folder = Path(folder)
        self.policy.save_pretrained(folder)
        self._before.save_pretrained(folder)
        self._after.save_pretrained(folder)

    @classmethod
    def load(cls, folder: str | Path) -> LeRobotAct:
        """Read a folder of LeRobot's files with LeRobot's code; nothing is fetched.

        Raises:
            FileNotFoundError: where there is no policy.
            ValueError: for another type of policy.
        """
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.act.modeling_act import ACTPolicy
        from lerobot.policies.factory import make_pre_post_processors

        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"no LeRobot policy at {folder}: config.json is missing")
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        if config.type != "act":
            raise ValueError(f"{folder}: policy.type is {config.type!r}; this reads 'act'")
        policy = ACTPolicy.from_pretrained(
            folder, config=config, local_files_only=True, strict=True
        )
        before, after = make_pre_post_processors(config, pretrained_path=str(folder))
        return cls(policy, before, after)
