"""Training of the progress model from stores of failure samples: one file, top to bottom.

Clips of consecutive frames are drawn from rollouts, each frame is encoded once, and every frame
that has its history gives one target. The loss is the cross-entropy of the value against the soft
target and of the success output against the predicate. What is saved is the moving average of the
weights; :mod:`regrasp.training.run` keeps it, with the schedule, the checkpoints and the log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.reward import RewardConfig, RewardModel, shrink
from regrasp.relabel.rollouts import Rollout, Split, read_rollouts
from regrasp.training.run import Schedule, TrainingRun
from torch import Tensor


@dataclass(frozen=True)
class RewardTraining(Schedule):
    """Settings of a training run, beside those of its schedule.

    Attributes:
        clips: clips a step.
        targets: values of a clip, ``gap`` frames apart.
        value_weight: of the value's loss; 0 trains a success classifier alone, as a baseline.
        success_weight: of the success output's loss.
        shift: pixels by which pictures are moved at most.
        jitter: of gain and offset of the colours.
        hold_out: every n-th task of a suite and every n-th initial state is held out.
        seed: of initialisation, data order and augmentation.
    """

    minutes: float = 15.0
    clips: int = 16
    targets: int = 8
    ema: float = 0.998
    value_weight: float = 1.0
    success_weight: float = 0.3
    shift: int = 3
    jitter: float = 0.15
    hold_out: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("clips", "targets")


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


class RewardTrainer(TrainingRun):
    """One training run in one folder: checkpoints, TensorBoard events and the model.

    The folder afterwards holds ``model/`` (moving average; for :meth:`RewardModel.load`, its meta
    has the split), ``step-<n>/`` (to resume), ``log.jsonl`` and TensorBoard's event files.

    Attributes:
        training: settings.
        split: what is held out.
        clips: where batches come from.
        model: in training.
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
            ValueError: the checkpoint is of a network of other sizes, or was trained with another
                split, so that what is held out now may have been seen.
        """
        self.training = c = training or RewardTraining()
        torch.manual_seed(c.seed)
        self.model = RewardModel(model)
        opened = EpisodeStore.open(store)
        rollouts = read_rollouts(opened)
        self.split = Split.make([rollout.header for rollout in rollouts], c.hold_out)
        cache = FrameCache(opened, self.model.config, Path(folder) / "cache")
        seen = [r for r in rollouts if self.split.of(r.header) == "train"]
        self.clips = Clips(seen, cache, c)
        super().__init__(folder, self.model, c, about={"split": asdict(self.split)})
        self.model.train()

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimiser step; returns both losses and the norm of the gradient."""
        losses, c = loss(self.model, batch), self.training
        total = c.value_weight * losses["value"] + c.success_weight * losses["success"]
        norm = self.update(total)
        return {**{k: v.item() for k, v in losses.items()}, "norm": norm}

    def run(self, report: Callable[..., None] = lambda **_: None) -> RewardModel:
        """Train to the end; returns the averaged model, which is also in ``model/``.

        Args:
            report: called every 10 steps with ``step``, ``progress``, ``frames_per_second`` and the
                means since the last call of ``value``, ``success`` (losses) and ``norm``.
        """
        t = self.training
        frames = t.clips * (t.targets + self.model.config.history - 1)

        def told(*, steps_per_second: float, lr: float, **row: float) -> None:
            report(frames_per_second=steps_per_second * frames, **row)

        self.loop(lambda: self.train_step(self.clips.batch(self.step)), told, saved=self._export)
        return self.averaged_model()

    def averaged_model(self) -> RewardModel:
        """A copy of the network with the averaged weights."""
        model = RewardModel(self.model.config)
        model.load_state_dict(self.averaged())
        return model.eval()

    def _export(self) -> None:
        """Write the model of this moment."""
        self.averaged_model().save(
            self.folder / "model",
            {"split": asdict(self.split), "step": self.step, "training": asdict(self.training)},
        )
