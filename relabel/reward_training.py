"""Training of the progress model from stores of failure samples: one file, top to bottom.

Clips of consecutive frames are drawn from rollouts, each frame is encoded once, and every frame
that has its history gives one target. The loss is the cross-entropy of the value against the soft
target and of the success output against the predicate. AdamW, warm-up, cosine schedule over steps
or minutes, a moving average of the weights (which is what is saved), TensorBoard, resume.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.reward import RewardConfig, RewardModel, shrink
from regrasp.relabel.rollouts import Rollout, Split, read_rollouts
from safetensors.torch import load_file, save_file
from torch import Tensor

_PREFIX = "step-"


@dataclass(frozen=True)
class RewardTraining:
    """Settings of a training run.

    Attributes:
        minutes: end after this many minutes of training; 0 means by ``steps`` alone. The schedule
            follows whichever is nearer its end.
        steps: end after this many optimiser steps; 0 means by ``minutes`` alone.
        clips: clips a step.
        targets: values of a clip, ``gap`` frames apart.
        lr: peak learning rate.
        final_lr: where the cosine ends, as a fraction of ``lr``.
        warmup: steps of linear warm-up.
        weight_decay: AdamW's, on matrices and kernels only.
        clip: largest norm of the gradient.
        ema: decay of the moving average (lower in the first steps).
        value_weight: of the value's loss; 0 trains a success classifier alone, as a baseline.
        success_weight: of the success output's loss.
        shift: pixels by which pictures are moved at most.
        jitter: of gain and offset of the colours.
        hold_out: every n-th task of a suite and every n-th initial state is held out.
        checkpoint_seconds: seconds between checkpoints.
        threads: processor threads of torch.
        seed: of initialisation, data order and augmentation.
    """

    minutes: float = 60.0
    steps: int = 0
    clips: int = 16
    targets: int = 8
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.998
    value_weight: float = 1.0
    success_weight: float = 0.3
    shift: int = 3
    jitter: float = 0.15
    hold_out: int = 5
    checkpoint_seconds: float = 120.0
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0 and self.steps <= 0:
            raise ValueError("RewardTraining: minutes and steps are both 0; give one of them")
        for name in ("clips", "targets", "warmup", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"RewardTraining.{name}: {getattr(self, name)} must be >= 1")


class FrameCache:
    """The frames of a store as the network takes them, in one file that is read by mapping it.

    Made once for a store: reading full pictures at random costs more than the training step.

    Args:
        store: where from.
        config: cameras, size and frames.
        folder: where the file lies; one that fits the store's episodes is used again.

    Attributes:
        frames: uint8 ``[N, cameras, s, s, 3]``.
        first: first row of each episode.
    """

    def __init__(self, store: EpisodeStore, config: RewardConfig, folder: str | Path) -> None:
        self.config = config
        lengths = np.diff(store.episode_ends, prepend=0)
        counts = -(-lengths // config.every)
        self.first = np.concatenate([[0], np.cumsum(counts)])
        size = config.image_size
        shape = (int(self.first[-1]), len(config.cameras), size, size, 3)
        cells = [h.extra.get("sample", h.extra.get("context")) for h in store.headers]
        facts = [config.cameras, config.every, size, lengths.tolist(), cells]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        path = Path(folder) / f"frames-{name}.npy"
        if not path.exists():
            self._make(store, path, shape)
        self.frames = np.load(path, mmap_mode="r")

    def rows(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """Rows of :attr:`frames` of a rollout, and the rollout's steps they show, int64 ``[N]``."""
        rows, steps, begun = [], [], 0
        for part in rollout.parts:
            shown = np.arange(
                -(-part.start // self.config.every) * self.config.every,
                part.stop,
                self.config.every,
            )
            rows.append(self.first[part.episode] + shown // self.config.every)
            steps.append(begun + shown - part.start)
            begun += part.stop - part.start
        return np.concatenate(rows), np.concatenate(steps)

    def _make(self, store: EpisodeStore, path: Path, shape: tuple[int, ...]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        made = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
        keys = [f"image/{name}" for name in self.config.cameras]
        for i in range(len(store)):
            steps = store.load(i, keys).steps
            for k, key in enumerate(keys):
                small = shrink(steps[key][:: self.config.every], self.config.image_size)
                made[self.first[i] : self.first[i + 1], k] = small
        made.flush()
        del made
        part.rename(path)


@dataclass(frozen=True)
class Batch:
    """Clips as the loss takes them.

    Attributes:
        frames: uint8 ``[B, L, cameras, s, s, 3]``.
        target: value of each of the last M frames, float32 ``[B, M]``.
        success: whether the task is done there, float32 ``[B, M]``.
        weight: 0 where a clip begins before its rollout, ``[B, M]``.
        instructions: one a clip.
    """

    frames: np.ndarray
    target: np.ndarray
    success: np.ndarray
    weight: np.ndarray
    instructions: list[str]


class Clips:
    """Random clips of rollouts; batch k depends on the seed and on k alone."""

    def __init__(
        self, rollouts: Sequence[Rollout], cache: FrameCache, training: RewardTraining
    ) -> None:
        if not rollouts:
            raise ValueError("Clips: no rollouts to train on")
        self.rollouts, self.cache, self.training = list(rollouts), cache, training
        self._rows = [cache.rows(rollout) for rollout in self.rollouts]

    def batch(self, k: int) -> Batch:
        """Batch number ``k``, augmented."""
        t, gap = self.training, self.cache.config.gap
        rng = np.random.default_rng((t.seed, k))
        length = t.targets + self.cache.config.history - 1
        chosen = rng.integers(len(self.rollouts), size=t.clips)
        parts: list[list[np.ndarray]] = [[], [], [], []]
        for i in chosen:
            rows, steps = self._rows[i]
            # Ends lie anywhere, so that the last frames of a rollout come as often as others.
            at = rng.integers(len(rows)) + np.arange(1 - length, 1) * gap
            real, place = at >= 0, np.maximum(at, 0)
            step = steps[place[-t.targets :]]
            parts[0].append(_moved(self.cache.frames[rows[place]], t, rng))
            parts[1].append(self.rollouts[i].target[step])
            parts[2].append(self.rollouts[i].success[step])
            parts[3].append(real[-t.targets :])
        frames, target, success, weight = (np.stack(part) for part in parts)
        words = [self.rollouts[i].header.instruction for i in chosen]
        return Batch(
            frames,
            target.astype(np.float32),
            success.astype(np.float32),
            weight.astype(np.float32),
            words,
        )


def _moved(frames: np.ndarray, t: RewardTraining, rng: np.random.Generator) -> np.ndarray:
    """A clip ``[L, cameras, s, s, 3]`` shifted and with other colours, each camera by itself."""
    out = np.empty_like(frames)
    size = frames.shape[2]
    for camera in range(frames.shape[1]):
        dy, dx = rng.integers(-t.shift, t.shift + 1, 2)
        ys = np.clip(np.arange(size) + dy, 0, size - 1)
        xs = np.clip(np.arange(size) + dx, 0, size - 1)
        gain = 1 + rng.uniform(-t.jitter, t.jitter, 3)
        offset = 128 * rng.uniform(-t.jitter, t.jitter, 3)
        table = np.clip(np.arange(256)[:, None] * gain + offset, 0, 255).astype(np.uint8)
        moved = frames[:, camera][:, ys][:, :, xs]
        for channel in range(3):
            out[:, camera, :, :, channel] = table[moved[..., channel], channel]
    return out


def loss(model: RewardModel, batch: Batch) -> dict[str, Tensor]:
    """``value`` and ``success``: mean cross-entropies over the real targets of a batch."""
    device = model.keys.weight.device
    distinct = list(dict.fromkeys(batch.instructions))
    text = model.read(distinct)[[distinct.index(words) for words in batch.instructions]]
    frames = torch.from_numpy(batch.frames).to(device)
    clips, length = frames.shape[:2]
    encoded = model.encode(frames.flatten(0, 1), text.repeat_interleave(length, dim=0))
    history, targets = model.config.history, batch.target.shape[1]
    # The clip's frames are `gap` apart already: a history is a run of neighbours.
    windows = encoded.view(clips, length, -1).unfold(1, history, 1).transpose(2, 3)
    logits = model.judge(windows.flatten(0, 1), text.repeat_interleave(targets, dim=0))
    logits = logits.view(clips, targets, 2)
    weight = torch.from_numpy(batch.weight).to(device)
    total = weight.sum().clamp_min(1)
    wanted = {"value": batch.target, "success": batch.success}
    return {
        name: F.binary_cross_entropy_with_logits(
            logits[..., i], torch.from_numpy(goal).to(device), weight=weight, reduction="sum"
        )
        / total
        for i, (name, goal) in enumerate(wanted.items())
    }


class RewardTrainer:
    """One training run in one folder: checkpoints, TensorBoard events and the model.

    The folder afterwards holds ``model/`` (moving average; for :meth:`RewardModel.load`, its meta
    has the split), ``step-<n>/`` (to resume), ``log.jsonl`` and TensorBoard's event files.

    Attributes:
        split: what is held out.
        clips: where batches come from.
        model: in training.
        average: moving average of its weights, by name.
        step: optimiser steps done.
        seconds: spent training.
    """

    def __init__(
        self,
        folder: str | Path,
        store: str | Path,
        *,
        model: RewardConfig | None = None,
        training: RewardTraining | None = None,
    ) -> None:
        """Prepare, or resume where the folder holds a checkpoint.

        Raises:
            ValueError: if the checkpoint is of a network of other sizes.
        """
        self.folder, self.training = Path(folder), training or RewardTraining()
        c = self.training
        torch.set_num_threads(c.threads)
        torch.manual_seed(c.seed)
        self.model = RewardModel(model)
        opened = EpisodeStore.open(store)
        rollouts = read_rollouts(opened)
        self.split = Split.make([rollout.header for rollout in rollouts], c.hold_out)
        cache = FrameCache(opened, self.model.config, self.folder / "cache")
        seen = [r for r in rollouts if self.split.of(r.header) == "train"]
        self.clips = Clips(seen, cache, c)
        named = dict(self.model.named_parameters())
        self.parameters = list(named.values())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.ndim > 1]},
                {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=c.lr,
            betas=(0.9, 0.99),
            weight_decay=c.weight_decay,
        )
        self.average = {name: p.detach().clone() for name, p in named.items()}
        self.step, self.seconds = 0, 0.0
        checkpoint = _latest(self.folder)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.model.train()

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        c = self.training
        by_time = self.seconds / 60 / c.minutes if c.minutes > 0 else 0.0
        by_step = self.step / c.steps if c.steps > 0 else 0.0
        return min(1.0, max(by_time, by_step))

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then a cosine to ``final_lr``."""
        c = self.training
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        warm = min(1.0, (self.step + 1) / c.warmup)
        return c.lr * warm * (c.final_lr + (1 - c.final_lr) * cosine)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimiser step; returns both losses and the norm of the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        losses = loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        c = self.training
        (c.value_weight * losses["value"] + c.success_weight * losses["success"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, c.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: gradient norm {norm.item()}")
        self.optimizer.step()
        decay = min(c.ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.values()), self.parameters, 1 - decay)
        self.step += 1
        return {**{k: v.item() for k, v in losses.items()}, "norm": norm.item()}

    def run(self, report: Callable[..., None] = lambda **_: None) -> RewardModel:
        """Train to the end; returns the averaged model, which is also in ``model/``.

        Args:
            report: called every 10 steps with ``step``, ``progress``, ``frames_per_second`` and the
                mean losses ``value`` and ``success`` since the last call.
        """
        from torch.utils.tensorboard import SummaryWriter

        c = self.training
        writer, log = SummaryWriter(str(self.folder)), JsonLines(self.folder / "log.jsonl")
        saved = told = time.perf_counter()
        losses: list[dict[str, float]] = []
        try:
            while self.progress < 1:
                began = time.perf_counter()
                batch = self.clips.batch(self.step)
                losses.append(self.train_step(batch))
                now = time.perf_counter()
                self.seconds += now - began
                if self.step % 10 == 0:
                    row = {k: float(np.mean([x[k] for x in losses])) for k in losses[0]}
                    count = len(losses) * math.prod(batch.frames.shape[:2])
                    row["frames_per_second"] = count / (now - told)
                    for name, value in row.items():
                        writer.add_scalar(name, value, self.step)
                    log.append({"step": self.step, "lr": self.learning_rate(), **row})
                    report(step=self.step, progress=self.progress, **row)
                    losses, told = [], time.perf_counter()
                if now - saved > c.checkpoint_seconds:
                    self.save()
                    saved = time.perf_counter()
        finally:
            writer.close()
        self.save()
        return self.averaged()

    def averaged(self) -> RewardModel:
        """A copy of the network with the averaged weights."""
        model = RewardModel(self.model.config)
        model.load_state_dict(self.average)
        return model.eval()

    def save(self) -> Path:
        """Write ``model/`` and a checkpoint, remove older ones; returns the checkpoint's folder."""
        settings = asdict(self.training)
        self.averaged().save(
            self.folder / "model",
            {"split": asdict(self.split), "step": self.step, "training": settings},
        )
        tensors = {f"average.{k}": v for k, v in self.average.items()}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        # Written under another name and renamed when complete: a kill leaves a whole one.
        part = self.folder / f".part-{_PREFIX}{self.step}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        plain = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
        save_file(plain, part / "tensors.safetensors")
        state = {"step": self.step, "seconds": self.seconds, "split": asdict(self.split)}
        (part / "state.json").write_text(json.dumps(state, indent=2))
        done = self.folder / f"{_PREFIX}{self.step}"
        shutil.rmtree(done, ignore_errors=True)
        part.rename(done)
        for old in self.folder.iterdir():
            if old != done and old.name.removeprefix(".part-").startswith(_PREFIX):
                shutil.rmtree(old)
        return done

    def _restore(self, checkpoint: Path) -> None:
        """Take up everything :meth:`save` wrote."""
        state = json.loads((checkpoint / "state.json").read_text())
        split = Split(**{k: tuple(v) for k, v in state["split"].items()})
        if split != self.split:
            raise ValueError(
                f"{checkpoint}: trained with another split, so that what is held out now may have "
                "been seen; train in an unused folder"
            )
        tensors = load_file(checkpoint / "tensors.safetensors")
        named = dict(self.model.named_parameters())
        shapes = {k: v.shape for k, v in tensors.items() if k.startswith("model.")}
        if shapes != {f"model.{k}": p.shape for k, p in named.items()}:
            raise ValueError(f"{checkpoint}: of a network of other sizes")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(tensors[f"model.{name}"])
                self.average[name].copy_(tensors[f"average.{name}"])
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                self.optimizer.state[named[name]][kind] = value
        self.step, self.seconds = state["step"], state["seconds"]


def _latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if (path / "state.json").exists()]
    return max(found, key=lambda path: int(path.name.removeprefix(_PREFIX)), default=None)
