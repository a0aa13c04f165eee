"""A real failure and its recovery, as the reward model and the segmentation see them."""

import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.relabel.reward import RewardConfig, RewardModel
from regrasp.relabel.rollouts import read_rollouts
from regrasp.relabel.segments import Label, boundaries, cut, keep_frames, truth
from regrasp.sim import make_env
from regrasp.sim.failures import INJECTIONS
from regrasp.sim.failures.gates import Examiner
from regrasp.sim.failures.sample import failure_episodes, nominal_episode


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = EpisodeStore.create(tmp_path_factory.mktemp("rewards") / "store")
    env = make_env("libero_object", 0)
    result = Examiner(env).examine(4, 7, INJECTIONS["early_release"])
    store.append(nominal_episode(env, result))
    for episode in failure_episodes(env, result, result.failures[0]):
        store.append(episode)
    env.close()
    return store


@pytest.fixture(scope="module")
def rollouts(store):
    return {rollout.kind: rollout for rollout in read_rollouts(store)}


def test_value_falls_where_the_object_does_and_comes_back(rollouts):
    nominal, failure, mended = (rollouts[k] for k in ("nominal", "failure", "recovered"))
    assert nominal.target[-1] == mended.target[-1] == 1
    assert failure.target.max() < 1
    assert failure.target[-1] < failure.target[failure.effect - 1] - 0.3
    assert np.array_equal(failure.target[: failure.effect], nominal.target[: failure.effect])
    assert mended.target[mended.back] < 0.3
    # Joined without a seam: the hand does not jump.
    assert np.abs(np.diff(mended.state[:, :3], axis=0)).max() < 0.03


def test_the_true_value_cuts_as_the_generator_did(rollouts):
    for rollout in rollouts.values():
        labels = cut(rollout.target, rollout.action)
        true = truth(rollout)
        for kind in (Label.FAILURE, Label.RECOVERY):
            assert (kind in labels) == (kind in true)
        if rollout.back is not None:
            begins = [i for i in boundaries(labels) if labels[i] == Label.FAILURE]
            assert abs(begins[0] - rollout.effect) <= 10
        (kept,) = keep_frames([labels])
        assert kept.mean() >= 0.5


def test_real_pictures_have_values(store, rollouts):
    model = RewardModel(RewardConfig(image_size=64))
    steps = store.load(rollouts["nominal"].parts[0].episode).steps
    images = {name: steps[f"image/{name}"] for name in model.config.cameras}
    values = model.values(images, rollouts["nominal"].header.instruction)
    assert values.shape == (len(rollouts["nominal"]),)
    assert np.isfinite(values).all()
