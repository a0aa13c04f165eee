"""A small action-conditioned world model in latent space: what would these actions lead to?

Two cameras and proprioception are encoded to a latent; a recurrent network carries it on, one chunk
of actions at a time, without seeing anything more; heads read from any latent, encoded or imagined,
whether the task's goal holds, what the cameras would show (small) and where the hand would be. The
goal's head learns row by row ("does it hold now"), so it has both answers to learn from even where
every rollout succeeds: what such data lack is what actions that fail lead to.

Whether the model believes in failure is CureWM's question (its "optimism"): see
:mod:`regrasp.relabel.world_model_metrics`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class WorldModelConfig:
    """Sizes.

    Attributes:
        cameras: names of the cameras.
        size: side of the pictures, pixels; a multiple of 16.
        thumbnail: side of the pictures that are decoded; divides ``size``.
        state: dimensions of the proprioception.
        action: dimensions of an action.
        stride: actions between two latents.
        width: channels of the first convolution.
        latent: dimensions of a latent, each in [-1, 1].
    """

    cameras: tuple[str, ...] = ("agentview", "wrist")
    size: int = 64
    thumbnail: int = 16
    state: int = 8
    action: int = 7
    stride: int = 4
    width: int = 16
    latent: int = 192

    def __post_init__(self) -> None:
        if self.size % 16 or self.size % self.thumbnail:
            raise ValueError(
                f"WorldModelConfig: size {self.size} must be a multiple of 16 and of the "
                f"thumbnail's {self.thumbnail}"
            )


@dataclass(frozen=True)
class Reading:
    """What the heads read from latents ``[..., L]``.

    Attributes:
        success: logit that the goal holds ``[...]``.
        state: normalised proprioception ``[..., S]``.
        thumbnails: pixels in [0, 1], ``[..., cameras, 3, h, w]``.
    """

    success: Tensor
    state: Tensor
    thumbnails: Tensor


class WorldModel(nn.Module):
    """Encoder, dynamics and heads; pixels are uint8 ``[..., cameras, H, W, 3]``.

    Args:
        config: sizes.
    """

    state_mean: Tensor
    state_std: Tensor

    def __init__(self, config: WorldModelConfig | None = None) -> None:
        super().__init__()
        self.config = c = config or WorldModelConfig()
        self.eyes = nn.ModuleList(_eye(c.width, c.size) for _ in c.cameras)
        self.body = nn.Linear(c.state, 64)
        self.fuse = nn.Linear(128 * len(c.cameras) + 64, c.latent)
        self.chunk = nn.Sequential(
            nn.Linear(c.stride * c.action, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU()
        )
        self.dynamics = nn.GRU(128, c.latent, batch_first=True)
        self.success = nn.Sequential(nn.Linear(c.latent, 64), nn.SiLU(), nn.Linear(64, 1))
        self.hand = nn.Linear(c.latent, c.state)
        pixels = len(c.cameras) * 3 * c.thumbnail**2
        self.picture = nn.Sequential(nn.Linear(c.latent, 256), nn.SiLU(), nn.Linear(256, pixels))
        self.register_buffer("state_mean", torch.zeros(c.state))
        self.register_buffer("state_std", torch.ones(c.state))

    def encode(self, pixels: Tensor, state: Tensor) -> Tensor:
        """Latents ``[N, L]`` of pictures uint8 ``[N, cameras, H, W, 3]`` and states ``[N, S]``."""
        moved = pixels.permute(0, 1, 4, 2, 3).float() / 255.0 - 0.5
        parts = [eye(moved[:, i]) for i, eye in enumerate(self.eyes)]
        parts.append(nn.functional.silu(self.body(self.normalised(state))))
        return torch.tanh(self.fuse(torch.cat(parts, dim=1)))

    def imagine(self, latent: Tensor, actions: Tensor) -> Tensor:
        """What actions lead to, unseen.

        Args:
            latent: of the beginning ``[B, L]``.
            actions: ``[B, T, stride, A]``.

        Returns:
            The latent after each chunk, ``[B, T, L]``.
        """
        latents, _ = self.dynamics(self.chunk(actions.flatten(2)), latent[None].contiguous())
        return latents

    def read(self, latents: Tensor) -> Reading:
        """Everything the heads know of latents ``[..., L]``."""
        c = self.config
        shape = (*latents.shape[:-1], len(c.cameras), 3, c.thumbnail, c.thumbnail)
        pixels = torch.sigmoid(self.picture(latents)).reshape(shape)
        return Reading(self.success(latents).squeeze(-1), self.hand(latents), pixels)

    def normalised(self, state: Tensor) -> Tensor:
        """Proprioception with the training data's mean and deviation taken out."""
        return (state - self.state_mean) / self.state_std

    def thumbnails(self, pixels: Tensor) -> Tensor:
        """What :attr:`Reading.thumbnails` should be: ``[N, cameras, 3, h, w]`` in [0, 1]."""
        moved = pixels.permute(0, 1, 4, 2, 3).float().flatten(0, 1) / 255.0
        small = nn.functional.avg_pool2d(moved, self.config.size // self.config.thumbnail)
        return small.unflatten(0, pixels.shape[:2])

    @torch.no_grad()
    def outcome(self, pixels: Tensor, state: Tensor, actions: Tensor) -> Tensor:
        """Imagined probability that the goal holds after each chunk, ``[B, T]``.

        Args:
            pixels: of the beginning, uint8 ``[B, cameras, H, W, 3]``.
            state: then, ``[B, S]``.
            actions: what is executed from there, ``[B, T, stride, A]``.
        """
        latents = self.imagine(self.encode(pixels, state), actions)
        return torch.sigmoid(self.success(latents).squeeze(-1))

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``model.json``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / _WEIGHTS)
        (folder / _SIZES).write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> WorldModel:
        """Read what :meth:`save` wrote, ready to imagine."""
        sizes: Mapping = json.loads((Path(folder) / _SIZES).read_text())
        model = cls(WorldModelConfig(**{**sizes, "cameras": tuple(sizes["cameras"])}))
        model.load_state_dict(load_file(Path(folder) / _WEIGHTS))
        return model.eval()


_WEIGHTS, _SIZES = "model.safetensors", "model.json"


def _eye(width: int, size: int) -> nn.Sequential:
    """Four halvings, then 128 features."""
    channels = (3, width, 2 * width, 2 * width, 4 * width)
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.SiLU()]
    flat = channels[-1] * (size // 16) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 128), nn.SiLU())
