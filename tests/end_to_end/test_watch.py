"""What a monitor says of an episode, replayed or followed."""

import json
import threading
import time

import numpy as np
import pytest
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.monitors.runtime import calibrate_monitor
from regrasp.monitors.scores.tide import Tide
from regrasp.scripts.watch import Args, line, main
from rerun.chunk import RrdReader

H, K = 8, 4


def episode(rng, noise, success=True, policy="p1"):
    steps = np.arange(10) * K
    path = np.cumsum(rng.normal(0, 0.1, (10 * K + H, 7)), axis=0)
    samples = np.stack([path[s : s + H] for s in steps])[:, None]
    samples = (samples + rng.normal(0, noise, samples.shape)).astype(np.float32)
    frames = rng.integers(0, 255, (10 * K, 8, 8, 3), dtype=np.uint8)
    header = EpisodeHeader(
        "s", "lift", "lift [it]", 0, 0, success, policy_hash=policy, protocol_hash="q1"
    )
    return Episode(
        header,
        {"action": path[: 10 * K].astype(np.float32), "image/front": frames},
        {"step": steps, "samples": samples, "embedding": np.zeros((10, 2), np.float32)},
    )


@pytest.fixture
def recorded(tmp_path):
    rng = np.random.default_rng(0)
    monitor = calibrate_monitor([Tide()], [episode(rng, 0.05) for _ in range(30)], 0.1)
    monitor.save(tmp_path / "monitor")
    store = EpisodeStore.create(tmp_path / "store")
    for one in (
        episode(rng, 0.01),
        episode(rng, 1.0, success=False),
        episode(rng, 1.0, policy="p2"),
    ):
        store.append(one)
    return tmp_path / "monitor", tmp_path / "store"


def test_replay(recorded, capsys):
    monitor, store = recorded
    quiet = main(Args(monitor=monitor, store=store))
    assert [r["step"] for r in quiet] == list(range(0, 40, K))
    assert "no alarm; it succeeded after 40 steps" in capsys.readouterr().out
    loud = main(Args(monitor=monitor, store=store, episode=1))
    out = capsys.readouterr().out
    assert "ALARM tide" in out
    assert "first alarm at step 4; it failed" in out
    assert "lift [it]" in out  # brackets are not markup
    assert loud[1]["causes"] == ["tide"]


def test_another_policys_episode_is_refused_unless_asked_for(recorded):
    monitor, store = recorded
    with pytest.raises(ValueError, match="policy_hash is 'p1', this run has 'p2'"):
        main(Args(monitor=monitor, store=store, episode=2))
    assert main(Args(monitor=monitor, store=store, episode=2, any_policy=True))
    with pytest.raises(SystemExit, match="no shipped monitor is of policy 'p1'"):
        main(Args(store=store))
    with pytest.raises(SystemExit, match="there is no 9"):
        main(Args(monitor=monitor, store=store, episode=9))
    for neither_or_both in (Args(), Args(store=store, follow=store / "live.jsonl")):
        with pytest.raises(SystemExit, match="not both"):
            main(neither_or_both)


def test_rerun_recording(recorded, tmp_path):
    monitor, store = recorded
    file = tmp_path / "deep" / "watch.rrd"
    main(Args(monitor=monitor, store=store, episode=1, rerun=file))
    paths = {chunk.entity_path for chunk in RrdReader(str(file)).stream().to_chunks()}
    curves = {"/scores/tide/value", "/scores/tide/threshold"}
    assert curves | {"/image/front", "/alarms"} <= paths


def test_follows_a_log_that_is_being_written(tmp_path, capsys):
    file = tmp_path / "live.jsonl"
    file.touch()
    reading = {"segment": 0, "scores": {"tide": 0.2}, "thresholds": {"tide": None}, "causes": []}

    def write():
        log = JsonLines(file)
        for i in range(3):
            log.append({"step": 8 * i, **reading})
            time.sleep(0.1)
        text = json.dumps({"step": 24, **reading}) + "\n"
        with file.open("a") as handle:  # a line that is read in two pieces
            handle.write(text[:20])
            handle.flush()
            time.sleep(0.2)
            handle.write(text[20:])

    writer = threading.Thread(target=write)
    writer.start()
    seen = main(Args(follow=file, quiet=1.0))
    writer.join()
    assert [r["step"] for r in seen] == [0, 8, 16, 24]
    assert "4 inferences, no alarm" in capsys.readouterr().out


def test_bars_are_full_at_the_threshold():
    reading = {"step": 8, "scores": {"a": 0.5}, "thresholds": {"a": 1.0}, "causes": []}
    assert line(reading).plain.count("█") == 12
    full = reading | {"scores": {"a": 3.0}, "causes": ["a"]}
    assert line(full).plain.count("█") == 24
    assert line(reading | {"scores": {"a": -1.0}}).plain.count("█") == 0
