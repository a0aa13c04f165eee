"""``regrasp train diagnose``: train the diagnosis model on stores of verified failures."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from regrasp.relabel.diagnose.dataset import Clip, balanced, clips_of
from regrasp.relabel.diagnose.frames import FrameChoice
from regrasp.relabel.diagnose.labels import CLASSES
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.relabel.diagnose.pictures import Pictures
from regrasp.relabel.diagnose.tiny import TinySize, build
from regrasp.relabel.diagnose.training import Trainer, TuneConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Bytes that the shipped model may take.
LARGEST = 10_000_000


@dataclass(frozen=True)
class Args:
    """Train a diagnosis model; started again with the same arguments, it continues.

    Attributes:
        stores: made by ``regrasp failures generate``.
        out: folder of the run: pictures, checkpoints, TensorBoard events, the model in full
            (``model/``) and in half precision (``fp16/``).
        text_only: the baseline that sees nothing: blank pictures, at two moments.
        init: start from this Hugging Face image-text-to-text model in place of a new small one.
        device: where it is trained.
        choice: what is shown.
        size: of a new network.
        training: settings of the training.
    """

    stores: tuple[Path, ...] = (Path("data/failures"),)
    out: Path = Path("runs/diagnose")
    text_only: bool = False
    init: Path | None = None
    device: str = "cpu"
    choice: FrameChoice = field(default_factory=FrameChoice)
    size: TinySize = field(default_factory=lambda: TinySize(patch=24, shuffle=2))
    training: TuneConfig = field(default_factory=lambda: TuneConfig(minutes=40.0, focus=8.0))


def main(args: Args) -> None:
    """Cut the pictures once, train with a progress bar, write the model; prints a summary."""
    console = Console()
    clips = [clip for clip in clips_of(args.stores) if clip.split == "train"]
    rows = balanced(clips)
    choice = replace(args.choice, blank=True, frames=2) if args.text_only else args.choice
    _check_same(args.out, clips, choice)
    with _bar(console, "pictures", len(clips)) as report:
        pictures = Pictures(args.out / "pictures.npy", clips, choice, report)
    model = _model(args, pictures)
    trainer = Trainer(args.out, model, args.training)
    count = sum(p.numel() for p in model.model.parameters())
    roles = ", ".join(f"{n} {role}" for role, n in Counter(clip.role for clip in clips).items())
    console.print(
        f"{len(clips)} clips ({roles}), {len(rows)} an epoch, {count / 1e6:.2f} M parameters; "
        f"from step {trainer.step}"
    )
    with _bar(console, "training", 1000) as report:

        def told(*, step: int, progress: float, **values: float) -> None:
            text = f"step {step}  loss {values['loss']:.3f}  "
            text += f"{values['examples_per_second']:.1f} examples/s"
            report(round(1000 * progress), 1000, text)

        examples = pictures.examples(rows, args.training.seed, trainer.seen)
        model = trainer.run(examples, told)
    size = save_half(model, args.out / "fp16")
    if args.init is None and size > LARGEST:
        console.print(f"[red]more than the {LARGEST / 1e6:.0f} MB that may ship")
    console.print_json(
        json.dumps(
            {
                "model": str(args.out / "fp16"),
                "megabytes": round(size / 1e6, 2),
                "steps": trainer.step,
                "epochs": round(trainer.seen / len(rows), 1),
                "minutes": round(trainer.seconds / 60, 1),
            }
        )
    )


def save_half(model: DiagnosisModel, folder: Path) -> int:
    """Write a model in half precision; returns the bytes of its folder."""
    model.save(folder, dtype=torch.float16)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _model(args: Args, pictures: Pictures) -> DiagnosisModel:
    """What is trained: a new small model, or somebody's."""
    types, choice = tuple(CLASSES), pictures.choice
    if args.init is not None:
        return DiagnosisModel.load(args.init, types=types, choice=choice, device=args.device)
    model = build(
        training_texts(pictures),
        types,
        choice=choice,
        size=args.size,
        seed=args.training.seed,
    )
    model.model.to(args.device)
    return model


def training_texts(pictures: Pictures) -> list[str]:
    """Everything that is read or written in training, for the tokenizer."""
    texts = [clip.truth.text for clip in pictures.clips]
    asked = {clip.instruction: i for i, clip in enumerate(pictures.clips)}
    for i in asked.values():
        texts += [part.get("text", "") for part in pictures.question(i).content]
    return texts


def _check_same(out: Path, clips: Sequence[Clip], choice: FrameChoice) -> None:
    """SystemExit if the folder's run was on other clips: its tokenizer would be another."""
    text = json.dumps([asdict(clip) for clip in clips])
    about = {"clips": hashlib.sha256(text.encode()).hexdigest()[:16], "choice": choice.to_json()}
    note = out / "data.json"
    if note.exists() and json.loads(note.read_text()) != about:
        raise SystemExit(f"{out} was begun on other data or pictures; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(about))


class _bar:
    """A progress bar that is a function: ``report(done, total, text)``."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        columns = (BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}")
        self._progress = Progress(*columns, text, console=console)
        self._task = self._progress.add_task(name, total=total)

    def __enter__(self) -> Any:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        self._progress.update(self._task, completed=done, total=total, description=text)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
