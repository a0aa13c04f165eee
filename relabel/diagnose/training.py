"""Supervised fine-tuning of a diagnosis model: one file, top to bottom.

Each example is a question (pictures and prompt) and the answer to write; the loss is the
cross-entropy of the answer's tokens alone. All weights are trained, or low-rank adapters only
(LoRA, Hu et al. 2021, by peft), which are merged into the model when it is saved.
:mod:`regrasp.training.run` keeps the schedule, the checkpoints and the log.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.relabel.diagnose.frames import Question
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.training.run import Schedule, TrainingRun
from torch import Tensor

#: Names of the linear layers that LoRA adapts: attention and MLP of Llama-like language models.
#: SigLIP-like encoders share the names of the first three.
LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

#: Labels that the loss leaves out.
_IGNORED = -100


@dataclass(frozen=True)
class Example:
    """A question and the text that answers it (:attr:`Diagnosis.text`)."""

    question: Question
    answer: str


@dataclass(frozen=True)
class TuneConfig(Schedule):
    """Settings of a training run, beside those of its schedule.

    Attributes:
        batch: examples a step.
        lora_rank: rank of the adapters; 0 trains all weights.
        lora_alpha: their scale is ``lora_alpha / lora_rank``.
        lora_layers: names of the layers that get one.
        focus: weight in the loss of the first three lines' tokens (did it fail, which type, when)
            over the others'. They are a tenth of an answer, and all that most figures look at.
        bf16: multiply matrices in bfloat16; on processors that can, it takes 0.6 of the time.
        seed: of adapters and dropout.
    """

    minutes: float = 60.0
    batch: int = 16
    betas: tuple[float, float] = (0.9, 0.98)
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_layers: tuple[str, ...] = LORA_LAYERS
    focus: float = 1.0
    bf16: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_1("batch")


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


class Trainer(TrainingRun):
    """One training run in one folder: checkpoints, TensorBoard events and the model.

    The folder afterwards holds ``model/`` (for :meth:`DiagnosisModel.load`), ``step-<n>/`` (to
    resume), ``log.jsonl`` and TensorBoard's event files.

    Attributes:
        config: settings.
        diagnosis: the model in training.
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
            ValueError: if the checkpoint is of another model or of other adapters, or of a run with
                another batch, whose examples could not be counted on, or if the model has none of
                ``lora_layers``.
        """
        self.config = c = config or TuneConfig()
        self.diagnosis = model
        self.attention = model.model.config._attn_implementation
        if c.bf16 and model.device.type == "cpu":
            # On processors the fused attention's way back is slow in bfloat16.
            model.model.set_attn_implementation("eager")
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.model.forward).parameters
        network = _with_adapters(model.model, c) if c.lora_rank else model.model
        super().__init__(folder, network, c, about={"batch": c.batch})
        self.network.train()

    @property
    def seen(self) -> int:
        """Examples consumed so far."""
        return self.step * self.config.batch

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
        loss = self.loss(examples)
        return {"norm": self.update(loss), "loss": loss.item()}

    def run(
        self, examples: Iterable[Example], report: Callable[..., None] = lambda **_: None
    ) -> DiagnosisModel:
        """Train to the end, or until there are no more examples; returns the model.

        Args:
            examples: from number :attr:`seen` on, as :func:`shuffled` gives them.
            report: called every 10 steps with ``step``, ``progress``, ``loss`` (mean since the
                last call), ``examples_per_second``.
        """
        source = iter(examples)

        def step() -> dict[str, float]:
            batch = list(islice(source, self.config.batch))
            if len(batch) < self.config.batch:
                raise StopIteration
            return self.train_step(batch)

        def told(
            *, step: int, progress: float, loss: float, steps_per_second: float, **_: float
        ) -> None:
            speed = steps_per_second * self.config.batch
            report(step=step, progress=progress, loss=loss, examples_per_second=speed)

        self.loop(step, told)
        return self.finish()

    def finish(self) -> DiagnosisModel:
        """Merge adapters, write ``model/``, and return the model, no longer in training."""
        self.network.load_state_dict(self.averaged())
        if self.config.lora_rank:
            self.diagnosis.model = self.network = self.network.merge_and_unload()
        self.diagnosis.model.eval()
        self.diagnosis.model.set_attn_implementation(self.attention)
        self.diagnosis.save(self.folder / "model")
        return self.diagnosis


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
