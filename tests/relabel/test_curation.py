"""Curation metrics on demonstrations of which the right order is known."""

from dataclasses import replace

import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.relabel.curation import (
    auroc,
    keep_best,
    length_correlation,
    load_demonstrations,
    matched_auroc,
    rank_correlation,
    residualise,
    score,
    spearman,
)
from regrasp.relabel.curation_metrics import (
    METRICS,
    Demonstration,
    _digamma,
    _local_information,
    _Samples,
)

GAIN = 0.08


def reach(rng, *, steps=60, shake=0.0, wrong=0.0, success=True, group="task"):
    """A hand that goes to a point and closes half-way.

    ``shake`` throws the hand about, ``wrong`` makes actions that do not answer the state.
    """
    goal = np.array([0.3, 0.1, 0.0])
    hand = rng.normal(0, 0.02, 3)
    positions, actions = [], []
    for t in range(steps):
        wanted = (goal - hand) / 0.3 + wrong * rng.normal(size=3)
        moved = wanted + shake * rng.normal(size=3)
        actions.append([*wanted, 1.0 if t > steps // 2 else -1.0])
        positions.append(hand.copy())
        hand = hand + GAIN * 0.3 * moved
    position = np.array(positions)
    return Demonstration(position, np.array(actions), position / 0.1, success, group, loss=0.1)


def sets(rng, **bad):
    """Twenty good demonstrations, then twenty of another kind; and which are which."""
    demos = [reach(rng) for _ in range(20)] + [reach(rng, **bad) for _ in range(20)]
    return demos, np.arange(40) >= 20


@pytest.mark.parametrize("name", ["sal", "ted", "path_efficiency", "jerk"])
def test_smoothness_metrics_find_the_shaken_hand(rng, name):
    demos, defective = sets(rng, shake=2.0)
    assert auroc(METRICS[name](demos), defective, demos).value > 0.95


@pytest.mark.parametrize("name", ["deminf", "action_variance", "action_reversals"])
def test_action_metrics_find_actions_that_do_not_answer_the_state(rng, name):
    demos, defective = sets(rng, wrong=1.5)
    assert auroc(METRICS[name](demos), defective, demos).value > 0.95


def test_distance_to_successes_finds_the_stray(rng):
    demos, defective = sets(rng, success=False)
    pairs = zip(demos, defective, strict=True)
    far = [replace(d, embedding=d.embedding + 2.0 * bad) for d, bad in pairs]
    assert auroc(METRICS["success_distance"](far), defective, far).value == 1.0
    none = [replace(d, success=False) for d in demos]
    assert (METRICS["success_distance"](none) == 0).all()
    lone = METRICS["success_distance"]([demos[0], *none[1:]])
    assert np.isfinite(lone).all()
    assert lone[0] == lone.min()


def test_length_and_loss_are_what_they_say(rng):
    demos = [replace(reach(rng, steps=n), loss=n / 10) for n in (30, 50, 40)]
    assert METRICS["length"](demos).tolist() == [-30, -50, -40]
    assert METRICS["bc_loss"](demos).tolist() == [-3, -5, -4]
    assert "bc_loss" not in score([replace(demo, loss=None) for demo in demos])
    with pytest.raises(ValueError, match="without a loss"):
        METRICS["bc_loss"]([replace(demos[0], loss=None)])


def test_mutual_information_of_gaussians(rng):
    """The estimator against the closed form, -ln(1 - rho^2) / 2."""
    n, rho = 2000, 0.9
    x = rng.normal(size=(n, 1))
    y = rho * x + np.sqrt(1 - rho**2) * rng.normal(size=(n, 1))
    local = _local_information(_Samples(x, y, np.arange(n)), (5, 6, 7))
    assert local.mean() == pytest.approx(-0.5 * np.log(1 - rho**2), abs=0.06)
    psi = _digamma(10)
    assert psi[1] == pytest.approx(-np.euler_gamma)
    assert psi[4] == pytest.approx(1 + 1 / 2 + 1 / 3 - np.euler_gamma)


def test_a_metric_that_reads_the_clock_is_found_out(rng):
    """The testbed's point: detection that is length and nothing else vanishes under control."""
    steps = rng.integers(40, 80, 60)
    defective = rng.random(60) < (steps - 40) / 40  # longer ones are defective more often
    demos = [reach(rng, steps=int(n)) for n in steps]
    scores = METRICS["length"](demos)
    assert auroc(scores, defective, demos).value > 0.75
    matched = matched_auroc(scores, defective, demos, tolerance=0.02)
    assert matched.low < 0.6
    rest = auroc(residualise(scores, demos), defective, demos)
    assert rest.value == pytest.approx(0.5)
    assert length_correlation(scores, demos) == pytest.approx(-1.0)


def test_residual_keeps_what_length_does_not_explain(rng):
    demos = [reach(rng, steps=int(n)) for n in rng.integers(40, 80, 60)]
    defective = np.arange(60) % 2 == 1
    lengths = np.array([len(demo) for demo in demos])
    scores = -0.01 * (lengths - 60.0) ** 2 - 1.0 * defective
    assert auroc(scores, defective, demos).value < 0.9
    assert auroc(residualise(scores, demos), defective, demos).value > 0.99


def test_pairs_are_within_groups_and_matched_by_length(rng):
    demos = [reach(rng, steps=n, group=g) for n, g in [(40, "a"), (80, "a"), (40, "b"), (41, "b")]]
    defective = np.array([False, True, False, True])
    scores = np.array([0.0, 1.0, 5.0, 4.0])  # across groups the good one of b beats everything
    assert auroc(scores, defective, demos).value == 0.5
    matched = matched_auroc(scores, defective, demos)
    assert (matched.value, matched.n) == (1.0, 1)
    assert matched_auroc(scores[:2], defective[:2], demos[:2]) is None
    with pytest.raises(ValueError, match="both good and defective"):
        auroc(scores[:2], np.zeros(2, bool), demos[:2])


def test_keeps_the_best_of_each_group(rng):
    demos = [reach(rng, group=g) for g in "aaaabb"]
    kept = keep_best(np.array([1.0, 4.0, 3.0, 2.0, 9.0, 8.0]), demos, 0.5)
    assert kept == [1, 2, 4]
    with pytest.raises(ValueError, match="share"):
        keep_best(np.zeros(6), demos, 0.0)


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)
    assert spearman([1, 2, 2, 3], [3, 2, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0
    figure = rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5])
    assert figure.value == pytest.approx(0.8)
    assert figure.low < figure.value <= figure.high
    with pytest.raises(ValueError, match="3 or more"):
        rank_correlation([1, 2], [1, 2])


def test_loads_from_a_store(rng, tmp_path):
    store = EpisodeStore.create(tmp_path / "store")
    for number in range(4):
        demo = reach(rng, steps=20 + number)
        state = np.hstack([demo.position, np.zeros((len(demo), 5))]).astype(np.float32)
        steps = {
            "state": state,
            "action": np.zeros((len(demo), 4), np.float32),
            "expert_action": demo.action.astype(np.float32),
            "image/front": rng.integers(0, 255, (len(demo), 24, 32, 3), np.uint8),
        }
        header = EpisodeHeader("suite", str(number % 2), "reach", 0, number, number != 3)
        store.append(Episode(header, steps))
    demos = load_demonstrations(store, loss=lambda episode: np.full(3, len(episode)), components=4)
    assert [len(demo) for demo in demos] == [20, 21, 22, 23]
    assert [demo.loss for demo in demos] == [20, 21, 22, 23]
    assert [demo.group for demo in demos] == ["suite/0", "suite/1"] * 2
    assert [demo.success for demo in demos] == [True, True, True, False]
    assert demos[0].embedding.shape == (20, 8 + 4)
    assert np.abs(demos[0].action).max() > 0.5  # the label, not what was executed
    every = np.concatenate([demo.embedding for demo in demos])
    assert every.std(axis=0)[[0, 8, 9]] == pytest.approx(1.0)
    assert set(score(demos)) == set(METRICS)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
