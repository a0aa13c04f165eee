"""``regrasp eval segments``: VLAC-CUT on held-out rollouts, against the generators' truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from regrasp.episodes.results import Figure, write_result
from regrasp.relabel.rollouts import Rollout
from regrasp.relabel.segments import (
    CutConfig,
    Cutter,
    Label,
    action_norm,
    cut,
    cut_by_value,
    f1_figure,
    fit,
    frame_figure,
    keep_frames,
    match,
    truth,
)
from regrasp.scripts._rewards import HELD_OUT, Study
from regrasp.scripts.eval_reward import show
from rich.console import Console

#: Ways to cut, by the prefix of their figures: by the model's values; by the true ones, which is
#: what the rule can do at best; by actions alone.
WAYS: dict[str, Cutter] = {
    "": cut_by_value,
    "true_value_": lambda rollout, _, config: cut(rollout.target, rollout.action, config),
    "action_norm_": lambda rollout, _, config: action_norm(rollout.action, config),
}

#: Steps that a boundary may be off.
TOLERANCES = (5, 10)


@dataclass(frozen=True)
class Args:
    """Cut held-out rollouts by the progress model and compare with what was injected.

    The thresholds are fitted on rollouts that training has seen.

    Attributes:
        store: failure samples that the model was trained on.
        model: folder of the model.
        limit: rollouts at most of each fold; 0 takes all.
        seed: of that draw.
        threads: processor threads of torch.
        results: where ``segments.json`` is written.
    """

    store: Path = Path("data/failures")
    model: Path = Path("runs/reward/model")
    limit: int = 200
    seed: int = 0
    threads: int = 2
    results: Path = Path("docs/results")


def main(args: Args) -> None:
    """Print and write the figures."""
    console = Console()
    torch.set_num_threads(args.threads)
    study = Study.open(args.store, args.model, args.limit, args.seed)
    seen = study.folds["train"]
    values = [output[:, 0] for output in study.outputs(seen, console, "seen in training")]
    with console.status("fitting each way's thresholds on what training has seen"):
        configs = {name: fit(seen, values, way) for name, way in WAYS.items()}
    found: dict[str, Figure] = {}
    for fold, prefix in HELD_OUT.items():
        rollouts = study.folds[fold]
        if rollouts:
            both = study.outputs(rollouts, console, f"held-out {fold}")
            found |= _figures(rollouts, [output[:, 0] for output in both], configs, prefix)
    protocol = {
        "store": str(args.store),
        "held_out": asdict(study.split),
        "model": {**asdict(study.model.config), "step": study.step},
        "cut": {name or "model": asdict(config) for name, config in configs.items()},
        "rollouts": {fold: len(rollouts) for fold, rollouts in study.folds.items()},
        "limit": args.limit,
        "tolerances": TOLERANCES,
    }
    command = f"regrasp eval segments --store {args.store} --model {args.model}"
    command += f" --limit {args.limit}"
    path = write_result("segments", command, protocol, [args.seed], found, args.results)
    show(console, "Segments of held-out rollouts", found)
    console.print(f"written: {path}")


def _figures(
    rollouts: Sequence[Rollout],
    values: Sequence[np.ndarray],
    configs: dict[str, CutConfig],
    prefix: str,
) -> dict[str, Figure]:
    """Of every way to cut, over the same rollouts."""
    true = [truth(rollout) for rollout in rollouts]
    cuts: dict[str, list[np.ndarray]] = {
        name: [
            way(rollout, value, configs[name])
            for rollout, value in zip(rollouts, values, strict=True)
        ]
        for name, way in WAYS.items()
    }
    found: dict[str, Figure] = {}
    for name, labels in cuts.items():
        pairs = list(zip(labels, true, strict=True))
        for tolerance in TOLERANCES:
            counts = [match(guess, right, tolerance) for guess, right in pairs]
            found[f"{prefix}{name}boundary_f1_{tolerance}"] = f1_figure(counts)
        found[f"{prefix}{name}frame_balanced_accuracy"] = frame_figure(labels, true)
    return found | {f"{prefix}{k}": v for k, v in _filter_figures(rollouts, cuts[""], true).items()}


def _filter_figures(
    rollouts: Sequence[Rollout], labels: Sequence[np.ndarray], true: Sequence[np.ndarray]
) -> dict[str, Figure]:
    """What the idle filter keeps: of all frames, of truly idle ones, and of the tasks."""
    kept = keep_frames(labels)
    idle = np.concatenate([steps == Label.IDLE for steps in true])
    every = np.concatenate(kept)
    tasks = {rollout.task for rollout in rollouts}
    left = {rollout.task for rollout, keep in zip(rollouts, kept, strict=True) if keep.any()}
    found = {
        "frames_kept": Figure(float(every.mean()), n=len(rollouts), unit="of frames"),
        "tasks_kept": Figure(len(left) / len(tasks), n=len(tasks), unit="of tasks"),
    }
    if idle.any():
        share = float(every[idle].mean())
        found["idle_frames_kept"] = Figure(share, n=len(rollouts), unit="of idle frames")
    return found
