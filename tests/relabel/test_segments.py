import numpy as np
import pytest
from bars import make_store
from regrasp.relabel.rollouts import read_rollouts
from regrasp.relabel.segments import (
    Counts,
    CutConfig,
    Label,
    action_norm,
    boundaries,
    cut,
    f1_figure,
    fit,
    frame_figure,
    keep_frames,
    match,
    truth,
)

P, REST, F, R = Label.PROGRESS, Label.IDLE, Label.FAILURE, Label.RECOVERY


def moving(steps):
    return np.full((steps, 7), 0.3, np.float32)


def spans(labels):
    edges = [0, *boundaries(labels), len(labels)]
    return [(Label(int(labels[a])), int(a)) for a in edges[:-1]]


def test_a_success_is_progress():
    assert spans(cut(np.linspace(0, 1, 80), moving(80))) == [(P, 0)]


def test_a_fall_and_the_way_back():
    values = np.concatenate(
        [np.linspace(0, 0.7, 40), np.linspace(0.7, 0, 6), np.zeros(14), np.linspace(0, 1, 50)]
    )
    (p, _), (f, fell), (r, rose), (again, back) = spans(cut(values, moving(len(values))))
    assert [p, f, r, again] == [P, F, R, P]
    assert abs(fell - 40) <= 3
    assert abs(rose - 60) <= 4
    assert abs(back - 94) <= 4  # where the value is again what it was: 0.7


def test_a_way_back_that_does_not_arrive_is_no_recovery():
    values = np.concatenate([np.linspace(0, 0.8, 40), np.zeros(20), np.linspace(0, 0.3, 40)])
    assert [label for label, _ in spans(cut(values, moving(100)))] == [P, F]


def test_moving_on_without_more_value_is_a_failure():
    values = np.concatenate([np.linspace(0, 0.4, 30), np.full(90, 0.4)])
    (_, _), (label, begin) = spans(cut(values, moving(120)))
    assert label == F
    assert abs(begin - 30) <= 5
    assert spans(cut(values, moving(120), CutConfig(stall=0))) == [(P, 0)]


def test_done_is_no_stall():
    values = np.concatenate([np.linspace(0, 1, 50), np.ones(100)])
    assert spans(cut(values, moving(150))) == [(P, 0)]


def test_idle_is_hand_gripper_and_value_at_rest():
    values = np.concatenate([np.linspace(0, 0.5, 40), np.full(20, 0.5), np.linspace(0.5, 1, 40)])
    actions = moving(100)
    actions[40:60, :6] = 0
    assert spans(cut(values, actions)) == [(P, 0), (REST, 40), (P, 60)]
    closing = actions.copy()
    closing[40:60:2, 6] = -1  # a gripper at work is not idle
    assert spans(cut(values, closing)) == [(P, 0)]
    rising = np.linspace(0, 1, 100) ** 0.5 * 1.2  # nor is what makes progress without the hand
    assert spans(cut(rising, actions, CutConfig(steady=0.001))) == [(P, 0)]


def test_noise_does_not_cut():
    values = np.linspace(0, 1, 100) + np.random.default_rng(0).normal(0, 0.02, 100)
    assert spans(cut(values, moving(100))) == [(P, 0)]


def test_the_generators_truth(tmp_path):
    for rollout in read_rollouts(make_store(tmp_path / "store", tasks=1, states=2)):
        found = spans(truth(rollout))
        if rollout.kind == "nominal":
            assert found == [(P, 0)]
        elif rollout.kind == "failure":
            assert found == [(P, 0), (F, rollout.effect)]
        else:
            assert [label for label, _ in found] == [P, F, R, P]
            assert [at for _, at in found[1:3]] == [rollout.effect, rollout.back]


def test_rest_is_read_from_the_state(tmp_path):
    rollout = read_rollouts(make_store(tmp_path / "store", tasks=1, states=1))[0]
    rollout.state[20:31] = rollout.state[20]
    assert spans(truth(rollout)) == [(P, 0), (REST, 20), (P, 30)]


def test_boundaries_match_one_to_one_within_tolerance():
    true = np.repeat([P, F], [50, 50])
    assert match(np.repeat([P, F], [54, 46]), true, 5).f1 == 1
    assert match(np.repeat([P, F], [56, 44]), true, 5).f1 == 0
    assert match(np.repeat([P, R], [50, 50]), true, 5).f1 == 0  # another kind begins
    twice = np.repeat([P, F, P, F], [47, 2, 2, 49])
    assert match(twice, true, 5) == Counts(1, 3, 1)
    assert match(np.full(100, P), np.full(100, P), 5).f1 == 1
    assert match(np.full(100, P), true, 5) == Counts(0, 0, 1)
    assert match(np.full(100, F), np.repeat([P, F], [3, 97]), 5) == Counts(1, 1, 1)


def test_intervals_hold_their_value():
    counts = [Counts(1, 1, 1), Counts(0, 2, 1), Counts(1, 1, 2)]
    figure = f1_figure(counts, resamples=200)
    assert figure.value == pytest.approx(4 / 8)
    assert figure.low <= figure.value <= figure.high
    true = [np.repeat([P, F], 10), np.full(20, P)]
    guess = [np.full(20, P), np.full(20, P)]
    assert frame_figure(guess, true, resamples=100).value == 0.5
    assert frame_figure(true, true, resamples=100).value == 1


def test_fit_finds_thresholds_that_cut_well(tmp_path):
    rollouts = read_rollouts(make_store(tmp_path / "store", tasks=2, states=2))
    values = [rollout.target for rollout in rollouts]
    config = fit(rollouts, values)
    total = Counts(0, 0, 0)
    for rollout, value in zip(rollouts, values, strict=True):
        total += match(cut(value, rollout.action, config), truth(rollout), 10)
    assert total.f1 > 0.9
    with pytest.raises(ValueError, match="no rollouts"):
        fit([], [])


def test_the_filter_drops_idle_frames_one_by_one():
    labels = np.repeat([P, REST, P], [40, 20, 40])
    (keep,) = keep_frames([labels])
    assert keep[:43].all()
    assert not keep[43:57].any()
    assert keep[57:].all()


def test_the_filter_cannot_erase_a_task():
    """A no-op filter by action norm lost a whole LIBERO-90 task; this one may be given it."""
    slow = np.full((300, 7), 1e-4, np.float32)
    still = np.zeros((40, 7), np.float32)
    labels = [action_norm(slow), action_norm(still), action_norm(moving(100))]
    assert (labels[0] == REST).all()
    kept = keep_frames(labels)
    assert [keep.sum() for keep in kept] == [150, 20, 100]
    gaps = np.diff(np.flatnonzero(kept[0]))
    assert gaps.max() <= 3  # what comes back is spread over the whole episode
    for length in range(1, 9):
        (short,) = keep_frames([np.full(length, REST)], margin=0, least=0.01)
        assert short.any()


def test_the_filter_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="least"):
        keep_frames([np.full(10, REST)], least=0.0)
    with pytest.raises(ValueError, match="values"):
        cut(np.zeros(3), moving(4))
