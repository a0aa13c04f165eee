import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from bars import CAMERAS, SIZE, make_store, sample
from regrasp.relabel.reward import RewardConfig, RewardModel, embed, shrink, spread
from regrasp.relabel.reward_training import FrameCache, RewardTrainer, RewardTraining
from regrasp.relabel.rollouts import read_rollouts
from regrasp.scripts.main import main

TINY = RewardConfig(image_size=SIZE, width=(16, 32), keypoints=8, features=32, text=32)
BRIEF = RewardTraining(
    minutes=0, steps=6, clips=4, targets=4, warmup=2, lr=2e-3, hold_out=4, threads=1
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("bars") / "store")


def images(steps=40, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 255, (steps, SIZE, SIZE, 3), np.uint8) for name in CAMERAS}


def test_values_of_an_episode():
    values = RewardModel(TINY).values(images(41), "push the plate")
    assert values.shape == (41,)
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() <= 1


def test_the_future_does_not_change_a_value():
    model, seen = RewardModel(TINY), images(40)
    later = {name: np.concatenate([frames[:20], frames[:20]]) for name, frames in seen.items()}
    a, b = model.values(seen, "push the plate"), model.values(later, "push the plate")
    assert np.allclose(a[:19], b[:19], atol=1e-5)
    assert not np.allclose(a[22:], b[22:], atol=1e-5)


def test_waiting_changes_no_value():
    """A failed episode cannot come to 1 by being long: nothing counts its steps."""
    model = RewardModel(TINY)
    stuck = {name: np.repeat(frames[:1], 2000, axis=0) for name, frames in images(1).items()}
    assert np.ptp(model.values(stuck, "push the plate")) < 1e-5


def test_the_instruction_matters():
    model, seen = RewardModel(TINY), images(10)
    left = model.values(seen, "push the plate to the left of the bowl")
    assert not np.array_equal(left, model.values(seen, "push the plate to the right of the bowl"))
    with pytest.raises(ValueError, match="empty"):
        embed("  ")


def test_pictures_are_averaged_down():
    picture = np.zeros((1, 4, 4, 3), np.uint8)
    picture[0, :2, :2] = 250
    picture[0, 2, 2] = 255
    small = shrink(picture, 2)
    assert small[0, 0, 0, 0] == 250
    assert small[0, 1, 1, 0] == 63
    with pytest.raises(ValueError, match="cannot be averaged"):
        shrink(np.zeros((1, 50, 50, 3), np.uint8), 32)


def test_what_lies_between_frames_is_interpolated():
    assert np.allclose(spread(np.array([0.0, 1.0, 0.0]), 2, 6), [0, 0.5, 1, 0.5, 0, 0])


def test_a_missing_camera_is_named():
    with pytest.raises(ValueError, match="wrist"):
        RewardModel(TINY).frames({"agentview": images()["agentview"]})


def test_a_saved_model_is_the_same(tmp_path):
    model = RewardModel(TINY)
    model.save(tmp_path / "model", {"note": [1, 2]})
    loaded, meta = RewardModel.load(tmp_path / "model")
    assert loaded.config == TINY
    assert meta == {"note": [1, 2]}
    seen = images()
    assert np.array_equal(model.values(seen, "go"), loaded.values(seen, "go"))
    with pytest.raises(FileNotFoundError, match="regrasp train reward"):
        RewardModel.load(tmp_path / "nothing")


def test_cached_frames_are_the_rollouts_own(store, tmp_path):
    cache = FrameCache(store, TINY, tmp_path)
    made = list(tmp_path.iterdir())
    for rollout in read_rollouts(store):
        rows, steps = cache.rows(rollout)
        assert (np.diff(steps) > 0).all()
        pictures = np.concatenate(
            [
                store.load(p.episode, ["image/wrist"]).steps["image/wrist"][p.start : p.stop]
                for p in rollout.parts
            ]
        )
        assert np.array_equal(cache.frames[rows][:, 1], pictures[steps])
    again = FrameCache(store, TINY, tmp_path)
    assert np.array_equal(again.first, cache.first)
    assert list(tmp_path.iterdir()) == made
    FrameCache(store, replace(TINY, every=3), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_held_out_tasks_and_states_are_not_trained_on(store, tmp_path):
    trainer = RewardTrainer(tmp_path, store.path, model=TINY, training=BRIEF)
    assert trainer.split.tasks
    assert trainer.split.states
    for rollout in trainer.clips.rollouts:
        assert rollout.task not in trainer.split.tasks
        assert rollout.header.init_state not in trainer.split.states


def test_a_stopped_run_goes_on_as_if_unbroken(store, tmp_path):
    whole = RewardTrainer(tmp_path / "a", store.path, model=TINY, training=BRIEF)
    whole.run()
    # The schedule looks at progress, so the break must not look like another length of run.
    first = RewardTrainer(tmp_path / "b", store.path, model=TINY, training=BRIEF)
    for k in range(3):
        first.train_step(first.clips.batch(k))
    first.save()
    second = RewardTrainer(tmp_path / "b", store.path, model=TINY, training=BRIEF)
    assert second.step == 3
    second.run()
    assert [p.name for p in (tmp_path / "b").glob("step-*")] == ["step-6"]
    for name, weight in whole.average.items():
        assert torch.allclose(weight, second.average[name], atol=1e-6), name


def test_another_split_or_size_is_refused(store, tmp_path):
    RewardTrainer(tmp_path, store.path, model=TINY, training=BRIEF).save()
    with pytest.raises(ValueError, match=r"begun with \{'split'"):
        RewardTrainer(tmp_path, store.path, model=TINY, training=replace(BRIEF, hold_out=1))
    with pytest.raises(ValueError, match="of another network"):
        RewardTrainer(tmp_path, store.path, model=replace(TINY, features=16), training=BRIEF)


def test_it_learns_and_the_commands_write_results(store, tmp_path):
    """Whole: train by the command, evaluate on held-out tasks, beat the clock."""
    run = tmp_path / "run"
    options = "--training.minutes 0 --training.steps 150 --training.clips 8 --training.lr 0.003"
    options += " --training.warmup 10 --training.ema 0.9 --training.hold-out 4 --training.threads 1"
    options += (
        " --training.shift 0 --training.jitter 0.05 --model.image-size 32 --model.width 16 32"
    )
    train = ["train", "reward", "--store", str(store.path), *options.split()]
    main([*train, "--out", str(run)])
    main([*train, "--out", str(tmp_path / "binary"), "--training.value-weight", "0"])
    where = ["--store", str(store.path), "--model", str(run / "model"), "--threads", "1"]
    other = ["--binary", str(tmp_path / "binary/model")]
    main(["eval", "reward", *where, *other, "--results", str(tmp_path)])
    record = json.loads((tmp_path / "reward.json").read_text())
    found = {name: figure["value"] for name, figure in record["figures"].items()}
    assert found["rank_correlation"] > 0.85
    assert found["voc"] > 0.9
    assert found["auroc_length_matched"] == 1
    assert found["failures_look_done"] == 0
    assert found["recovery_rise"] > 0.6
    assert found["time_linear_failures_look_done"] == 1
    assert found["time_linear_auroc_length_matched"] == 0.5
    assert found["rank_correlation"] > found["time_linear_rank_correlation"] + 0.3
    assert found["rank_correlation"] > found["binary_rank_correlation"]
    assert "states.rank_correlation" in found
    assert re.match(r"regrasp eval reward --store ", record["command"])

    main(["eval", "segments", *where, "--results", str(tmp_path)])
    record = json.loads((tmp_path / "segments.json").read_text())
    found = {name: figure["value"] for name, figure in record["figures"].items()}
    assert found["boundary_f1_10"] > found["action_norm_boundary_f1_10"] + 0.4
    assert found["true_value_boundary_f1_10"] > 0.8
    assert found["tasks_kept"] == 1


def test_the_model_can_be_asked_without_a_store():
    made = sample(0, 0, 0)[1]
    frames = {name: made.steps[f"image/{name}"] for name in CAMERAS}
    assert len(RewardModel(TINY).values(frames, made.header.instruction)) == len(made)
