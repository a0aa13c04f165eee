"""TIDE and RND-OE: the right moments compared, live and stored alike, NumPy alone."""

import subprocess
import sys

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.base import lookup, score_episode
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.mlp import Mlp
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.tide import Tide

H, K, A, D = 10, 6, 7, 12


def answer(samples, embedding=None):
    embedding = np.zeros(D) if embedding is None else embedding
    return PolicyOutput(np.asarray(samples, np.float32), np.asarray(embedding, np.float32))


def recorded(rng, chunks=12, k=K, noise=0.0, success=True):
    """An episode of a policy that follows one trajectory, with noise between its chunks."""
    path = np.cumsum(rng.normal(0, 0.1, (chunks * k + H, A)), axis=0).astype(np.float32)
    steps = np.arange(chunks) * k
    samples = np.stack([path[s : s + H] for s in steps])[:, None]
    samples = samples + rng.normal(0, noise, samples.shape).astype(np.float32)
    header = EpisodeHeader("fake", "line", "follow the line", 0, 0, success, policy_hash="p")
    return Episode(
        header,
        {"action": path[: chunks * k]},
        {
            "step": steps,
            "samples": samples.astype(np.float32),
            "embedding": rng.normal(0, 1, (chunks, D)).astype(np.float32),
        },
    )


def live(score, episode):
    """What a robot's loop would do: infer, score, execute, score, ..."""
    score.reset()
    values, last = [], 0
    for i, step in enumerate(episode.chunks["step"]):
        out = PolicyOutput(episode.chunks["samples"][i], episode.chunks["embedding"][i])
        values.append(score.update(out, episode.steps["action"][last:step]))
        last = step
    return np.array(values)


def test_tide_compares_the_same_moments():
    """A consistent plan scores zero whatever it does; shifted by one step it does not."""
    episode = recorded(np.random.default_rng(0))
    np.testing.assert_array_equal(score_episode(Tide(), episode), 0.0)

    score = Tide()  # a loop that misreports how much was executed compares other moments
    values = [
        score.update(PolicyOutput(samples, np.zeros(D)), np.zeros((K - 1, A)))
        for samples in episode.chunks["samples"]
    ]
    assert min(values[1:]) > 0


def test_tide_value_by_hand():
    score = Tide()
    first, second = np.zeros((1, H, A)), np.full((1, H, A), 2.0)
    assert score.update(answer(first), np.zeros((0, A))) == 0.0
    assert score.update(answer(second), np.zeros((K, A))) == pytest.approx(4.0)
    # Only the gripper differs: dropped by dims, kept otherwise.
    third = second.copy()
    third[..., 6] += 1.0
    no_gripper = Tide(dims=range(6))
    no_gripper.update(answer(second), np.zeros((0, A)))
    assert no_gripper.update(answer(third), np.zeros((K, A))) == 0.0
    assert score.update(answer(third), np.zeros((K, A))) == pytest.approx(1.0 / 7.0)


def test_tide_refuses_disjoint_chunks():
    score = Tide()
    score.update(answer(np.zeros((1, H, A))), np.zeros((0, A)))
    with pytest.raises(ValueError, match="no moment is planned twice"):
        score.update(answer(np.zeros((1, H, A))), np.zeros((H, A)))


def test_clock_counts_executed_steps():
    episode = recorded(np.random.default_rng(0))
    np.testing.assert_array_equal(score_episode(Clock(), episode), episode.chunks["step"])


def test_tide_grows_with_disagreement():
    scores = [
        score_episode(Tide(), recorded(np.random.default_rng(1), chunks=80, noise=n)).mean()
        for n in (0.0, 0.1, 0.3)
    ]
    assert scores[0] < scores[1] < scores[2]
    # Two independent noises of variance n^2 each, over all chunks but the first.
    assert scores[2] == pytest.approx(2 * 0.3**2 * 79 / 80, rel=0.15)


@pytest.fixture(scope="module")
def rnd():
    rng = np.random.default_rng(2)
    basis = rng.normal(0, 1, (3, D))
    seen = rng.normal(0, 1, (1500, 3)) @ basis + rng.normal(0, 0.05, (1500, D))
    return RndOe.train(seen, seed=0, width=64, epochs=40, batch=128), basis


def test_rnd_separates_unseen_embeddings(rnd):
    score, basis = rnd
    rng = np.random.default_rng(3)
    inside = rng.normal(0, 1, (200, 3)) @ basis + rng.normal(0, 0.05, (200, D))
    outside = inside + rng.normal(0, 1.0, (200, D))
    chunk = np.zeros((1, H, A))
    none = np.zeros((0, A))
    a = np.array([score.update(answer(chunk, e), none) for e in inside])
    b = np.array([score.update(answer(chunk, e), none) for e in outside])
    auroc = np.mean(b[:, None] > a[None, :])
    assert auroc > 0.9


def test_rnd_is_reproducible_and_refuses_other_embeddings(rnd):
    score, _ = rnd
    x = np.random.default_rng(4).normal(0, 1, (300, D))
    one, two = (RndOe.train(x, seed=5, width=16, epochs=2) for _ in range(2))
    for key, value in one.weights().items():
        np.testing.assert_array_equal(value, two.weights()[key])
    with pytest.raises(ValueError, match="retrain it for this policy"):
        score.update(PolicyOutput(np.zeros((1, H, A)), np.zeros(D + 1)), np.zeros((0, A)))


def test_mlp_gradient_matches_finite_differences():
    rng = np.random.default_rng(6)
    mlp = Mlp.random([4, 8, 8, 3], rng)
    mlp.layers = [(w.astype(np.float64), b.astype(np.float64)) for w, b in mlp.layers]
    x, y = rng.normal(0, 1, (5, 4)), rng.normal(0, 1, (5, 3))
    _, grads = mlp.gradients(x, y)
    for layer in range(3):
        for part in range(2):
            array = mlp.layers[layer][part]
            index = tuple(rng.integers(0, s) for s in array.shape)
            old, eps = array[index], 1e-6
            array[index] = old + eps
            up, _ = mlp.gradients(x, y)
            array[index] = old - eps
            down, _ = mlp.gradients(x, y)
            array[index] = old
            assert grads[layer][part][index] == pytest.approx((up - down) / (2 * eps), abs=1e-6)


@pytest.mark.parametrize("window", [1, 3])
def test_stored_and_live_scores_are_identical(rnd, window):
    episode = recorded(np.random.default_rng(7), noise=0.2)
    trained, _ = rnd
    rnd_oe = RndOe.build({"window": window}, trained.weights())
    for score in (Tide(window=window), rnd_oe, Clock()):
        np.testing.assert_array_equal(live(score, episode), score_episode(score, episode))


def test_state_continues_and_segments_reset(rnd):
    episode = recorded(np.random.default_rng(8), noise=0.2)
    trained, _ = rnd
    for make in (
        lambda: Tide(window=3),
        lambda: RndOe.build({"window": 3}, trained.weights()),
        Clock,
    ):
        whole = score_episode(make(), episode)
        first, second = make(), make()
        for i in range(12):
            step = episode.chunks["step"][i]
            executed = episode.steps["action"][max(step - K, 0) : step]
            out = PolicyOutput(episode.chunks["samples"][i], episode.chunks["embedding"][i])
            if i == 6:
                second.load_state(first.state())
            score = first if i < 6 else second
            assert score.update(out, executed) == whole[i]
    # A new segment starts afresh: nothing to compare with, so TIDE is zero there.
    episode.chunks["segment"] = (np.arange(12) >= 5).astype(np.int64)
    values = score_episode(Tide(), episode)
    assert values[5] == 0.0
    assert values[4] > 0.0
    assert values[6] > 0.0


def test_unknown_score_names_the_nearest():
    with pytest.raises(KeyError, match="did you mean tide"):
        lookup({"tide": Tide, "rnd_oe": RndOe}, "tid", "score")


def test_monitors_need_no_torch():
    """A robot's computer has the base install only."""
    code = (
        "import sys; import regrasp.monitors.runtime, regrasp.recovery.supervisor; "
        "print(sorted({'torch', 'mujoco', 'scipy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
