import numpy as np
import pytest
from bars import END, STAGES, make_store, sample, stairs
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.rollouts import (
    Split,
    dense,
    dense_failure,
    read_rollouts,
    task_of,
    without_flicker,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("bars") / "store", tasks=3, states=3)


def test_a_stage_rises_to_the_next_one():
    value = dense(stairs(END))
    assert np.allclose(value[list(STAGES)], [0.2, 0.4, 0.6, 0.8, 1.0])
    assert (np.diff(value) >= 0).all()
    assert 0.09 < value[STAGES[0] // 2] < 0.11
    assert (value[STAGES[-1] :] == 1).all()


def test_what_is_not_reached_is_not_credited():
    progress = stairs(END)
    progress[40:] = 0
    value = dense(progress)
    assert np.allclose(value[30:40], 0.6)  # the stage that was lost: no ramp towards the next
    assert (value[40:] == 0).all()
    assert (dense(np.zeros(50)) == 0).all()


def test_contacts_that_flicker_are_no_failure():
    progress = stairs(END)
    progress[54:57] = 0.8
    assert (without_flicker(progress)[52:] == 1).all()
    progress[53:60] = 0.8  # too long for a flicker
    assert (without_flicker(progress)[53:60] == np.float32(0.8)).all()


def test_a_failure_is_its_nominal_until_it_shows_and_then_only_falls():
    nominal = dense(stairs(END))
    lost = stairs(END + 20)
    lost[38:] = 0
    value = dense_failure(lost, 34, 38, nominal)
    assert np.array_equal(value[:34], nominal[:34])
    assert (np.diff(value[33:]) <= 0).all()
    assert (value[38:] == 0).all()


@pytest.mark.parametrize("length", [60, 120, 5000])
def test_a_failure_is_not_worth_more_for_being_long(length):
    progress = np.full(length, 0.4, np.float32)
    progress[:20] = stairs(20, (5, 10))
    assert dense_failure(progress, 25, 30).max() <= 0.4 + 1e-6


def test_failure_and_recovery_are_one_rollout(store):
    rollouts = read_rollouts(store)
    kinds = [r.kind for r in rollouts]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "nominal": 9, "failure": 9, "recovered": 9,
    }  # fmt: skip
    for rollout in rollouts:
        images = np.concatenate(
            [
                store.load(p.episode, ["state"]).steps["state"][p.start : p.stop]
                for p in rollout.parts
            ]
        )
        assert np.array_equal(images, rollout.state)
        assert len(rollout) == len(rollout.success) == len(rollout.action)
        assert 0 <= rollout.target.min() <= rollout.target.max() <= 1
        assert (rollout.target[-1] == 1) == rollout.succeeds
        if rollout.kind == "failure":
            assert rollout.target.max() < 1
        if rollout.kind == "recovered":
            assert rollout.effect < rollout.failed < rollout.back
            assert rollout.target[rollout.back] < 0.05 < rollout.target[rollout.effect]


def test_a_split_holds_out_whole_tasks(store):
    headers = [rollout.header for rollout in read_rollouts(store)]
    split = Split.make(headers)
    assert split == Split.make(headers[::-1])
    folds = {
        fold: {task_of(h) for h in headers if split.of(h) == fold} for fold in ("train", "tasks")
    }
    assert folds["tasks"]
    assert not folds["train"] & folds["tasks"]
    states = {h.init_state for h in headers if split.of(h) == "states"}
    assert states
    assert not states & {h.init_state for h in headers if split.of(h) == "train"}


def test_a_failure_without_its_nominal_stands_alone(tmp_path):
    store = EpisodeStore.create(tmp_path / "store")
    store.append(sample(0, 0, 0)[1])
    (rollout,) = read_rollouts(store)
    assert rollout.target.max() < 1


def test_a_store_of_other_episodes_is_refused(tmp_path):
    store = EpisodeStore.create(tmp_path / "store")
    made = sample(0, 0, 0)[0]
    made.header.extra.clear()
    store.append(made)
    with pytest.raises(ValueError, match="regrasp failures generate"):
        read_rollouts(store)
