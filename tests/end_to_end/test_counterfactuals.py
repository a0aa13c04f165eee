"""`regrasp failures counterfactuals`: it fills a store, goes on where it was, repeats itself."""

from dataclasses import replace

import pytest
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts import counterfactuals
from regrasp.scripts.counterfactuals import Args

SMALL = Args(
    suites=("libero_object",),
    tasks=(0,),
    states=1,
    severities=(0.0, 0.2, 1.0),
    families=("premature_release",),
    workers=1,
)


def executions(out):
    """Cell -> digest of everything that happened in it."""
    return {h.extra["cell"]: h.extra["digest"] for h in EpisodeStore.open(out).headers}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    out = tmp_path_factory.mktemp("counterfactuals") / "first"
    counterfactuals.main(replace(SMALL, out=out))
    return out


def test_a_set_has_both_outcomes(first):
    headers = EpisodeStore.open(first).headers
    contexts = {header.extra["context"] for header in headers}
    assert len(contexts) == 2
    for context in contexts:
        mine = [header.success for header in headers if header.extra["context"] == context]
        assert len(mine) == 3
        assert any(mine)
        assert not all(mine)


def test_a_cut_run_loses_nothing_and_repeats_nothing(first, capsys):
    before = executions(first)
    log = first / "jobs.jsonl"
    whole = JsonLines(log).read()
    # Killed after its episodes were written and before its job was noted down.
    log.write_bytes(b"")
    counterfactuals.main(replace(SMALL, out=first))
    assert executions(first) == before
    assert len(EpisodeStore.open(first)) == len(before)
    assert [row["cells"] for row in JsonLines(log).read()] == [row["cells"] for row in whole]
    assert "premature_release" in capsys.readouterr().out


def test_another_grid_is_not_mixed_in(first):
    with pytest.raises(SystemExit, match="choose another --out"):
        counterfactuals.main(replace(SMALL, out=first, stride=2))


def test_jobs_do_not_depend_on_how_many_there_are():
    some, more = (counterfactuals.jobs_of(replace(SMALL, states=n)) for n in (2, 3))
    assert more[:2] == some


def test_more_states_than_are_for_training_are_refused():
    with pytest.raises(ValueError, match="30 are for training"):
        Args(states=31)
