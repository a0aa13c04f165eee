"""`regrasp failures generate`: it fills a store, goes on where it was, and repeats itself."""

from dataclasses import replace

import pytest
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.diagnose.answer import Diagnosis
from regrasp.relabel.diagnose.model import DiagnosisModel
from regrasp.scripts import failures
from regrasp.scripts.failures import Args

SMALL = Args(
    count=1,
    suites=("libero_object",),
    tasks=(0,),
    types=("early_release", "offset_y"),
    policy_share=0.0,
    states_per_round=1,
    workers=1,
)


def samples(out):
    """Sample -> (length, everything said of it), of the failures of a store."""
    store = EpisodeStore.open(out)
    return {
        h.extra["sample"]: (store.bounds(i)[1] - store.bounds(i)[0], h.extra)
        for i, h in enumerate(store.headers)
        if h.extra["role"] == "failure"
    }


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    out = tmp_path_factory.mktemp("failures") / "first"
    failures.main(replace(SMALL, out=out))
    return out


def test_samples_come_with_all_that_is_known_of_them(first):
    found = samples(first)
    assert found
    for _, extra in found.values():
        assert extra["driver"] == "expert"
        assert extra["gates"]["nominal_sturdy"] >= 0.8
        for gate in ("nominal_succeeds", "fails_for_good", "monotone", "cause_proven"):
            assert extra["gates"][gate] is True, gate
        assert extra["explanation"]
        assert extra["correction_text"]
        assert len(extra["recovery"]["replays"]) in (0, 5)


def test_a_finished_run_is_not_run_again(first):
    before = len(EpisodeStore.open(first))
    rows = JsonLines(first / "jobs.jsonl").read()
    failures.main(replace(SMALL, out=first))
    assert len(EpisodeStore.open(first)) == before
    assert JsonLines(first / "jobs.jsonl").read() == rows


def test_the_same_seed_gives_the_same_samples_and_a_cut_run_loses_none(first, tmp_path):
    out = tmp_path / "second"
    failures.main(replace(SMALL, out=out))
    assert samples(out) == samples(first)
    # The log of a killed run lacks its last job, whose episodes are in the store already.
    (out / "jobs.jsonl").write_text("")
    failures.main(replace(SMALL, out=out))
    assert samples(out) == samples(first)
    assert len(EpisodeStore.open(out)) == len(EpisodeStore.open(first))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="early_release"):
        replace(SMALL, types=("early",))
    with pytest.raises(ValueError, match="count is 0"):
        replace(SMALL, count=0)


def test_the_last_round_is_cut_to_what_it_takes():
    rows = [{"kept": [{}] * n} for n in (6, 4, 5)]
    jobs = list(range(10))
    assert failures.portion(jobs, [], 100) == 10  # nothing is known yet
    assert failures.portion(jobs, rows, 1000) == 10
    assert failures.portion(jobs, rows, 26) == 3  # 11 more, at 5 a context
    assert failures.portion(jobs, rows, 16) == 1
    assert failures.portion(jobs[:2], rows, 26) == 2


def test_every_gate_is_counted_even_if_it_rejected_nothing(first):
    rows = JsonLines(first / "jobs.jsonl").read()
    figures = failures.figures_of(rows, 1)
    assert "rejected.cause_unproven" in figures
    tried = sum(sum(row["tried"].values()) for row in rows)
    rejected = sum(f.value * tried for k, f in figures.items() if k.startswith("rejected."))
    kept = figures["samples"].value
    # Of the severities that pass, one a cell is kept.
    assert kept <= tried - round(rejected)


def test_the_shipped_model_answers_about_real_failures(first):
    store = EpisodeStore.open(first)
    shown = [store.load(i) for i, h in enumerate(store.headers) if h.extra["role"] == "failure"]
    answers = DiagnosisModel.load().diagnose(shown)
    assert all(isinstance(answer, Diagnosis) and answer.failed for answer in answers)
