"""`regrasp failures natural` and `regrasp eval interventions`, with the shipped policy."""

from dataclasses import replace

import numpy as np
import pytest
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.diagnose.dataset import natural_clips
from regrasp.scripts import intervene, natural_failures
from regrasp.scripts.natural_failures import Args

#: The shipped policy fails in the second episode of this.
SMALL = Args(suites=("libero_spatial",), tasks=(0,), count=1, most=1, successes=1.0, workers=1)


@pytest.fixture(scope="module")
def natural(tmp_path_factory):
    out = tmp_path_factory.mktemp("natural") / "store"
    natural_failures.main(replace(SMALL, out=out))
    return out


def test_failures_are_dated_and_drawn_and_a_finished_run_is_not_run_again(natural):
    rows = JsonLines(natural / "jobs.jsonl").read()
    assert {row["outcome"] for row in rows} <= {"success", "failure", "latched", "unsolved"}
    store = EpisodeStore.open(natural)
    assert len(store) == sum(row["outcome"] in ("success", "failure") for row in rows)
    for clip, header in zip(natural_clips(natural), store.headers, strict=True):
        assert clip.truth.failed != header.success
        assert clip.truth.failed == ("onset_step" in header.extra)
    natural_failures.main(replace(SMALL, out=natural))
    assert JsonLines(natural / "jobs.jsonl").read() == rows


def test_a_rollout_that_is_run_again_and_left_alone_ends_as_it_did(natural):
    store = EpisodeStore.open(natural)
    index = len(store) - 1
    header = store.headers[index]
    episode = natural_failures.Job(**header.extra["job"])
    # A policy looks every eight steps: stopped there, it goes on as if it had not been.
    job = intervene.Job(episode, index, 40, "alone", None)
    assert intervene.intervene_one(job)["success"] == header.success


def test_figures_of_interventions():
    verdicts = [(False, True, False)] * 6 + [(True, True, False)] * 4
    figures = intervene.figures_of(verdicts, 20)
    assert figures["diagnosed"].value == 0.5
    assert figures["success_alone"].value == 0.4
    assert figures["success_advised"].value == 1.0
    assert np.isclose(figures["advised_minus_alone"].value, 0.6)
