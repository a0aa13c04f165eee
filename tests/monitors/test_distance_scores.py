"""Mahalanobis and nearest neighbours: against exact forms, live as stored, saved as trained."""

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.base import score_episode
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.monitors.scores import SCORES
from regrasp.monitors.scores.knn import Knn
from regrasp.monitors.scores.mahalanobis import Mahalanobis, ledoit_wolf

D, A = 24, 7
CHUNK, NONE = np.zeros((1, 8, A), np.float32), np.zeros((0, A))
BASIS = np.random.default_rng(0).normal(0, 1, (5, D))


def embeddings(n, seed=1, away=0.0):
    """Near a plane of five dimensions, float32; ``away`` leaves it."""
    rng = np.random.default_rng(seed)
    near = rng.normal(0, 1, (n, 5)) @ BASIS + rng.normal(0, 0.1, (n, D)) + 3.0
    return (near + away * rng.normal(0, 1, (n, D))).astype(np.float32)


def episode(seed, chunks=12):
    header = EpisodeHeader("fake", "line", "go", 0, 0, True, policy_hash="p")
    return Episode(
        header,
        {"action": np.zeros((chunks * 4, A), np.float32)},
        {
            "step": np.arange(chunks) * 4,
            "samples": CHUNK[None].repeat(chunks, axis=0),
            "embedding": embeddings(chunks, seed),
        },
    )


def readings(score, rows):
    score.reset()
    return np.array([score.update(PolicyOutput(CHUNK, row), NONE) for row in rows])


def trained(window=1):
    return [
        Mahalanobis.train(embeddings(400), window=window),
        Knn.train(embeddings(400), k=3, bank=150, window=window),
    ]


@pytest.mark.parametrize("window", [1, 3])
def test_stored_and_live_scores_are_identical_and_survive_a_change_of_process(window):
    stored = episode(2)
    for score, other in zip(trained(window), trained(window), strict=True):
        whole = score_episode(score, stored)
        np.testing.assert_array_equal(readings(score, stored.chunks["embedding"]), whole)
        readings(score, stored.chunks["embedding"][:7])
        other.load_state(score.state())
        for i in range(7, 12):
            out = PolicyOutput(CHUNK, stored.chunks["embedding"][i])
            assert other.update(out, NONE) == whole[i]
        # A new segment empties the window; what was learned stays.
        stored.chunks["segment"] = (np.arange(12) >= 5).astype(np.int64)
        afresh = score_episode(score, stored)
        np.testing.assert_array_equal(afresh[:5], whole[:5])
        assert afresh[5] == readings(score, stored.chunks["embedding"][5:6])[0]
        del stored.chunks["segment"]


def test_scores_are_registered_and_saved(tmp_path):
    scores = trained(window=2)
    assert all(SCORES[score.name] is type(score) for score in scores)
    monitor = calibrate_monitor(scores, [episode(s) for s in range(10, 40)], 0.5)
    monitor.save(tmp_path)
    again = Monitor.load(tmp_path)
    for one, two in zip(monitor.scores, again.scores, strict=True):
        assert one.config() == two.config()
        np.testing.assert_array_equal(
            score_episode(one, episode(50)), score_episode(two, episode(50))
        )


@pytest.mark.parametrize("make", [Mahalanobis, Knn])
def test_what_leaves_the_successes_scores_higher(make):
    score = make.train(embeddings(400))
    inside = readings(score, embeddings(100, seed=3))
    outside = readings(score, embeddings(100, seed=3, away=2.0))
    assert np.mean(outside[:, None] > inside[None, :]) > 0.9
    one, two = make.train(embeddings(400)), make.train(embeddings(400))
    for key, value in one.weights().items():
        np.testing.assert_array_equal(value, two.weights()[key])


@pytest.mark.parametrize("make", [Mahalanobis, Knn])
def test_bad_embeddings_are_refused(make):
    for bad in (np.zeros(5), np.zeros((1, 5)), np.zeros((2, 3, 4))):
        with pytest.raises(ValueError, match=rf"{make.__name__}.train: embeddings have shape"):
            make.train(bad)
    for bad in (np.ones((9, 5)), np.full((9, 5), np.nan)):
        with pytest.raises(ValueError, match="not finite, or all the same"):
            make.train(bad)
    with pytest.raises(ValueError, match="retrain it for this policy"):
        make.train(embeddings(50)).update(PolicyOutput(CHUNK, np.zeros(D + 1)), NONE)


def test_mahalanobis_equals_the_formula():
    rows, test = embeddings(300).astype(np.float64), embeddings(40, seed=4, away=0.2)
    covariance, _ = ledoit_wolf(rows)
    difference = test - rows.mean(axis=0)
    solved = np.linalg.solve(covariance, difference.T).T
    expected = np.sqrt(np.sum(difference * solved, axis=1))
    np.testing.assert_allclose(readings(Mahalanobis.train(rows), test), expected, rtol=1e-3)


@pytest.mark.parametrize(("n", "dims"), [(500, 8), (60, 24), (10, 40), (2, 5)])
def test_ledoit_wolf_equals_the_definition_and_scikit_learn(n, dims):
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 1, (n, dims)) * np.linspace(0.1, 3, dims)
    covariance, shrinkage = ledoit_wolf(rows)
    x = rows - rows.mean(axis=0)
    sample = x.T @ x / n
    mu = np.trace(sample) / dims
    d = np.sum((sample - mu * np.eye(dims)) ** 2)
    b = sum(np.sum((np.outer(row, row) - sample) ** 2) for row in x) / n**2
    assert shrinkage == pytest.approx(min(b, d) / d)
    assert np.linalg.eigvalsh(covariance)[0] > 0 or n == 2
    reference = pytest.importorskip("sklearn.covariance").LedoitWolf().fit(rows)
    assert shrinkage == pytest.approx(reference.shrinkage_)
    np.testing.assert_allclose(covariance, reference.covariance_, rtol=1e-9, atol=1e-12)


def test_mahalanobis_of_whitened_successes_is_about_the_root_of_the_dimension():
    rng = np.random.default_rng(6)
    score = Mahalanobis.train(rng.normal(2, 5, (4000, D)))
    assert np.mean(readings(score, rng.normal(2, 5, (500, D))) ** 2) == pytest.approx(D, rel=0.1)


def test_a_constant_dimension_does_not_make_rounding_an_alarm():
    rows = embeddings(400)
    rows[:, 3] = 1.0
    test = embeddings(50, seed=7)
    test[:, 3] = 1.0
    nudged = test.copy()
    nudged[:, 3] = np.nextafter(np.float32(1.0), np.float32(2.0))
    for make in (Mahalanobis, Knn):
        score = make.train(rows)
        np.testing.assert_allclose(readings(score, nudged), readings(score, test), rtol=1e-4)


def test_knn_equals_brute_force():
    rows, test = embeddings(300), embeddings(40, seed=8, away=0.3)
    for k in (1, 5, 300):
        score = Knn.train(rows, k=k)
        bank = score.bank.astype(np.float64)
        z = (test.astype(np.float64) - score.mean) / score.scale
        distances = np.linalg.norm(z[:, None] - bank[None], axis=2)
        expected = np.sort(distances, axis=1)[:, :k].mean(axis=1)
        np.testing.assert_allclose(readings(score, test), expected, rtol=1e-4)
        # float16 costs little beside the distances themselves.
        exact = (rows - score.mean) / score.scale
        distances = np.linalg.norm(z[:, None] - exact[None], axis=2)
        expected = np.sort(distances, axis=1)[:, :k].mean(axis=1)
        np.testing.assert_allclose(readings(score, test), expected, rtol=1e-2)


def test_knn_finds_what_it_has_seen_and_bounds_its_bank():
    rows = embeddings(300)
    score = Knn.train(rows, k=1)
    assert readings(score, rows[:20]).max() < 0.01
    small = Knn.train(rows, k=4, bank=30, seed=3)
    assert small.bank.shape == (30, D)
    assert small.weights()["bank"].dtype == np.float16
    kept = readings(Knn.build({"k": 1}, small.weights()), rows)
    assert np.sum(kept < 0.01) == 30
    assert np.any(small.bank != Knn.train(rows, bank=30, seed=4).bank)
    with pytest.raises(ValueError, match="k is 31; it must be from 1 to the 30"):
        Knn.train(rows, k=31, bank=30)
    with pytest.raises(ValueError, match="bank is 0"):
        Knn.train(rows, bank=0)
    with pytest.raises(ValueError, match=r"give \[M, D\], \[D\] and \[D\]"):
        Knn(small.bank, small.mean[1:], small.scale)
