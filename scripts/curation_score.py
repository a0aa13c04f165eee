"""``regrasp curation score``: how well each curation metric finds the defective demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from regrasp.episodes.results import Figure
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, Observation
from regrasp.relabel.curation import (
    PolicyLoss,
    auroc,
    length_correlation,
    load_demonstrations,
    matched_auroc,
    residualise,
    score,
)
from regrasp.relabel.curation_metrics import Demonstration
from rich.console import Console
from rich.table import Table

#: A policy is asked about every so many steps of an episode.
LOSS_STRIDE = 4


@dataclass(frozen=True)
class Args:
    """Score a store of ``regrasp curation collect`` and compare with the truth in its headers.

    Attributes:
        store: the demonstrations.
        policy: a saved policy for the metric ``bc_loss`` (that of ``regrasp curation train`` is
            ``runs/curation/uncurated/policy``); without one that metric is left out.
    """

    store: Path = Path("data/curation")
    policy: Path | None = None


def policy_loss(folder: str | Path) -> PolicyLoss:
    """Mean absolute error of a policy's chunks, in action units, at every few steps of an episode.

    Actions behind the end or behind a disturbance do not count.
    """
    from regrasp.policies.small_vla import SmallVLA

    policy = SmallVLA.load(folder)

    def loss(episode: Episode) -> np.ndarray:
        policy.reset(0)
        steps = episode.steps
        rows = np.arange(0, len(episode), LOSS_STRIDE)
        seen = [
            Observation(
                {name: steps[f"image/{name}"][t] for name in policy.spec.cameras},
                steps["state"][t],
                episode.header.instruction,
            )
            for t in rows
        ]
        chunks = np.stack([output.samples[0] for output in policy.infer(seen)])
        at = rows[:, None] + np.arange(chunks.shape[1])
        valid = at < len(episode)
        at = np.minimum(at, len(episode) - 1)
        if "segment" in steps:
            valid &= steps["segment"][at] == steps["segment"][rows][:, None]
        error = np.abs(chunks - steps["expert_action"][at]).mean(axis=2)
        return (error * valid).sum(axis=1) / valid.sum(axis=1)

    return loss


def truth(store: EpisodeStore) -> np.ndarray:
    """Which demonstrations are defective, bool ``[N]``."""
    return np.array([bool(header.extra.get("defect")) for header in store.headers])


def detection(
    scores: Mapping[str, np.ndarray],
    demos: Sequence[Demonstration],
    defective: np.ndarray,
    resamples: int = 1000,
) -> dict[str, Figure]:
    """AUROC of every metric, plain, between equal lengths, and without what length explains.

    ``<metric>.auroc_length_matched`` is missing where no two lengths are equal.
    """
    figures = {}
    for name, values in scores.items():
        figures[f"{name}.auroc"] = auroc(values, defective, demos, resamples=resamples)
        matched = matched_auroc(values, defective, demos, resamples=resamples)
        if matched is not None:
            figures[f"{name}.auroc_length_matched"] = matched
        rest = residualise(values, demos)
        figures[f"{name}.auroc_residual"] = auroc(rest, defective, demos, resamples=resamples)
        tied = length_correlation(values, demos)
        figures[f"{name}.length_correlation"] = Figure(tied, n=len(demos), unit="rank correlation")
    return figures


def print_detection(
    console: Console, names: Sequence[str], figures: Mapping[str, Figure], more: Sequence[str] = ()
) -> None:
    """A row a metric; ``more`` names further figures of each."""
    columns = ["auroc", "auroc_length_matched", "auroc_residual", "length_correlation", *more]
    table = Table("metric", *(column.replace("_", " ") for column in columns), title="curation")
    for name in names:
        cells = [_cell(figures.get(f"{name}.{column}")) for column in columns]
        table.add_row(name, *cells)
    console.print(table)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if figure.low is None or figure.high is None:
        return f"{figure.value:.2f}"
    return f"{figure.value:.2f} ({figure.low:.2f} to {figure.high:.2f})"


def main(args: Args) -> None:
    """Score and print."""
    console = Console()
    store = EpisodeStore.open(args.store)
    defective = truth(store)
    loss = policy_loss(args.policy) if args.policy else None
    demos = load_demonstrations(store, loss=loss)
    scores = score(demos)
    console.print(f"{len(demos)} demonstrations, {defective.sum()} defective")
    print_detection(console, list(scores), detection(scores, demos, defective))
    if loss is None:
        console.print("bc_loss needs --policy")
