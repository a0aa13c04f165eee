"""ACE, STAC, spread and reversal: against slow direct forms, in absolute time, live as stored."""

import math

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.base import score_episode
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.monitors.scores import SCORES
from regrasp.monitors.scores.ace import Ace, grid_entropy
from regrasp.monitors.scores.reversal import Reversal
from regrasp.monitors.scores.spread import FlowSpread
from regrasp.monitors.scores.stac import StacKl, StacMmd, kde_kl, mmd_squared

B, H, K, A, D, C = 16, 12, 5, 7, 4, 11
NONE = np.zeros((0, A))


def episode(seed=0, noise=0.1, samples=B, policy_hash="p"):
    """One trajectory, planned with noise by every sample of every chunk."""
    rng = np.random.default_rng(seed)
    path = np.cumsum(rng.normal(0, 0.1, (C * K + H, A)), axis=0)
    steps = np.arange(C) * K
    chunks = np.stack([path[s : s + H] for s in steps])[:, None]
    chunks = chunks + rng.normal(0, noise, (C, samples, H, A))
    header = EpisodeHeader("fake", "line", "go", 0, 0, True, policy_hash=policy_hash)
    return Episode(
        header,
        {"action": (path[: C * K] + rng.normal(0, 0.5, (C * K, A))).astype(np.float32)},
        {
            "step": steps,
            "samples": chunks.astype(np.float32),
            "embedding": np.zeros((C, D), np.float32),
        },
    )


def answer(samples):
    return PolicyOutput(np.asarray(samples, np.float32), np.zeros(D, np.float32))


def live(score, stored, first=0, state=None):
    """What a robot's loop would do from inference ``first`` on: infer, score, execute, ..."""
    score.reset()
    if state is not None:
        score.load_state(state)
    values, last = [], 0 if first == 0 else stored.chunks["step"][first - 1]
    for i, step in list(enumerate(stored.chunks["step"]))[first:]:
        out = PolicyOutput(stored.chunks["samples"][i], stored.chunks["embedding"][i])
        values.append(score.update(out, stored.steps["action"][last:step]))
        last = step
    return np.array(values)


def all_scores(window=1):
    ranges = Ace.train(episode(99).chunks["samples"][:, 0]).ranges
    return [
        Ace(ranges, window=window),
        StacMmd(window=window),
        StacMmd(dims=(0, 1, 2), cumulative=True, window=window),
        StacKl(window=window),
        StacKl(dims=None, cumulative=True, window=window),
        FlowSpread(window=window),
        Reversal(window=window),
    ]


# What every score owes a monitor.


@pytest.mark.parametrize("window", [1, 3])
def test_stored_and_live_scores_are_identical_and_survive_a_change_of_process(window):
    stored = episode()
    for score, other in zip(all_scores(window), all_scores(window), strict=True):
        whole = score_episode(score, stored)
        assert np.isfinite(whole).all()
        assert whole.min() >= 0
        np.testing.assert_array_equal(live(score, stored), whole)
        half = episode()
        half.chunks = {key: value[:6] for key, value in half.chunks.items()}
        np.testing.assert_array_equal(score_episode(score, half), whole[:6])
        np.testing.assert_array_equal(live(other, stored, 6, score.state()), whole[6:])


def test_a_segment_starts_afresh():
    stored, through = episode(), episode()
    stored.chunks["segment"] = (np.arange(C) >= 5).astype(np.int64)
    for score in all_scores(window=3):
        values = score_episode(score, stored)
        alone = type(score).build(score.config(), score.weights())
        rest = Episode(
            stored.header, stored.steps, {key: value[5:] for key, value in stored.chunks.items()}
        )
        np.testing.assert_array_equal(values[5:], score_episode(alone, rest))
        whole = score_episode(score, through)
        np.testing.assert_array_equal(values[:5], whole[:5])
        assert np.any(values[5:7] != whole[5:7])


def test_scores_are_registered_and_saved(tmp_path):
    scores = [Ace.train(episode(99).chunks["samples"][:, 0], window=2), StacMmd(cumulative=True)]
    scores += [StacKl(dims=(0, 1, 2)), FlowSpread(dims=None), Reversal(threshold=0.1)]
    assert all(SCORES[score.name] is type(score) for score in scores)
    monitor = calibrate_monitor(scores, [episode(s) for s in range(60)], 0.5)
    assert monitor.samples == 16
    monitor.save(tmp_path)
    again = Monitor.load(tmp_path)
    assert [s.config() for s in again.scores] == [s.config() for s in monitor.scores]
    test = episode(100, samples=B + 2)  # asked for more by another score: only B are shown
    for one, two in zip(monitor.scores, again.scores, strict=True):
        np.testing.assert_array_equal(score_episode(one, test), score_episode(two, test))
    with pytest.raises(ValueError, match="stac: needs 16 samples of the policy, got 3"):
        score_episode(StacMmd(), episode(samples=3))


# ACE.


def slow_entropy(points, cell):
    """Cell by cell, step by step, dimension by dimension."""
    total = 0.0
    for tau in range(points.shape[1]):
        counts = {}
        lows = []
        for d in range(3):
            values = [float(p[tau][d]) for p in points]
            lows.append(min(values) - 0.01 * (max(values) - min(values)))
        for p in points:
            key = tuple(math.floor((p[tau][d] - lows[d]) / cell[d]) for d in range(3))
            counts[key] = counts.get(key, 0) + 1
        shares = [count / len(points) for count in counts.values()]
        total -= sum(p * math.log2(p) for p in shares)
    return total / points.shape[1]


def test_ace_equals_a_slow_loop():
    rng = np.random.default_rng(1)
    for spread in (0.01, 0.1, 0.5, 3.0):
        chunks = rng.normal(0, spread, (B, H, A)).astype(np.float32)
        score = Ace(np.array([4.0, 2.0, 6.0]))
        moved = np.cumsum(chunks[..., :3].astype(np.float64), axis=1)
        expected = slow_entropy(moved, 0.03 * np.array([4.0, 2.0, 6.0]))
        assert score.update(answer(chunks), NONE) == pytest.approx(expected, abs=1e-12)


def test_ace_of_known_distributions():
    score = Ace(np.ones(3))
    same = np.tile(np.random.default_rng(2).normal(0, 1, (1, H, A)), (B, 1, 1))
    assert score.update(answer(same), NONE) == 0.0
    # Every sample its own way: log2 of their number, and no more than that.
    apart = np.zeros((B, H, A))
    apart[:, 0, 0] = np.arange(B)
    assert score.update(answer(apart), NONE) == pytest.approx(4.0)
    # Two ways, however far apart: one bit. They part halfway through the chunk: half a bit.
    for distance in (0.5, 50.0):
        ways = np.zeros((B, H, A))
        ways[: B // 2, 0, 1] = distance
        assert score.update(answer(ways), NONE) == pytest.approx(1.0)
        assert score.update(answer(np.roll(ways, H // 2, axis=1)), NONE) == pytest.approx(0.5)
    # Independent uniform x over 4 cells: 2 bits, but for the sample's own error.
    points = np.random.default_rng(3).uniform(0, 4, (4000, 1, 3)) * [1, 0, 0]
    assert grid_entropy(points, np.full(3, 1.01)) == pytest.approx(2.0, abs=0.06)


def test_ace_ignores_place_order_rotation_and_gripper():
    rng = np.random.default_rng(4)
    chunks = np.round(rng.normal(0, 0.2, (B, H, A)) * 64) / 64  # sums then do not round
    score = Ace(np.full(3, 16.0))
    value = score.update(answer(chunks), NONE)
    assert 0 < value < 4
    changed = chunks[rng.permutation(B)].copy()
    changed[:, 0, :3] += 0.25  # moves all later positions alike
    changed[..., 3:] = rng.normal(0, 1, (B, H, A - 3))
    assert score.update(answer(changed), NONE) == pytest.approx(value, abs=1e-12)
    # Cells follow the range, so the unit of actions does not matter.
    assert Ace(np.full(3, 128.0)).update(answer(8 * chunks), NONE) == pytest.approx(value)


def test_ace_training():
    chunks = np.zeros((2, 3, A))
    chunks[0, :, 0] = 1.0  # to x = 3
    chunks[1, :, 1] = -0.5  # to y = -1.5
    np.testing.assert_allclose(Ace.train(chunks).ranges, [2 + 1, 1.5, 3.0])  # z never moved
    with pytest.raises(ValueError, match=r"chunks have shape \(3, 7\); give \[N >= 1"):
        Ace.train(chunks[0])
    with pytest.raises(ValueError, match="give chunks that move"):
        Ace.train(np.zeros((2, 3, A)))
    with pytest.raises(ValueError, match="three positive extents"):
        Ace(np.array([1.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="fraction is 0"):
        Ace(np.ones(3), fraction=0)


# STAC.


def slow_mmd(x, y):
    pooled = np.concatenate([x, y])
    distances = [[float(np.sum((a - b) ** 2)) for b in pooled] for a in pooled]
    gamma = 1 / (2 * np.median([d for row in distances for d in row if d > 0]))

    def kernel(u, v):
        return np.mean([[math.exp(-gamma * float(np.sum((a - b) ** 2))) for b in v] for a in u])

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def test_mmd_equals_a_double_loop():
    rng = np.random.default_rng(5)
    for shift in (0.0, 0.3, 3.0):
        x, y = rng.normal(5, 1, (16, 40)), rng.normal(5 + shift, 1, (12, 40))
        assert mmd_squared(x, y) == pytest.approx(slow_mmd(x, y), abs=1e-12)
    x[3] = x[4] = y[0]  # equal points are zero apart, not a rounding error apart
    assert mmd_squared(x, y) == pytest.approx(slow_mmd(x, y), abs=1e-12)


@pytest.mark.parametrize("statistic", [mmd_squared, kde_kl])
def test_equal_samples_score_zero(statistic):
    rng = np.random.default_rng(6)
    factors = rng.normal(0, 1, (2, 66))  # plans differ in a few ways, not in each action
    x = rng.normal(0, 1, (16, 2)) @ factors
    assert statistic(x, x[::-1]) == pytest.approx(0.0, abs=1e-12)
    assert statistic(x[:1].repeat(16, axis=0), x[:1].repeat(16, axis=0)) == 0.0
    near, far = (statistic(x, rng.normal(shift, 1, (16, 2)) @ factors) for shift in (0.0, 2.0))
    assert 0 <= 2 * near < far


def test_mmd_has_no_scale():
    """As documented: any two points are 0.79 apart; TIDE is the better score then."""
    for distance in (1e-3, 1.0, 1e3):
        x, y = np.zeros((16, 3)), np.full((16, 3), distance)
        assert mmd_squared(x, y) == pytest.approx(2 - 2 * math.exp(-0.5))


def test_kl_equals_kernel_densities_of_scikit_learn():
    neighbors = pytest.importorskip("sklearn.neighbors")
    rng = np.random.default_rng(7)
    for dims, shift in ((2, 1.0), (66, 1.0), (66, 30.0)):
        x, y = rng.normal(0, 1, (16, dims)), rng.normal(shift, 1, (14, dims))
        covariance = np.cov(np.concatenate([x, y]).T)
        bandwidth = math.sqrt(np.linalg.eigvalsh(covariance)[-1])
        p, q = (neighbors.KernelDensity(bandwidth=bandwidth).fit(s) for s in (x, y))
        expected = np.mean(p.score_samples(x) - q.score_samples(x))
        assert expected > 0.01
        assert kde_kl(x, y) == pytest.approx(expected, rel=1e-9)


def test_kl_of_two_gaussians():
    """A kernel density of N(m, 1) with bandwidth h is N(m, 1 + h^2): KL = m^2 / (2 (1 + h^2))."""
    rng = np.random.default_rng(8)
    z = rng.normal(0, 1, (600, 1))
    z = (z - z.mean()) / z.std()
    for mean in (0.5, 2.0):
        h2 = 1 + mean**2 / 4
        assert kde_kl(z, -z + mean) == pytest.approx(mean**2 / (2 * (1 + h2)), rel=0.05)


def test_kl_is_forward_and_safe_far_away():
    """Old plans in two ways, new ones in one of them: what the formula gives for points."""
    one, two = np.zeros((16, 20)), np.zeros((16, 20))
    two[:8, 3] = 3.0
    # A quarter of all points lie 3 away: bandwidth^2 is their variance, divisor n - 1.
    kernel = math.exp(-9.0 / (2 * 9.0 * 0.25 * 0.75 * 32 / 31))
    both = math.log((1 + kernel) / 2)
    assert kde_kl(two, one) == pytest.approx(0.5 * (both - math.log(kernel)) + 0.5 * both)
    assert kde_kl(one, two) == pytest.approx(-both)
    # One point and one outlier: kernels underflow without the log-sum-exp.
    far = np.zeros((16, 200))
    far[0] = 1e6
    assert 0 < kde_kl(far, np.zeros((16, 200))) < 100


@pytest.mark.parametrize("make", [StacMmd, StacKl])
def test_stac_compares_the_same_moments(make):
    """A consistent plan scores zero whatever it does; misaligned by one step it does not."""
    stored = episode(noise=0.0)
    # The same spread about the path at each absolute time, whichever chunk plans it.
    steps = stored.chunks["step"]
    wobble = np.random.default_rng(10).normal(0, 0.05, (B, C * K + H, A))
    for i, step in enumerate(steps):
        stored.chunks["samples"][i] += wobble[:, step : step + H].astype(np.float32)
    # In float32 the same number comes out of different sums, hence not exactly zero.
    assert score_episode(make(), stored).max() < 1e-9

    score = make()
    values = [score.update(answer(s), np.zeros((K - 1, A))) for s in stored.chunks["samples"]]
    assert min(values[1:]) > 0.01
    # Constant motion looks consistent however misaligned: only a changing plan shows an error.
    constant = np.random.default_rng(11).normal(0, 1, (B, 1, A)).repeat(H, axis=1)
    score.reset()
    assert [score.update(answer(constant), np.zeros((K, A))) for _ in range(3)] == pytest.approx(
        [0.0] * 3, abs=1e-12
    )


def test_stac_cumulative_is_the_published_sum():
    stored = episode()
    for make in (StacMmd, StacKl):
        each = score_episode(make(), stored)
        np.testing.assert_allclose(score_episode(make(cumulative=True), stored), np.cumsum(each))


def test_stac_drops_the_gripper_and_refuses_what_it_cannot_compare():
    stored = episode()
    changed = episode()
    changed.chunks["samples"][..., 6] *= -3.0
    for make in (StacMmd, StacKl):
        np.testing.assert_array_equal(score_episode(make(), stored), score_episode(make(), changed))
        assert np.any(
            score_episode(make(dims=None), stored) != score_episode(make(dims=None), changed)
        )
        score = make()
        score.update(answer(stored.chunks["samples"][0]), NONE)
        with pytest.raises(ValueError, match="12 actions were executed of a chunk of 12"):
            score.update(answer(stored.chunks["samples"][1]), np.zeros((H, A)))
        with pytest.raises(ValueError, match=r"dims are \[9\] but actions have 7 dimensions"):
            make(dims=(9,)).update(answer(stored.chunks["samples"][0]), NONE)
        with pytest.raises(ValueError, match="at least one, each once"):
            make(dims=(1, 1))


# Spread and reversal.


def test_spread_is_the_variance_over_samples():
    rng = np.random.default_rng(12)
    chunks = rng.normal(0, 1, (B, H, A))
    chunks[..., 6] *= 100
    by_hand = np.mean(
        [
            np.mean((chunks[:, t, d] - chunks[:, t, d].mean()) ** 2)
            for t in range(H)
            for d in range(6)
        ]
    )
    assert FlowSpread().update(answer(chunks), NONE) == pytest.approx(by_hand, rel=1e-5)
    assert FlowSpread(dims=None).update(answer(chunks), NONE) > 100 * by_hand
    assert FlowSpread().update(answer(chunks[:1].repeat(B, axis=0)), NONE) == 0.0
    with pytest.raises(ValueError, match=r"samples have shape \(12, 7\)"):
        FlowSpread().update(answer(chunks[0]), NONE)


def executed(*xs):
    actions = np.zeros((len(xs), A))
    actions[:, 0] = xs
    actions[:, 3:] = np.random.default_rng(13).normal(0, 1, (len(xs), A - 3))  # never looked at
    return actions


def test_reversal_by_hand():
    score = Reversal(threshold=0.1)
    out = answer(np.zeros((1, H, A)))
    assert score.update(out, NONE) == 0.0
    assert score.update(out, executed(1, 1, 1, 1)) == 0.0
    assert score.update(out, executed(-1, -1, -1, -1)) == 0.25  # the turn between the two chunks
    assert score.update(out, executed(1, -1, 1, -1)) == 1.0
    assert score.update(out, executed(-1, 0.05, -1, -0.05)) == 0.0  # jitter is no motion
    assert score.update(out, executed(0.0, 0.01, 0.0, -0.01)) == 0.0  # nor is standing
    assert score.update(out, executed(0.0, 0.0, 1.0, 1.0)) == 0.25  # turned after a pause
    score.reset()
    assert score.update(out, executed(-1, -1)) == 0.0  # nothing before to turn from


def test_reversal_looks_at_the_angle_in_space():
    score = Reversal()
    out = answer(np.zeros((1, H, A)))
    circle = np.zeros((40, A))
    angles = np.linspace(0, 2 * np.pi, 40)
    circle[:, 0], circle[:, 1] = np.cos(angles), np.sin(angles)
    assert score.update(out, circle) == 0.0  # turns, but never back
    noise = np.random.default_rng(14).normal(0, 1, (4000, A))
    score.reset()
    assert score.update(out, noise) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(ValueError, match="threshold is 0"):
        Reversal(threshold=0)
    with pytest.raises(ValueError, match=r"executed has shape \(4, 2\)"):
        score.update(out, np.zeros((4, 2)))
