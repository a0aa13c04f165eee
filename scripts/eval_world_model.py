"""``regrasp eval world-model``: how optimistic each world model is, on tasks it has not seen."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from regrasp.episodes.results import Figure, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.world_model import WorldModel
from regrasp.relabel.world_model_data import ARMS, Rollouts, task_of
from regrasp.relabel.world_model_metrics import Outcomes, compare, nearness
from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True)
class Args:
    """Imagine every execution of the held-out tasks, given its beginning and its actions.

    Attributes:
        run: folder of ``regrasp train world-model``.
        store: the store that it was trained on.
        arms: compared; the first is the baseline.
        tasks: ``suite/task``; those held out when empty.
        result: name of the file in ``docs/results``; none is written when empty.
        threads: processor threads of torch.
    """

    run: Path = Path("runs/world_model")
    store: Path = Path("data/counterfactuals")
    arms: tuple[str, ...] = ARMS
    tasks: tuple[str, ...] = ()
    result: str = "world_model"
    threads: int = 2


def main(args: Args) -> None:
    """Print and write the figures of both models, side by side."""
    torch.set_num_threads(args.threads)
    console, store = Console(), EpisodeStore.open(args.store)
    about = {arm: json.loads((args.run / arm / "arm.json").read_text()) for arm in args.arms}
    tasks = args.tasks or held_out(about)
    chosen = sorted(
        (h.extra["cell"], i) for i, h in enumerate(store.headers) if task_of(h) in tasks
    )
    models = {arm: WorldModel.load(args.run / arm / "model") for arm in args.arms}
    cameras = next(iter(models.values())).config.cameras
    rollouts = Rollouts(store, [i for _, i in chosen], cameras)
    imagined = {arm: outcomes(rollouts, imagine(model, rollouts)) for arm, model in models.items()}
    figures = compare(imagined)
    figures |= by_latent(models, rollouts) | ceilings(models, rollouts) | by_distance(rollouts)
    for arm, facts in about.items():
        figures[f"episodes.{arm}"] = Figure(facts["episodes"], unit="training episodes")
        figures[f"failures.{arm}"] = Figure(facts["failures"], unit="of them failures")
        figures[f"frames.{arm}"] = Figure(facts["frames"], unit="training frames")
        figures[f"minutes.{arm}"] = Figure(facts["seconds"] / 60, unit="minutes of training")
    _print(console, figures, args.arms)
    if args.result:
        protocol = {
            "tasks": list(tasks),
            "executions": len(rollouts),
            "counterfactuals": store.attrs.get("counterfactuals", {}),
            "training": {arm: facts["training"] for arm, facts in about.items()},
        }
        seeds = sorted({facts["training"]["seed"] for facts in about.values()})
        path = write_result(args.result, "regrasp eval world-model", protocol, seeds, figures)
        console.print(f"wrote {path}")


def held_out(about: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """The tasks that no arm was trained on.

    Raises:
        SystemExit: the arms were not trained with the same tasks and budget.
    """
    splits = {json.dumps(facts["split"], sort_keys=True) for facts in about.values()}
    budgets = {(f["episodes"], f["training"]["steps"]) for f in about.values()}
    if len(splits) > 1 or len(budgets) > 1:
        raise SystemExit("the arms have different tasks or budgets; train them together")
    return tuple(json.loads(splits.pop())["held_out"])


def outcomes(rollouts: Rollouts, score: np.ndarray) -> Outcomes:
    """Scores beside what came of the executions."""
    success = np.array([header.success for header in rollouts.headers])
    return Outcomes(score, success, [header.extra["context"] for header in rollouts.headers])


def imagine(model: WorldModel, rollouts: Rollouts) -> np.ndarray:
    """Imagined probability that the goal holds at the end of each execution ``[n]``."""
    scores = []
    for i in range(len(rollouts)):
        pixels, state = (torch.from_numpy(x[i][:1]) for x in (rollouts.pixels, rollouts.state))
        actions = torch.from_numpy(rollouts.actions[i])[None]
        scores.append(float(model.outcome(pixels, state, actions)[0, -1]))
    return np.array(scores)


@torch.no_grad()
def seen(model: WorldModel, rollouts: Rollouts) -> np.ndarray:
    """Probability that the goal holds, read from the last picture of each execution ``[n]``."""
    pixels = torch.from_numpy(np.stack([frames[-1] for frames in rollouts.pixels]))
    state = torch.from_numpy(np.stack([states[-1] for states in rollouts.state]))
    logits = [
        model.success(model.encode(p, s)).squeeze(-1)
        for p, s in zip(pixels.split(64), state.split(64), strict=True)
    ]
    return torch.sigmoid(torch.cat(logits)).numpy()


@torch.no_grad()
def ends(model: WorldModel, rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Latents at the last picture of each execution, imagined and encoded, ``[n, L]`` each."""
    imagined, encoded = [], []
    for pixels, state, actions in zip(
        rollouts.pixels, rollouts.state, rollouts.actions, strict=True
    ):
        rows = [0, -1]
        both = model.encode(torch.from_numpy(pixels[rows]), torch.from_numpy(state[rows]))
        # The last picture is the one before the last chunk.
        latents = model.imagine(both[:1], torch.from_numpy(actions)[None, :-1])
        imagined.append(latents[0, -1].numpy())
        encoded.append(both[1].numpy())
    return np.stack(imagined), np.stack(encoded)


def by_latent(models: dict[str, WorldModel], rollouts: Rollouts) -> dict[str, Figure]:
    """The same comparison without heads: is the imagined end near real successes or failures?"""
    near = {}
    for arm, model in models.items():
        plain = outcomes(rollouts, np.zeros(len(rollouts)))
        imagined, encoded = ends(model, rollouts)
        score = nearness(imagined, encoded, plain.success, plain.context)
        near[arm] = outcomes(rollouts, score)
    return {f"latent.{name}": figure for name, figure in compare(near).items()}


def ceilings(models: dict[str, WorldModel], rollouts: Rollouts) -> dict[str, Figure]:
    """What each model's head makes of the real end: no imagination is better than this."""
    read = {arm: outcomes(rollouts, seen(model, rollouts)) for arm, model in models.items()}
    names = ("optimism", "success_believed", "auroc", "auroc_within")
    return {
        f"seen.{name}": figure
        for name, figure in compare(read).items()
        if name.partition(".")[0] in names and not name.endswith(".difference")
    }


def by_distance(rollouts: Rollouts) -> dict[str, Figure]:
    """A baseline without a model: the farther the actions are from the plan's, the likelier it
    fails."""
    plans = {
        header.extra["context"]: actions
        for header, actions in zip(rollouts.headers, rollouts.actions, strict=True)
        if header.extra["severity"] == 0.0
    }
    near = [
        -float(np.abs(actions - plans[header.extra["context"]]).mean())
        for header, actions in zip(rollouts.headers, rollouts.actions, strict=True)
    ]
    figures = compare({"action_distance": outcomes(rollouts, np.array(near))})
    return {name: f for name, f in figures.items() if name.startswith("auroc")}


def _print(console: Console, figures: dict[str, Figure], arms: Sequence[str]) -> None:
    columns = (*arms, "difference", "action_distance")
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    for name, figure in figures.items():
        statistic, _, column = name.rpartition(".")
        interval = f" [{figure.low:.2f}, {figure.high:.2f}]" if figure.low is not None else ""
        rows[statistic][column] = f"{figure.value:.2f}{interval}"
    table = Table(Column(no_wrap=True), *columns, title="executions of held-out tasks, imagined")
    for statistic, cells in rows.items():
        table.add_row(statistic, *(cells.get(column, "") for column in columns))
    console.print(table)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
