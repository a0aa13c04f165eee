"""``regrasp curation train``: the policy that each metric's curated demonstrations make.

Each condition is a subset of one store: all of it (``uncurated``), the good ones (``oracle``), a
``random`` half, and the half that each metric likes best. All train the same network for the same
number of steps; all are evaluated on the same held-out states. Beside each success stands how well
the metric finds defects, and over the metrics the rank correlation of the two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import Figure, protocol_hash, write_result
from regrasp.episodes.store import EpisodeStore
from regrasp.policies.bc import BCConfig, Trainer
from regrasp.policies.data import Augmentation
from regrasp.policies.small_vla import SmallVLA
from regrasp.policies.vla import VLAConfig
from regrasp.relabel.curation import (
    keep_best,
    load_demonstrations,
    rank_correlation,
    residualise,
    score,
)
from regrasp.scripts._jobs import run_missing
from regrasp.scripts.curation_score import detection, policy_loss, print_detection, truth
from regrasp.scripts.evaluate import Job, roll_out
from regrasp.sim.cache import LastEnv
from rich.console import Console

Form = Literal["plain", "residual"]

#: A network and settings with which fourteen trainings fit into half an hour on two cores.
SMALL = VLAConfig(image_size=64, width=(24, 48), blocks=(1, 1), dim=128, layers=3)
SHORT = BCConfig(
    minutes=0,
    steps=1200,
    batch=64,
    lr=1.5e-3,
    warmup=50,
    ema=0.995,
    augmentation=Augmentation(shift=2),
    validate_seconds=1e9,
    validation_windows=128,
)


@dataclass(frozen=True)
class Args:
    """Train and evaluate on each metric's curated set; resumes where it was stopped.

    Attributes:
        store: demonstrations of ``regrasp curation collect``.
        out: folder of the study: one run a condition, and the log of the evaluation.
        keep: share of each task's demonstrations that a metric keeps.
        forms: select by the scores as they are (``plain``), without what length explains
            (``residual``), or both ways.
        episodes: evaluation episodes a task and policy, on held-out initial states.
        protocol: a named protocol; the camera is the network's.
        training: settings of every training.
        model: sizes of the network.
        workers: processes of the evaluation.
        result: write docs/results/<result>.json; empty writes none.
    """

    store: Path = Path("data/curation")
    out: Path = Path("runs/curation")
    keep: float = 0.5
    forms: tuple[Form, ...] = ("plain",)
    episodes: int = 15
    protocol: str = "openpi"
    training: BCConfig = field(default_factory=lambda: SHORT)
    model: VLAConfig = field(default_factory=lambda: SMALL)
    workers: int = 2
    result: str = "curation"


def main(args: Args) -> None:
    """Train what is missing, evaluate what is missing, print and write the result."""
    console = Console()
    store = EpisodeStore.open(args.store)
    record = _record(args, store)
    _stamp(args.out, record)
    # First the policy on everything: its loss is one of the metrics.
    train_condition(console, args, store, "uncurated", list(range(len(store))))
    demos = load_demonstrations(store, loss=policy_loss(args.out / "uncurated/policy"))
    scores = score(demos)
    defective = truth(store)
    chosen = _remembered(args.out / "selections.json", args, scores, demos, defective)
    for name, indices in chosen.items():
        train_condition(console, args, store, name, indices)
    outcomes = evaluate(console, args, store, list(chosen))
    figures = detection(scores, demos, defective)
    figures |= _of_conditions(chosen, outcomes, defective)
    figures |= decoupling(list(scores), figures)
    print_detection(console, list(scores), figures, ("defective_kept", "success"))
    for name in [n for n in figures if "." not in n or n.split(".")[0] not in scores]:
        console.print(f"{name}: {figures[name].value:.3f}")
    if args.result:
        command = f"regrasp curation train --result {args.result}"
        path = write_result(args.result, command, record, [args.training.seed], figures)
        console.print(f"wrote {path}")


def _record(args: Args, store: EpisodeStore) -> dict[str, Any]:
    """Everything that decides the figures."""
    from regrasp.sim.protocol import get_protocol

    size = (args.model.image_size,) * 2
    return {
        "demonstrations": {
            **store.attrs,
            "episodes": len(store),
            "defective": int(truth(store).sum()),
            "jobs": protocol_hash({"jobs": [h.extra.get("job") for h in store.headers]}),
        },
        "keep": args.keep,
        "forms": list(args.forms),
        "episodes": args.episodes,
        "protocol": get_protocol(args.protocol, camera=size).record(),
        "training": asdict(args.training),
        "model": args.model.to_json(),
    }


def _stamp(out: Path, record: Mapping[str, Any]) -> None:
    """Refuse to continue a study of other settings."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, sort_keys=True, default=list)
    stamp = out / "protocol.json"
    if stamp.exists() and stamp.read_text() != text:
        raise SystemExit(f"{out} holds a study with other settings; give another --out")
    stamp.write_text(text)


def conditions(
    args: Args, scores: Mapping[str, np.ndarray], demos: Sequence[Any], defective: np.ndarray
) -> dict[str, list[int]]:
    """Which demonstrations each policy is trained on: condition -> indices."""
    rng = np.random.default_rng(args.training.seed)
    chosen = {
        "uncurated": list(range(len(demos))),
        "oracle": np.flatnonzero(~defective).tolist(),
        "random": keep_best(rng.random(len(demos)), demos, args.keep),
    }
    for name, values in scores.items():
        if "plain" in args.forms:
            chosen[name] = keep_best(values, demos, args.keep)
        if "residual" in args.forms and name != "length":  # which has nothing left
            rest = residualise(values, demos)
            chosen[f"{name}.residual"] = keep_best(rest, demos, args.keep)
    return chosen


def _remembered(
    path: Path,
    args: Args,
    scores: Mapping[str, np.ndarray],
    demos: Sequence[Any],
    defective: np.ndarray,
) -> dict[str, list[int]]:
    """The conditions as they were first chosen: a policy's loss may differ in its last digits."""
    if not path.exists():
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(conditions(args, scores, demos, defective)))
        partial.replace(path)
    return json.loads(path.read_text())


def train_condition(
    console: Console, args: Args, store: EpisodeStore, name: str, indices: Sequence[int]
) -> None:
    """Train one condition's policy, ``<out>/<name>/policy``, unless it is finished.

    The subset is copied into a store of its own for as long as the training takes.
    """
    folder = args.out / name
    finished = folder / "finished.json"
    if finished.exists():
        if json.loads(finished.read_text()) != list(indices):
            raise SystemExit(f"{folder} was trained on other demonstrations; give another --out")
        return
    part = _copy(store, indices, folder / "demos")
    every = max(2, min(25, len(indices) // 2))
    config = replace(args.training, validation_every=every)
    trainer = Trainer(folder, [part], model=args.model, config=config)
    console.print(f"{name}: {len(indices)} demonstrations, from step {trainer.step}")
    trainer.run()
    console.print(f"{name}: {trainer.step} steps in {trainer.seconds:.0f} s")
    finished.write_text(json.dumps(list(indices)))
    for leftover in (*folder.glob("step-*"), part):
        shutil.rmtree(leftover)


def _copy(store: EpisodeStore, indices: Sequence[int], path: Path) -> Path:
    """A store of some episodes of another; continues one that a kill cut short."""
    part = EpisodeStore.create(path, exist_ok=True)
    for index in indices[len(part) :]:
        part.append(store[index])
    return path


_last_env = LastEnv()
_POLICIES: dict[str, SmallVLA] = {}


def evaluate_one(job: Job) -> dict[str, Any]:
    """Run one evaluation episode in a worker."""
    import torch
    from regrasp.sim import LiberoEnv, get_task
    from regrasp.sim.protocol import get_protocol

    torch.set_num_threads(1)
    assert job.policy is not None
    if job.policy not in _POLICIES:
        _POLICIES[job.policy] = SmallVLA.load(job.policy)
    policy = _POLICIES[job.policy]
    size = policy.model.config.image_size
    protocol = get_protocol(job.protocol, camera=(size, size))
    env = _last_env.get(
        (job.suite, job.task, size),
        lambda: LiberoEnv(get_task(job.suite, job.task), protocol.env_config(job.suite)),
    )
    steps = roll_out(env, policy, env.task.instruction, job)
    return {"key": job.key, "success": env.succeeded, "steps": steps}


def scene_of(job: Job) -> tuple[str, int]:
    """Jobs of one scene go to one worker, which then builds the scene once."""
    return job.suite, job.task


def evaluate(
    console: Console, args: Args, store: EpisodeStore, names: Sequence[str]
) -> dict[str, list[bool]]:
    """Each condition's successes, in the same order of tasks and initial states."""
    from regrasp.sim.protocol import HELD_OUT_STATES

    tasks = sorted({(header.suite, int(header.task)) for header in store.headers})
    chunk = SmallVLA.load(args.out / "uncurated/policy").spec.chunk
    jobs = [
        Job(
            policy=str(args.out / name / "policy"),
            flow_steps=None,
            protocol=args.protocol,
            condition=name,
            suite=suite,
            task=task,
            init_state=state,
            replan=chunk,
            seed=args.training.seed,
        )
        for suite, task in tasks
        for name in names
        for state in HELD_OUT_STATES[: args.episodes]
    ]
    log = JsonLines(args.out / "episodes.jsonl")
    done = {result["key"]: result["success"] for result in log.read()}
    for result in run_missing(
        console,
        jobs,
        done,
        evaluate_one,
        workers=args.workers,
        timeout_s=600.0,
        recycle_after=400,
        affinity=scene_of,
    ):
        done[result["key"]] = result["success"]
        log.append(result)
    outcomes: dict[str, list[bool]] = {name: [] for name in names}
    for job in jobs:
        outcomes[job.condition].append(done[job.key])
    return outcomes


def _of_conditions(
    chosen: Mapping[str, Sequence[int]],
    outcomes: Mapping[str, Sequence[bool]],
    defective: np.ndarray,
) -> dict[str, Figure]:
    """Success of every condition and how many defective demonstrations it was trained on."""
    figures = {}
    for name, indices in chosen.items():
        bad = int(defective[list(indices)].sum())
        figures[f"{name}.defective_kept"] = Figure.rate(bad, len(indices), "share")
        figures[f"{name}.success"] = Figure.rate(sum(outcomes[name]), len(outcomes[name]))
        if name != "oracle":
            figures[f"{name}.minus_oracle"] = Figure.paired(
                outcomes[name], outcomes["oracle"], "success rate"
            )
    return figures


def decoupling(names: Sequence[str], figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Does finding defects go with making good policies? Rank correlations over the metrics.

    ``rank_correlation`` for plain AUROC, ``..._length_matched`` and ``..._residual`` for the
    others; ``best_detector_success`` and ``best_policy_auroc`` are the two ends of the question,
    and ``tied_to_length`` counts metrics whose rank correlation with length exceeds one half.
    """
    tied = sum(abs(figures[f"{name}.length_correlation"].value) > 0.5 for name in names)
    out = {"tied_to_length": Figure(float(tied), n=len(names), unit="metrics")}
    trained = [name for name in names if f"{name}.success" in figures]
    if not trained:
        return out
    best = max(trained, key=lambda name: figures[f"{name}.auroc"].value)
    out["best_detector_success"] = figures[f"{best}.success"]
    best = max(trained, key=lambda name: figures[f"{name}.success"].value)
    out["best_policy_auroc"] = figures[f"{best}.auroc"]
    for form in ("", "_length_matched", "_residual"):
        both = [name for name in trained if f"{name}.auroc{form}" in figures]
        if len(both) >= 3:
            out[f"rank_correlation{form}"] = rank_correlation(
                [figures[f"{name}.auroc{form}"].value for name in both],
                [figures[f"{name}.success"].value for name in both],
            )
    return out
