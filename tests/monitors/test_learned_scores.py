"""Learned scores: what they learn where the onset is known; live as in training and as saved."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.base import score_episode
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.monitors.scores.hide_and_seek import HideAndSeek
from regrasp.monitors.scores.labelled import CLIP, LabelledEpisodes, Projection
from regrasp.monitors.scores.learned import Training, prepare
from regrasp.monitors.scores.logpzo import LogpZo
from regrasp.monitors.scores.lstm import Lstm, network
from regrasp.monitors.scores.onset import Onset
from regrasp.monitors.scores.safe import SafeLstm, SafeMlp

D, A, H, K, TASKS = 32, 3, 6, 4, 4
LABELLED = (HideAndSeek, Onset, SafeLstm, SafeMlp)
SMALL = {"members": 1, "hidden": 32, "components": 24, "inputs": "embedding"}
SHORTEST, LONGEST = 10, 16
NO_ACTION = np.zeros((0, A), np.float32)


def rollouts(seed, count, *, shift=3.0):
    """Half of the episodes fail. Each task has its own embeddings and moves along its own line; a
    failure stops there, leaves along one of two directions, and lasts twice as long as a success.

    Returns: data, and the direction along which each episode left.
    """
    world = np.random.default_rng(0)
    task, line = world.normal(0, 1.0, (TASKS, D)), world.normal(0, 0.7, (TASKS, D))
    away = np.linalg.qr(world.normal(0, 1, (D, 2)))[0].T
    rng = np.random.default_rng(seed)
    embeddings, failed, onset, groups, left = [], [], [], [], []
    for i in range(count):
        t, fails = int(rng.integers(TASKS)), i % 2 == 0
        length = int(rng.integers(SHORTEST, LONGEST))
        begun = int(rng.integers(2, 7)) if fails else None
        n = 2 * length if fails else length
        done = np.minimum(np.arange(n), n if begun is None else begun) / length
        x = task[t] + np.outer(2 * done - 1, line[t]) + rng.normal(0, 0.6, (n, D))
        direction = away[int(rng.integers(2))]
        if begun is not None:
            x += shift * np.outer(np.clip((np.arange(n) - begun + 1) / 2, 0, 1), direction)
        embeddings.append(x.astype(np.float32))
        failed.append(fails)
        onset.append(begun)
        groups.append(str(t))
        left.append(direction)
    return LabelledEpisodes(embeddings, np.array(failed), onset, None, groups), np.array(left)


def readings(score, rows):
    score.reset()
    chunk = np.zeros((1, H, A), np.float32)
    return np.array([score.update(PolicyOutput(chunk, row), NO_ACTION) for row in rows])


def auroc(values, failed):
    high, low = np.asarray(values)[failed][:, None], np.asarray(values)[~failed][None]
    return float(np.mean(high > low) + 0.5 * np.mean(high == low))


def chance(failed, deviations):
    """How far from 1/2 the AUROC of a score that knows nothing rarely is (Mann-Whitney)."""
    n, m = int(np.sum(failed)), int(np.sum(~failed))
    return deviations * np.sqrt((n + m + 1) / (12 * n * m))


@pytest.fixture(scope="module")
def training():
    return rollouts(1, 160)[0]


@pytest.fixture(scope="module")
def trained(training):
    return {cls.name: cls.train(training, **SMALL) for cls in LABELLED}


@pytest.fixture(scope="module")
def unseen():
    """Other episodes, all as long as the shortest success: how late it is tells nothing."""
    data, left = rollouts(2, 100)
    return replace(data, embeddings=[x[:SHORTEST] for x in data.embeddings]), left


# -- what they learn ------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", LABELLED, ids=lambda cls: cls.name)
def test_learns_what_a_failure_is(trained, unseen, cls):
    """Five standard deviations above chance, among episodes as long as one another."""
    data, _ = unseen
    peaks = [readings(trained[cls.name], x).max() for x in data.embeddings]
    assert auroc(peaks, data.failed) > 0.5 + chance(data.failed, 5)


def test_onset_comes_near_one_who_knows_the_direction(trained, unseen):
    data, left = unseen
    best = [(x @ w).max() for x, w in zip(data.embeddings, left, strict=True)]
    peaks = [readings(trained["onset"], x).max() for x in data.embeddings]
    assert auroc(peaks, data.failed) > auroc(best, data.failed) - 0.05


def test_onset_fires_after_the_onset_not_before(trained, unseen):
    data, _ = unseen
    values = [readings(trained["onset"], x) for x in data.embeddings]
    threshold = np.quantile(
        [v.max() for v, f in zip(values, data.failed, strict=True) if not f], 0.9
    )
    failures = [(v, o) for v, o in zip(values, data.onset, strict=True) if o is not None]
    before = np.mean([v[:o].max() > threshold for v, o in failures])
    after = np.mean([v[o:].max() > threshold for v, o in failures])
    assert before < 0.2
    assert after > 0.8
    assert np.mean([v[:o].mean() for v, o in failures]) < 0.3
    assert np.mean([v[o + 1 :].mean() for v, o in failures]) > 0.6


@pytest.mark.parametrize("cls", LABELLED, ids=lambda cls: cls.name)
def test_learns_nothing_from_labels_without_meaning(cls):
    """Labels are drawn at random, for the training and for the test."""
    rng = np.random.default_rng(5)

    def drawn(seed, count):
        data = rollouts(seed, count)[0].cut()
        failed = rng.permutation(data.failed)
        onset = [len(x) // 2 if f else None for x, f in zip(data.embeddings, failed, strict=True)]
        return replace(data, failed=failed, onset=onset)

    score = cls.train(drawn(3, 100), **SMALL, training=Training(epochs=15))
    data = drawn(4, 200)
    peaks = [readings(score, x).max() for x in data.embeddings]
    assert abs(auroc(peaks, data.failed) - 0.5) < chance(data.failed, 4)


def test_the_sum_grows_with_time_and_the_mean_does_not(training, trained):
    mean = SafeMlp.build(
        {**trained["safe_mlp"].config(), "cumulative": False}, trained["safe_mlp"].weights()
    )
    x = np.tile(training.embeddings[1][:1], (20, 1))
    total, running = readings(trained["safe_mlp"], x), readings(mean, x)
    np.testing.assert_allclose(total, running[0] * np.arange(1, 21))
    np.testing.assert_allclose(running, running[0])


def test_logpzo_is_low_where_it_was_trained():
    data, _ = rollouts(6, 120, shift=8.0)
    good = [x for x, f in zip(data.embeddings, data.failed, strict=True) if not f]
    score = LogpZo.train(np.concatenate(good[:40]), components=24, epochs=30)
    inside = np.concatenate([readings(score, x) for x in good[40:]])
    failures = [(x, o) for x, o in zip(data.embeddings, data.onset, strict=True) if o is not None]
    outside = np.concatenate([readings(score, x[o + 1 :]) for x, o in failures])
    values = np.concatenate([inside, outside])
    assert auroc(values, np.arange(len(values)) >= len(inside)) > 0.95
    # In theory zero on what it saw, where 25 numbers of unit variance have a square of 25.
    assert np.median([readings(score, x).mean() for x in good[:40]]) < 25 / 2
    assert inside.min() >= 0


# -- live, stored, saved --------------------------------------------------------------------------


def recorded(seed, success=True, chunks=10, samples=3):
    """A stored episode of a policy that plans several chunks; a failure's embeddings are away."""
    rng = np.random.default_rng(seed)
    header = EpisodeHeader(
        "fake", "line", "go", 0, seed, success, policy_hash="p", protocol_hash="q"
    )
    embedding = rng.normal(0, 1, (chunks, D)) + (0 if success else 2)
    return Episode(
        header,
        {"action": rng.normal(0, 1, (chunks * K, A)).astype(np.float32)},
        {
            "step": np.arange(chunks) * K,
            "samples": rng.normal(0, 1, (chunks, samples, H, A)).astype(np.float32),
            "embedding": embedding.astype(np.float32),
        },
    )


@pytest.fixture(scope="module")
def from_episodes():
    """Every score trained on stored episodes; those that can read two chunks of each inference."""
    episodes = [recorded(i, success=i % 2 == 0) for i in range(40)]
    data = LabelledEpisodes.from_episodes(episodes, [None, 5] * 20, samples=2)
    assert data.onset == [None, 2] * 20  # step 5 is first seen at the inference of step 8
    short = Training(epochs=3)
    scores = [
        cls.train(
            data, inputs="embedding+action", members=2, hidden=8, components=8, training=short
        )
        for cls in LABELLED
    ]
    return [*scores, LogpZo.train(np.concatenate(data.embeddings[::2]), draws=2, epochs=1)]


def live(score, episode, first=0, last=None):
    """What a robot's loop would do from one inference to another."""
    values = []
    for i in range(first, len(episode.chunks["step"]) if last is None else last):
        step = int(episode.chunks["step"][i])
        executed = episode.steps["action"][max(step - K, 0) : step]
        samples = episode.chunks["samples"][i][: score.samples]
        values.append(score.update(PolicyOutput(samples, episode.chunks["embedding"][i]), executed))
    return np.array(values)


@pytest.mark.parametrize("window", [1, 3])
def test_stored_live_and_resumed_scores_are_identical(from_episodes, window):
    episode = recorded(100)
    for trained_score in from_episodes:
        weights = trained_score.weights()
        config = {**trained_score.config(), "window": window}
        one, two = (type(trained_score).build(config, weights) for _ in range(2))
        assert one.config() == config
        whole = score_episode(one, episode)
        one.reset()
        np.testing.assert_array_equal(live(one, episode), whole)
        one.reset()
        live(one, episode, 0, 6)
        live(two, recorded(101))  # what it did before leaves no trace
        two.load_state(one.state())
        np.testing.assert_array_equal(live(two, episode, 6), whole[6:])
        for key, value in two.weights().items():
            np.testing.assert_array_equal(value, weights[key])


def test_live_inputs_are_those_of_training(from_episodes):
    """The action features of a stored episode are what the score sees live."""
    episode = recorded(102)
    stored = LabelledEpisodes.from_episodes([episode], samples=2)
    score = next(s for s in from_episodes if s.name == "onset")
    seen, read = [], score.read
    score.read = lambda x: seen.append(x) or read(x)
    try:
        score_episode(score, episode)
    finally:
        del score.read
    expected = score.projection(stored.embeddings[0], stored.actions[0])
    np.testing.assert_allclose(np.stack(seen), np.clip(expected, -CLIP, CLIP), atol=1e-5)
    assert score.samples == 2
    assert seen[3].shape == (8 + 3 * A,)


def test_artifact_round_trip(from_episodes, tmp_path):
    calibration = [recorded(i) for i in range(200, 240)]
    monitor = calibrate_monitor(from_episodes, calibration, 0.2)
    monitor.save(tmp_path)
    again = Monitor.load(tmp_path, policy_hash="p", protocol_hash="q")
    assert again.samples == 2
    episode = recorded(300, success=False)
    for mine, theirs in zip(monitor.scores, again.scores, strict=True):
        np.testing.assert_array_equal(score_episode(mine, episode), score_episode(theirs, episode))
    assert again.calibration == monitor.calibration


def test_the_same_seed_gives_the_same_weights(training):
    some = training.take(range(30))
    short = {**SMALL, "training": Training(epochs=2)}
    for cls in LABELLED:
        before = torch.random.get_rng_state()
        one, two, other = (cls.train(some, seed=s, **short) for s in (1, 1, 2))
        assert torch.equal(before, torch.random.get_rng_state())  # nobody else's numbers change
        for key, value in one.weights().items():
            np.testing.assert_array_equal(value, two.weights()[key])
        assert any(not np.array_equal(v, other.weights()[k]) for k, v in one.weights().items())
    embeddings = np.concatenate(some.embeddings)
    one, two = (LogpZo.train(embeddings, seed=3, draws=2, epochs=1) for _ in range(2))
    for key, value in one.weights().items():
        np.testing.assert_array_equal(value, two.weights()[key])


def test_an_update_is_quick():
    """Networks of the default sizes at 192 dimensions: half a millisecond is the limit."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (400, 192)).astype(np.float32)
    projection = Projection.fit(x, rng.normal(0, 1, (400, 3 * 7)), 64)
    torch.manual_seed(0)
    state = {k: v.numpy() for k, v in network(projection.dims, 128, 0.0).state_dict().items()}
    onset = Onset(projection, [Lstm.from_torch(state)] * 4, "embedding+action")
    logpzo = LogpZo.train(x, draws=1, epochs=1)
    for score in (onset, logpzo):
        took = []
        for row in x:
            output = PolicyOutput(np.zeros((1, 16, 7), np.float32), row)
            begun = time.perf_counter()
            score.update(output, np.zeros((8, 7)))
            took.append(time.perf_counter() - begun)
        assert np.median(took) < 0.5e-3


# -- errors ---------------------------------------------------------------------------------------


def test_bad_arguments_are_named(training, trained):
    with pytest.raises(ValueError, match="episodes have no actions"):
        Onset.train(training)
    with pytest.raises(ValueError, match="inputs is 'action'"):
        prepare(training, "action", 4)
    with pytest.raises(ValueError, match="names no failure's onset"):
        Onset.train(replace(training, onset=None), inputs="embedding")
    with pytest.raises(ValueError, match="smoothing is 1"):
        Onset.train(training, inputs="embedding", smoothing=1.0)
    with pytest.raises(ValueError, match="balance is -1"):
        HideAndSeek.train(training, balance=-1.0)
    with pytest.raises(ValueError, match="members is 0"):
        SafeLstm.train(training, members=0)
    with pytest.raises(ValueError, match="0 failed and"):
        SafeMlp.train(training.take(np.flatnonzero(~training.failed)))
    with pytest.raises(ValueError, match="samples is 4, episodes"):
        LabelledEpisodes.from_episodes([recorded(0)], samples=4)
    with pytest.raises(ValueError, match=r"onset\[0\]: 9 is outside"):
        LabelledEpisodes([np.zeros((3, 2))], np.array([True]), [9])
    with pytest.raises(ValueError, match=r"Training.dropout: 1.0"):
        Training(dropout=1.0)
    with pytest.raises(ValueError, match="give \\[N >= 2, D\\]"):
        LogpZo.train(np.zeros(4))
    chunk = np.zeros((1, H, A), np.float32)
    for score in (*trained.values(), LogpZo.train(training.embeddings[0], draws=1, epochs=1)):
        with pytest.raises(ValueError, match="retrain it for this policy"):
            score.update(PolicyOutput(chunk, np.zeros(D + 1, np.float32)), NO_ACTION)


def test_without_torch_training_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from regrasp.monitors.scores.labelled import LabelledEpisodes\n"
        "from regrasp.monitors.scores.safe import SafeLstm\n"
        "x = np.random.default_rng(0).normal(size=(4, 5, 2))\n"
        "SafeLstm.train(LabelledEpisodes(list(x), np.array([True, False] * 2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: training a score needs 'torch'" in done.stderr
    assert "pip install 'regrasp[train]'" in done.stderr
