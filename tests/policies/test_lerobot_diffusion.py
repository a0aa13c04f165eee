"""LeRobot's Diffusion Policy as a policy: small, random or trained for a moment."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.types import Observation
from regrasp.policies.data import NO_AUGMENTATION
from regrasp.policies.lerobot_diffusion import LeRobotDiffusion
from regrasp.policies.protocol import Policy
from regrasp.scripts._rollouts import load_policy
from regrasp.scripts.train_diffusion import (
    DiffusionSizes,
    DiffusionTrainer,
    DiffusionTraining,
    diffusion_config,
    picture_size,
)
from safetensors.torch import load_file, save_file

SIZES = DiffusionSizes(chunk=8, down_dims=(64, 128), keypoints=8, inference_steps=3)
STATS = {
    "action": {"min": torch.full((7,), -0.6), "max": torch.full((7,), 0.8)},
    "observation.state": {"mean": torch.zeros(8), "std": torch.ones(8)},
}


def build(tiny, stats=STATS, **changes):
    torch.manual_seed(0)
    config = diffusion_config(tiny.cameras, tiny.image_size, SIZES)
    for name, value in changes.items():
        setattr(config, name, value)
    policy = DiffusionPolicy(config)
    return policy, *make_diffusion_pre_post_processors(config, dataset_stats=stats)


@pytest.fixture
def policy(tiny):
    return LeRobotDiffusion(*build(tiny))


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


def test_is_a_policy_and_answers_in_shape(policy, toy_observation, tiny):
    assert isinstance(policy, Policy)
    assert policy.spec.cameras == dict.fromkeys(tiny.cameras, (64, 64))
    (output,) = policy.infer([toy_observation], 5)
    assert output.samples.shape == (5, 8, 7)
    assert output.samples.dtype == np.float32
    assert output.samples.std(axis=0).max() > 0.01
    # State, two cameras of eight keypoints, and the instruction.
    assert output.embedding.shape == (8 + 2 * 2 * 8 + 384,)
    assert policy.infer([]) == []


def test_actions_are_in_environment_units(policy, toy_observation):
    """Denoising clips at -1 and 1, which are the ends of the action's range."""
    samples = policy.infer([toy_observation], 32)[0].samples
    assert samples.min() == pytest.approx(-0.6, abs=1e-5)
    assert samples.max() == pytest.approx(0.8, abs=1e-5)


@pytest.mark.parametrize("scheduler", ["DDIM", "DDPM"])
def test_noise_belongs_to_observation_and_sample(tiny, toy_observation, scheduler):
    policy = LeRobotDiffusion(*build(tiny, noise_scheduler_type=scheduler))
    observations = others(toy_observation)

    def answers(groups, count):
        policy.reset(3)
        return np.stack([o.samples for group in groups for o in policy.infer(group, count)])

    together = answers([observations], 3)
    np.testing.assert_array_equal(answers([observations], 3), together)
    one_by_one = answers([[o] for o in observations], 3)
    np.testing.assert_allclose(one_by_one, together, atol=1e-4)
    # What runs does not depend on how many samples somebody else wants to see.
    np.testing.assert_allclose(answers([observations], 1)[:, 0], together[:, 0], atol=1e-4)
    policy.reset(4)
    assert np.abs(policy.infer(observations, 3)[0].samples - together[0]).max() > 0.01
    again = policy.infer(observations, 3)[0].samples
    assert np.abs(again - together[0]).max() > 0.01


def test_same_answer_as_lerobot_itself(policy, toy_observation):
    batch = policy._before(policy._batch([toy_observation]))
    inputs = {k: v[:, None] if k.endswith("state") else v for k, v in batch.items() if k != "task"}
    inputs = {k: v for k, v in inputs.items() if k.startswith("observation")}
    noise = torch.randn(1, 8, 7, generator=torch.Generator().manual_seed(1))
    theirs = policy._after(policy.policy.predict_action_chunk(inputs, noise=noise))
    chunks, _ = policy._denoise(batch, [torch.Generator().manual_seed(1)])
    torch.testing.assert_close(policy._after(chunks), theirs)


def test_everything_seen_matters(policy, toy_observation):
    def embedding(observation):
        return policy.infer([observation])[0].embedding

    base = embedding(toy_observation)
    for other in (
        replace(toy_observation, instruction="open the top drawer"),
        replace(toy_observation, images={k: v // 2 for k, v in toy_observation.images.items()}),
        replace(toy_observation, state=toy_observation.state + np.float32(0.05)),
    ):
        assert not np.allclose(embedding(other), base, atol=1e-6)


def test_execute_shortens_the_chunk(policy, toy_observation):
    policy.set_execute(3)
    assert policy.spec.chunk == 3
    assert policy.infer([toy_observation])[0].samples.shape == (1, 3, 7)
    for bad in (0, 9):
        with pytest.raises(ValueError, match="execute"):
            policy.set_execute(bad)


def test_round_trip_by_lerobots_own_files(policy, toy_observation, tmp_path):
    policy.save(tmp_path)
    again = LeRobotDiffusion.load(tmp_path)
    assert again.hash() == policy.hash()
    for p in (policy, again):
        p.reset(1)
    np.testing.assert_array_equal(
        again.infer([toy_observation])[0].samples, policy.infer([toy_observation])[0].samples
    )
    assert load_policy("diffusion", tmp_path).hash() == policy.hash()


def test_hash_sees_weights_normalisation_and_settings(tiny):
    plain = LeRobotDiffusion(*build(tiny)).hash()
    assert LeRobotDiffusion(*build(tiny)).hash() == plain
    stats = STATS | {"action": {**STATS["action"], "max": torch.full((7,), 0.9)}}
    assert LeRobotDiffusion(*build(tiny, stats)).hash() != plain
    assert LeRobotDiffusion(*build(tiny, num_inference_steps=4)).hash() != plain
    parts = build(tiny)
    with torch.no_grad():
        next(parts[0].parameters()).view(-1)[0] += 1e-3
    assert LeRobotDiffusion(*parts).hash() != plain


def test_half_read_weights_do_not_run(policy, tmp_path):
    policy.save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)
    with pytest.raises(RuntimeError, match="Missing key"):
        LeRobotDiffusion.load(tmp_path)


def test_what_cannot_be_a_policy_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="no statistics of 'action'"):
        LeRobotDiffusion(*build(tiny, {"observation.state": STATS["observation.state"]}))
    parts = build(tiny)
    parts[0].config.n_obs_steps = 2
    with pytest.raises(ValueError, match="n_obs_steps: 2"):
        LeRobotDiffusion(*parts)
    parts = build(tiny)
    parts[0].config.input_features.pop("observation.environment_state")
    with pytest.raises(ValueError, match="beside pictures they must be"):
        LeRobotDiffusion(*parts)
    with pytest.raises(FileNotFoundError, match="no LeRobot policy"):
        LeRobotDiffusion.load(tmp_path)
    with pytest.raises(ValueError, match="none is shipped"):
        load_policy("diffusion", None)


def test_wrong_observations_are_named(policy, toy_observation):
    images = dict(toy_observation.images)
    cases = [
        (replace(toy_observation, images={"wrist": images["wrist"]}), "agentview"),
        (replace(toy_observation, images={k: v[:32] for k, v in images.items()}), "32, 64"),
        (replace(toy_observation, images={k: v / 255 for k, v in images.items()}), "uint8"),
        (replace(toy_observation, state=toy_observation.state[:7]), "state"),
        (replace(toy_observation, state=toy_observation.state * np.nan), "finite"),
        (replace(toy_observation, instruction=" "), "empty"),
    ]
    for observation, words in cases:
        with pytest.raises(ValueError, match=words):
            policy.infer([observation])
    with pytest.raises(ValueError, match="num_samples"):
        policy.infer([toy_observation], num_samples=0)


QUICK = DiffusionTraining(
    minutes=0, steps=4, batch=8, threads=1, warmup=2, lr=1e-3, ema=0.9,
    validation_every=10, validation_windows=64, checkpoint_seconds=1e9,
)  # fmt: skip


def test_overfits_a_few_windows(toy_store, tmp_path):
    config = replace(QUICK, steps=80, ema=0.0)
    trainer = DiffusionTrainer(tmp_path, [toy_store], config, SIZES)
    few = trainer.windows.batch(8, np.random.default_rng(0), NO_AUGMENTATION)
    losses = [trainer.train_step(*few)["loss"] for _ in range(80)]
    assert np.mean(losses[-20:]) < 0.9 * np.mean(losses[:20])


def test_trained_policy_is_exported(toy_store, toy_observation, tmp_path):
    trainer = DiffusionTrainer(tmp_path, [toy_store], QUICK, SIZES)
    policy = trainer.run()
    assert set(JsonLines(tmp_path / "log.jsonl").read()[-1]) >= {"held_out_error"}
    loaded = load_policy("diffusion", tmp_path / "policy")
    assert loaded.hash() == policy.hash()
    assert loaded.spec.cameras == {"agentview": (64, 64), "wrist": (64, 64)}
    assert np.isfinite(loaded.infer([toy_observation])[0].samples).all()
    averaged = trainer.averaged()["diffusion.unet.final_conv.1.weight"]
    torch.testing.assert_close(
        loaded.policy.state_dict()["diffusion.unet.final_conv.1.weight"], averaged
    )


def test_resumed_run_equals_unbroken_run(toy_store, tmp_path):
    unbroken = DiffusionTrainer(tmp_path / "a", [toy_store], QUICK, SIZES)
    unbroken.run()
    first = DiffusionTrainer(tmp_path / "b", [toy_store], QUICK, SIZES)
    batches = first.windows.batches(8, 0, QUICK.augmentation)
    for _ in range(2):
        first.train_step(*next(batches)[:2])
    batches.close()
    first.save()
    second = DiffusionTrainer(tmp_path / "b", [toy_store], QUICK, SIZES)
    assert second.step == 2
    second.run()
    for name, value in unbroken.averaged().items():
        torch.testing.assert_close(value, second.averaged()[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match="begun with"):
        DiffusionTrainer(tmp_path / "b", [toy_store], replace(QUICK, seed=1), SIZES)


def test_picture_size_is_the_stores(toy_store):
    assert picture_size([toy_store], ("agentview", "wrist")) == 64
