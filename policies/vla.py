"""The small vision-language-action model (VLA): its network, losses and sampling.

Two cameras, an instruction and proprioception in, a chunk of actions out. Built to learn in an
hour on two processor cores, so every choice buys sample efficiency or speed: a spatial readout
that the instruction steers (:mod:`regrasp.policies.trunk`), a flow-matching action expert with a
memory of about 20 tokens (:mod:`regrasp.policies.expert`), and between them a geometry head that
turns keypoints and proprioception into the offsets from gripper to target and to goal and into the
phase of the task. Where demonstrations carry those labels the head and the first two keypoints of
each camera are supervised; what the head says, at several scales, is part of the memory, so the
action expert has only a low-dimensional map left to learn.

Tensors: B observations, S noise draws each, H actions of A numbers, K keypoints, D width.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from regrasp.policies.expert import ActionExpert
from regrasp.policies.text import TEXT_DIM
from regrasp.policies.trunk import Trunk, heatmap_loss, prepare_image
from torch import Tensor, nn

#: Metres of one unit of a predicted offset.
OFFSET_UNIT = 0.1
#: Scales (metres) at which an offset is shown to the action expert.
SCALES = (0.3, 0.06, 0.015)
#: Wavelengths (metres) at which the gripper's position is shown.
WAVES = (2.0, 0.5, 0.125)
FILM_DIM, WORD_DIM, HIDDEN = 64, 128, 384


@dataclass(frozen=True)
class VLAConfig:
    """Sizes of the network.

    Attributes:
        cameras: names, in the order of the trunks.
        image_size: pixels a side, square; a multiple of 8.
        state_dim: width of proprioception: LIBERO_STATE (8), or any layout that begins with the
            gripper's position (m) and axis-angle orientation (rad).
        action_dim: width of an action.
        chunk: actions a chunk (H), a multiple of ``patch``.
        patch: neighbouring actions in one token of the action expert.
        width: channels of the (stride 4, stride 8) maps of a trunk.
        blocks: residual blocks of each trunk, one entry a camera.
        keypoints: questions asked of each camera (K), at least 2.
        dim: width of the memory and of the action expert (D).
        layers: transformer layers of the action expert.
        heads: attention heads.
        language_tokens: pooled language tokens in the memory.
        phases: number of phase classes of the auxiliary head.
    """

    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: int = 128
    state_dim: int = 8
    action_dim: int = 7
    chunk: int = 16
    patch: int = 2
    width: tuple[int, int] = (32, 64)
    blocks: tuple[int, ...] = (2, 1)
    keypoints: int = 8
    dim: int = 192
    layers: int = 4
    heads: int = 4
    language_tokens: int = 2
    phases: int = 16

    def __post_init__(self) -> None:
        checks = {
            "image_size": (self.image_size, self.image_size % 8 == 0, "a multiple of 8"),
            "chunk": (self.chunk, self.chunk % self.patch == 0, f"a multiple of {self.patch}"),
            "dim": (self.dim, self.dim % self.heads == 0, f"a multiple of heads={self.heads}"),
            "blocks": (self.blocks, len(self.blocks) == len(self.cameras), "one entry a camera"),
            "state_dim": (self.state_dim, self.state_dim >= 6, "at least 6"),
            "keypoints": (self.keypoints, self.keypoints >= 2, "at least 2"),
        }
        for name, (value, good, right) in checks.items():
            if not good:
                raise ValueError(f"VLAConfig.{name}: {value} must be {right}")

    def to_json(self) -> dict:
        """A JSON-serialisable dict; :meth:`from_json` inverts it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> VLAConfig:
        """Rebuild a configuration; unknown keys raise ValueError naming them."""
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"VLAConfig: unknown fields {sorted(unknown)}")
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return cls(**fields)


class Inputs(NamedTuple):
    """A batch of observations as tensors.

    Attributes:
        images: one a camera, as :func:`regrasp.policies.trunk.prepare_image` gives it.
        state: ``[B, S]``, raw units.
        tokens: ``[U, L, 384]`` of the distinct instructions.
        mask: bool ``[U, L]``.
        index: int64 ``[B]``, which instruction.
        shift: ``[B, cameras, 2]`` of augmentation crops, half image widths, or None.
    """

    images: tuple[Tensor, ...]
    state: Tensor
    tokens: Tensor
    mask: Tensor
    index: Tensor
    shift: Tensor | None = None


class Labels(NamedTuple):
    """What a batch is trained on; the optional ones are skipped where None or NaN.

    Attributes:
        action: ``[B, H, A]``, environment units.
        valid: bool ``[B, H]``, false where the window ran past its episode.
        offsets: ``[B, 6]``, metres: target minus gripper, goal minus gripper.
        pixels: ``[B, cameras, 2, 2]``: where target and goal are in each picture as shown.
        phase: int64 ``[B]``.
    """

    action: Tensor
    valid: Tensor
    offsets: Tensor | None = None
    pixels: Tensor | None = None
    phase: Tensor | None = None


class Encoded(NamedTuple):
    """What the encoder knows of B observations.

    Attributes:
        memory: ``[B, M, D]``, what the action expert attends to.
        pooled: ``[B, D]``, one vector an observation.
        offsets: ``[B, 6]``, metres: target and goal minus gripper, as predicted.
        phase: ``[B, phases]``, logits.
        direct: ``[B, H, A]``, the normalised chunk regressed without flow; a training signal only.
        heatmaps: one ``[B, K, cells]`` a camera, log attention over the fine map.
    """

    memory: Tensor
    pooled: Tensor
    offsets: Tensor
    phase: Tensor
    direct: Tensor
    heatmaps: tuple[Tensor, ...]


class Encoder(nn.Module):
    """Observation to memory; see the module docstring."""

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        self.config = config
        dim, cameras = config.dim, len(config.cameras)
        state_dim = state_features(torch.zeros(1, config.state_dim)).shape[-1]
        self.sentence = nn.Linear(TEXT_DIM, WORD_DIM)
        self.word = nn.Linear(TEXT_DIM, WORD_DIM)
        self.word_query = nn.Parameter(torch.randn(config.language_tokens, WORD_DIM) * 0.1)
        self.language = nn.Linear(WORD_DIM, dim)
        self.film = nn.Sequential(
            nn.Linear(WORD_DIM * (1 + config.language_tokens), 128),
            nn.GELU(),
            nn.Linear(128, FILM_DIM),
        )
        self.trunks = nn.ModuleList(
            Trunk(config.image_size, config.width, blocks, config.keypoints, FILM_DIM)
            for blocks in config.blocks
        )
        point_dim = self.trunks[0].out_dim
        self.point = nn.ModuleList(nn.Linear(point_dim, dim) for _ in range(cameras))
        self.state = nn.Linear(state_dim, dim)
        flat = cameras * (config.keypoints * point_dim + config.width[1]) + FILM_DIM + state_dim
        self.geometry = nn.Sequential(
            nn.Linear(flat, HIDDEN),
            nn.LayerNorm(HIDDEN),
            nn.GELU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.GELU(),
        )
        self.offsets = nn.Linear(HIDDEN, 6)
        self.phase = nn.Linear(HIDDEN, config.phases)
        relative = 9 * len(SCALES) + config.phases
        self.relative = nn.Linear(relative, dim)
        self.summary = nn.Sequential(
            nn.Linear(HIDDEN + relative + state_dim, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 2 * dim)
        )
        self.direct = nn.Sequential(
            nn.Linear(2 * dim, 256), nn.GELU(), nn.Linear(256, config.chunk * config.action_dim)
        )
        tokens = cameras * config.keypoints + config.language_tokens + 4
        self.slot = nn.Parameter(torch.randn(tokens, dim) * 0.1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, inputs: Inputs, state: Tensor, text: tuple[Tensor, Tensor]) -> Encoded:
        """Encode B observations.

        Args:
            inputs: the batch.
            state: ``[B, F]``, of :func:`state_features`.
            text: mean and scale, each ``[384]``, of the pooled training instructions.
        """
        # What distinguishes one instruction from another is a small part of its pooled embedding;
        # standardised over the training instructions it is all of it, from the first step.
        weight = inputs.mask[..., None].to(inputs.tokens.dtype)
        mean = (inputs.tokens * weight).sum(1) / weight.sum(1)
        sentence = self.sentence(((mean - text[0]) / text[1]).clamp(-4, 4) * 0.5)
        words = self.word(inputs.tokens)
        score = (self.word_query @ words.transpose(1, 2)) * WORD_DIM**-0.5
        score = score.masked_fill(~inputs.mask[:, None], float("-inf"))
        pooled_words = torch.softmax(score, dim=-1) @ words
        film = self.film(torch.cat([sentence, pooled_words.flatten(1)], dim=-1))[inputs.index]
        language = self.language(pooled_words)[inputs.index]
        points, flat, heatmaps = [], [], []
        for i, (trunk, image) in enumerate(zip(self.trunks, inputs.images, strict=True)):
            shift = None if inputs.shift is None else inputs.shift[:, i]
            found, mean, heatmap = trunk(image, film, shift)
            points.append(self.point[i](found))
            flat += [found.flatten(1), mean]
            heatmaps.append(heatmap)
        hidden = self.geometry(torch.cat([*flat, film, state], dim=-1))
        offsets, phase = self.offsets(hidden) * OFFSET_UNIT, self.phase(hidden)
        relative = torch.cat([scaled_offsets(offsets), torch.softmax(phase, -1)], dim=-1)
        summary = self.summary(torch.cat([hidden, relative, state], dim=-1))
        extra = torch.stack(
            [self.state(state), self.relative(relative), *summary.chunk(2, dim=-1)], dim=1
        )
        memory = self.norm(torch.cat([*points, language, extra], dim=1) + self.slot)
        direct = self.direct(summary).view(-1, self.config.chunk, self.config.action_dim)
        pooled = summary[:, : self.config.dim]
        return Encoded(memory, pooled, offsets, phase, direct, tuple(heatmaps))


class VLA(nn.Module):
    """The whole model, with the statistics that normalise actions, states and instructions."""

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config).to(memory_format=torch.channels_last)
        self.expert = ActionExpert(
            config.chunk, config.action_dim, config.patch, config.dim, config.layers, config.heads
        )
        sizes = {"action": config.action_dim, "text": TEXT_DIM}
        sizes["state"] = state_features(torch.zeros(1, config.state_dim)).shape[-1]
        for name, size in sizes.items():
            # NaN until set, so that an unset or missing statistic can never pass silently.
            self.register_buffer(f"{name}_center", torch.full((size,), torch.nan))
            self.register_buffer(f"{name}_scale", torch.full((size,), torch.nan))

    def set_statistics(self, **statistics: tuple[Tensor, Tensor]) -> None:
        """Set ``action``, ``state`` (of :func:`state_features`) and ``text``: (center, scale)."""
        for name in ("action", "state", "text"):
            center, scale = statistics[name]
            getattr(self, f"{name}_center").copy_(center)
            getattr(self, f"{name}_scale").copy_(scale)
        self.check_statistics()

    def check_statistics(self) -> None:
        """Raise ValueError unless every statistic is finite and every scale positive."""
        for name in ("action", "state", "text"):
            center, scale = getattr(self, f"{name}_center"), getattr(self, f"{name}_scale")
            if not (torch.isfinite(center).all() and torch.isfinite(scale).all()):
                raise ValueError(
                    f"VLA.{name}_center/{name}_scale: not set; a policy without its normalisation "
                    "statistics must not run (train it, or load a checkpoint that has them)"
                )
            if (scale <= 0).any():
                raise ValueError(f"VLA.{name}_scale: {scale.min().item()} must be positive")

    def encode(self, inputs: Inputs) -> Encoded:
        """Encode observations; their states in raw units."""
        state = (state_features(inputs.state) - self.state_center) / self.state_scale
        text = (self.text_center, self.text_scale)
        return self.encoder(inputs, state.clamp(-5, 5), text)

    def flow_loss(
        self,
        encoded: Encoded,
        action: Tensor,
        valid: Tensor,
        draws: int,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Flow-matching loss of normalised ``action`` ``[B, H, A]``, mean over valid steps only."""
        batch, device = len(action), action.device
        # Stratified noise levels: the draws of one observation cover the whole path.
        uniform = torch.rand(batch, draws, generator=generator, device=device)
        sigma = (torch.arange(draws, device=device) + uniform) / draws
        noise = torch.randn(batch, draws, *action.shape[1:], generator=generator, device=device)
        level = sigma[..., None, None]
        noisy = (1 - level) * action[:, None] + level * noise
        memory = self.expert.prepare(encoded.memory)
        velocity = self.expert(noisy, sigma, encoded.pooled, memory)
        error = (velocity - (noise - action[:, None])).square().mean(dim=(1, 3))
        return (error * valid).sum() / valid.sum().clamp_min(1)

    def losses(
        self, inputs: Inputs, labels: Labels, draws: int, generator: torch.Generator | None
    ) -> tuple[dict[str, Tensor], Encoded]:
        """Every loss that the labels allow, unweighted, and the encoding they were taken on."""
        encoded = self.encode(inputs)
        action = (labels.action - self.action_center) / self.action_scale
        valid = labels.valid.to(action.dtype)
        error = (encoded.direct - action).abs().mean(dim=-1)
        losses = {
            "flow": self.flow_loss(encoded, action, valid, draws, generator),
            "direct": (error * valid).sum() / valid.sum().clamp_min(1),
        }
        if labels.offsets is not None:
            known = torch.isfinite(labels.offsets).all(dim=-1, keepdim=True)
            truth = torch.nan_to_num(labels.offsets)
            far = F.smooth_l1_loss(
                encoded.offsets / OFFSET_UNIT, truth / OFFSET_UNIT, beta=0.1, reduction="none"
            )
            near = (scaled_offsets(encoded.offsets) - scaled_offsets(truth)).abs()
            count = known.sum().clamp_min(1)
            losses["offsets"] = (far * known).sum() / (6 * count) + (near * known).sum() / (
                near.shape[-1] * count
            )
        if labels.pixels is not None:
            losses["pixels"] = torch.stack(
                [
                    heatmap_loss(heatmap[:, :2], labels.pixels[:, i])
                    for i, heatmap in enumerate(encoded.heatmaps)
                ]
            ).mean()
        if labels.phase is not None:
            losses["phase"] = F.cross_entropy(encoded.phase, labels.phase)
        return losses, encoded

    @torch.no_grad()
    def sample(
        self, encoded: Encoded, num_samples: int, flow_steps: int, generator: torch.Generator | None
    ) -> Tensor:
        """Draw chunks ``[B, N, H, A]`` in environment units.

        Noise is integrated to actions by diffusers' Euler scheduler in ``flow_steps`` equal steps;
        the encoder's work and the expert's keys are shared by all samples and steps.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.check_statistics()
        config, batch = self.config, len(encoded.memory)
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
        sigmas = [1 - i / flow_steps for i in range(flow_steps)]
        scheduler.set_timesteps(sigmas=sigmas, device=encoded.memory.device)
        chunk = torch.randn(
            batch, num_samples, config.chunk, config.action_dim, generator=generator
        ).to(encoded.memory)
        memory = self.expert.prepare(encoded.memory)
        for timestep in scheduler.timesteps:
            sigma = (timestep / 1000).expand(batch, num_samples)
            velocity = self.expert(chunk, sigma, encoded.pooled, memory)
            chunk = scheduler.step(velocity, timestep, chunk).prev_sample
        return chunk * self.action_scale + self.action_center


def scaled_offsets(offsets: Tensor) -> Tensor:
    """Offsets ``[B, 6]`` (m) and goal minus target, squashed at each of ``SCALES``; ``[B, 27]``."""
    target, goal = offsets.chunk(2, dim=-1)
    three = torch.cat([target, goal, goal - target], dim=-1)
    return torch.cat([torch.tanh(three / scale) for scale in SCALES], dim=-1)


def state_features(state: Tensor) -> Tensor:
    """Proprioception without cuts and with fine resolution, ``[B, S]`` to ``[B, 30 + S - 6]``.

    Position, its sines and cosines at ``WAVES`` (a height matters to the centimetre on tables
    0.9 m apart), the rotation matrix of the axis-angle (a hand that points down sits on the
    axis-angle's cut at pi, where neighbours are 2 pi apart), and what follows unchanged.
    """
    position, axis_angle, rest = state[:, :3], state[:, 3:6], state[:, 6:]
    waves = torch.cat([position * (2 * math.pi / wave) for wave in WAVES], dim=-1)
    angle = axis_angle.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    x, y, z = (axis_angle / angle).unbind(dim=-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(-1, 3, 3)
    sin, cos = angle.sin()[..., None], angle.cos()[..., None]
    rotation = torch.eye(3, device=state.device) + sin * skew + (1 - cos) * (skew @ skew)
    return torch.cat([position, waves.sin(), waves.cos(), rotation.flatten(1), rest], dim=-1)


__all__ = ["VLA", "Encoded", "Encoder", "Inputs", "Labels", "VLAConfig", "prepare_image"]
