"""Supervised fine-tuning of a diagnosis model: one file, top to bottom.

Each example is a question (pictures and prompt) and the answer to write; the loss is the
cross-entropy of the answer's tokens alone. All weights are trained, or low-rank adapters only
(LoRA, Hu et al. 2021, by peft), which are merged into the model when it is saved. AdamW, linear
warm-up, cosine schedule over steps or minutes, TensorBoard, resume.
"""

from __future__ import annotations

import inspect
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.jsonlines import JsonLines
from regrasp.relabel.diagnose.frames import Question
from regrasp.relabel.diagnose.model import DiagnosisModel
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Names of the linear layers that LoRA adapts: attention and MLP of Llama-like language models.
#: SigLIP-like encoders share the names of the first three.
LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

#: Labels that the loss leaves out.
_IGNORED = -100

_PREFIX = "step-"


@dataclass(frozen=True)
class Example:
    """A question and the text that answers it (:attr:`Diagnosis.text`)."""

    question: Question
    answer: str


@dataclass(frozen=True)
class TuneConfig:
    """Settings of a training run.

    Attributes:
        minutes: end after this many minutes of training; 0 means by ``steps`` alone. The schedule
            follows whichever is nearer its end.
        steps: end after this many optimiser steps; 0 means by ``minutes`` alone.
        batch: examples a step.
        lr: peak learning rate.
        final_lr: where the cosine ends, as a fraction of ``lr``.
        warmup: steps of linear warm-up.
        weight_decay: AdamW's, on matrices and kernels only.
        clip: largest norm of the gradient.
        lora_rank: rank of the adapters; 0 trains all weights.
        lora_alpha: their scale is ``lora_alpha / lora_rank``.
        lora_layers: names of the layers that get one.
        focus: weight in the loss of the first three lines' tokens (did it fail, which type, when)
            over the others'. They are a tenth of an answer, and all that most figures look at.
        bf16: multiply matrices in bfloat16; on processors that can, it takes 0.6 of the time.
        checkpoint_seconds: seconds between checkpoints.
        threads: processor threads of torch.
        seed: of adapters and dropout.
    """

    minutes: float = 60.0
    steps: int = 0
    batch: int = 16
    lr: float = 1e-3
    final_lr: float = 0.02
    warmup: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_layers: tuple[str, ...] = LORA_LAYERS
    focus: float = 1.0
    bf16: bool = True
    checkpoint_seconds: float = 120.0
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0 and self.steps <= 0:
            raise ValueError("TuneConfig: minutes and steps are both 0; give one of them")
        for name in ("batch", "warmup", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"TuneConfig.{name}: {getattr(self, name)} must be at least 1")


def shuffled[Item](items: Sequence[Item], seed: int, start: int = 0) -> Iterator[Item]:
    """``items`` for ever, each epoch in an order of its own.

    Args:
        items: what to go through.
        seed: of the orders.
        start: how many to pass over: a resumed run goes on with :attr:`Trainer.seen`.
    """
    epoch, skip = divmod(start, len(items))
    while True:
        for i in np.random.default_rng((seed, epoch)).permutation(len(items))[skip:]:
            yield items[int(i)]
        epoch, skip = epoch + 1, 0


def collate(model: DiagnosisModel, examples: Sequence[Example]) -> tuple[dict[str, Tensor], Tensor]:
    """A batch of examples.

    The questions are padded on the left and the answers on the right, so that all answers begin in
    the same column, and are cut into tokens by themselves, as they will be when generated.

    Returns:
        the model's inputs, questions and answers, ``[B, Q + A]``; and the answers' tokens
        ``[B, A]``, -100 where there is none.
    """
    inputs = model.inputs([example.question for example in examples])
    end = model.tokenizer.eos_token_id
    written = [
        [*model.tokenizer(example.answer, add_special_tokens=False)["input_ids"], end]
        for example in examples
    ]
    longest = max(len(tokens) for tokens in written)
    labels = torch.tensor([w + [_IGNORED] * (longest - len(w)) for w in written])
    labels = labels.to(model.device)
    real = (labels != _IGNORED).long()
    shape = inputs["input_ids"].shape
    for key, value in inputs.items():
        if key == "input_ids":
            added = torch.where(real.bool(), labels, model.tokenizer.pad_token_id)
        elif key == "attention_mask":
            added = real
        elif value.shape == shape:  # kinds of tokens, as some processors give them: text
            added = torch.zeros_like(labels)
        else:
            continue
        inputs[key] = torch.cat([value, added.to(value.dtype)], dim=1)
    return inputs, labels


def token_weights(
    model: DiagnosisModel, examples: Sequence[Example], labels: Tensor, focus: float
) -> Tensor:
    """Weight of each label of :func:`collate` in the loss, ``[B, A]``; 0 where there is none.

    Raises:
        NotImplementedError: ``focus`` is not 1, and the tokenizer cannot say which characters a
            token stands for.
    """
    weights = (labels != _IGNORED).float()
    if focus == 1.0:
        return weights
    for row, example in enumerate(examples):
        head = len("\n".join(example.answer.split("\n")[:3]))
        written = model.tokenizer(
            example.answer, add_special_tokens=False, return_offsets_mapping=True
        )
        count = sum(start < head for start, _ in written["offset_mapping"])
        weights[row, :count] *= focus
    return weights


class Trainer:
    """One training run in one folder: checkpoints, TensorBoard events and the model.

    The folder afterwards holds ``model/`` (for :meth:`DiagnosisModel.load`), ``step-<n>/`` (to
    resume), ``log.jsonl`` and TensorBoard's event files.

    Attributes:
        diagnosis: the model in training.
        step: optimiser steps done.
        seen: examples consumed.
        seconds: spent training.
    """

    def __init__(
        self, folder: str | Path, model: DiagnosisModel, config: TuneConfig | None = None
    ) -> None:
        """Prepare, or resume where the folder holds a checkpoint.

        Args:
            folder: of this run.
            model: to start from; trained in place.
            config: settings.

        Raises:
            ValueError: if the checkpoint is of another model or of other adapters, or if the model
                has none of ``lora_layers``.
        """
        self.folder, self.config = Path(folder), config or TuneConfig()
        c = self.config
        torch.set_num_threads(c.threads)
        self.diagnosis = model
        self.attention = model.model.config._attn_implementation
        if c.bf16 and model.device.type == "cpu":
            # On processors the fused attention's way back is slow in bfloat16.
            model.model.set_attn_implementation("eager")
        self.network = _with_adapters(model.model, c) if c.lora_rank else model.model
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.model.forward).parameters
        self.named = {n: p for n, p in self.network.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.ndim > 1]},
                {"params": [p for p in self.parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=c.lr,
            betas=(0.9, 0.98),
            weight_decay=c.weight_decay,
        )
        self.step, self.seconds = 0, 0.0
        checkpoint = _latest(self.folder)
        if checkpoint is not None:
            self._restore(checkpoint)
        self.network.train()

    @property
    def seen(self) -> int:
        """Examples consumed so far."""
        return self.step * self.config.batch

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        by_time = self.seconds / 60 / self.config.minutes if self.config.minutes > 0 else 0.0
        by_step = self.step / self.config.steps if self.config.steps > 0 else 0.0
        return min(1.0, max(by_time, by_step))

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then a cosine to ``final_lr``."""
        c = self.config
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress))
        return (
            c.lr * min(1.0, (self.step + 1) / c.warmup) * (c.final_lr + (1 - c.final_lr) * cosine)
        )

    def loss(self, examples: Sequence[Example]) -> Tensor:
        """Mean cross-entropy of the answers' tokens, weighted by :func:`token_weights`."""
        inputs, labels = collate(self.diagnosis, examples)
        answer = labels.shape[1]
        # The token before an answer predicts its first one. The rest need no logits.
        keep = {"logits_to_keep": answer + 1} if self.keeps_logits else {}
        device = self.diagnosis.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.config.bf16):
            logits = self.network(**inputs, use_cache=False, **keep).logits
        predicted = logits[:, -(answer + 1) : -1].float()
        each = torch.nn.functional.cross_entropy(
            predicted.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none"
        )
        weights = token_weights(self.diagnosis, examples, labels, self.config.focus)
        return (weights * each).sum() / weights.sum()

    def train_step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimiser step; returns ``loss`` and ``norm`` of the gradient."""
        # The same noise in a resumed run as in an unbroken one.
        torch.manual_seed(self.config.seed + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.loss(examples)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step}: gradient norm {norm.item()}")
        self.optimizer.step()
        self.step += 1
        return {"loss": loss.item(), "norm": norm.item()}

    def run(
        self, examples: Iterable[Example], report: Callable[..., None] = lambda **_: None
    ) -> DiagnosisModel:
        """Train to the end, or until there are no more examples; returns the model.

        Args:
            examples: from number :attr:`seen` on, as :func:`shuffled` gives them.
            report: called every 10 steps with ``step``, ``progress``, ``loss`` (mean since the
                last call), ``examples_per_second``.
        """
        from torch.utils.tensorboard import SummaryWriter

        c = self.config
        source = iter(examples)
        writer, log = SummaryWriter(str(self.folder)), JsonLines(self.folder / "log.jsonl")
        saved = told = time.perf_counter()
        losses: list[float] = []
        try:
            while self.progress < 1:
                began = time.perf_counter()
                batch = list(islice(source, c.batch))
                if len(batch) < c.batch:
                    break
                losses.append(self.train_step(batch)["loss"])
                now = time.perf_counter()
                self.seconds += now - began
                if self.step % 10 == 0:
                    row = {
                        "loss": sum(losses) / len(losses),
                        "examples_per_second": len(losses) * c.batch / (now - told),
                        "lr": self.learning_rate(),
                    }
                    for name, value in row.items():
                        writer.add_scalar(name, value, self.step)
                    log.append({"step": self.step, **row})
                    report(step=self.step, progress=self.progress, **row)
                    losses, told = [], time.perf_counter()
                if now - saved > c.checkpoint_seconds:
                    self.save()
                    saved = time.perf_counter()
        finally:
            writer.close()
        self.save()
        return self.finish()

    def finish(self) -> DiagnosisModel:
        """Merge adapters, write ``model/``, and return the model, no longer in training."""
        if self.config.lora_rank:
            self.diagnosis.model = self.network = self.network.merge_and_unload()
        self.diagnosis.model.eval()
        self.diagnosis.model.set_attn_implementation(self.attention)
        self.diagnosis.save(self.folder / "model")
        return self.diagnosis

    def save(self) -> Path:
        """Write a checkpoint of what is trained and remove the older ones; returns its folder."""
        tensors = {f"model.{name}": p for name, p in self.named.items()}
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        # Written under another name and renamed when complete: a kill leaves a whole one.
        part = self.folder / f".part-{_PREFIX}{self.step}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(
            {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()},
            part / "tensors.safetensors",
        )
        state = {"step": self.step, "seconds": self.seconds, "config": asdict(self.config)}
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
        tensors = load_file(checkpoint / "tensors.safetensors")
        weights = {k.removeprefix("model."): v for k, v in tensors.items() if k[:6] == "model."}
        shapes = {name: value.shape for name, value in weights.items()}
        if shapes != {name: p.shape for name, p in self.named.items()}:
            raise ValueError(f"{checkpoint}: of another model or other adapters")
        with torch.no_grad():
            for name, value in weights.items():
                self.named[name].copy_(value)
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                parameter = self.named[name]
                moved = value.to(parameter.device) if value.ndim else value
                self.optimizer.state[parameter][kind] = moved
        state = json.loads((checkpoint / "state.json").read_text())
        self.step, self.seconds = state["step"], state["seconds"]
        if state["config"]["batch"] != self.config.batch:
            raise ValueError(
                f"{checkpoint}: batch was {state['config']['batch']}, now {self.config.batch}; "
                "examples could not be counted on"
            )


def _with_adapters(model: Any, config: TuneConfig) -> Any:
    """The model with LoRA adapters, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(config.seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=list(config.lora_layers),
        ),
    )


def _latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = [p for p in folder.glob(f"{_PREFIX}*") if (p / "state.json").exists()]
    return max(found, key=lambda p: int(p.name.removeprefix(_PREFIX)), default=None)
