"""Metrics by hand, against scikit-learn, and what a clock may not gain from time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from regrasp.monitors import metrics
from regrasp.monitors.metrics import Outcomes, first_alarm, length_matched, twa_difference
from sklearn.metrics import roc_auc_score

NAN = float("nan")


def build(failed, lengths, onset, alarms, *, scores=None, steps=None, horizon=100, groups=None):
    n = len(failed)
    steps = steps or [np.arange(0, length, 5) for length in lengths]
    return Outcomes(
        scores=scores or [np.zeros(len(s)) for s in steps],
        steps=steps,
        failed=np.array(failed),
        lengths=np.array(lengths),
        horizons=np.full(n, horizon),
        onset=np.array(onset),
        alarms=np.array(alarms),
        groups=groups or ["task"] * n,
    )


def simulated(rng, failures=60, successes=60, *, score, groups=("a", "b"), late=False):
    """Failures run to the horizon; successes stop earlier, at another time in each group."""
    steps, scores, lengths, onset, names = [], [], [], [], []
    for i in range(failures + successes):
        group = i % len(groups)
        usual = 40 + 40 * group
        length = 160 if i < failures else int(rng.integers(usual, usual + 40))
        steps.append(np.arange(0, length, 8))
        scores.append(score(rng, steps[-1], i < failures))
        lengths.append(length)
        onset.append(float(rng.integers(0, 100 if late else 40)) if i < failures else NAN)
        names.append(groups[group])
    alarms = [first_alarm(s, t, 100.0) for s, t in zip(scores, steps, strict=True)]
    failed = [True] * failures + [False] * successes
    return build(
        failed, lengths, onset, alarms, scores=scores, steps=steps, horizon=160, groups=names
    )


def clock(rng, steps, failed):
    return steps.astype(float)


# Four failures: alarm at 20 (onset 40: before it), at 60 (onset 20: half of 80 passed), at 90
# (onset 80: half of 20 passed), none. Two successes: one false alarm.
HAND = build(
    [True, True, True, True, False, False],
    [100, 100, 100, 100, 50, 50],
    [40, 20, 80, 10, NAN, NAN],
    [20, 60, 90, NAN, 30, NAN],
)


def test_by_hand():
    assert metrics.tpr(HAND).value == 3 / 4
    assert metrics.tnr(HAND).value == 1 / 2
    assert metrics.balanced_accuracy(HAND).value == 5 / 8
    assert metrics.weighted_accuracy(HAND).value == pytest.approx(1 / 3 * 3 / 4 + 2 / 3 * 1 / 2)
    # 1/2 [(.8 + .4 + .1) / 4 + 1 / 2]
    assert metrics.twa(HAND).value == pytest.approx(0.4125)
    assert metrics.detection_time(HAND).value == pytest.approx((0.2 + 0.6 + 0.9) / 3)
    assert metrics.detection_time(HAND).n == 3
    np.testing.assert_allclose(metrics.lead_fractions(HAND), [0, 0.5, 0.5, 1])
    assert metrics.lead_fraction(HAND).value == 0.5
    assert metrics.early_share(HAND).value == 1 / 4
    assert metrics.before_onset_share(HAND).value == pytest.approx(1 / 3)


@pytest.mark.parametrize("alarms", [[NAN] * 6, [0.0] * 6])
def test_twa_of_alarms_that_know_nothing(alarms):
    assert metrics.twa(replace(HAND, alarms=np.array(alarms))).value == 0.5


def test_length_matched_by_hand():
    # Successes of 50 and 90 steps; the first alarms falsely at 30. Cut at 50, failure 0 (onset
    # 40, alarm 60) is missed; at 90 it is found. Failure 1 (onset 60) is none yet at 50.
    outcomes = build(
        [True, True, False, False], [100, 100, 50, 90], [40, 60, NAN, NAN], [60, 80, 30, NAN]
    )
    matched = length_matched(outcomes)
    assert (matched.pairs, matched.excluded, matched.unmatched) == (3, 1, 0)
    assert matched.tpr.value == pytest.approx(2 / 3)
    assert matched.tnr.value == pytest.approx(2 / 3)
    assert matched.twa.value == pytest.approx(0.5 * ((0.4 + 0.2) / 3 + 2 / 3))
    assert matched.auroc.value == 0.5  # all scores are 0


@pytest.mark.parametrize("late", [False, True])
def test_clock_gains_nothing_when_lengths_match(late):
    outcomes = simulated(np.random.default_rng(0), score=clock, late=late)
    assert metrics.auroc(outcomes).value == 1.0  # that is the trap
    matched = length_matched(outcomes)
    assert (matched.excluded > 0) == late
    assert matched.auroc.value == pytest.approx(0.5, abs=1e-12)
    assert matched.tpr.value == pytest.approx(1 - matched.tnr.value, abs=1e-12)
    assert matched.twa.value < 0.5 < metrics.twa(outcomes).value
    assert metrics.auroc_alive(outcomes, 40).value == 0.5


def test_a_score_that_knows_keeps_its_auroc_when_lengths_match():
    def knows(rng, steps, failed):
        return rng.normal(3.0 * failed, 1.0, len(steps)) + steps / 1000

    outcomes = simulated(np.random.default_rng(1), score=knows)
    assert length_matched(outcomes).auroc.low > 0.8
    assert metrics.auroc_alive(outcomes, 40).low > 0.8


def test_length_matched_is_the_mean_over_random_draws():
    """Draws of a partner for every failure, compared with the exact mean; 4 standard errors."""

    def noisy(rng, steps, failed):
        return rng.normal(0.3 * failed, 1.0, len(steps)) + steps / 50

    rng = np.random.default_rng(2)
    outcomes = simulated(rng, score=noisy, late=True)
    groups, draws = np.array(outcomes.groups), []
    for _ in range(400):
        wins = []
        for i in np.flatnonzero(outcomes.failed):
            j = rng.choice(np.flatnonzero(~outcomes.failed & (groups == groups[i])))
            cut = outcomes.lengths[j]
            if outcomes.onset[i] < cut:
                mine = outcomes.scores[i][outcomes.steps[i] < cut].max()
                theirs = outcomes.scores[j].max()
                wins.append((mine > theirs) + 0.5 * (mine == theirs))
        draws.append(np.mean(wins))
    error = np.std(draws) / math.sqrt(len(draws))
    assert abs(np.mean(draws) - length_matched(outcomes).auroc.value) < 4 * error


def test_auroc_against_scikit_learn():
    rng = np.random.default_rng(3)
    for _ in range(20):
        failed = rng.random(40) < 0.4
        scores = [rng.integers(0, 6, 1) + failed[i] for i in range(40)]  # with many ties
        onset = np.where(failed, 0.0, NAN)
        outcomes = build(failed, [5] * 40, onset, [NAN] * 40, scores=scores)
        expected = roc_auc_score(failed, outcomes.maxima)
        assert metrics.auroc(outcomes).value == pytest.approx(expected, abs=1e-12)
        assert length_matched(outcomes).auroc.value == pytest.approx(expected, abs=1e-12)


def test_groups_are_compared_within_themselves():
    outcomes = build(
        [True, False, True], [10, 10, 10], [0, NAN, 0], [NAN] * 3, groups=["a", "a", "b"]
    )
    matched = length_matched(outcomes)
    assert (matched.pairs, matched.unmatched) == (1, 1)
    with pytest.raises(ValueError, match="none of 1 pairs"):
        length_matched(replace(outcomes, onset=[9, NAN, 0], lengths=[10, 9, 10], steps=[[0]] * 3,
                               scores=[[0.0]] * 3))  # fmt: skip


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 600)
    metrics._resamples.cache_clear()
    yield
    metrics._resamples.cache_clear()


@pytest.mark.usefixtures("few_resamples")
def test_coverage_of_the_intervals():
    """Share of 300 intervals that hold the truth. Percentile bootstraps at n = 60 + 60 cover
    about .94; tolerance below that: 4 binomial standard errors of .95 at 300, .05."""
    rng = np.random.default_rng(4)
    truth = {"tpr": 0.7, "tnr": 0.8, "balanced_accuracy": 0.75, "twa": 0.5 * (0.7 * 0.6 + 0.8)}
    truth["auroc"] = truth["auroc_length_matched"] = 0.5 * math.erfc(-1.0 / 2.0)
    hits, repeats, n = dict.fromkeys(truth, 0), 300, 60
    failed = np.arange(2 * n) < n
    for _ in range(repeats):
        alarmed = rng.random(2 * n) < np.where(failed, 0.7, 0.2)
        outcomes = build(
            failed,
            [50] * (2 * n),
            np.where(failed, 0.0, NAN),
            np.where(alarmed, 40.0, NAN),
            scores=[rng.normal(float(f), 1.0, 1) for f in failed],
            steps=[np.zeros(1)] * (2 * n),
        )
        metric_of = (
            metrics.tpr,
            metrics.tnr,
            metrics.balanced_accuracy,
            metrics.twa,
            metrics.auroc,
        )
        figures = {metric.__name__: metric(outcomes) for metric in metric_of}
        figures["auroc_length_matched"] = length_matched(outcomes).auroc
        for name, value in truth.items():
            hits[name] += figures[name].low <= value <= figures[name].high
    for name, count in hits.items():
        assert count / repeats >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / repeats), name
        assert count < repeats, name  # the test can fail: no interval holds everything


def test_bootstrap_is_the_same_every_time():
    outcomes = simulated(np.random.default_rng(5), score=clock)
    first = metrics.twa(outcomes)
    metrics._resamples.cache_clear()
    assert metrics.twa(outcomes) == first


def test_median_of_resamples():
    weights = np.array([[1, 1, 1, 1], [0, 2, 2, 0], [4, 0, 0, 0]], float)
    values = np.array([3.0, 0.0, 1.0, 2.0])
    np.testing.assert_allclose(metrics._median(weights, values), [1.5, 0.5, 3.0])


def test_summary_without_any_alarm():
    figures = metrics.summary(replace(HAND, alarms=[NAN] * 6))
    assert figures["twa"].value == 0.5
    assert figures["lead_fraction"].value == 1.0
    assert "detection_time" not in figures
    with pytest.raises(ValueError, match="none of 4 failures alarmed"):
        metrics.detection_time(replace(HAND, alarms=[NAN] * 6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"onset": [40, 20, 80, NAN, NAN, NAN]}, r"onset\[3\] is nan"),
        ({"onset": [40, 20, 80, 10, 5, NAN]}, r"onset\[4\] is 5.0; it must be nan"),
        ({"alarms": [20, 60, 90, NAN, 50, NAN]}, r"alarms\[4\] is 50.0"),
        ({"horizons": [99] * 6}, r"horizons\[0\] is 99; it must be at least"),
        ({"lengths": [100, 100, 100, 100, 40, 50]}, r"steps\[4\]"),
        ({"scores": [np.zeros(3)] * 6}, r"scores\[0\]"),
        ({"groups": ["a"]}, "one an episode"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(HAND, **change)


def test_one_kind_of_episode_is_not_enough():
    only = build([True, True], [10, 10], [0, 0], [NAN, NAN])
    for metric in (metrics.tpr, metrics.auroc, length_matched):
        with pytest.raises(ValueError, match="0 successes"):
            metric(only)
    with pytest.raises(ValueError, match="step=100"):
        metrics.auroc_alive(HAND, 100)


def test_twa_difference_is_the_difference_and_is_paired():
    rng = np.random.default_rng(5)
    failed = rng.random(80) < 0.4
    lengths = np.where(failed, 200, rng.integers(60, 120, 80))
    steps = [np.arange(0, n, 8) for n in lengths]
    onset = np.where(failed, 20.0, np.nan)

    def outcomes(missed):
        alarms = np.where(failed & ~missed, 40.0, np.nan)
        scores = [np.zeros(len(s)) for s in steps]
        return Outcomes(scores, steps, failed, lengths, np.full(80, 200), onset, alarms, ["t"] * 80)

    missed = rng.random(80) < 0.5
    good, bad = outcomes(missed & (rng.random(80) < 0.9)), outcomes(missed)
    difference = twa_difference(good, bad)
    apart = [length_matched(o).twa for o in (good, bad)]
    assert difference.value == pytest.approx(apart[0].value - apart[1].value)
    assert difference.low >= 0.0
    width = difference.high - difference.low
    assert width < 0.5 * sum(f.high - f.low for f in apart)
    other = outcomes(missed)
    with pytest.raises(ValueError, match="lengths differs"):
        twa_difference(good, replace(other, lengths=other.lengths + 1, horizons=other.horizons + 1))
