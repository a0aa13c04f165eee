"""LeRobot's ACT as a policy: small, randomly initialised or trained for a moment."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from regrasp.episodes.types import Observation
from regrasp.policies.lerobot_act import LeRobotAct, act_config, freeze, thaw
from regrasp.policies.lerobot_act_training import ActTrainer, ActTraining
from regrasp.policies.protocol import Policy
from regrasp.scripts._rollouts import load_policy

SMALL = {"dim_model": 32, "dim_feedforward": 64, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}


def build(tiny):
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.act.processor_act import make_act_pre_post_processors

    torch.manual_seed(0)
    config = act_config(tiny.cameras, tiny.image_size, 8, **SMALL)
    stats = {
        "action": {"mean": torch.full((7,), 0.1), "std": torch.full((7,), 0.5)},
        "observation.state": {"mean": torch.zeros(8), "std": torch.ones(8)},
    }
    return LeRobotAct(ACTPolicy(config), *make_act_pre_post_processors(config, dataset_stats=stats))


@pytest.fixture
def policy(tiny):
    return build(tiny)


def others(observation):
    """A few observations that differ in everything."""
    rng = np.random.default_rng(0)
    return [
        Observation(
            {k: rng.integers(0, 255, v.shape, np.uint8) for k, v in observation.images.items()},
            rng.normal(size=8).astype(np.float32),
            text,
        )
        for text in ("pick up the ball", "open the drawer", "pick up the ball")
    ]


def test_is_a_policy(policy, toy_observation, tiny):
    assert isinstance(policy, Policy)
    assert policy.spec.chunk == 8
    assert set(policy.spec.cameras) == set(tiny.cameras)
    (output,) = policy.infer([toy_observation], 5)
    assert output.samples.shape == (5, 8, 7)
    assert output.samples.dtype == np.float32
    assert output.embedding.shape == (32,)
    assert policy.infer([]) == []


def test_first_sample_is_acts_own_and_the_others_are_drawn(policy, toy_observation):
    one = policy.infer([toy_observation])[0]
    policy.reset(3)
    many = policy.infer([toy_observation], 4)[0]
    np.testing.assert_allclose(many.samples[0], one.samples[0], atol=1e-5)
    np.testing.assert_allclose(many.embedding, one.embedding, atol=1e-5)
    assert np.ptp(many.samples, axis=0).max() > 1e-4
    policy.reset(3)
    again = policy.infer([toy_observation], 4)[0]
    np.testing.assert_array_equal(again.samples, many.samples)


def test_a_batch_is_one_by_one(policy, toy_observation):
    observations = others(toy_observation)
    together = policy.infer(observations)
    for observation, output in zip(observations, together, strict=True):
        alone = policy.infer([observation])[0]
        np.testing.assert_allclose(alone.samples, output.samples, atol=1e-4)
        np.testing.assert_allclose(alone.embedding, output.embedding, atol=1e-4)


def test_instruction_matters(policy, toy_observation):
    first, second = others(toy_observation)[:2]
    other = replace(first, instruction=second.instruction)
    difference = policy.infer([first])[0].samples - policy.infer([other])[0].samples
    assert np.abs(difference).max() > 1e-4


def test_round_trip_by_lerobots_own_files(policy, toy_observation, tmp_path):
    policy.save(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "policy_preprocessor.json"} <= names
    again = LeRobotAct.load(tmp_path)
    assert again.hash() == policy.hash()
    np.testing.assert_array_equal(
        again.infer([toy_observation])[0].samples, policy.infer([toy_observation])[0].samples
    )
    assert load_policy("act", tmp_path).hash() == policy.hash()


def test_errors_name_what_is_wrong(policy, toy_observation, tmp_path):
    camera = next(iter(toy_observation.images))
    less = {k: v for k, v in toy_observation.images.items() if k != camera}
    with pytest.raises(ValueError, match=f"no camera '{camera}'"):
        policy.infer([replace(toy_observation, images=less)])
    bad = {k: v[:4] for k, v in toy_observation.images.items()}
    with pytest.raises(ValueError, match="must be uint8"):
        policy.infer([replace(toy_observation, images=bad)])
    with pytest.raises(ValueError, match="finite"):
        policy.infer([replace(toy_observation, state=np.full(8, np.nan, np.float32))])
    with pytest.raises(ValueError, match="num_samples=0"):
        policy.infer([toy_observation], 0)
    with pytest.raises(FileNotFoundError, match="no LeRobot policy"):
        LeRobotAct.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="none is shipped"):
        load_policy("act", None)


def test_thawed_and_frozen_norms_are_the_same_function(policy):
    backbone = policy.policy.model.backbone.eval()
    pictures = torch.rand(2, 3, 32, 32)
    before = backbone(pictures)["feature_map"]
    thaw(backbone)
    assert any(isinstance(m, torch.nn.BatchNorm2d) for m in backbone.modules())
    backbone.train()
    for _ in range(3):
        backbone(torch.rand(8, 3, 32, 32))
    backbone.eval()
    moved = backbone(pictures)["feature_map"]
    assert (moved - before).abs().max() > 1e-4
    freeze(backbone)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in backbone.modules())
    torch.testing.assert_close(backbone(pictures)["feature_map"], moved, rtol=1e-4, atol=1e-5)


QUICK = ActTraining(
    minutes=0, steps=40, batch=16, threads=1, warmup=5, lr=1e-3, image_size=32, chunk=8,
    validation_every=10, checkpoint_seconds=1e9,
)  # fmt: skip


def test_training_learns_resumes_and_exports(toy_store, toy_observation, tmp_path, tiny):
    config = replace(QUICK, image_size=tiny.image_size, chunk=tiny.chunk)
    trainer = ActTrainer(tmp_path, [toy_store], config, **SMALL)
    before = trainer.validate()["held_out_error"]
    policy = trainer.run()
    again = ActTrainer(tmp_path, [toy_store], config, **SMALL)
    assert again.step == 40
    # The norms' running statistics are in the checkpoint too, or it would be another function.
    after = again.validate()["held_out_error"]
    assert after < 0.8 * before
    loaded = LeRobotAct.load(tmp_path / "policy")
    assert loaded.hash() == policy.hash()
    assert np.isfinite(loaded.infer([toy_observation])[0].samples).all()
    with pytest.raises(ValueError, match="begun with"):
        ActTrainer(tmp_path, [toy_store], replace(config, seed=1), **SMALL)
