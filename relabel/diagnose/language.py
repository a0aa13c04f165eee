"""Second stage of the small diagnosis model: its language model learns to answer.

The vision encoder is done (:mod:`regrasp.relabel.diagnose.encoder`) and its output for every moment
lies in a file; trained are the connector, the language model and, thrown away afterwards, heads on
the hidden state after each moment that say whether it has gone wrong by then, in which way, how far
the task has come and whether its goal holds. So every moment teaches, not only the answer's few
words, and what is learned first is to follow the episode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from regrasp.relabel.diagnose.dense import UNKNOWN, Dense
from regrasp.relabel.diagnose.frames import Question, moment
from regrasp.relabel.diagnose.labels import CLASSES
from regrasp.relabel.diagnose.metrics import NEAR
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.relabel.diagnose.pictures import Pictures
from regrasp.relabel.diagnose.training import shuffled
from regrasp.training.run import Schedule, TrainingRun
from torch import Tensor, nn

#: What a token of an answer says. All but the first are a tenth of an answer, and all that most
#: figures look at: so they weigh more in the loss.
WORDS, FAILED, CLASS, WHEN, CAUSE = range(5)
WEIGHTS = torch.tensor([1.0, 16.0, 8.0, 8.0, 8.0])

_IGNORED = -100


@dataclass(frozen=True)
class LanguageConfig:
    """Settings of the second stage.

    Attributes:
        schedule: length and optimiser.
        batch: examples a step.
        moments: weight of the heads' losses beside the answer's.
        drop: share of pictures that are hidden in training.
        bf16: multiply matrices in bfloat16.
        seed: of order, moments and heads.
    """

    schedule: Schedule = field(
        default_factory=lambda: Schedule(minutes=12.0, warmup=200, ema=0.998, weight_decay=0.1)
    )
    batch: int = 16
    moments: float = 0.5
    drop: float = 0.1
    bf16: bool = True
    seed: int = 0


class Prompts:
    """Questions and answers as tokens, without handling a picture.

    Args:
        model: whose processor it stands in for; counts by moments.
    """

    def __init__(self, model: DiagnosisModel) -> None:
        self._model, self._tokenizer = model, model.tokenizer
        self.pad = model.tokenizer.pad_token_id
        self.image = model.model.config.image_token_id
        self.labels = torch.tensor(
            [model.tokenizer.convert_tokens_to_ids(moment(i)) for i in range(model.choice.frames)]
        )
        self.block: list[int] = []
        if not model.choice.blank:
            self.block = _block(model)

    def question(self, question: Question) -> list[int]:
        """Tokens of a question, as :meth:`DiagnosisModel.inputs` gives them."""
        text = self._model.processor.apply_chat_template(
            question.messages, add_generation_prompt=True
        )
        tokens: list[int] = []
        for i, piece in enumerate(text.split("<image>")):
            tokens += self.block if i else []
            if piece:
                tokens += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        return tokens

    def answer(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of an answer with its end, and what each says (:data:`WORDS` and so on)."""
        written = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = _spans(text)
        roles = [
            next((role for start, end, role in spans if start <= at < end), WORDS)
            for at, _ in written["offset_mapping"]
        ]
        return [*written["input_ids"], self._tokenizer.eos_token_id], [*roles, WORDS]


class Student(nn.Module):
    """Connector and language model of a diagnosis model, shared, with heads on every moment.

    Args:
        model: the small model.
        prompts: how it is asked.
    """

    def __init__(self, model: DiagnosisModel, prompts: Prompts) -> None:
        super().__init__()
        network = model.model
        self.connector, self.text = network.model.connector, network.model.text_model
        self.writer = network.lm_head
        width = network.config.text_config.hidden_size
        self.heads = nn.ModuleDict(
            {
                "wrong": nn.Linear(width, 2),
                "kind": nn.Linear(width, len(CLASSES) + 1),
                "success": nn.Linear(width, 2),
                "progress": nn.Linear(width, 1),
            }
        )
        self._image, self._labels = prompts.image, prompts.labels
        # Tokens from a moment's name to its last picture's end.
        self._long = len(prompts.block) * len(model.choice.cameras)

    def forward(self, batch: Batch, drop: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits before each token of the answers ``[B, A, V]``, and what the heads say ``[B, F]``.

        Args:
            batch: examples.
            drop: share of pictures that are hidden.
        """
        embedded = self.text.get_input_embeddings()(batch.tokens)
        if batch.features is not None:
            tokens = self.connector(batch.features.flatten(0, 2))
            if drop:
                tokens = tokens * (torch.rand(len(tokens), 1, 1) >= drop)
            pictures = batch.tokens == self._image
            embedded = embedded.masked_scatter(pictures[..., None], tokens.to(embedded.dtype))
        hidden = self.text(
            inputs_embeds=embedded, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
        length = batch.labels.shape[1]
        logits = self.writer(hidden[:, -(length + 1) : -1])
        # Names of moments stand in questions and, again, in answers.
        asked = torch.isin(batch.tokens[:, :-length], self._labels)
        after = asked.nonzero()[:, 1].view(len(hidden), -1) + self._long
        ends = hidden.gather(1, after[..., None].expand(-1, -1, hidden.shape[-1]))
        return logits, {name: head(ends) for name, head in self.heads.items()}


@dataclass(frozen=True)
class Batch:
    """Examples as the student takes them.

    Attributes:
        tokens: questions, padded on the left, and answers, padded on the right, ``[B, Q + A]``.
        mask: 0 where padded.
        labels: the answers ``[B, A]``, -100 where padded.
        roles: what each label says, ``[B, A]``; where padded, anything.
        features: of the moments shown, ``[B, frames, cameras, patches, width]``; None if blank.
        truth: name -> of each moment, ``[B, frames]``.
        starts: control step of the onset, -1 for successes ``[B]``; steps: of each moment.
    """

    tokens: Tensor
    mask: Tensor
    labels: Tensor
    roles: Tensor
    features: Tensor | None
    truth: dict[str, Tensor]
    starts: np.ndarray
    steps: np.ndarray


class Lessons:
    """Batches of clips for the student.

    Args:
        prompts: how they are asked.
        pictures: of the clips.
        features: of their moments (:class:`Encoded`); None where the choice is blank.
        dense: truths of their moments.
    """

    def __init__(
        self, prompts: Prompts, pictures: Pictures, features: np.ndarray | None, dense: Dense
    ) -> None:
        self.prompts, self.pictures, self.dense = prompts, pictures, dense
        self.features = features

    def batch(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Batch:
        """The examples of some clips; with ``rng``, moments vary."""
        asked, answers, roles, chosen, steps = [], [], [], [], []
        for i in rows:
            at = self.pictures.chosen(i, rng)
            question = self.pictures.pose(i, at, ())
            asked.append(self.prompts.question(question))
            written, said = self.prompts.answer(self.pictures.answer(i, question.steps))
            answers.append(written)
            roles.append(said)
            chosen.append(at)
            steps.append(question.steps)
        index = np.asarray(rows)[:, None], np.stack(chosen)
        tokens, mask, labels = _padded(asked, answers, self.prompts)
        longest = labels.shape[1]
        truth = {
            "wrong": self.dense.wrong[index],
            "kind": self.dense.kind[index],
            "success": self.dense.success[index],
            "progress": self.dense.measures[index][..., -1],
        }
        clips = [self.pictures.clips[i].truth for i in rows]
        return Batch(
            tokens,
            mask,
            labels,
            torch.tensor([said + [WORDS] * (longest - len(said)) for said in roles]),
            None if self.features is None else torch.from_numpy(self.features[index]).float(),
            {name: torch.from_numpy(value) for name, value in truth.items()},
            np.array([clip.start if clip.failed else -1 for clip in clips]),
            np.array(steps),
        )


def losses_of(
    logits: Tensor, heads: dict[str, Tensor], batch: Batch, config: LanguageConfig
) -> dict[str, Tensor]:
    """``answer`` and ``moments``, the second with its weight."""
    each = nn.functional.cross_entropy(
        logits.float().transpose(1, 2), batch.labels, ignore_index=_IGNORED, reduction="none"
    )
    weights = WEIGHTS[batch.roles] * (batch.labels != _IGNORED)
    truth = batch.truth
    parts = [
        nn.functional.cross_entropy(
            heads[name].float().flatten(0, 1), truth[name].flatten(), ignore_index=UNKNOWN
        )
        for name in ("wrong", "kind", "success")
    ]
    progress = heads["progress"].float().squeeze(-1)
    parts.append(4 * nn.functional.mse_loss(progress, truth["progress"]))
    return {
        "answer": (weights * each).sum() / weights.sum(),
        "moments": config.moments * torch.stack(parts).sum(),
    }


def train_language(
    folder: str | Path,
    model: DiagnosisModel,
    lessons: Lessons,
    rows: Sequence[int],
    config: LanguageConfig,
    report: Callable[..., None] = lambda **_: None,
    *,
    check: Sequence[int] = (),
    checked: Callable[[dict[str, float]], None] = lambda _: None,
) -> DiagnosisModel:
    """Train connector and language model in place, or go on where the folder's run was.

    Args:
        folder: of the run.
        model: with a trained encoder.
        lessons: what it learns from.
        rows: clips to learn from; one that is named twice comes twice as often.
        config: settings.
        report: as in :meth:`TrainingRun.loop`.
        check: clips that are not learned from, tried every two minutes and at the end.
        checked: is told how that went (:func:`tried`).
    """
    torch.manual_seed(config.seed)
    student = Student(model, lessons.prompts)
    about = {"batch": config.batch, "seed": config.seed, "clips": len(lessons.pictures)}
    run = TrainingRun(folder, student, config.schedule, about=about)
    order = shuffled(rows, config.seed, run.step * config.batch)

    def step() -> dict[str, float]:
        torch.manual_seed(config.seed + run.step)
        rng = np.random.default_rng((config.seed, run.step))
        batch = lessons.batch([next(order) for _ in range(config.batch)], rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
            logits, heads = student(batch, config.drop)
        losses = losses_of(logits, heads, batch, config)
        run.update(sum(losses.values()))
        return {name: value.item() for name, value in losses.items()}

    def look() -> dict[str, float]:
        own = {name: value.clone() for name, value in student.state_dict().items()}
        student.load_state_dict(run.averaged())
        found = tried(student, lessons, check, config)
        student.load_state_dict(own)
        checked({"step": run.step, **found})
        return {f"check/{name}": value for name, value in found.items()}

    run.loop(step, report, timers={120.0: look} if check else {})
    if run.average:
        student.load_state_dict(run.averaged())
    model.model.eval()
    return model


@torch.inference_mode()
def tried(
    student: Student, lessons: Lessons, rows: Sequence[int], config: LanguageConfig
) -> dict[str, float]:
    """How the student does on clips, given the right answer up to each token it is asked for.

    Returns:
        ``answer`` and ``moments`` losses; the shares of ``failures`` and of ``successes`` that are
        called so; of the failures those whose ``type`` and whose ``onset`` (within :data:`NEAR`
        steps) is right.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(rows), 32):
        batch = lessons.batch(rows[start : start + 32])
        with torch.autocast("cpu", torch.bfloat16, enabled=config.bf16):
            logits, heads = student(batch)
        for name, value in losses_of(logits, heads, batch, config).items():
            found[name].append(value.item())
        said = logits.argmax(dim=-1)
        right = said == batch.labels
        labels = lessons.prompts.labels
        for i, onset in enumerate(batch.starts):
            failed = "failures" if onset >= 0 else "successes"
            found[failed].append(float(right[i][batch.roles[i] == FAILED].all()))
            if onset >= 0:
                found["type"].append(float(right[i][batch.roles[i] == CLASS].all()))
                first = (torch.isin(batch.labels[i], labels)).nonzero()[0, 0]
                which = (labels == said[i, first]).nonzero()
                near = len(which) and abs(batch.steps[i, which[0, 0]] - onset) <= NEAR
                found["onset"].append(float(near))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _padded(
    asked: list[list[int]], answers: list[list[int]], prompts: Prompts
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and labels of a batch: all answers begin in the same column."""
    pad = prompts.pad
    left, right = max(map(len, asked)), max(map(len, answers))
    tokens = torch.full((len(asked), left + right), pad)
    mask = torch.zeros_like(tokens)
    labels = torch.full((len(asked), right), _IGNORED)
    for i, (question, answer) in enumerate(zip(asked, answers, strict=True)):
        row = torch.tensor(question + answer)
        tokens[i, left - len(question) : left + len(answer)] = row
        mask[i, left - len(question) : left + len(answer)] = 1
        labels[i, : len(answer)] = row[len(question) :]
    return tokens, mask, labels


def _spans(text: str) -> list[tuple[int, int, int]]:
    """Stretches of an answer that say something else than words: first character, end, what."""
    spans, at = [], 0
    for line in text.split("\n"):
        key, _, said = line.partition(": ")
        role = {"failed": FAILED, "type": CLASS, "steps": WHEN, "why": CAUSE}.get(key)
        if role is not None:
            said = said.partition(": ")[0] if role == CAUSE else said
            start = at + len(key) + 1
            spans.append((start, start + 1 + len(said), role))
        at += len(line) + 1
    return spans


def _block(model: DiagnosisModel) -> list[int]:
    """The tokens that the processor writes for one picture."""
    size = model.choice.size
    picture = np.zeros((size, size, 3), np.uint8)
    batch = model.processor(text=["<image>"], images=[[picture]], return_tensors="pt")
    return batch["input_ids"][0].tolist()
