"""``regrasp eval interventions``: does the diagnosis of a policy's failure help the policy?

Each natural failure is run again up to the step at which the diagnosis says it had failed. From
there the policy goes on alone; or after the motion that the diagnosis advises; or after the motion
of the answer that knows nothing but the training set. The three differ in nothing else, and the
motion is part of the policy's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.diagnose.answer import Diagnosis
from regrasp.relabel.diagnose.baselines import constant_answer
from regrasp.relabel.diagnose.dataset import clips_of, natural_clips
from regrasp.scripts import eval_diagnose, natural_failures
from regrasp.scripts._jobs import run_missing
from rich.console import Console

#: What happens where the rollout is stopped.
WAYS = ("alone", "advised", "constant")


@dataclass(frozen=True)
class Args:
    """Test diagnoses of natural failures by doing what they say; continues ``out``.

    Attributes:
        natural: a store of ``regrasp failures natural``.
        stores: those that the model was trained on, for the constant answer.
        model: the model's folder.
        limit: failures, at most; 0 is all.
        workers: processes.
        out: folder for answers and verdicts.
        result: also write docs/results/<result>.json.
    """

    natural: Path = Path("data/natural")
    stores: tuple[Path, ...] = (Path("data/failures"),)
    model: Path = Path("runs/diagnose/fp16")
    limit: int = 0
    workers: int = 2
    out: Path = Path("runs/interventions")
    result: str | None = None


@dataclass(frozen=True)
class Job:
    """One failure, stopped at one step, and what is done then."""

    episode: natural_failures.Job
    index: int
    step: int
    way: str
    delta: tuple[float, ...] | None

    @property
    def key(self) -> str:
        """A name that is the same in every run of the same evaluation."""
        motion = "" if self.delta is None else ",".join(f"{x:.3f}" for x in self.delta)
        return f"{self.episode.key}/{self.step}/{self.way}/{motion}"


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.episode.suite, job.episode.task


def intervene_one(job: Job) -> dict[str, Any]:
    """Run a failure again in a worker up to its step, and go on in the job's way."""
    from regrasp.sim.failures.natural import advised

    store = EpisodeStore.open(job.episode.out)
    actions = store.load(job.index, ["action"]).steps["action"][: job.step]
    robot, policy = natural_failures.robot_of(job.episode)
    return {"key": job.key, "success": advised(robot, actions, job.delta, policy)}


def jobs_of(args: Args, console: Console) -> tuple[list[list[Job]], int]:
    """Per diagnosed failure one job a way; and how many failures there are in all."""
    store = EpisodeStore.open(args.natural)
    clips = [clip for clip in natural_clips(args.natural) if clip.truth.failed]
    clips = clips[: args.limit or None]
    asked = eval_diagnose.Args(model=args.model, out=args.out)
    answers = eval_diagnose.written(args.model, asked, "natural", clips, console)
    trained = [c.truth for c in clips_of(args.stores) if c.split == "train"]
    constant = constant_answer(trained).delta
    jobs = []
    for clip, answer in zip(clips, answers, strict=True):
        if not (isinstance(answer, Diagnosis) and answer.failed):
            continue  # nothing is advised; it counts as not helped
        index = clip.parts[0].episode
        job = {**store.headers[index].extra["job"], "out": str(args.natural)}
        episode = natural_failures.Job(**job)
        motions = (None, answer.delta, constant)
        jobs.append(
            [
                Job(episode, index, answer.end + 1, way, delta)
                for way, delta in zip(WAYS, motions, strict=True)
            ]
        )
    return jobs, len(clips)


def main(args: Args) -> None:
    """Diagnose, intervene, print, and write the result."""
    console = Console()
    jobs, total = jobs_of(args, console)
    log = JsonLines(args.out / "verdicts.jsonl")
    done = {row["key"]: row["success"] for row in log.read()}
    for row in run_missing(
        console,
        [job for ways in jobs for job in ways],
        done,
        intervene_one,
        workers=args.workers,
        timeout_s=300.0,
        recycle_after=40,
        affinity=scene_of,
    ):
        done[row["key"]] = row["success"]
        log.append(row)
    if not jobs:
        raise SystemExit(f"none of {total} failures was diagnosed as one: nothing to be tried")
    figures = figures_of([[bool(done[job.key]) for job in ways] for ways in jobs], total)
    for name, figure in figures.items():
        console.print(f"{name}: {figure.value:.3f} ({figure.low:.3f} to {figure.high:.3f})")
    if args.result:
        command = f"regrasp eval interventions --result {args.result}"
        protocol = {"ways": list(WAYS), "failures": total, "stopped": "at the diagnosed end"}
        path = write_result(args.result, command, protocol, [0], figures)
        console.print(f"wrote {path}")


def figures_of(verdicts: Sequence[Sequence[bool]], total: int) -> dict[str, Figure]:
    """Success of each way, and what advice adds to going on alone, over the same failures.

    Args:
        verdicts: per diagnosed failure, one a way of :data:`WAYS`.
        total: failures in all; advice that was not given helps nobody.
    """
    table = np.array(verdicts, float)
    figures = {"diagnosed": Figure.rate(len(table), total, "of failures")}
    for way, column in zip(WAYS, table.T, strict=True):
        figures[f"success_{way}"] = Figure.rate(int(column.sum()), len(column))
    alone, advised, constant = table.T
    figures["advised_minus_alone"] = Figure.paired(advised, alone)
    figures["advised_minus_constant"] = Figure.paired(advised, constant)
    return figures


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
