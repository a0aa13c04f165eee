"""The coverage study, in small: promises hold, broken ones are found, MAPIE agrees."""

import json
import math
import warnings

import numpy as np
import pytest
from regrasp.monitors.conformal import conformal_rank, conformal_threshold
from regrasp.scripts import coverage
from regrasp.scripts._coverage_items import BROKEN, CALIBRATIONS, Fixed, draw
from regrasp.scripts.coverage import Args, Cell, simulate, study, summarise, tail_of

SMALL = Args(repetitions=800, sizes=(10, 60), alphas=(0.01, 0.1), sequences=3, seed=7)


@pytest.fixture(scope="module")
def cells():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(SMALL, CALIBRATIONS | BROKEN)


def test_no_calibration_leaves_its_band(cells):
    """Binomial bands of the repetitions, adjusted for how many cells are looked at."""
    good = [cell for cell in cells if cell.name in CALIBRATIONS]
    tail = tail_of(good)
    assert tail < 0.01 / len(good)
    assert [(c.name, c.alpha, c.n, c.rate) for c in good if c.outside(tail)] == []
    assert {cell.name for cell in good} == set(CALIBRATIONS)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_every_broken_one_leaves_it(cells, name):
    good = [cell for cell in cells if cell.name in CALIBRATIONS]
    worst = max((c for c in cells if c.name == name), key=lambda c: c.over(c.promised))
    assert worst.outside(tail_of(good)), (worst.alpha, worst.n, worst.rate)


def test_where_nothing_can_be_promised_nothing_alarms(cells):
    silent = [c for c in cells if c.exact == 0.0 and c.name != "mondrian"]
    assert {c.name for c in silent} >= {"constant", "band", "or", "and"}
    assert not any(c.rate for c in silent)
    # A task that is too small shares the pooled threshold and has no cell.
    assert not [c for c in cells if c.name == "mondrian" and conformal_rank(c.n, c.alpha) > c.n]


def test_a_cell_by_hand():
    cell = Cell("x", 0.1, 50, 0.1, None, [1.0] * 15 + [0.0] * 85)
    assert cell.over(0.1) == pytest.approx(0.05 / 0.03)
    assert not cell.outside(0.025)
    assert cell.outside(0.1)
    assert Cell("x", 0.1, 50, 0.1, 0.4, cell.alarms).outside(0.01)  # too quiet for its exact rate
    assert Cell("x", 0.1, 50, 0.1, 0.0, cell.alarms).over(0.0) == math.inf


def test_episodes_are_exchangeable_but_for_the_shifted_ones():
    """Ranks of the new episode among all are uniform; under drift they are not."""
    rng = np.random.default_rng(0)
    found = draw(rng, 9, 3000, Fixed.draw(rng))
    ranks = np.array([(r.maxima[0, :9] < r.maxima[0, 9]).sum() for r in found])
    shares = np.bincount(ranks, minlength=10) / len(ranks)
    assert np.abs(shares - 0.1).max() < 4 * math.sqrt(0.1 * 0.9 / 3000)
    drifted = np.mean([(r.drifted[:9] < r.drifted[9]).all() for r in found])
    assert drifted > 0.1 + 4 * math.sqrt(0.1 * 0.9 / 3000)
    lengths = np.array([len(s) for r in found[:200] for s in r.series])
    assert lengths.min() >= 6
    assert len(set(lengths.tolist())) > 15


def test_both_legs_count_in_the_learned_sum():
    weights = Fixed.draw(np.random.default_rng(SMALL.seed)).weights
    assert weights.min() > 0.2 * weights.max()


def test_figures_and_file(tmp_path, monkeypatch, capsys):
    args = Args(repetitions=20, sizes=(20,), alphas=(0.1,), sequences=2)
    figures = study(args)
    assert figures["cells_outside"].value == 0
    assert figures["adaptive"].value <= 1.0
    worst = max(figures[name].value for name in CALIBRATIONS if name in figures)
    assert figures["worst"].value == worst < figures["limit_above_only"].value
    assert figures["limit_above_only"].value < figures["limit"].value
    assert {f"{name}.rate" for name in CALIBRATIONS | BROKEN} <= set(figures)
    assert study(args) == figures  # the seed says all
    monkeypatch.setattr(coverage, "study", lambda *_: figures)
    monkeypatch.chdir(tmp_path)
    coverage.main(Args(repetitions=20, sizes=(20,), alphas=(0.1,), sequences=2, result="coverage"))
    record = json.loads((tmp_path / "docs/results/coverage.json").read_text())
    assert record["protocol"]["repetitions"] == 20
    assert set(record["figures"]) == set(figures)
    assert "coverage.json" in capsys.readouterr().out


def test_the_worst_cell_speaks_for_its_calibration():
    calm = Cell("band", 0.1, 20, 0.1, 0.1, [1.0] * 5 + [0.0] * 95)
    loud = Cell("band", 0.1, 50, 0.1, 0.1, [1.0] * 20 + [0.0] * 80)
    figures = summarise([calm, loud])
    assert figures["band"].value == pytest.approx(0.1 / 0.03)
    assert figures["band.rate"].value == 0.2
    assert figures["band.rate"].unit == "rate at alpha 0.1, n 50"
    assert figures["band.from_exact"].value == pytest.approx(0.1 / 0.03)


def test_the_threshold_is_mapies_interval():
    """Split conformal around a model that says 0: the interval's end is our threshold."""
    regression = pytest.importorskip("mapie.regression")
    base = pytest.importorskip("sklearn.base")

    class Zero(base.RegressorMixin, base.BaseEstimator):
        def fit(self, x, y):
            self.fitted_ = True
            return self

        def predict(self, x):
            return np.zeros(len(x))

    rng = np.random.default_rng(3)
    for n in (20, 21, 50, 133):
        maxima = rng.exponential(size=n)
        for alpha in (0.05, 0.1, 0.2):
            model = Zero().fit(np.zeros((1, 1)), np.zeros(1))
            mapie = regression.SplitConformalRegressor(model, confidence_level=1 - alpha)
            mapie.conformalize(np.zeros((n, 1)), maxima)
            end = mapie.predict_interval(np.zeros((1, 1)))[1][0, 1, 0]
            assert conformal_threshold(maxima, alpha) == pytest.approx(end)
