"""LeRobot's Diffusion Policy behind regrasp's ``Policy`` protocol (``regrasp train diffusion``).

The folder is LeRobot's own format and is read by LeRobot's own code, strictly: a tensor too few or
too many is an error, where LeRobot warns and goes on with random weights. As with
:mod:`regrasp.policies.lerobot_act`, the instruction enters as ``observation.environment_state``.

Samples differ by their noise alone. Noise belongs to an observation and a sample: what runs
(``samples[0]``) is the same whether one sample is asked for or ten, and a batch answers what its
observations one by one would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.types import LIBERO_ACTION, LIBERO_STATE, Observation, PolicyOutput
from regrasp.policies.lerobot_act import ACTION, LANGUAGE, PICTURE, STATE, language
from regrasp.policies.protocol import PolicySpec
from regrasp.policies.text import TEXT_DIM
from torch import Tensor


class LeRobotDiffusion:
    """A LeRobot diffusion policy as a :class:`~regrasp.policies.protocol.Policy`.

    Attributes:
        policy: LeRobot's ``DiffusionPolicy``, in eval mode.
        spec: what it needs and gives; ``spec.chunk`` follows ``set_execute``.
    """

    def __init__(
        self, policy: Any, preprocessor: Any, postprocessor: Any, *, control_hz: float = 20.0
    ) -> None:
        """Wrap a policy and its two pipelines.

        Args:
            policy: LeRobot's ``DiffusionPolicy``.
            preprocessor: its pipeline, which normalises.
            postprocessor: its pipeline, which undoes that for actions.
            control_hz: actions a second.

        Raises:
            ValueError: the policy needs a history or other inputs than an observation has, or its
                actions have no statistics.
        """
        config = policy.config
        if config.n_obs_steps != 1:
            raise ValueError(
                f"policy.n_obs_steps: {config.n_obs_steps}; must be 1, since a policy is shown the "
                "moment at which a chunk begins and none before it"
            )
        _check_features(config)
        _check_statistics(config, postprocessor)
        self.policy = policy.eval().requires_grad_(False)
        self._before, self._after = preprocessor, postprocessor
        stem = PICTURE.format("")
        self.spec = PolicySpec(
            cameras={
                name.removeprefix(stem): (int(feature.shape[1]), int(feature.shape[2]))
                for name, feature in config.image_features.items()
            },
            state=LIBERO_STATE,
            action=LIBERO_ACTION,
            chunk=int(config.n_action_steps),
            control_hz=control_hz,
        )
        self.reset(0)

    def set_execute(self, execute: int) -> None:
        """Hand out the first ``execute`` actions of every chunk from now on."""
        most = int(self.policy.config.n_action_steps)
        if not 1 <= execute <= most:
            raise ValueError(f"LeRobotDiffusion.execute: {execute} must be within 1 and {most}")
        self.spec = replace(self.spec, chunk=int(execute))

    def reset(self, seed: int) -> None:
        """Forget the episode; the same seed and observations then give the same actions."""
        self._seeds = np.random.default_rng(int(seed) % 2**63)

    @torch.inference_mode()
    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """One output an observation; one denoising for all samples, pictures encoded once.

        Returns:
            ``samples`` ``[num_samples, spec.chunk, 7]``, environment units, not clipped;
            ``embedding`` ``[D]``: the global conditioning, that is the normalised state, the
            pictures' features and the instruction.

        Raises:
            ValueError: for a missing camera, a wrong shape or type, or ``num_samples`` below 1.
        """
        if num_samples < 1:
            raise ValueError(
                f"LeRobotDiffusion.infer: num_samples={num_samples} must be at least 1"
            )
        if not observations:
            return []
        seeds = self._seeds.integers(2**63, size=len(observations))
        generators = [g for seed in seeds for g in _generators(int(seed), num_samples)]
        chunks, seen = self._denoise(self._before(self._batch(observations)), generators)
        samples = self._after(chunks)[:, : self.spec.chunk]
        samples = samples.unflatten(0, (len(observations), num_samples)).numpy()
        return [
            PolicyOutput(samples=s.copy(), embedding=e.copy())
            for s, e in zip(samples, seen.numpy(), strict=True)
        ]

    def _denoise(
        self, batch: dict[str, Any], generators: list[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Normalised chunks ``[R, H, A]``, a generator each, and conditioning ``[B, D]``."""
        config, model = self.policy.config, self.policy.diffusion
        # The model reads a history, here of one moment.
        inputs = {k: batch[k][:, None] for k in config.input_features}
        inputs["observation.images"] = torch.stack([inputs[k] for k in config.image_features], 2)
        condition = model._prepare_global_conditioning(inputs)
        shape = (config.horizon, config.action_feature.shape[0])
        chunks = model.conditional_sample(
            len(generators),
            global_cond=condition.repeat_interleave(len(generators) // len(condition), dim=0),
            noise=torch.stack([torch.randn(shape, generator=g) for g in generators]),
            # An ancestral sampler draws more on the way; diffusers takes a generator a row.
            generator=generators,
        )
        return chunks[:, : config.n_action_steps], condition

    def _batch(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """Check the observations against the specification and stack them for LeRobot."""
        batch = {}
        for camera in self.spec.cameras:
            frames = [_picture(o, camera, self.spec) for o in observations]
            stacked = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
            batch[PICTURE.format(camera)] = stacked.float() / 255.0
        state = np.stack([np.asarray(o.state, np.float32) for o in observations])
        if state.shape[1:] != (len(self.spec.state),) or not np.isfinite(state).all():
            raise ValueError(
                f"observation.state: shape {state.shape[1:]}; must be ({len(self.spec.state)},) "
                "and finite"
            )
        batch[STATE] = torch.from_numpy(state)
        batch[LANGUAGE] = torch.from_numpy(language([o.instruction for o in observations]))
        return batch

    def hash(self) -> str:
        """sha256 of settings, weights and normalisation (16 hexadecimal digits)."""
        skip = {"device", "pretrained_path", "pretrained_revision"}
        config = {k: v for k, v in vars(self.policy.config).items() if k not in skip}
        pipelines = [("before", self._before), ("after", self._after)]
        steps = {
            f"{side}.{i}": step for side, p in pipelines for i, step in enumerate(p.steps)
        }  # where the numbers lie is no part of the function, so devices are left out
        about = {k: s.get_config() for k, s in steps.items() if "device" not in s.get_config()}
        text = json.dumps([config, about], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode())
        tensors = dict(self.policy.state_dict())
        for place, step in steps.items():
            tensors |= {f"{place}.{name}": value for name, value in step.state_dict().items()}
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
    def load(cls, folder: str | Path) -> LeRobotDiffusion:
        """Read a folder of LeRobot's files with LeRobot's code; nothing is fetched.

        Raises:
            FileNotFoundError: where there is no policy.
            ValueError: for another type of policy, or as the class does.
            RuntimeError: a tensor is missing, unknown or of another shape.
        """
        from lerobot.configs import PreTrainedConfig
        from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
        from lerobot.policies.factory import make_pre_post_processors

        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"no LeRobot policy at {folder}: config.json is missing")
        config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
        if config.type != "diffusion":
            raise ValueError(f"{folder}: policy.type is {config.type!r}; this reads 'diffusion'")
        config.device = "cpu"
        policy = DiffusionPolicy.from_pretrained(
            folder, config=config, local_files_only=True, strict=True
        )
        before, after = make_pre_post_processors(
            config,
            pretrained_path=str(folder),
            preprocessor_overrides={"device_processor": {"device": "cpu"}},
        )
        return cls(policy, before, after)


def _generators(seed: int, count: int) -> list[torch.Generator]:
    """A generator for each sample of one observation; the first ones do not depend on ``count``."""
    words = np.random.SeedSequence(seed).generate_state(count, np.uint64)
    return [torch.Generator().manual_seed(int(word) % 2**63) for word in words]


def _picture(observation: Observation, camera: str, spec: PolicySpec) -> np.ndarray:
    """One checked picture, uint8 ``[h, w, 3]``."""
    image = observation.images.get(camera)
    if image is None:
        raise ValueError(
            f"observation.images: no camera {camera!r}; it has {sorted(observation.images)}, "
            f"the policy needs {list(spec.cameras)}"
        )
    height, width = spec.cameras[camera]
    if image.shape != (height, width, 3) or image.dtype != np.uint8:
        raise ValueError(
            f"observation.images[{camera!r}]: {image.dtype} {image.shape}; "
            f"must be uint8 ({height}, {width}, 3)"
        )
    return image


def _check_features(config: Any) -> None:
    """ValueError where inputs or outputs are not those of the protocol on LIBERO."""
    stem = PICTURE.format("")
    if not config.image_features or not all(k.startswith(stem) for k in config.image_features):
        raise ValueError(
            f"policy.input_features: pictures {sorted(config.image_features)}; at least one, and "
            f"each must begin with {stem!r}"
        )
    want = {STATE: len(LIBERO_STATE), LANGUAGE: TEXT_DIM, ACTION: len(LIBERO_ACTION)}
    features = {**config.input_features, **config.output_features}
    have = {k: v.shape for k, v in features.items() if k not in config.image_features}
    if have != {key: (size,) for key, size in want.items()}:
        raise ValueError(f"policy features: {have}; beside pictures they must be {want}")


def _check_statistics(config: Any, postprocessor: Any) -> None:
    """ValueError where actions would come out normalised: LeRobot passes them on in silence."""
    mode = config.normalization_mapping.get("ACTION", "IDENTITY")
    known = [key for step in postprocessor.steps for key in step.state_dict()]
    if mode != "IDENTITY" and not any(key.startswith(f"{ACTION}.") for key in known):
        raise ValueError(
            f"postprocessor: no statistics of {ACTION!r} for {mode}; a policy without its "
            "normalisation statistics must not run"
        )
