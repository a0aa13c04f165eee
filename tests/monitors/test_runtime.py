"""The monitor artifact: same numbers after loading, and only for what it was calibrated on."""

import math

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.conformal import TooFewEpisodesWarning
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.tide import Tide

H, K, A, D = 8, 4, 7, 6


def episode(rng, noise, success=True, policy_hash="p1"):
    chunks = int(rng.integers(8, 15))
    path = np.cumsum(rng.normal(0, 0.1, (chunks * K + H, A)), axis=0)
    steps = np.arange(chunks) * K
    samples = np.stack([path[s : s + H] for s in steps])[:, None]
    samples = samples + rng.normal(0, noise, samples.shape)
    header = EpisodeHeader(
        "fake", "line", "go", 0, 0, success, policy_hash=policy_hash, protocol_hash="q1"
    )
    return Episode(
        header,
        {"action": path[: chunks * K].astype(np.float32)},
        {
            "step": steps,
            "samples": samples.astype(np.float32),
            "embedding": rng.normal(0, 1, (chunks, D)).astype(np.float32),
        },
    )


@pytest.fixture(scope="module")
def monitor():
    rng = np.random.default_rng(0)
    training = [episode(rng, 0.05) for _ in range(20)]
    rnd = RndOe.train(
        np.concatenate([e.chunks["embedding"] for e in training]), width=32, epochs=10
    )
    calibration = [episode(rng, 0.05) for _ in range(60)]
    failures = [episode(rng, 5.0, success=False) for _ in range(10)]
    return calibrate_monitor(
        [Tide(), rnd], calibration + failures, 0.1, provenance={"note": "synthetic"}
    )


def readings(monitor, e):
    monitor.reset()
    out = []
    for i, step in enumerate(e.chunks["step"]):
        executed = e.steps["action"][max(step - K, 0) : step]
        answer = PolicyOutput(e.chunks["samples"][i], e.chunks["embedding"][i])
        out.append(monitor.update(answer, executed))
    return out


def test_only_successes_calibrate(monitor):
    assert monitor.calibration.n == 60
    assert monitor.calibration.thresholds["tide"] < 0.05


def test_alarms_on_disagreement_and_names_the_cause(monitor):
    rng = np.random.default_rng(1)
    bad = readings(monitor, episode(rng, 1.0))
    assert any("tide" in r.causes for r in bad)
    quiet = [any(r.alarm for r in readings(monitor, episode(rng, 0.05))) for _ in range(100)]
    assert np.mean(quiet) < 0.25


def test_artifact_round_trip(monitor, tmp_path):
    monitor.save(tmp_path)
    again = Monitor.load(tmp_path, policy_hash="p1", protocol_hash="q1")
    e = episode(np.random.default_rng(2), 0.3)
    assert readings(monitor, e) == readings(again, e)
    assert again.calibration == monitor.calibration
    assert again.provenance == {"note": "synthetic"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["monitor.json", "monitor.safetensors"]


def test_artifact_refuses_another_policy_or_protocol(monitor, tmp_path):
    monitor.save(tmp_path)
    with pytest.raises(ValueError, match="policy_hash is 'p1', this run has 'p2'"):
        Monitor.load(tmp_path, policy_hash="p2", protocol_hash="q1")
    with pytest.raises(ValueError, match="protocol_hash"):
        Monitor.load(tmp_path, policy_hash="p1", protocol_hash="other")


def test_state_moves_between_monitors(monitor, tmp_path):
    monitor.save(tmp_path)
    other = Monitor.load(tmp_path)
    e = episode(np.random.default_rng(3), 0.3)
    whole = readings(monitor, e)
    monitor.reset()
    for i, step in enumerate(e.chunks["step"]):
        if i == 5:
            other.load_state(monitor.state())
        executed = e.steps["action"][max(step - K, 0) : step]
        answer = PolicyOutput(e.chunks["samples"][i], e.chunks["embedding"][i])
        assert (monitor if i < 5 else other).update(answer, executed) == whole[i]


def test_infinite_threshold_survives_saving(tmp_path):
    rng = np.random.default_rng(4)
    with pytest.warns(TooFewEpisodesWarning):
        monitor = calibrate_monitor([Tide()], [episode(rng, 0.05) for _ in range(5)], 0.1)
    monitor.save(tmp_path)
    assert Monitor.load(tmp_path).calibration.thresholds["tide"] == math.inf


def test_mixed_policies_are_refused():
    rng = np.random.default_rng(5)
    mixed = [episode(rng, 0.05), episode(rng, 0.05, policy_hash="p2")]
    with pytest.raises(ValueError, match="several policy_hash"):
        calibrate_monitor([Tide()], mixed, 0.5)
    with pytest.raises(ValueError, match="none of 1 episodes succeeded"):
        calibrate_monitor([Tide()], [episode(rng, 0.05, success=False)], 0.5)
