"""The monitors' benchmark at a small size, on real rollouts of the shipped policy."""

import json
import math

import numpy as np
import pytest
from regrasp.episodes.results import read_result
from regrasp.episodes.types import PolicyOutput
from regrasp.monitors.base import WindowedScore, score_episode, shown
from regrasp.monitors.runtime import Monitor, replay
from regrasp.scripts import bench_monitors, calibrate
from regrasp.scripts._bench_data import load
from regrasp.scripts._bench_report import page
from regrasp.scripts._bench_scores import FITS, fit_all, read, training_of, windowed


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One task that monitors are trained on and one that they are not."""
    folder = tmp_path_factory.mktemp("bench")
    args = bench_monitors.Args(
        out=folder / "data",
        suites=("libero_object",),
        tasks=2,
        alpha=0.2,
        shrink=2,
        results=folder / "docs" / "results",
    )
    figures = bench_monitors.main(args)
    return args, figures, load(args.store, args.tasks)


def test_every_score_is_measured(bench):
    _, figures, _ = bench
    for key in (*FITS, "fiper", "default"):
        for name in ("twa", "twa_length_matched", "auroc_length_matched", "lead_fraction"):
            assert 0.0 <= figures[f"{key}.{name}"].value <= 1.0
            assert f"unseen.{key}.{name}" in figures
        assert figures[f"{key}.p99_ms"].value > 0 or key == "clock"
    assert figures["clock.auroc_length_matched"].value == pytest.approx(0.5)
    assert figures["default.samples"].value == 1


def test_page_and_plots(bench):
    args, _, _ = bench
    record = read_result("monitors", args.results)
    text = page([record])
    assert "**default**" in text
    assert text.count("| clock |") >= 3
    for plot in ("leaderboard", "promise", "delay"):
        file = args.results.parent / f"monitors_{plot}.png"
        assert file.read_bytes().startswith(b"\x89PNG")
        assert f"({file.name})" in text


def test_again_changes_nothing(bench, monkeypatch):
    args, _, rollouts = bench
    monkeypatch.setattr(bench_monitors, "roll_out", None)  # nothing is left to run
    store = bench_monitors.collect(args, bench_monitors.Console(quiet=True))
    assert len(store) == len(rollouts)
    with pytest.raises(SystemExit, match="other settings"):
        bench_monitors.collect(
            bench_monitors.Args(out=args.out, tasks=3), bench_monitors.Console(quiet=True)
        )


def test_folds_share_no_initial_state(bench):
    _, _, rollouts = bench
    states = {}
    for rollout in rollouts:
        states.setdefault(rollout.fold, set()).add(rollout.episode.header.init_state)
    assert states["train"] | states["failures"] <= set(range(8))
    for other in ("select", "calibrate", "test"):
        for fold in set(states) - {other}:
            assert not states[other] & states[fold]
    assert min(states["test"]) >= 30


def test_streaming_and_batch_agree_on_real_episodes(bench):
    args, _, rollouts = bench
    scores = fit_all(training_of(rollouts, args.seed))
    assert set(scores) == set(FITS)
    for name, score in scores.items():
        for rollout in rollouts[:: max(1, len(rollouts) // 6)]:
            episode = rollout.episode
            batch = score_episode(score, episode)
            np.testing.assert_allclose(
                streamed(score, episode), batch, rtol=0, atol=1e-6, err_msg=name
            )
            if isinstance(score, WindowedScore):
                wide = type(score).build(score.config() | {"window": 3}, score.weights())
                np.testing.assert_allclose(
                    windowed(read(score, episode), 3), score_episode(wide, episode), atol=1e-12
                )


def streamed(score, episode):
    """As on a robot whose monitor is stopped and continued elsewhere after every inference."""
    score.reset()
    state, values, last = score.state(), [], 0
    for i, step in enumerate(episode.chunks["step"]):
        score.reset()
        score.load_state(state)
        output = PolicyOutput(episode.chunks["samples"][i], episode.chunks["embedding"][i])
        executed = episode.steps["action"][last:step]
        values.append(score.update(shown(score, output), executed))
        state, last = {k: v.copy() for k, v in score.state().items()}, step
    return np.array(values)


def test_default_monitor_is_an_artifact(bench):
    args, _, rollouts = bench
    folder = args.out / args.policy / "monitor"
    header = rollouts[0].episode.header
    monitor = Monitor.load(
        folder, policy_hash=header.policy_hash, protocol_hash=header.protocol_hash
    )
    assert monitor.samples == 1
    readings = list(replay(monitor, rollouts[0].episode))
    assert len(readings) == len(rollouts[0].episode.chunks["step"])
    assert all(math.isfinite(v) for r in readings for v in r.scores.values())
    with pytest.raises(ValueError, match="policy_hash"):
        Monitor.load(folder, policy_hash="another")


def test_calibrate_command(bench, tmp_path):
    args, _, _ = bench
    monitor = calibrate.main(
        calibrate.Args(
            store=args.store, out=tmp_path / "m", scores=("tide", "knn"), alpha=0.3, fold=True
        )
    )
    assert set(monitor.thresholds) == {"tide", "knn"}
    text = json.loads((tmp_path / "m" / "monitor.json").read_text())
    assert "0.15" in text["promise"]["tide"]
    alone = calibrate.main(
        calibrate.Args(
            store=args.store, out=tmp_path / "t", scores=("tide",), alpha=0.3, per_task=True
        )
    )
    assert alone.thresholds["tide"].groups
    with pytest.raises(KeyError, match="did you mean tide"):
        calibrate.main(
            calibrate.Args(store=args.store, out=tmp_path / "x", scores=("tyde",), fold=True)
        )
