"""The moment at which a benchmark rollout began to fail."""

import numpy as np
import pytest
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.scripts._bench_data import find_onset, longest_stays

LONGEST = np.array([20.0, 15.0, 30.0, np.inf])


def stages(*runs):
    return np.concatenate([np.full(n, stage) for stage, n in runs])


@pytest.mark.parametrize(
    ("runs", "injected_at", "onset"),
    [
        # Never reached anything: late once every success would have gone on.
        ([(0, 200)], None, 20),
        # Slow at first, then as far as anyone: late is late.
        ([(0, 150), (1, 10), (2, 40)], None, 20),
        # Dropped on the way: from the step after it was last held.
        ([(0, 18), (1, 10), (2, 12), (0, 160)], None, 40),
        # Dropped and picked up again: only the last loss counts, and then the stall is first.
        ([(0, 18), (1, 10), (2, 5), (0, 20), (2, 150)], None, 58),
        # Nothing can have failed before it was disturbed.
        ([(0, 200)], 60, 60),
        # Lost at the very end: no step comes after.
        ([(0, 10), (1, 10), (2, 10)], None, 29),
    ],
)
def test_find_onset(runs, injected_at, onset):
    assert find_onset(stages(*runs), LONGEST, injected_at) == onset


def test_without_any_success_only_a_loss_can_be_told():
    assert find_onset(stages((0, 50), (1, 10), (0, 40)), None, None) == 60
    assert find_onset(stages((0, 50)), None, None) == 49


def rollout(stage, success=True, family="none"):
    header = EpisodeHeader("s", "t", "go", 0, 0, success, extra={"family": family})
    return Episode(header, {"stage": stage})


def test_longest_stays_are_those_of_unperturbed_successes():
    stays = longest_stays(
        [
            rollout(stages((0, 20), (1, 5), (2, 30), (3, 1))),
            rollout(stages((0, 12), (1, 15), (0, 4), (2, 8), (3, 1))),
            rollout(stages((0, 300)), success=False),
            rollout(stages((0, 90), (3, 1)), family="physics"),
        ]
    )
    assert stays["s/t"].tolist() == [20.0, 19.0, 30.0, np.inf]
