"""The eye of the small VLA: a convolutional trunk with a language-conditioned spatial readout.

One :class:`Trunk` a camera: a stride-4 stem, 32x32 and 16x16 maps kept channels last (which
processors' convolutions like), FiLM by the instruction (Perez et al. 2018), and a spatial softmax
(Levine et al. 2016) whose queries come from the instruction: each answer is an expected image
coordinate, finer than a pixel, with its spread, its strength and the features found there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KEY_DIM = 32


class ResBlock(nn.Module):
    """Two 3x3 convolutions with FiLM between them; ``[B, C, h, w]`` to the same."""

    def __init__(self, channels: int, film_dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, channels, affine=False)
        self.film = nn.Linear(film_dim, 2 * channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.film.bias)
        # A small start keeps the sum of blocks near the identity without a second norm.
        nn.init.normal_(self.conv2.weight, std=0.3 / (3 * channels**0.5))

    def forward(self, x: Tensor, film: Tensor) -> Tensor:
        """``x`` ``[B, C, h, w]``, ``film`` ``[B, film_dim]``."""
        scale, shift = self.film(film)[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm(self.conv1(F.relu(x)))
        return x + self.conv2(F.relu(hidden * (1 + scale) + shift))


class Trunk(nn.Module):
    """One camera: picture and instruction to keypoints with features, and a pooled vector.

    Args:
        image_size: pixels a side, a multiple of 8.
        width: channels of the fine (stride 4) and the coarse (stride 8) map.
        blocks: residual blocks on the coarse map.
        keypoints: questions asked (K).
        film_dim: width of the instruction vector.
    """

    def __init__(
        self, image_size: int, width: tuple[int, int], blocks: int, keypoints: int, film_dim: int
    ) -> None:
        super().__init__()
        fine, coarse = width
        self.keypoints = keypoints
        self.stem = nn.Conv2d(12, fine, 3, stride=2, padding=1)
        self.fine = nn.Conv2d(fine, fine, 3, padding=1)
        self.down = nn.Conv2d(fine, coarse, 3, stride=2, padding=1)
        self.where = nn.Linear(2, coarse)
        self.coarse = nn.ModuleList(ResBlock(coarse, film_dim) for _ in range(blocks))
        self.value = nn.Linear(coarse, coarse)
        self.key_coarse = nn.Linear(coarse, KEY_DIM)
        self.key_fine = nn.Conv2d(fine, KEY_DIM, 3, padding=1)
        self.key = nn.Linear(KEY_DIM, KEY_DIM)
        self.query = nn.Linear(film_dim, keypoints * KEY_DIM)
        self.query_bias = nn.Parameter(torch.randn(keypoints, KEY_DIM) * 0.5)
        size = image_size // 4
        self.register_buffer("grid_fine", grid(size), persistent=False)
        self.register_buffer("grid_coarse", grid(size // 2), persistent=False)
        #: numbers a keypoint: x, y, their spreads, strength, features.
        self.out_dim = 5 + coarse

    def forward(
        self, image: Tensor, film: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ask the K questions.

        Args:
            image: as :func:`prepare_image` gives it.
            film: ``[B, film_dim]``.
            shift: ``[B, 2]``, how far the crop was moved by augmentation, in half image widths;
                coordinates are those of the image before it, so labels stay true.

        Returns:
            keypoint features ``[B, K, out_dim]`` (coordinates -1 to 1, x right, y down), the mean
            of the coarse map ``[B, C]``, and the log attention ``[B, K, cells]`` of the fine map.
        """
        batch, points = image.shape[0], self.keypoints
        fine = F.relu(self.stem(image))
        fine = fine + F.relu(self.fine(fine))
        coarse = self.down(fine)
        side = coarse.shape[-1]
        position = self.where(self.grid_coarse).view(1, side, side, -1)
        if shift is not None:
            position = position + F.linear(shift, self.where.weight)[:, None, None]
        coarse = coarse + position.permute(0, 3, 1, 2)
        for block in self.coarse:
            coarse = block(coarse, film)
        flat = F.relu(coarse).permute(0, 2, 3, 1)  # [B, side, side, C] from here on
        # Nearest-neighbour upsampling of the coarse keys as a broadcast: nothing is copied.
        up = self.key_coarse(flat)[:, :, None, :, None]
        key = self.key_fine(fine).permute(0, 2, 3, 1)
        key = key.unflatten(2, (side, 2)).unflatten(1, (side, 2))
        key = self.key(F.relu(key + up)).reshape(batch, 4 * side * side, KEY_DIM)
        query = self.query(film).view(batch, points, -1) + self.query_bias
        score = query @ key.transpose(1, 2)
        total = torch.logsumexp(score, dim=-1, keepdim=True)
        log_attention = score - total
        attention = log_attention.exp()
        moments = attention @ torch.cat([self.grid_fine, self.grid_fine.square()], dim=-1)
        mean, second = moments.chunk(2, dim=-1)
        spread = (second - mean.square()).clamp_min(1e-6).sqrt()
        if shift is not None:
            mean = mean + shift[:, None]
        cells = attention.view(batch, points, side, 2, side, 2).sum(dim=(3, 5)).flatten(2)
        flat = flat.reshape(batch, side * side, -1)
        values = cells @ self.value(flat)
        found = torch.cat([mean, spread, 0.1 * total, values], dim=-1)
        return found, flat.mean(dim=1), log_attention


def grid(side: int) -> Tensor:
    """Cell centres of a square map, ``[side * side, 2]``: x then y, -1 to 1 across the image."""
    axis = (torch.arange(side) + 0.5) / side * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def prepare_image(
    image: Tensor, gain: Tensor | None = None, offset: Tensor | None = None
) -> Tensor:
    """uint8 ``[B, h, w, 3]`` to float ``[B, 12, h / 2, w / 2]`` in [-1, 1], channels last.

    Each 2x2 block of pixels becomes 12 channels, which convolutions like better than 3. Colour
    jitter is ``gain`` and ``offset``, each ``[B, 3]``, applied to the channels after scaling.
    """
    batch, height, width, channels = image.shape
    blocks = image.view(batch, height // 2, 2, width // 2, 2, channels)
    blocks = blocks.permute(0, 1, 3, 2, 4, 5).reshape(batch, height // 2, width // 2, -1)
    if gain is None or offset is None:
        scaled = blocks.float() * (1 / 127.5) - 1
    else:
        scale = (gain * (1 / 127.5)).repeat(1, 4)[:, None, None]
        scaled = torch.addcmul((offset - gain).repeat(1, 4)[:, None, None], blocks.float(), scale)
    return scaled.permute(0, 3, 1, 2)


def heatmap_loss(log_attention: Tensor, pixels: Tensor) -> Tensor:
    """Cross-entropy of attention against known points, averaged over those that are visible.

    Args:
        log_attention: ``[B, N, cells]`` over a square map, row by row.
        pixels: ``[B, N, 2]``, x and y in -1 to 1 of the picture as shown to the network; NaN where
            unknown. Each point is spread bilinearly over its four nearest cells.
    """
    side = round(log_attention.shape[-1] ** 0.5)
    visible = (pixels.abs() <= 1).all(dim=-1)
    place = ((torch.nan_to_num(pixels) + 1) * (side / 2) - 0.5).clamp(0, side - 1)
    corner = place.floor().clamp(max=side - 2)
    part = place - corner
    corner = corner.long()
    loss = torch.zeros_like(log_attention[..., 0])
    for dy in (0, 1):
        for dx in (0, 1):
            weight = (part[..., 0] if dx else 1 - part[..., 0]) * (
                part[..., 1] if dy else 1 - part[..., 1]
            )
            cell = (corner[..., 1] + dy) * side + corner[..., 0] + dx
            loss = loss - weight * log_attention.gather(-1, cell[..., None])[..., 0]
    return (loss * visible).sum() / visible.sum().clamp_min(1)
