"""First stage of the small diagnosis model: its encoder learns what is true at single moments.

The vision encoder and the connector of an Idefics3 are trained, with heads that are thrown away
afterwards, to tell from the pictures of one moment what :mod:`regrasp.relabel.diagnose.dense` knows
of it. Then every moment of every clip is encoded once, and the language model is trained on what
came out (:mod:`regrasp.relabel.diagnose.language`) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from regrasp.relabel.diagnose.dense import MEASURES, PHASES, UNKNOWN, Dense
from regrasp.relabel.diagnose.labels import CLASSES
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.relabel.diagnose.pictures import Pictures
from regrasp.training.run import Schedule, TrainingRun
from torch import Tensor, nn

#: How much each loss counts; the classes least, for a moment seldom shows them.
LOSS_WEIGHTS = {"measures": 1.0, "success": 0.3, "phase": 0.3, "wrong": 0.1, "kind": 0.1}


@dataclass(frozen=True)
class EncoderConfig:
    """Settings of the first stage.

    Attributes:
        schedule: length and optimiser.
        batch: moments a step, each with the pictures of all cameras.
        shift: pictures are moved by up to this many pixels in training.
        jitter: and their contrast and brightness changed by up to this fraction.
        bf16: multiply matrices in bfloat16.
        seed: of batches, augmentation and heads.
    """

    schedule: Schedule = field(
        default_factory=lambda: Schedule(minutes=6.0, warmup=200, ema=0.998, weight_decay=0.05)
    )
    batch: int = 32
    shift: int = 4
    jitter: float = 0.15
    bf16: bool = True
    seed: int = 0


class Teacher(nn.Module):
    """Encoder and connector of a diagnosis model with heads for every truth of a moment.

    The heads are told the instruction, for "the thing" is another one in every task: so the encoder
    has to keep where everything is.

    Args:
        model: whose encoder it is, shared.
        values: mean and deviation of :attr:`Dense.measures`.
    """

    def __init__(self, model: DiagnosisModel, values: tuple[np.ndarray, np.ndarray]) -> None:
        super().__init__()
        network, config = model.model.model, model.model.config
        self.vision, self.connector = network.vision_model, network.connector
        self.size, self.patch = model.choice.size, config.vision_config.patch_size
        width, tokens = config.text_config.hidden_size, model.processor.image_seq_len
        self.words = nn.EmbeddingBag(len(model.tokenizer), width)
        seen = tokens * len(model.choice.cameras) * width
        self.trunk = nn.Sequential(nn.Linear(seen + width, 384), nn.GELU(), nn.Linear(384, 384))
        self.heads = nn.ModuleDict(
            {
                "measures": nn.Linear(384, sum(MEASURES.values())),
                "success": nn.Linear(384, 2),
                "phase": nn.Linear(384, PHASES),
                "wrong": nn.Linear(384, 2),
                "kind": nn.Linear(384, len(CLASSES) + 1),
            }
        )
        mean, deviation = (torch.from_numpy(v).float() for v in values)
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def patches(self, pictures: Tensor) -> Tensor:
        """Encode pictures uint8 ``[N, 3, size, size]`` as ``[N, patches, width]``."""
        side = self.size // self.patch
        whole = torch.ones(len(pictures), side, side, dtype=torch.bool, device=pictures.device)
        # As the image processor does it: to [-1, 1].
        pixels = pictures.float() / 127.5 - 1.0
        return self.vision(pixel_values=pixels, patch_attention_mask=whole).last_hidden_state

    def forward(self, pictures: Tensor, words: Tensor) -> dict[str, Tensor]:
        """What the pictures of moments tell.

        Args:
            pictures: uint8 ``[B, cameras, 3, size, size]``.
            words: tokens of the instructions ``[B, W]``, padded with the padding token.
        """
        tokens = self.connector(self.patches(pictures.flatten(0, 1)))
        told = self.words(words)
        both = torch.cat([tokens.reshape(len(pictures), -1), told], dim=1)
        hidden = torch.nn.functional.gelu(self.trunk(both))
        return {name: head(hidden) for name, head in self.heads.items()}

    def losses(self, told: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of each head; values are compared in deviations, smooth-L1."""
        wanted = (truth["measures"] - self.mean) / self.deviation
        losses = {"measures": nn.functional.smooth_l1_loss(told["measures"].float(), wanted)}
        for name in ("success", "phase", "wrong", "kind"):
            known = (truth[name] != UNKNOWN).any()
            each = nn.functional.cross_entropy(
                told[name].float(), truth[name], ignore_index=UNKNOWN
            )
            losses[name] = each if known else each.new_zeros(())
        return losses


def train_encoder(
    folder: str | Path,
    model: DiagnosisModel,
    pictures: Pictures,
    dense: Dense,
    config: EncoderConfig,
    report: Callable[..., None] = lambda **_: None,
) -> None:
    """Train the encoder of ``model`` in place, or go on where the folder's run was.

    Args:
        folder: of the run.
        model: a small model (:func:`regrasp.relabel.diagnose.tiny.build`).
        pictures: of the clips to learn from.
        dense: their truths.
        config: settings.
        report: as in :meth:`TrainingRun.loop`.
    """
    torch.manual_seed(config.seed)
    flat = dense.measures.reshape(-1, dense.measures.shape[-1])
    teacher = Teacher(model, (flat.mean(axis=0), np.maximum(flat.std(axis=0), 1e-2)))
    words = words_of(model, [clip.instruction for clip in pictures.clips])
    about = {"batch": config.batch, "seed": config.seed, "clips": len(pictures)}
    run = TrainingRun(folder, teacher, config.schedule, about=about)
    model.model.train()
    if config.bf16:
        # Of few patches, the fused attention's way back is slow in bfloat16 on processors.
        model.model.set_attn_implementation("eager")

    def step() -> dict[str, float]:
        rng = np.random.default_rng((config.seed, run.step))
        clips = rng.integers(len(pictures), size=config.batch)
        at = rng.integers(dense.measures.shape[1], size=config.batch)
        shown = np.stack([pictures.images[i, m] for i, m in zip(clips, at, strict=True)])
        shown = disturbed(shown, config.shift, config.jitter, rng)
        truth = {k: torch.from_numpy(v[clips, at]) for k, v in vars(dense).items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
            told = teacher(torch.from_numpy(shown.transpose(0, 1, 4, 2, 3)), words[clips])
        losses = teacher.losses(told, truth)
        total = sum(LOSS_WEIGHTS[name] * value for name, value in losses.items())
        run.update(total)
        return {name: value.item() for name, value in losses.items()}

    run.loop(step, report)
    if run.average:
        teacher.load_state_dict(run.averaged())
    model.model.set_attn_implementation("sdpa")
    model.model.eval()


def words_of(model: DiagnosisModel, instructions: Sequence[str]) -> Tensor:
    """Tokens of instructions, ``[N, W]``, padded."""
    tokens = [model.tokenizer(text)["input_ids"] for text in instructions]
    longest = max(len(row) for row in tokens)
    pad = model.tokenizer.pad_token_id
    return torch.tensor([row + [pad] * (longest - len(row)) for row in tokens])


def disturbed(
    pictures: np.ndarray, shift: int, jitter: float, rng: np.random.Generator
) -> np.ndarray:
    """Pictures ``[B, cameras, s, s, 3]``, each moved and with another contrast and brightness."""
    out = np.empty_like(pictures)
    size = pictures.shape[2]
    for i, k in np.ndindex(pictures.shape[:2]):
        dy, dx = rng.integers(-shift, shift + 1, 2)
        ys = np.clip(np.arange(size) + dy, 0, size - 1)
        xs = np.clip(np.arange(size) + dx, 0, size - 1)
        gain, offset = 1 + rng.uniform(-jitter, jitter), 128 * rng.uniform(-jitter, jitter)
        table = np.clip(np.arange(256) * gain + offset, 0, 255).astype(np.uint8)
        out[i, k] = table[pictures[i, k][ys][:, xs]]
    return out


class Encoded:
    """Every moment of every clip, encoded once: what the language model is trained on.

    Attributes:
        features: float16 ``[clips, moments, cameras, patches, width]``, mapped.
    """

    def __init__(
        self,
        file: str | Path,
        model: DiagnosisModel,
        pictures: Pictures,
        *,
        batch: int = 8,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Encode, unless the file is there.

        Args:
            file: its name ends in ``.npy``; it is of one encoder and these clips, whose run's
                folder it lies in.
            model: with a trained encoder.
            pictures: of the clips.
            batch: clips at a time.
            report: called with clips done and all of them.
        """
        path = Path(file)
        if not path.exists():
            part = path.with_name(f".part-{path.name}")
            _encode(part, model, pictures, batch, report)
            part.replace(path)
        self.features = np.load(path, mmap_mode="r")
        if len(self.features) != len(pictures):
            raise ValueError(
                f"{path}: holds {len(self.features)} clips, not {len(pictures)}; delete it"
            )


@torch.inference_mode()
def _encode(
    file: Path,
    model: DiagnosisModel,
    pictures: Pictures,
    batch: int,
    report: Callable[[int, int], None],
) -> None:
    """Write the features of all clips."""
    teacher = Teacher(model, (np.zeros(1), np.ones(1)))
    images = pictures.images
    count, shown, cameras, size = images.shape[:4]
    width = model.model.config.vision_config.hidden_size
    patches = (size // teacher.patch) ** 2
    shape = (count, shown, cameras, patches, width)
    out = np.lib.format.open_memmap(file, "w+", np.float16, shape)
    for start in range(0, count, batch):
        some = np.ascontiguousarray(images[start : start + batch].transpose(0, 1, 2, 5, 3, 4))
        with torch.autocast("cpu", torch.bfloat16):
            found = teacher.patches(torch.from_numpy(some).flatten(0, 2))
        out[start : start + batch] = found.float().half().numpy().reshape(-1, *shape[1:])
        report(min(start + batch, count), count)
    out.flush()
