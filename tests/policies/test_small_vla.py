import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from regrasp.policies.data import NO_AUGMENTATION
from regrasp.policies.protocol import Policy
from regrasp.policies.small_vla import SmallVLA, load_model
from regrasp.policies.text import embed_batch, embed_instruction
from regrasp.policies.trunk import grid, heatmap_loss, prepare_image
from regrasp.policies.vla import VLA, Inputs, Labels, VLAConfig, state_features


def fresh(config: VLAConfig, seed: int = 0) -> VLA:
    """A network with plausible statistics and random weights everywhere."""
    torch.manual_seed(seed)
    model = VLA(config)
    width = model.state_center.numel()
    model.set_statistics(
        action=(torch.full((config.action_dim,), 0.1), torch.full((config.action_dim,), 0.5)),
        state=(torch.zeros(width), torch.ones(width)),
        text=(torch.zeros(384), torch.ones(384)),
    )
    torch.nn.init.normal_(model.expert.head.weight, std=0.1)
    return model


@pytest.fixture
def policy(tiny) -> SmallVLA:
    return SmallVLA(fresh(tiny))


def test_is_a_policy_and_answers_in_shape(policy, toy_observation):
    assert isinstance(policy, Policy)
    assert policy.spec.cameras == {"agentview": (64, 64), "wrist": (64, 64)}
    outputs = policy.infer([toy_observation] * 3, num_samples=5)
    assert [o.samples.shape for o in outputs] == [(5, 4, 7)] * 3
    assert outputs[0].samples.dtype == np.float32
    assert outputs[0].embedding.shape == (64,)
    assert outputs[0].samples.std(axis=0).max() > 0
    assert policy.infer([]) == []


def test_same_seed_same_actions(policy, toy_observation):
    policy.reset(3)
    first = [policy.infer([toy_observation])[0].samples for _ in range(2)]
    policy.reset(3)
    again = [policy.infer([toy_observation])[0].samples for _ in range(2)]
    policy.reset(4)
    other = policy.infer([toy_observation])[0].samples
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], other)


def test_chunk_and_flow_steps_change_at_run_time(policy, toy_observation):
    policy.reset(0)
    five = policy.infer([toy_observation])[0].samples
    policy.flow_steps = 20
    policy.set_execute(2)
    policy.reset(0)
    twenty = policy.infer([toy_observation])[0].samples
    assert policy.spec.chunk == 2
    assert twenty.shape == (1, 2, 7)
    assert not np.allclose(five[:, :2], twenty)
    for bad in (0, 5):
        with pytest.raises(ValueError, match="execute"):
            policy.set_execute(bad)
    with pytest.raises(ValueError, match="flow_steps"):
        policy.flow_steps = 0


def test_more_flow_steps_approach_the_exact_flow(tiny, toy_observation):
    """Euler's error falls with the number of steps, so the sampler integrates the right field."""
    policy = SmallVLA(fresh(tiny))
    results = {}
    for steps in (4, 16, 256):
        policy.flow_steps = steps
        policy.reset(0)
        results[steps] = policy.infer([toy_observation])[0].samples
    errors = [np.abs(results[n] - results[256]).max() for n in (4, 16)]
    assert errors[1] < 0.5 * errors[0]


def test_saved_policy_is_the_same_policy(policy, tmp_path, toy_observation):
    policy.meta["seed"] = 7
    policy.save(tmp_path / "full")
    policy.save(tmp_path / "half", half=True)
    full = SmallVLA.load(tmp_path / "full", execute=4)
    half = SmallVLA.load(tmp_path / "half", execute=4)
    assert full.hash() == policy.hash() != half.hash()
    assert full.meta == {"seed": 7}
    for p in (policy, full, half):
        p.reset(1)
    want = policy.infer([toy_observation])[0].samples
    np.testing.assert_array_equal(full.infer([toy_observation])[0].samples, want)
    np.testing.assert_allclose(half.infer([toy_observation])[0].samples, want, atol=0.02)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("full", "half")]
    assert sizes[1] < 0.55 * sizes[0]


def test_hash_sees_every_weight_and_statistic(tiny):
    model = fresh(tiny)
    before = SmallVLA(model).hash()
    model.action_scale[3] *= 1.001
    assert SmallVLA(model).hash() != before


def test_missing_statistics_never_run(tiny, tmp_path):
    with pytest.raises(ValueError, match="not set"):
        SmallVLA(VLA(tiny))
    model = fresh(tiny)
    policy = SmallVLA(model)
    policy.save(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if k != "state_center"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="state_center"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path / "nowhere")


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


def test_instruction_and_picture_change_the_answer(policy, toy_observation):
    policy.reset(0)
    base = policy.infer([toy_observation])[0]
    for other in (
        replace(toy_observation, instruction="open the top drawer"),
        replace(toy_observation, images={k: v // 2 for k, v in toy_observation.images.items()}),
        replace(toy_observation, state=toy_observation.state + np.float32(0.05)),
    ):
        policy.reset(0)
        assert not np.allclose(policy.infer([other])[0].embedding, base.embedding, atol=1e-4)


def test_default_size_is_small_and_quick():
    policy = SmallVLA(fresh(VLAConfig()))
    assert sum(p.numel() for p in policy.model.parameters()) < 8e6
    rng = np.random.default_rng(0)
    from regrasp.episodes.types import Observation

    images = {c: rng.integers(0, 255, (128, 128, 3), np.uint8) for c in ("agentview", "wrist")}
    observation = Observation(images, np.zeros(8, np.float32), "pick up the bowl")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy.infer([observation])
    began = time.process_time()  # of this process alone, whatever else the machine does
    for _ in range(10):
        policy.infer([observation])
    seconds = (time.process_time() - began) / 10
    torch.set_num_threads(threads)
    assert seconds < 0.06, f"{seconds * 1e3:.0f} ms an observation"


def test_axis_angle_cut_is_no_cut():
    """A hand turned by pi - 0.01 and by pi + 0.01 is nearly the same hand."""
    state = torch.zeros(2, 8)
    state[0, 3], state[1, 3] = np.pi - 0.01, -np.pi + 0.01
    a, b = state_features(state)
    assert (a - b).abs().max() < 0.05


def test_heatmap_loss_is_least_at_the_point():
    cells = grid(16)
    point = torch.tensor([[[0.21, -0.4]]])

    def loss(centre):
        distance = (cells - torch.tensor(centre)).square().sum(-1)
        return heatmap_loss(torch.log_softmax(-distance * 200, 0)[None, None], point).item()

    at = loss([0.21, -0.4])
    assert all(at < loss([0.21 + dx, -0.4 + dy]) for dx, dy in ((0.1, 0), (-0.1, 0), (0, 0.1)))
    assert heatmap_loss(torch.zeros(1, 1, 256), torch.full((1, 1, 2), torch.nan)) == 0


def test_jitter_and_blocks_keep_pixels_in_place():
    image = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    plain = prepare_image(image)
    assert plain.shape == (2, 12, 4, 4)
    # Row 5, column 2 is block (2, 1), lower left of its four: channels 6 to 8.
    torch.testing.assert_close(plain[1, 6:9, 2, 1], image[1, 5, 2].float() / 127.5 - 1)
    gain, offset = torch.full((2, 3), 1.2), torch.full((2, 3), 0.1)
    torch.testing.assert_close(prepare_image(image, gain, offset), plain * 1.2 + 0.1)


def test_instructions_keep_their_tokens_in_a_batch():
    texts = ["open the drawer", "pick up the red bowl on the left", "open the drawer"]
    batch = embed_batch(texts)
    assert batch.index.tolist() == [0, 1, 0]
    for row, text in zip(batch.index, texts, strict=True):
        np.testing.assert_array_equal(batch.tokens[row][batch.mask[row]], embed_instruction(text))
    left = embed_instruction("the bowl left of the plate")
    right = embed_instruction("the bowl right of the plate")
    assert np.abs(left - right).max() > 0.5


def test_padding_of_other_instructions_changes_nothing(tiny):
    model = fresh(tiny).eval()
    image = prepare_image(torch.randint(0, 256, (1, 64, 64, 3), dtype=torch.uint8))

    def encode(texts):
        text = embed_batch(texts)
        tensors = [torch.from_numpy(a) for a in (text.tokens, text.mask, text.index[:1])]
        return model.encode(Inputs((image, image), torch.zeros(1, 8), *tensors)).memory

    alone = encode(["open the drawer"])
    padded = encode(["open the drawer", "put the white mug on the plate to the left of the stove"])
    torch.testing.assert_close(alone, padded)


def test_no_augmentation_means_none():
    assert NO_AUGMENTATION.shift == 0
    assert Labels(torch.zeros(1), torch.zeros(1)).offsets is None
