"""One training run in one folder: schedule, optimiser step, moving average, resume, log.

Trainers bring a network and a loss; what happens around them is the same for a policy, a reward
model, a world model and a diagnosis model, and is here. A checkpoint is a folder ``step-<n>`` with
``tensors.safetensors`` (weights, moving average, AdamW's moments) and ``state.json``; it is written
under another name and renamed when complete, so that a kill at any byte leaves a whole one, and
nothing in it is a pickle.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from regrasp.episodes.jsonlines import JsonLines
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_PREFIX = "step-"


@dataclass(frozen=True)
class Schedule:
    """How long a run is, and how its optimiser is driven; trainers' settings are made from it.

    Attributes:
        minutes: end after this many minutes of training; 0 means by ``steps`` alone. The learning
            rate follows whichever is nearer its end.
        steps: end after this many optimiser steps; 0 means by ``minutes`` alone.
        lr: peak learning rate.
        final_lr: where the cosine ends, as a fraction of ``lr``.
        warmup: steps of linear warm-up.
        weight_decay: AdamW's, on matrices and kernels only.
        betas: AdamW's.
        clip: largest norm of the gradient.
        ema: decay of the moving average of the weights (lower in the first steps); 0 keeps none.
        checkpoint_seconds: seconds between checkpoints.
        threads: processor threads of torch.
    """

    minutes: float = 0.0
    steps: int = 0
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: int = 100
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    ema: float = 0.0
    checkpoint_seconds: float = 120.0
    threads: int = 2

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.minutes <= 0 and self.steps <= 0:
            raise ValueError(f"{kind}: minutes and steps are both 0; give one of them")
        self._at_least_1("warmup", "threads")
        if not 0.0 <= self.ema < 1.0:
            raise ValueError(f"{kind}.ema: {self.ema}; at least 0 and below 1")

    def _at_least_1(self, *names: str) -> None:
        """ValueError naming the first of these fields that is less."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{type(self).__name__}.{name}: {getattr(self, name)} must be at least 1"
                )


class TrainingRun:
    """The state of one run; a new one in the same folder goes on where it was.

    Attributes:
        folder: of checkpoints, ``log.jsonl`` and TensorBoard's events.
        schedule: its settings.
        network: what is trained, in place.
        named: its trainable parameters, by name.
        average: their moving average, by name; empty where the schedule keeps none.
        step: optimiser steps done.
        seconds: spent in :meth:`loop`.
    """

    def __init__(
        self,
        folder: str | Path,
        network: nn.Module,
        schedule: Schedule,
        *,
        about: Mapping[str, Any] | None = None,
        extra: Mapping[str, Tensor | torch.Generator] | None = None,
    ) -> None:
        """Prepare, or resume where the folder holds a checkpoint.

        Args:
            folder: of this run.
            network: its parameters that require a gradient are trained and stored; in a
                checkpoint, its buffers are left out.
            schedule: settings.
            about: what must be the same for a run to be continued (data, seed, sizes), as JSON.
            extra: further tensors and generators that a checkpoint keeps, restored in place.

        Raises:
            ValueError: the checkpoint is of another network, or of a run with another ``about``.
        """
        self.folder, self.schedule, self.network = Path(folder), schedule, network
        torch.set_num_threads(schedule.threads)
        self.named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        self._parameters = list(self.named.values())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.ndim > 1]},
                {"params": [p for p in self._parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=schedule.lr,
            betas=schedule.betas,
            weight_decay=schedule.weight_decay,
            fused=True,
        )
        self.average = {}
        if schedule.ema:
            self.average = {n: p.detach().clone() for n, p in self.named.items()}
        self._about = json.loads(json.dumps(about or {}))
        self._extra = dict(extra or {})
        self.step, self.seconds = 0, 0.0
        checkpoint = latest(self.folder)
        if checkpoint is not None:
            self._restore(checkpoint)

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        s = self.schedule
        by_time = self.seconds / 60 / s.minutes if s.minutes > 0 else 0.0
        by_step = self.step / s.steps if s.steps > 0 else 0.0
        return min(1.0, max(by_time, by_step))

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then a cosine to ``final_lr``."""
        s = self.schedule
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return (
            s.lr * min(1.0, (self.step + 1) / s.warmup) * (s.final_lr + (1 - s.final_lr) * cosine)
        )

    def update(self, loss: Tensor) -> float:
        """One optimiser step down the gradient of ``loss``; returns the gradient's norm.

        Raises:
            FloatingPointError: the gradient is not finite; nothing was changed.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.schedule.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: gradient norm {norm.item()}")
        self._optimizer.step()
        if self.average:
            decay = min(self.schedule.ema, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(list(self.average.values()), self._parameters, 1 - decay)
        self.step += 1
        return float(norm)

    def loop(
        self,
        train_step: Callable[[], dict[str, float]],
        report: Callable[..., None] = lambda **_: None,
        *,
        every: int = 10,
        timers: Mapping[float, Callable[[], Mapping[str, float] | None]] | None = None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        """Take steps to the end, or until ``train_step`` raises StopIteration.

        Args:
            train_step: one step, with one call of :meth:`update`; returns what is to be logged.
            report: called every ``every`` steps with ``step``, ``progress``, ``steps_per_second``
                (of :attr:`seconds`) and the means of what ``train_step`` returned since then.
            every: steps between lines of the log; the run's last step has one too.
            timers: seconds -> what is done whenever as many have passed and after the last step
                (validation); what it returns is logged.
            saved: called after every checkpoint, the last one included (to export the model).
        """
        from torch.utils.tensorboard import SummaryWriter

        writer, log = SummaryWriter(str(self.folder)), JsonLines(self.folder / "log.jsonl")
        kept, told = time.perf_counter(), self.seconds
        timers = timers or {}
        due = {seconds: kept + seconds for seconds in timers}
        acted = dict.fromkeys(timers, -1)
        rows: list[dict[str, float]] = []

        def act(seconds: float) -> None:
            values = timers[seconds]()
            if values:
                self.write(writer, log, values)
            due[seconds], acted[seconds] = time.perf_counter() + seconds, self.step

        try:
            while self.progress < 1:
                began = time.perf_counter()
                try:
                    rows.append(train_step())
                except StopIteration:
                    break
                now = time.perf_counter()
                self.seconds += now - began
                if self.step % every == 0 or self.progress >= 1:
                    row = _means(rows)
                    row["lr"] = self.learning_rate()
                    row["steps_per_second"] = len(rows) / (self.seconds - told)
                    self.write(writer, log, row)
                    report(step=self.step, progress=self.progress, **row)
                    rows, told = [], self.seconds
                if now - kept > self.schedule.checkpoint_seconds:
                    self.save()
                    saved()
                    kept = time.perf_counter()
                for seconds in timers:
                    if now > due[seconds]:
                        act(seconds)
            for seconds in timers:
                if acted[seconds] != self.step:
                    act(seconds)
        finally:
            writer.close()
        self.save()
        saved()

    def write(self, writer: Any, log: JsonLines, row: Mapping[str, float]) -> None:
        """One row to TensorBoard and to ``log.jsonl``."""
        for name, value in row.items():
            writer.add_scalar(name, value, self.step)
        line = {name: float(f"{value:.5g}") for name, value in row.items()}
        log.append({"step": self.step, "seconds": round(self.seconds, 1), **line})

    def save(self) -> Path:
        """Write a checkpoint and remove the older ones; returns its folder."""
        tensors = {f"model.{name}": p for name, p in self.named.items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for name, value in self._extra.items():
            state = value.get_state() if isinstance(value, torch.Generator) else value
            tensors[f"extra.{name}"] = state
        for name, parameter in self.named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        part = self.folder / f".part-{_PREFIX}{self.step}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        plain = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
        save_file(plain, part / "tensors.safetensors")
        facts = {"step": self.step, "seconds": self.seconds, "about": self._about}
        (part / "state.json").write_text(json.dumps(facts, indent=2))
        done = self.folder / f"{_PREFIX}{self.step}"
        shutil.rmtree(done, ignore_errors=True)
        part.rename(done)
        for old in self.folder.iterdir():
            if old != done and old.name.removeprefix(".part-").startswith(_PREFIX):
                shutil.rmtree(old)
        return done

    def averaged(self) -> dict[str, Tensor]:
        """The network's state dict with the averaged weights in place of its own."""
        return self.network.state_dict() | self.average

    def _restore(self, checkpoint: Path) -> None:
        """Take up everything :meth:`save` wrote."""
        facts = json.loads((checkpoint / "state.json").read_text())
        begun = facts["about"]
        other = [k for k in {**begun, **self._about} if begun.get(k) != self._about.get(k)]
        if other:
            was, now = ({k: about.get(k) for k in other} for about in (begun, self._about))
            raise ValueError(f"{checkpoint}: begun with {was}, now {now}; use another folder")
        tensors = load_file(checkpoint / "tensors.safetensors")
        shapes = {k: tuple(v.shape) for k, v in tensors.items() if k.startswith("model.")}
        mine = {f"model.{k}": tuple(p.shape) for k, p in self.named.items()}
        if shapes != mine:
            wrong = sorted(k for k in {*shapes, *mine} if shapes.get(k) != mine.get(k))
            raise ValueError(f"{checkpoint}: of another network; it differs in {wrong[:3]}")
        with torch.no_grad():
            for kind, values in (("model", self.named), ("average", self.average)):
                for name, value in values.items():
                    value.copy_(tensors[f"{kind}.{name}"])
            for name, value in self._extra.items():
                state = tensors[f"extra.{name}"]
                if isinstance(value, torch.Generator):
                    value.set_state(state)
                else:
                    value.copy_(state)
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                parameter = self.named[name]
                if kind != "step":  # in the parameter's own memory layout, as fused AdamW needs it
                    value = torch.empty_like(parameter).copy_(value)
                self._optimizer.state[parameter][kind] = value.to(parameter.device)
        self.step, self.seconds = facts["step"], facts["seconds"]


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each value by name, over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def latest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = [p for p in Path(folder).glob(f"{_PREFIX}*") if (p / "state.json").exists()]
    return max(found, key=lambda p: int(p.name.removeprefix(_PREFIX)), default=None)
