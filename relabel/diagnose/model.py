"""Any Hugging Face image-text-to-text model as a diagnosis model.

Loading, the chat template, batching, greedy generation and parsing are the same for the small
model that ships (:mod:`regrasp.relabel.diagnose.tiny`) and for somebody else's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.types import Episode
from regrasp.relabel.diagnose.answer import Answer, parse
from regrasp.relabel.diagnose.frames import FrameChoice, Question, ask, to_steps
from regrasp.relabel.diagnose.grammar import Grammar
from transformers import AutoModelForImageTextToText, AutoProcessor

#: Beside the weights: the failure types, and what the model was trained to be shown.
SETTINGS = "diagnosis.json"

#: The model that ships.
SHIPPED = Path(__file__).parent / "weights"

#: Tokens of the longest answer. One that is not finished by then does not parse.
LONGEST_ANSWER = 256


class DiagnosisModel:
    """A model, its processor, and what it is asked.

    Attributes:
        model: a ``*ForConditionalGeneration`` of transformers.
        processor: its processor, with a chat template.
        types: the failure types there are.
        choice: what it is shown.
    """

    def __init__(
        self, model: Any, processor: Any, types: Sequence[str], choice: FrameChoice
    ) -> None:
        if not types:
            raise ValueError("DiagnosisModel: no failure types; name at least one")
        self.model, self.processor = model, processor
        self.types, self.choice = tuple(types), choice
        self.tokenizer = processor.tokenizer
        # One that names moments was trained here, on this form; others are left to themselves.
        by_moments = choice.count_by == "moment"
        self._grammar = Grammar(self.tokenizer, types, choice) if by_moments else None
        # Answers begin where questions end: in a batch, all in the same column.
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # A picture that is cut into tiles costs up to 17 times as many tokens, and there are many.
        if getattr(processor.image_processor, "do_image_splitting", False):
            processor.image_processor.do_image_splitting = False

    @classmethod
    def load(
        cls,
        path: str | Path = SHIPPED,
        *,
        types: Sequence[str] | None = None,
        choice: FrameChoice | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> DiagnosisModel:
        """A model from a local folder in Hugging Face's layout.

        Args:
            path: folder with ``config.json``, ``*.safetensors`` and the processor's files; the
                model that ships unless given.
            types: the failure types; those it was saved with when None.
            choice: what it is shown; what it was saved with when None.
            device: where it runs.
            dtype: of the weights in memory, whatever it is in the file.

        Raises:
            FileNotFoundError: if the folder or one of these files is missing.
            ValueError: if its class is none that turns images and text into text, or if it was not
                saved by :meth:`save` and ``types`` is None.
        """
        path = Path(path)
        settings = _settings(path)
        if types is None and "types" not in settings:
            raise ValueError(f"{path} has no {SETTINGS}; name the failure types with types=")
        if choice is None:
            # A model that was never trained to answer has to be told how.
            saved = settings.get("choice")
            choice = FrameChoice.from_json(saved) if saved else FrameChoice(size=256, explain=True)
        options = {"local_files_only": True, "trust_remote_code": False}
        model = AutoModelForImageTextToText.from_pretrained(
            path, use_safetensors=True, dtype=dtype, **options
        )
        processor = AutoProcessor.from_pretrained(path, **options)
        return cls(model.to(device).eval(), processor, types or settings["types"], choice)

    def save(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write what :meth:`load` reads, replacing what is there when it is complete.

        Args:
            path: folder.
            dtype: of the weights in the file; as in memory when None.
        """
        path = Path(path)
        part = path.with_name(f".part-{path.name}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        state = self.model.state_dict()
        if dtype is not None:
            state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
        self.model.save_pretrained(part, state_dict=state, safe_serialization=True)
        self.processor.save_pretrained(part)
        settings = {"types": list(self.types), "choice": self.choice.to_json()}
        (part / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def question(self, episode: Episode, rng: np.random.Generator | None = None) -> Question:
        """What this model is asked about an episode; with ``rng``, moments vary, for training."""
        return ask(episode, self.choice, types=self.types, rng=rng)

    def inputs(self, questions: Sequence[Question]) -> dict[str, torch.Tensor]:
        """A batch of questions as the model takes them, padded on the left."""
        texts = [
            self.processor.apply_chat_template(q.messages, add_generation_prompt=True)
            for q in questions
        ]
        # Where nothing is shown, processors want no lists at all.
        images = [list(q.images) for q in questions] if questions[0].images else None
        batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        return {key: value.to(self.device) for key, value in batch.items()}

    @torch.inference_mode()
    def write(self, questions: Sequence[Question]) -> list[str]:
        """What the model writes in answer to each question, greedily; when, in control steps."""
        training = self.model.training
        self.model.eval()
        inputs = self.inputs(questions)
        asked = inputs["input_ids"].shape[1]
        held = {"prefix_allowed_tokens_fn": self._grammar(asked)} if self._grammar else {}
        tokens = self.model.generate(
            **inputs,
            **held,
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        self.model.train(training)
        texts = self.tokenizer.batch_decode(tokens[:, asked:], skip_special_tokens=True)
        return [to_steps(text, q.steps) for text, q in zip(texts, questions, strict=True)]

    def diagnose(self, episodes: Sequence[Episode], *, batch: int = 8) -> list[Answer]:
        """What went wrong in each episode; what is no diagnosis comes back as unparseable."""
        answers: list[Answer] = []
        for start in range(0, len(episodes), batch):
            some = [self.question(episode) for episode in episodes[start : start + batch]]
            for question, text in zip(some, self.write(some), strict=True):
                answers.append(parse(text, types=self.types, steps=question.length))
        return answers


def _settings(path: Path) -> dict[str, Any]:
    """What :meth:`DiagnosisModel.save` noted, if it did; FileNotFoundError without a model."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; a local model is needed, not a hub's name")
    for pattern in ("config.json", "*.safetensors"):
        if not any(path.glob(pattern)):
            there = sorted(p.name for p in path.iterdir())
            raise FileNotFoundError(f"{path} holds no {pattern}; it holds {there}")
    file = path / SETTINGS
    return json.loads(file.read_text()) if file.exists() else {}
