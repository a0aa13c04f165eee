"""Certificates: exact where they can be, simulated where not, and the order of the search."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from regrasp.monitors.certify import (
    REFERENCE,
    Design,
    Trial,
    anytime_bound,
    certify,
    fixed_bound,
    hopeless,
    log_wealth,
    reference_bound,
    split_error,
    stakes,
)
from scipy.stats import beta

TASKS = tuple(f"task{t}" for t in range(20))
DESIGN = Design(tasks=TASKS, states=tuple(range(30)))
#: Tasks that differ: the budget of 0.15 is all in four of twenty.
UNEVEN = np.where(np.arange(20) < 4, 0.75, 0.0)


@pytest.mark.parametrize(("eps", "n"), [(0.01, 299), (0.05, 59), (0.10, 29)])
def test_trials_without_failure_that_certify(eps, n):
    assert fixed_bound(0, n, 0.05) <= eps < fixed_bound(0, n - 1, 0.05)


def test_bounds_with_failures():
    assert fixed_bound(5, 50, 0.05) == pytest.approx(0.199, abs=5e-4)
    assert fixed_bound(5, 100, 0.05) == pytest.approx(0.102, abs=5e-4)
    assert reference_bound(95, 100, 0.05) == pytest.approx(1 - fixed_bound(5, 100, 0.05))


@pytest.mark.parametrize(("k", "n", "delta"), [(0, 1, 0.05), (3, 20, 0.01), (19, 20, 0.2)])
def test_bounds_against_scipy(k, n, delta):
    assert fixed_bound(k, n, delta) == pytest.approx(beta.ppf(1 - delta, k + 1, n - k), abs=1e-9)
    assert fixed_bound(n, n, delta) == 1.0
    with pytest.raises(ValueError, match="failures=21, n=20"):
        fixed_bound(21, 20, delta)


def test_error_is_split_without_rest():
    assert split_error(0.05, 4) == [0.0125] * 4
    assert split_error(0.04, 3, (2, 1, 1)) == pytest.approx([0.02, 0.01, 0.01])
    with pytest.raises(ValueError, match="3 positive numbers"):
        split_error(0.05, 3, (1, 0, 1))


@pytest.mark.parametrize("bet", ["product", "mean"])
def test_stakes_see_only_the_past_and_stay_in_their_range(bet):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, 12)
    stake = stakes(counts, 20, 0.15, bet)
    assert stake.shape == (13,)
    assert (stake >= 0).all()
    assert (stake <= 1 / 0.85).all()
    other = counts.copy()
    other[7:] = 20
    np.testing.assert_array_equal(stakes(other, 20, 0.15, bet)[:8], stake[:8])


def test_wealth_by_hand():
    # Before anything p = 0.5 / (2 / 0.15), a quarter of the budget.
    p = 0.15 / 4
    expected = 19 * math.log((1 - p) / 0.85) + math.log(p / 0.15)
    assert log_wealth([1], 20, 0.15, "product")[0] == pytest.approx(expected)
    stake = stakes([1], 20, 0.15, "mean")[0]
    assert log_wealth([1], 20, 0.15, "mean")[0] == pytest.approx(math.log1p(stake * 0.1))
    many = log_wealth([1, 0, 3], 20, np.array([[0.15], [0.3]]), "product")
    np.testing.assert_allclose(many[0], log_wealth([1, 0, 3], 20, 0.15, "product"))


@pytest.mark.parametrize("bet", ["product", "mean"])
@pytest.mark.parametrize("risks", [(0.2, 0.2, 0.2), (0.6, 0.0, 0.0), (0.5, 0.2, 0.1)])
def test_fair_at_best_when_the_budget_is_spent(bet, risks):
    """E[wealth after a round | before] / wealth, summed over all outcomes; tasks may differ."""
    eps, before = np.mean(risks), [0, 1]
    expected = 0.0
    for outcome in itertools.product((0, 1), repeat=3):
        chance = np.prod([r if x else 1 - r for r, x in zip(risks, outcome, strict=True)])
        wealth = log_wealth([*before, sum(outcome)], 3, eps, bet)
        expected += chance * math.exp(wealth[-1] - wealth[-2])
    assert expected <= 1 + 1e-12
    assert expected == pytest.approx(1.0) or (bet == "product" and len(set(risks)) > 1)


def rounds_of(rng, risks, runs, rounds=15):
    """AIFs of each round, ``[runs, rounds]``."""
    return (rng.random((runs, rounds, len(risks))) < risks).sum(axis=2)


@pytest.mark.parametrize("risks", [np.full(20, 0.15), UNEVEN], ids=["even", "uneven"])
def test_whenever_one_looks_at_most_delta_are_certified_falsely(risks):
    """Tolerance: 4 binomial standard errors of delta at 2,000 runs."""
    delta, runs = 0.05, 2000
    counts = rounds_of(np.random.default_rng(1), risks, runs)
    allowed = delta + 4 * math.sqrt(delta * (1 - delta) / runs)
    target = -math.log(delta)
    crossed = [log_wealth(c, 20, 0.15, "product").max() >= target for c in counts]
    assert np.mean(crossed) <= allowed
    wrong = [anytime_bound(c, 20, delta, "product") < 0.15 for c in counts[:500]]
    assert np.mean(wrong) <= delta + 4 * math.sqrt(delta * (1 - delta) / 500)


def test_looking_at_a_fixed_bound_again_and_again_would_break_the_promise():
    """The test above can fail."""
    delta, runs = 0.05, 1000
    counts = rounds_of(np.random.default_rng(2), np.full(20, 0.15), runs).cumsum(axis=1)
    table = {
        (k, n): fixed_bound(k, n, delta) <= 0.15 for n in range(20, 301, 20) for k in range(n + 1)
    }
    false = [any(table[int(k), 20 * (i + 1)] for i, k in enumerate(row)) for row in counts]
    assert np.mean(false) > delta + 4 * math.sqrt(delta * (1 - delta) / runs)


def test_mean_bet_is_valid_for_single_trials():
    delta, runs = 0.05, 1000
    counts = rounds_of(np.random.default_rng(3), np.full(1, 0.15), runs, 150)
    crossed = [log_wealth(c, 1, 0.15, "mean").max() >= -math.log(delta) for c in counts]
    assert 0 < np.mean(crossed) <= delta + 4 * math.sqrt(delta * (1 - delta) / runs)


def test_good_candidates_are_certified_soon():
    counts = rounds_of(np.random.default_rng(4), np.full(20, 0.03), 300)
    reached = np.array([log_wealth(c, 20, 0.15, "product") >= math.log(200) for c in counts])
    assert reached.any(axis=1).mean() > 0.98
    assert (reached.argmax(axis=1) + 1).mean() < 6  # rounds


def test_hopeless_sees_the_past_and_the_rounds_left():
    assert hopeless(np.array([8]), 20, DESIGN, 0.005)  # 8 of 20 is over the budget
    assert not hopeless(np.array([0]), 20, DESIGN, 0.005)
    assert not hopeless(np.array([2, 3]), 20, DESIGN, 0.005)
    assert hopeless(np.array([2]), 20, replace(DESIGN, max_rounds=2, reference_rounds=1), 0.005)
    assert not hopeless(np.array([20]), 20, replace(DESIGN, futility=0.0), 0.005)
    # Rounds that bet on the mean cannot reach 1 / delta in 15, not even without a failure.
    assert hopeless(np.array([0]), 20, replace(DESIGN, bet="mean"), 0.005)


def test_giving_up_costs_little_power():
    """Certified with and without it, at a third of the budget."""
    counts = rounds_of(np.random.default_rng(5), np.full(20, 0.05), 300)
    target = math.log(200)
    without = given_up = 0
    for row in counts:
        reached = log_wealth(row, 20, 0.15, "product") >= target
        last = int(reached.argmax()) + 1 if reached.any() else 15
        without += reached.any()
        given_up += reached.any() and any(
            hopeless(row[:i], 20, DESIGN, 1 / 200) for i in range(1, last)
        )
    assert without > 270
    assert given_up < 0.06 * without


class Table:
    """A runner whose outcomes are looked up; remembers what it ran."""

    def __init__(self, broken, unsolved=()):
        self.broken, self.unsolved, self.ran = broken, unsolved, []

    def success(self, name, trial):
        if trial.task in self.unsolved:
            return False
        return name == REFERENCE or trial.task not in self.broken.get(name, ())

    def __call__(self, name, trials, want_reference):
        answers = []
        for trial, want in zip(trials, want_reference, strict=True):
            self.ran.append((name, trial))
            success = self.success(name, trial)
            reference = None
            if want and not success:
                reference = self.success(REFERENCE, trial)
                self.ran.append((REFERENCE, trial))
            answers.append((success, reference))
        return answers


def test_the_fastest_certified_is_deployed_and_the_reference_runs_once_a_trial():
    runner = Table({"fast": TASKS[:8], "medium": TASKS[:1]}, unsolved=TASKS[19:])
    found = certify(["fast", "medium", "slow"], DESIGN, runner)
    assert found.deployed == "medium"
    assert [(t.name, t.reason) for t in found.tested] == [
        ("fast", "hopeless"),
        ("medium", "certified"),
    ]
    assert found.rollouts == len(runner.ran) == len(set(runner.ran))
    fast, medium = found.tested
    assert (fast.rounds, fast.failures, fast.rollouts) == (1, 8, 20)  # the reference was known
    assert medium.failures == medium.rounds  # the unsolved task is no induced failure
    assert found.exhaustive == 4 * 15 * 20
    assert found.rollouts_saved == 1 - found.rollouts / found.exhaustive
    later = {t for name, t in runner.ran if name == REFERENCE and t not in first_trials()}
    assert all(t.task in (TASKS[0], TASKS[19]) for t in later)  # only where medium failed


def first_trials():
    return {t for i in range(DESIGN.reference_rounds) for t in DESIGN.round(i)}


def test_what_is_promised():
    found = certify(["fast"], DESIGN, Table({}, unsolved=TASKS[18:]))
    assert (found.reference_successes, found.reference_trials) == (90, 100)
    assert found.reference_low == pytest.approx(reference_bound(90, 100, 0.01))
    assert found.tested[0].delta == pytest.approx(0.04)
    assert found.risk == found.tested[0].bound <= 0.15
    assert found.preserved == pytest.approx(1 - found.risk / found.reference_low)
    assert found.confidence == 0.95


def test_rounds_in_batches_find_the_same():
    runner = Table({"fast": TASKS[:8], "medium": TASKS[:1]})
    one, three = (
        certify(["fast", "medium"], replace(DESIGN, batch=batch), runner) for batch in (1, 3)
    )
    assert one.deployed == three.deployed == "medium"
    assert [t.reason for t in one.tested] == [t.reason for t in three.tested]
    assert one.tested[0].rounds == 1
    assert three.tested[0].rounds == 3
    rounds = one.tested[1].rounds
    assert three.tested[1].rounds == -(-rounds // 3) * 3  # rounded up


def test_nothing_certified_deploys_the_reference():
    found = certify(["a", "b"], DESIGN, Table({"a": TASKS[:9], "b": TASKS[:9]}))
    assert (found.deployed, found.risk, found.preserved) == (REFERENCE, 0.0, 1.0)
    assert [t.certified for t in found.tested] == [False, False]


def test_safest_first_stops_at_the_first_that_is_not_certified():
    design = replace(DESIGN, order="safest_first")
    runner = Table({"b": TASKS[:9]})
    found = certify(["a", "b", "c", "d"], design, runner)
    assert [(t.name, t.certified) for t in found.tested] == [
        ("d", True),
        ("c", True),
        ("b", False),
    ]
    assert found.deployed == "c"
    assert found.risk == 0.15
    assert {t.delta for t in found.tested} == {0.04}


def test_the_same_design_draws_the_same_trials():
    trials = DESIGN.round(3)
    assert trials == DESIGN.round(3)
    assert [t.task for t in trials] == list(TASKS)
    assert len({t.seed for t in trials + DESIGN.round(4)}) == 40
    assert {t.state for i in range(15) for t in DESIGN.round(i)} == set(range(30))


def test_a_runner_without_the_reference_is_an_error():
    def runner(name, trials, want_reference):
        return [(name == REFERENCE, None)] * len(trials)

    found = certify(["a"], replace(DESIGN, reference_rounds=1, max_rounds=1), runner)
    assert found.deployed == REFERENCE

    class Half(Table):
        def __call__(self, name, trials, want_reference):
            return [(s, None) for s, _ in super().__call__(name, trials, want_reference)]

    with pytest.raises(ValueError, match="no outcome of the reference on Trial"):
        certify(["a"], replace(DESIGN, reference_rounds=1), Half({"a": TASKS[:2]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 1.0}, "Design.eps is 1.0"),
        ({"delta": 0.6}, "Design.delta is 0.6"),
        ({"tasks": ("a", "a")}, "Design.tasks"),
        ({"reference_rounds": 16}, "within 1 and max_rounds=15"),
        ({"bet": "all"}, "Design.bet is 'all'"),
        ({"states": ()}, "Design.states"),
    ],
)
def test_designs_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DESIGN, **change)


@pytest.mark.parametrize("names", [[], ["a", "a"], [REFERENCE]])
def test_candidates_that_cannot_be(names):
    with pytest.raises(ValueError, match="certify: candidates are"):
        certify(names, DESIGN, Table({}))


def test_trials_are_keys():
    assert Trial("a", 1, 2) == Trial("a", 1, 2)
    assert len({Trial("a", 1, 2), Trial("a", 1, 2), Trial("a", 1, 3)}) == 2
