"""``regrasp train diagnose``: train the diagnosis model on stores of verified failures."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from regrasp.relabel.diagnose.dataset import Clip, balanced, clips_of
from regrasp.relabel.diagnose.dense import dense_of
from regrasp.relabel.diagnose.encoder import Encoded, EncoderConfig, train_encoder
from regrasp.relabel.diagnose.frames import FrameChoice
from regrasp.relabel.diagnose.labels import CLASSES
from regrasp.relabel.diagnose.language import LanguageConfig, Lessons, Prompts, train_language
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

    A new small model is trained in two stages, its encoder and then its language model; somebody's
    is fine-tuned as a whole.

    Attributes:
        stores: made by ``regrasp failures generate``.
        out: folder of the run: pictures, checkpoints, TensorBoard events, and the model in half
            precision (``fp16/``).
        text_only: the baseline that sees nothing, trained in the second stage alone.
        init: fine-tune this Hugging Face image-text-to-text model in place of a new small one.
        device: where ``init`` is trained.
        choice: what is shown.
        size: of a new network.
        encoder: settings of the first stage.
        language: settings of the second.
        training: settings of fine-tuning ``init``.
    """

    stores: tuple[Path, ...] = (Path("data/failures"),)
    out: Path = Path("runs/diagnose")
    text_only: bool = False
    init: Path | None = None
    device: str = "cpu"
    choice: FrameChoice = field(default_factory=lambda: FrameChoice(24, count_by="moment"))
    size: TinySize = field(default_factory=TinySize)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    training: TuneConfig = field(default_factory=lambda: TuneConfig(minutes=40.0, focus=8.0))


def main(args: Args) -> None:
    """Cut the pictures once, train with progress bars, write the model; prints a summary."""
    console = Console()
    clips = [clip for clip in clips_of(args.stores) if clip.split == "train"]
    choice = replace(args.choice, blank=True) if args.text_only else args.choice
    if args.init is not None:
        choice = replace(choice, count_by="step")
    _check_same(args.out, clips, choice)
    with _bar(console, "pictures", len(clips)) as report:
        pictures = Pictures(args.out / "pictures.npy", clips, choice, report)
    roles = ", ".join(f"{n} {role}" for role, n in Counter(clip.role for clip in clips).items())
    console.print(f"{len(clips)} clips: {roles}")
    if args.init is not None:
        model = fine_tuned(args, args.init, pictures, console)
    else:
        model = build(
            training_texts(pictures), tuple(CLASSES), choice=choice, size=args.size, seed=0
        )
        teach(args, model, pictures, console)
    size = save_half(model, args.out / "fp16")
    if args.init is None and size > LARGEST:
        console.print(f"[red]more than the {LARGEST / 1e6:.0f} MB that may ship")
    parameters = sum(p.numel() for p in model.model.parameters())
    console.print_json(
        json.dumps(
            {
                "model": str(args.out / "fp16"),
                "megabytes": round(size / 1e6, 2),
                "million_parameters": round(parameters / 1e6, 2),
            }
        )
    )


def teach(args: Args, model: DiagnosisModel, pictures: Pictures, console: Console) -> None:
    """Both stages of the small model, in place; the first only where it is shown something."""
    dense = dense_of(pictures.clips, pictures.choice.frames)
    features = None
    if not pictures.choice.blank:
        with _bar(console, "encoder", 1000) as report:
            settings = args.encoder
            train_encoder(
                args.out / "encoder", model, pictures, dense, settings, _told(report, "measures")
            )
        with _bar(console, "encoding", len(pictures)) as report:
            file = args.out / "encoder" / "features.npy"
            features = Encoded(file, model, pictures, report=report).features
    lessons = Lessons(Prompts(model), pictures, features, dense)
    learned, check = _apart(pictures.clips)
    rows = [learned[i] for i in balanced([pictures.clips[i] for i in learned])]

    def checked(found: dict[str, float]) -> None:
        said = "  ".join(f"{name} {value:.3g}" for name, value in found.items())
        console.print(f"{len(check)} clips kept apart: {said}")

    with _bar(console, "language", 1000) as report:
        train_language(
            args.out / "language",
            model,
            lessons,
            rows,
            args.language,
            _told(report, "answer"),
            check=check,
            checked=checked,
        )


def fine_tuned(args: Args, init: Path, pictures: Pictures, console: Console) -> DiagnosisModel:
    """Somebody's model, trained to answer."""
    types = tuple(CLASSES)
    model = DiagnosisModel.load(init, types=types, choice=pictures.choice, device=args.device)
    trainer = Trainer(args.out, model, args.training)
    rows = balanced(pictures.clips)
    with _bar(console, "training", 1000) as report:
        examples = pictures.examples(rows, args.training.seed, trainer.seen)
        return trainer.run(examples, _told(report, "loss"))


def _apart(clips: Sequence[Clip]) -> tuple[list[int], list[int]]:
    """Indices of clips to learn from, and of those of a twentieth of the contexts, to look at."""
    digests = [hashlib.sha256(clip.context.encode()).digest()[0] for clip in clips]
    check = [i for i, digest in enumerate(digests) if digest % 20 == 0]
    return [i for i, digest in enumerate(digests) if digest % 20], check


def _told(report: Callable[..., None], name: str) -> Callable[..., None]:
    """A trainer's report on a bar of 1000."""

    def told(*, step: int, progress: float, **values: float) -> None:
        report(round(1000 * progress), 1000, f"step {step}  {name} {values[name]:.3f}")

    return told


def save_half(model: DiagnosisModel, folder: Path) -> int:
    """Write a model in half precision; returns the bytes of its folder."""
    model.save(folder, dtype=torch.float16)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


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
