"""Several scores as one: the same numbers live and stored, and exactly alpha for all together."""

import json
import math

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.base import score_episode
from regrasp.monitors.conformal import conformal_rank, conformal_threshold
from regrasp.monitors.runtime import Monitor, calibrate_monitor
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.combined import Combined, combine
from regrasp.monitors.scores.labelled import LabelledEpisodes
from regrasp.monitors.scores.learned import Training
from regrasp.monitors.scores.onset import Onset
from regrasp.monitors.scores.reversal import Reversal
from regrasp.monitors.scores.safe import SafeLstm
from regrasp.monitors.scores.spread import FlowSpread
from regrasp.monitors.scores.tide import Tide

H, K, A = 10, 6, 7


def episode(seed=0, chunks=12, samples=1, success=True):
    rng = np.random.default_rng(seed)
    header = EpisodeHeader("fake", "line", "follow the line", 0, 0, success, policy_hash="p")
    return Episode(
        header,
        {"action": rng.normal(0, 1, (chunks * K, A)).astype(np.float32)},
        {
            "step": K * np.arange(chunks),
            "samples": rng.normal(0, 1, (chunks, samples, H, A)).astype(np.float32),
            "embedding": rng.normal(0, 1, (chunks, 3)).astype(np.float32),
        },
    )


@pytest.mark.parametrize("rule", ["or", "and", "sum"])
def test_it_is_the_rule_of_its_legs_at_the_same_inference(rule):
    legs, units = [Tide(window=2), Reversal(), Clock()], np.array([2.0, 0.5, 40.0])
    weights = [1.0, 0.0, 3.0] if rule == "sum" else None
    values = np.stack([score_episode(leg, episode()) for leg in legs], axis=-1) / units
    expected = {"or": values.max(1), "and": values.min(1), "sum": values @ [1.0, 0.0, 3.0]}[rule]
    combined = Combined(legs, units, rule, weights)
    np.testing.assert_allclose(score_episode(combined, episode()), expected)
    # Through JSON, and from the middle of an episode on.
    again = Combined.build(json.loads(json.dumps(combined.config())), combined.weights())
    ep = episode()
    combined.reset()
    for i, step in enumerate(ep.chunks["step"]):
        if i == 5:
            again.load_state(combined.state())
        output = PolicyOutput(ep.chunks["samples"][i], ep.chunks["embedding"][i])
        executed = ep.steps["action"][max(step - K, 0) : step]
        value = combined.update(output, executed)
        if i >= 5:
            assert again.update(output, executed) == value


def test_each_leg_is_shown_as_many_samples_as_it_asked_for():
    combined = Combined([FlowSpread(), Tide(), Clock()], [1.0, 1.0, 1.0], "sum")
    assert combined.samples == 16
    stored = episode(samples=20)
    seen = {leg.name: [] for leg in combined.legs}
    for leg in combined.legs:
        counts, update = seen[leg.name], leg.update
        leg.update = lambda out, done, c=counts, u=update: (
            c.append(len(out.samples)) or u(out, done)
        )
    score_episode(combined, stored)
    assert {name: set(counts) for name, counts in seen.items()} == {
        "spread": {16}, "tide": {1}, "clock": {1}
    }  # fmt: skip
    with pytest.raises(ValueError, match="combined: needs 16 samples of the policy, got 4"):
        score_episode(combined, episode(samples=4))


def test_learned_legs_survive_being_saved(tmp_path):
    """An artifact holds a combination whole: its legs, their networks and how many samples."""
    episodes = [episode(i, samples=2, success=i % 2 == 0) for i in range(12)]
    data = LabelledEpisodes.from_episodes(episodes, [None, 12] * 6, samples=2)
    small = {"hidden": 4, "members": 2, "components": 2, "training": Training(epochs=1)}
    legs = [Onset.train(data, **small), SafeLstm.train(data, **small), Tide()]
    combined = Combined(legs, [0.5, 0.7, 2.0], "sum", [1.0, 0.0, 2.5])
    monitor = calibrate_monitor([combined], [episode(i, samples=2) for i in range(20, 50)], 0.1)
    monitor.save(tmp_path)
    again = Monitor.load(tmp_path)
    assert again.samples == 2
    (loaded,) = again.scores
    assert [type(leg) for leg in loaded.legs] == [Onset, SafeLstm, Tide]
    assert loaded.config() == combined.config()
    assert loaded.weights().keys() == combined.weights().keys()
    new = episode(99, samples=2)
    np.testing.assert_array_equal(score_episode(loaded, new), score_episode(combined, new))
    # In the middle of an episode, from one into the other.
    combined.reset()
    for i in range(8):
        step = int(new.chunks["step"][i])
        output = PolicyOutput(new.chunks["samples"][i], new.chunks["embedding"][i])
        executed = new.steps["action"][max(step - K, 0) : step]
        value = combined.update(output, executed)
        if i == 7:
            assert loaded.update(output, executed) == value
        loaded.load_state(combined.state())


def test_learning_finds_what_tells_and_turns_nothing_around():
    rng = np.random.default_rng(0)
    begun = [rng.random(50) < 0.5 for _ in range(20)]
    values = [
        np.stack([b * 2 + rng.normal(3, 1, 50), rng.normal(3, 1, 50), 5 - b], axis=1) for b in begun
    ]
    learned = Combined.learn([Tide(), Reversal(), Clock()], [1, 1, 1], values, begun)
    weights = np.array(learned.config()["weights"])
    assert weights[0] > 5 * weights[1]
    assert weights[1] < 0.4  # four standard errors, 1 / sqrt(1000 * 0.1), of what says nothing
    assert weights[2] == 0.0  # it falls in failures, which no score may
    with pytest.raises(ValueError, match="all of one kind"):
        Combined.learn([Tide(), Clock()], [1, 1], [np.zeros((4, 2))], [np.zeros(4, bool)])


def test_learned_weights_are_the_logistic_regressions():
    linear = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(1)
    begun = rng.random(2000) < 0.3
    x = np.abs(rng.normal(1 + begun[:, None] * [0.8, 0.4], 0.7, (2000, 2)))
    learned = Combined.learn([Tide(), Clock()], [1, 1], [x], [begun])
    oracle = linear.LogisticRegression(C=1e9, class_weight="balanced", tol=1e-8).fit(x, begun)
    np.testing.assert_allclose(learned.config()["weights"], oracle.coef_[0], rtol=0.05)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"legs": [Tide()], "units": [1.0]}, "at least two"),
        ({"legs": [Tide(), Tide()], "units": [1, 1]}, "different names"),
        ({"legs": [Tide(), Clock()], "units": [1, 0]}, "must be above 0"),
        ({"legs": [Tide(), Clock()], "units": [1]}, "give 2 numbers"),
        ({"legs": [Tide(), Clock()], "units": [1, 1], "rule": "xor"}, "one of or, and, sum"),
        ({"legs": [Tide(), Clock()], "units": [1, 1], "weights": [1, 1]}, "belong to the rule"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Combined(**kwargs)


def pairs(rng, episodes, moments=15):
    """Two correlated scores ``[n, T, 2]`` with levels of their own."""
    shared = rng.normal(size=(episodes, 1, 1)) + rng.normal(size=(episodes, moments, 1))
    return np.exp(0.5 * (shared + rng.normal(size=(episodes, moments, 2))))


@pytest.mark.parametrize("rule", ["or", "and", "sum"])
def test_the_combination_alarms_exactly_as_often_as_promised(rule):
    rng = np.random.default_rng(2)
    n, alpha, repetitions = 30, 0.1, 2000
    units = np.quantile(pairs(rng, 200).max(axis=1), 0.95, axis=0)  # on episodes of their own
    reduce = {"or": lambda x: x.max(-1), "and": lambda x: x.min(-1), "sum": lambda x: x.sum(-1)}
    sample = pairs(rng, 1)[0, 0] / units
    assert reduce[rule](sample) == pytest.approx(combine(sample, rule, np.ones(2)))
    alarms, each_leg = 0, 0
    for _ in range(repetitions):
        x = pairs(rng, n + 1) / units
        maxima = reduce[rule](x).max(axis=1)
        alarms += maxima[n] > conformal_threshold(maxima[:n], alpha)
        limits = [conformal_threshold(x[:n, :, k].max(axis=1), alpha) for k in range(2)]
        each_leg += bool((x[n] > limits).all(axis=-1).any())
    exact = 1 - conformal_rank(n, alpha) / (n + 1)
    error = math.sqrt(exact * (1 - exact) / repetitions)
    assert abs(alarms / repetitions - exact) < 4 * error
    assert each_leg / repetitions < alpha - 4 * error  # AND of two thresholds: valid, and wasteful
