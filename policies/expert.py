"""The hand of the small VLA: a flow-matching transformer over the action chunk.

The flow (Lipman et al. 2023; used for robot actions by pi0, Black et al. 2024) runs from noise at
sigma = 1 to an action at sigma = 0 along ``x_sigma = (1 - sigma) * action + sigma * noise``; the
network predicts the velocity ``noise - action``. The convention is that of diffusers'
``FlowMatchEulerDiscreteScheduler``, which does the sampling.

Tensors: B observations, S noise draws each, H actions of A numbers, M memory tokens of width D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ExpertLayer(nn.Module):
    """Self-attention over the chunk, cross-attention to the memory, an MLP; adaptive norms."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = nn.Linear(dim, 6 * dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.cross_out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def _split(self, x: Tensor) -> Tensor:
        """``[N, L, D]`` to ``[N, heads, L, D / heads]``."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory, ``[B, heads, M, d]``, computed once a chunk."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return self._split(key), self._split(value)

    def forward(self, x: Tensor, cond: Tensor, memory: tuple[Tensor, Tensor], draws: int) -> Tensor:
        """``x`` ``[B * S, L, D]``, ``cond`` ``[B * S, D]``; rows of one observation together."""
        a, b, c, d, e, f = self.modulate(cond)[:, None].chunk(6, dim=-1)
        q, k, v = map(self._split, self.qkv(self.norm(x) * (1 + a) + b).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        query = self.query(self.norm(x) * (1 + c) + d)
        rows, length, dim = query.shape
        # All draws of one observation are queries to the same memory, which is never repeated.
        query = self._split(query.reshape(rows // draws, draws * length, dim))
        read = F.scaled_dot_product_attention(query, *memory).transpose(1, 2).flatten(2)
        x = x + self.cross_out(read.reshape(rows, length, dim))
        return x + self.mlp(self.norm(x) * (1 + e) + f)


class ActionExpert(nn.Module):
    """Velocity of the flow: noisy chunk, noise level and memory to ``noise - action``.

    Args:
        chunk: actions a chunk (H).
        action_dim: width of an action (A).
        patch: neighbouring actions in one token.
        dim: width (D).
        layers: transformer layers.
        heads: attention heads.
    """

    def __init__(
        self, chunk: int, action_dim: int, patch: int, dim: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(action_dim * patch, dim)
        self.place = nn.Parameter(torch.randn(chunk // patch, dim) * 0.1)
        self.time = nn.Sequential(nn.Linear(64, dim), nn.GELU(), nn.Linear(dim, dim))
        self.pooled = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(ExpertLayer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, action_dim * patch)
        frequencies = torch.exp(torch.linspace(0.0, 6.0, 32))
        self.register_buffer("frequencies", frequencies, persistent=False)
        nn.init.zeros_(self.head.weight)

    def prepare(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, shared by all draws and all flow steps."""
        return [layer.memory(memory) for layer in self.layers]

    def forward(
        self,
        noisy: Tensor,
        sigma: Tensor,
        pooled: Tensor,
        memory: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """``noisy`` ``[B, S, H, A]`` and ``sigma`` ``[B, S]`` (1 is noise) to ``[B, S, H, A]``."""
        batch, draws = sigma.shape
        patches = noisy.reshape(batch * draws, len(self.place), -1)
        angle = sigma.reshape(-1, 1) * self.frequencies
        cond = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        cond = F.silu(cond + self.pooled(pooled).repeat_interleave(draws, dim=0))
        x = self.embed(patches) + self.place
        for layer, keys in zip(self.layers, memory, strict=True):
            x = layer(x, cond, keys, draws)
        return self.head(self.norm(x)).reshape(noisy.shape)
