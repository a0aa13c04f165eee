"""Every variant of the shipped policy: what it answers, and what it must not change."""

import numpy as np
import pytest
from regrasp.episodes.types import Observation
from regrasp.policies.accelerate import CANDIDATES, Candidate, decision_costs, shrink
from regrasp.policies.protocol import Policy
from regrasp.policies.small_vla import SmallVLA


@pytest.fixture(scope="module")
def reference():
    return SmallVLA.load()


@pytest.fixture(scope="module")
def seen(reference):
    rng = np.random.default_rng(0)
    images = {}
    for camera, (height, width) in reference.spec.cameras.items():
        coarse = rng.integers(0, 256, (height // 16, width // 16, 3))
        images[camera] = np.kron(coarse, np.ones((16, 16, 1))).astype(np.uint8)
    state = np.array([-0.1, 0, 1.1, 3.14, 0, 0, 0.04, -0.04], np.float32)
    return Observation(images, state, "pick up the milk and place it in the basket")


def answer(policy, seen, seed=3):
    policy.reset(seed)
    return policy.infer([seen])[0].samples[0]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_every_candidate_is_a_policy_and_leaves_the_reference_alone(candidate, reference, seen):
    before, hashed = answer(reference, seen), reference.hash()
    fast = candidate.apply(reference)
    assert isinstance(fast, Policy)
    assert fast.spec.chunk == candidate.execute
    assert fast.spec.cameras == reference.spec.cameras
    actions = answer(fast, seen)
    assert actions.shape == (candidate.execute, 7)
    assert actions.dtype == np.float32
    assert np.isfinite(actions).all()
    np.testing.assert_array_equal(answer(fast, seen), actions)
    np.testing.assert_array_equal(answer(reference, seen), before)
    assert reference.hash() == hashed


def test_names_differ_and_none_is_the_reference(reference):
    settings = [(c.execute, c.flow_steps, c.image_size, c.weights) for c in CANDIDATES]
    assert len({c.name for c in CANDIDATES}) == len(set(settings)) == len(CANDIDATES)
    assert (reference.spec.chunk, reference.flow_steps, None, "fp32") not in settings


def test_nothing_changed_is_the_reference(reference, seen):
    same = Candidate("same").apply(reference)
    np.testing.assert_array_equal(answer(same, seen), answer(reference, seen))


def test_a_longer_part_of_a_chunk_begins_with_the_shorter(reference, seen):
    longer = answer(Candidate("longer", execute=16).apply(reference), seen)
    np.testing.assert_array_equal(longer[:8], answer(reference, seen))


@pytest.mark.parametrize(("weights", "tolerance"), [("bf16", 0.1), ("int8", 0.1)])
def test_rounded_weights_answer_nearly_the_same_but_not_the_same(
    weights, tolerance, reference, seen
):
    difference = answer(Candidate("c", weights=weights).apply(reference), seen)
    difference = np.abs(difference - answer(reference, seen))
    assert 0 < difference.mean() < tolerance


def test_int8_has_int8_weights(reference):
    fast = Candidate("c", weights="int8").apply(reference)
    weight = fast.model.expert.layers[0].qkv.weight()
    assert weight.int_repr().element_size() == 1
    assert len(weight.q_per_channel_scales()) == weight.shape[0]


def test_small_pictures_show_the_same_and_the_network_gets_them(reference, seen):
    image = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    assert shrink(image, 4).tolist() == image.tolist()
    plain = np.full((128, 128, 3), 77, np.uint8)
    assert (shrink(plain, 96) == 77).all()
    step = np.zeros((128, 128, 3), np.uint8)
    step[:, 64:] = 200
    small = shrink(step, 64)
    assert small[:, 0].max() == 0
    assert small[:, -1].min() == 200
    fast = Candidate("c", image_size=64).apply(reference)
    fast.reset(0)
    assert np.abs(answer(fast, seen) - answer(reference, seen)).mean() > 1e-3
    with pytest.raises(ValueError, match="wrist"):
        fast.infer([Observation({"agentview": plain}, seen.state, seen.instruction)])


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (Candidate("c", image_size=256), "image_size: 256 must be at most"),
        (Candidate("c", image_size=100), "image_size: 100 must be a multiple of 8"),
        (Candidate("c", execute=17), "execute: 17"),
        (Candidate("c", flow_steps=0), "flow_steps: 0"),
    ],
)
def test_what_cannot_be_is_refused(candidate, message, reference):
    with pytest.raises(ValueError, match=message):
        candidate.apply(reference)


def test_costs_are_of_a_control_step(reference, seen):
    policies = {
        "reference": reference,
        "twice": Candidate("twice", execute=16).apply(reference),
        "flow1": Candidate("flow1", flow_steps=1).apply(reference),
    }
    costs = decision_costs(policies, seen, rounds=8)
    ratio = {name: np.median(costs["reference"] / cost) for name, cost in costs.items()}
    assert ratio["reference"] == 1.0
    assert 1.5 < ratio["twice"] < 2.7  # two when nothing disturbs
    assert ratio["flow1"] > 1.1
