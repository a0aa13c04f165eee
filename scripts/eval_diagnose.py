"""``regrasp eval diagnose``: how right the diagnosis model is, beside what knows less."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, write_result
from regrasp.relabel.diagnose.answer import Answer, parse
from regrasp.relabel.diagnose.baselines import constant_answer, constant_answers
from regrasp.relabel.diagnose.dataset import (
    HELD_OUT_STATES,
    HELD_OUT_TASKS,
    Clip,
    clips_of,
    natural_clips,
)
from regrasp.relabel.diagnose.labels import CLASSES, HELD_OUT_TYPES, by_cause
from regrasp.relabel.diagnose.metrics import Scores, score
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.relabel.diagnose.pictures import Pictures
from rich.console import Console
from rich.progress import track
from rich.table import Table

#: What is told of a policy's own failures, whose type nobody knows.
_NATURAL = ("parsed", "detection_balanced_accuracy", "onset_error", "onset_within_10")

#: Splits that the figures without a prefix are about.
_HEADLINE = ("tasks", "types")


@dataclass(frozen=True)
class Args:
    """Score a diagnosis model on what it was not trained on; resumes where it was stopped.

    Attributes:
        stores: those it was trained on; the rest of their contexts is held out.
        model: the model's folder.
        text_only: the folder of the baseline that sees nothing; not scored when None.
        natural: a store of ``regrasp failures natural``; not scored when None.
        splits: of the stores, to be scored.
        limit: clips of a split, at most, evenly spread; 0 is all.
        batch: questions answered at a time.
        out: folder for answers, pictures and confusions.
        result: also write docs/results/<result>.json.
    """

    stores: tuple[Path, ...] = (Path("data/failures"),)
    model: Path = Path("runs/diagnose/fp16")
    text_only: Path | None = Path("runs/diagnose_text/fp16")
    natural: Path | None = None
    splits: tuple[str, ...] = ("tasks", "types", "states")
    limit: int = 0
    batch: int = 16
    out: Path = Path("runs/eval_diagnose")
    result: str | None = None


def main(args: Args) -> None:
    """Answer, score, print, and write the result."""
    console = Console()
    clips = clips_of(args.stores)
    splits = {name: [c for c in clips if c.split == name] for name in args.splits}
    if args.natural is not None:
        splits["natural"] = natural_clips(args.natural)
    if args.limit:
        splits = {name: few[:: -(-len(few) // args.limit) or 1] for name, few in splits.items()}
    trained = [clip for clip in clips if clip.split == "train"]
    answers = {
        name: answers_of(args, name, few, trained, console) for name, few in splits.items() if few
    }
    headline = [name for name in _HEADLINE if name in answers]
    figures: dict[str, Figure] = {}
    if headline:
        together = [clip for name in headline for clip in splits[name]]
        joined = {
            who: [answer for name in headline for answer in answers[name][who]]
            for who in answers[headline[0]]
        }
        figures |= figures_of(joined, together)[0]
    for name, said in answers.items():
        more, scores = figures_of(said, splits[name], natural=name == "natural")
        figures |= {f"{name}.{key}": figure for key, figure in more.items()}
        write_confusion(args.out / f"confusion_{name}.md", scores)
    _print(console, figures, [*answers])
    if args.result:
        path = write_result(args.result, _command(args), _protocol(args, splits), [0], figures)
        console.print(f"wrote {path}")


def answers_of(
    args: Args, split: str, clips: Sequence[Clip], trained: Sequence[Clip], console: Console
) -> dict[str, list[Answer]]:
    """Prefix of its figures -> answers of the model and of both baselines to a split."""
    lengths = [clip.length for clip in clips]
    said: dict[str, list[Answer]] = {"": written(args.model, args, split, clips, console)}
    failures = [clip for clip in trained if clip.truth.failed]
    if failures:
        commonest = Counter(clip.kind for clip in failures).most_common(1)[0][0]
        constant = constant_answer([clip.truth for clip in failures])
        constant = replace(constant, why=f"{commonest}: {constant.why.partition(': ')[2]}")
        said["constant_"] = [*constant_answers(constant, lengths)]
    if args.text_only is not None:
        said["text_only_"] = written(args.text_only, args, split, clips, console)
    return said


def written(
    folder: Path, args: Args, split: str, clips: Sequence[Clip], console: Console
) -> list[Answer]:
    """A model's answers; those in the log are not asked again."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise SystemExit(f"{folder} holds no model; regrasp train diagnose makes one")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()[:12]
    log = JsonLines(args.out / "answers.jsonl")
    args.out.mkdir(parents=True, exist_ok=True)
    # The length is part of what was asked: clips are cut anew when a store grows.
    names = [f"{digest}/{clip.key}/{clip.length}" for clip in clips]
    known = {row["name"]: row["text"] for row in log.read()}
    todo = [i for i, name in enumerate(names) if name not in known]
    if todo:
        model = DiagnosisModel.load(folder)
        pictures = Pictures(args.out / f"{split}.npy", clips, model.choice)
        batches = [todo[i : i + args.batch] for i in range(0, len(todo), args.batch)]
        for batch in track(batches, f"{folder}, {split}", console=console):
            texts = model.write([pictures.question(i) for i in batch])
            for i, text in zip(batch, texts, strict=True):
                log.append({"name": names[i], "text": text})
                known[names[i]] = text
    return [
        parse(known[name], types=CLASSES, steps=clip.length)
        for name, clip in zip(names, clips, strict=True)
    ]


def figures_of(
    answers: Mapping[str, Sequence[Answer]], clips: Sequence[Clip], natural: bool = False
) -> tuple[dict[str, Figure], Scores]:
    """Figures of every answerer, and the model's scores by cause.

    ``type_macro_accuracy`` is over visible classes; ``cause_macro_accuracy`` over injected types.
    """
    truths, lengths = [clip.truth for clip in clips], [clip.length for clip in clips]
    causes = [replace(t, type=clip.kind or t.type) for t, clip in zip(truths, clips, strict=True)]
    groups = [clip.context for clip in clips]
    figures: dict[str, Figure] = {}
    scores: dict[str, Scores] = {}
    for prefix, said in answers.items():
        found = score(said, truths, lengths, groups=groups).figures
        scores[prefix] = score(by_cause(said), causes, lengths, groups=groups)
        if "type_macro_accuracy" in found:
            found["cause_macro_accuracy"] = scores[prefix].figures["type_macro_accuracy"]
        kept = _NATURAL if natural else tuple(found)
        figures |= {f"{prefix}{name}": found[name] for name in kept if name in found}
    return figures, scores[""]


def write_confusion(path: Path, scores: Scores) -> None:
    """The confusion of causes as a Markdown table, a row a truth."""
    head = "| truth | " + " | ".join(scores.answers) + " |"
    rows = [head, "| --- " * (len(scores.answers) + 1) + "|"]
    for name, counts in zip(scores.truths, scores.confusion, strict=True):
        rows.append(f"| {name} | " + " | ".join(str(n or "") for n in counts) + " |")
    path.write_text("\n".join(rows) + "\n")


def _protocol(args: Args, splits: Mapping[str, Sequence[Clip]]) -> dict[str, object]:
    """What was measured: which clips, and how they were chosen."""
    keys = {name: [(c.key, c.length) for c in clips] for name, clips in splits.items()}
    return {
        "clips": {name: len(clips) for name, clips in splits.items()},
        "digest": hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16],
        "held_out_tasks": {suite: list(tasks) for suite, tasks in HELD_OUT_TASKS.items()},
        "held_out_types": list(HELD_OUT_TYPES),
        "held_out_states": list(HELD_OUT_STATES),
        "headline": list(_HEADLINE),
        "classes": {name: list(kinds) for name, (_, kinds) in CLASSES.items()},
        "generation": "greedy",
    }


def _command(args: Args) -> str:
    parts = ["regrasp eval diagnose"]
    if args.natural is not None:
        parts.append(f"--natural {args.natural}")
    return " ".join([*parts, f"--result {args.result}"])


def _print(console: Console, figures: Mapping[str, Figure], splits: Sequence[str]) -> None:
    """The figures that matter most, a line a split and answerer."""
    names = (
        "detection_balanced_accuracy",
        "onset_within_10",
        "type_macro_accuracy",
        "cause_macro_accuracy",
        "interval_iou",
        "parsed",
    )
    table = Table("split", "who", *names, title="diagnosis")
    for split in splits:
        for prefix in ("", "constant_", "text_only_"):
            found = [figures.get(f"{split}.{prefix}{name}") for name in names]
            if any(found):
                cells = [f"{figure.value:.3f}" if figure else "" for figure in found]
                table.add_row(split, prefix.strip("_") or "model", *cells)
    console.print(table)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
