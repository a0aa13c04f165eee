"""The curation study end to end, tiny: collect, score, train, evaluate, resume."""

import json
from dataclasses import replace

import numpy as np
import pytest
from regrasp.episodes.results import read_result
from regrasp.episodes.store import EpisodeStore
from regrasp.policies.bc import BCConfig
from regrasp.relabel.curation_metrics import METRICS
from regrasp.scripts import curation_collect, curation_score, curation_train
from regrasp.sim.experts.base import Phase

QUICK = BCConfig(
    minutes=0, steps=2, batch=4, threads=1, validation_windows=64, warmup=1, validate_seconds=1e9
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Eight demonstrations, half of them defective."""
    out = tmp_path_factory.mktemp("curation") / "store"
    args = curation_collect.Args(out=out, tasks=(0,), demos=8, workers=1)
    curation_collect.main(args)
    curation_collect.main(args)  # adds nothing
    return EpisodeStore.open(out)


def test_defective_demonstrations_let_go_on_the_way(store):
    kinds = [header.extra["defect"] for header in store.headers]
    assert kinds.count("") == 4
    assert kinds.count("early_release") == 4
    for header, episode in zip(store.headers, store, strict=True):
        gripper, phase = episode.steps["expert_action"][:, 6], episode.steps["phase"]
        if not header.extra["defect"]:
            assert header.success
            continue
        step = header.extra["release_step"]
        assert phase[step - 1] == Phase.CARRY  # the label is the defective action itself
        assert gripper[step - 1] == 1.0
        assert (gripper[step:] == -1.0).all()
        assert phase[-1] == Phase.DONE
        assert header.success == episode.steps["success"][-1]


def test_plan_is_the_same_every_time_and_keeps_the_share():
    args = curation_collect.Args(demos=10, defective=0.3, tasks=(0, 4))
    jobs = curation_collect.plan(args)
    assert jobs == curation_collect.plan(args)
    assert sum(job.release is not None for job in jobs) == 6
    assert len({job.key for job in jobs}) == 20
    with pytest.raises(ValueError, match="defective"):
        curation_collect.Args(defective=1.0)


def test_scores_are_shown(store, capsys):
    curation_score.main(curation_score.Args(store=store.path))
    shown = capsys.readouterr().out
    assert "8 demonstrations, 4 defective" in shown
    assert "deminf" in shown
    assert "bc_loss needs --policy" in shown


def test_study_trains_evaluates_and_resumes(store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = replace(
        curation_train.SMALL, chunk=4, width=(8, 16), keypoints=4, dim=32, layers=1, heads=2
    )
    args = curation_train.Args(
        store=store.path, out=tmp_path / "run", episodes=1, training=QUICK, model=model, workers=1,
        forms=("plain", "residual"), protocol="openpi",
    )  # fmt: skip
    monkeypatch.setattr(curation_train, "roll_out", short_roll_out)
    monkeypatch.setattr(curation_train, "run_missing", in_this_process)
    curation_train.main(args)
    figures = read_result("curation", tmp_path / "docs/results")["figures"]
    for name in METRICS:
        assert {f"{name}.auroc", f"{name}.auroc_residual", f"{name}.success"} <= set(figures)
    assert figures["oracle.defective_kept"].value == 0.0
    assert figures["uncurated.defective_kept"].value == 0.5
    assert {"rank_correlation", "rank_correlation_residual", "tied_to_length"} <= set(figures)
    assert "length.residual.success" not in figures
    kept = json.loads((tmp_path / "run/sal/finished.json").read_text())
    assert len(kept) == 4
    assert not (tmp_path / "run/sal/demos").exists()

    monkeypatch.setattr(curation_train, "Trainer", None)  # nothing is left to train ...
    monkeypatch.setattr(curation_train, "evaluate_one", None)  # ... or to evaluate
    curation_train.main(args)
    with pytest.raises(SystemExit, match="other settings"):
        curation_train.main(replace(args, keep=0.25))
    capsys.readouterr()


def short_roll_out(env, policy, instruction, job):
    """Three actions are enough to see that policy and environment fit."""
    env.reset(seed=7, options={"init_state": job.init_state, "render": False})
    policy.reset(0)
    chunk = policy.infer([env.observation()])[0].samples[0]
    env.step_chunk(np.clip(chunk[: job.replan], -1, 1), render="none")
    return int(env.steps)


def in_this_process(console, jobs, done, function, **_):
    """The job loop without workers, in which nothing could be replaced."""
    for job in jobs:
        if job.key not in done:
            yield function(job)
