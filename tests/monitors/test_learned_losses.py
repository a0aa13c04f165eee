"""What learned scores train on and by: losses, labels and features by hand; torch's LSTM."""

import numpy as np
import pytest
import torch
from regrasp.episodes.types import Episode, EpisodeHeader, PolicyOutput
from regrasp.monitors.scores.hide_and_seek import inter_loss, intra_loss, onset_index
from regrasp.monitors.scores.labelled import LabelledEpisodes, Projection, action_features
from regrasp.monitors.scores.learned import Batch, class_weights, minibatches, pad, split
from regrasp.monitors.scores.lstm import Lstm, network
from regrasp.monitors.scores.onset import onset_loss
from regrasp.monitors.scores.safe import safe_lstm_loss, safe_mlp_loss


def batch(x, lengths, failed, begun=None, dated=None):
    """A batch of torch tensors, of which the losses read all but ``x``."""
    failed = np.array(failed, bool)
    mask = (np.arange(x.shape[1])[None] < np.array(lengths)[:, None]).astype(np.float32)
    zeros = np.zeros_like(mask)
    return Batch(
        np.zeros((*x.shape, 1), np.float32),
        mask,
        failed.astype(np.float32),
        class_weights(failed),
        zeros if begun is None else np.array(begun, np.float32),
        mask if dated is None else np.array(dated, np.float32),
    ).map(torch.from_numpy)


# -- the recurrent cell ---------------------------------------------------------------------------


def test_lstm_is_torchs():
    torch.manual_seed(0)
    module = network(5, 7, 0.5).eval()
    cell = Lstm.from_torch({k: v.numpy() for k, v in module.state_dict().items()})
    x = torch.randn(2, 30, 5) * 3
    with torch.no_grad():
        expected = module(x).numpy()
        states, _ = module.lstm(x)
    for row, logits, hidden in zip(x.numpy(), expected, states.numpy(), strict=True):
        h = c = np.zeros(7, np.float32)
        for value, logit, after in zip(row, logits, hidden, strict=True):
            got, h, c = cell.step(value, h, c)
            assert got == pytest.approx(logit, abs=1e-5)
            np.testing.assert_allclose(h, after, atol=1e-5)


# -- losses by hand -------------------------------------------------------------------------------


def test_safe_mlp_loss_by_hand():
    """A failure of two inferences and a success of one, every sigmoid 1/2."""
    logits = torch.zeros(2, 2)
    b = batch(logits, [2, 1], [True, False])
    # Failure: (1 - 1/2) + (2 - 1); success: 1/2; three inferences, class weights of 1.
    assert float(safe_mlp_loss(logits, b, True)) == pytest.approx((1.5 + 0.5) / 3)
    # Each term by its t: 1/2 + 1/2; 1/2.
    assert float(safe_mlp_loss(logits, b, False)) == pytest.approx((1.0 + 0.5) / 3)
    # Two failures to a success weigh half as much each: 3/4, 3/4, 3/2.
    logits = torch.zeros(3, 1)
    b = batch(logits, [1, 1, 1], [True, True, False])
    np.testing.assert_allclose(b.weight, [0.75, 0.75, 1.5])
    assert float(safe_mlp_loss(logits + np.log(3), b, True)) == pytest.approx(
        (2 * 0.75 * 0.25 + 1.5 * 0.75) / 3
    )


def test_safe_lstm_loss_by_hand():
    logits = torch.tensor([[0.0, np.log(3.0)], [np.log(3.0), 50.0]])
    b = batch(logits, [2, 1], [True, False])
    expected = (np.log(2) - np.log(0.75) - np.log(0.25)) / 3  # the padding's 50 is not counted
    assert float(safe_lstm_loss(logits, b)) == pytest.approx(expected, rel=1e-5)


def test_hide_and_seek_losses_by_hand():
    scores = torch.tensor(
        [[0.1, 0.2, 0.9, 0.8], [0.5, 0.6, 0.5, 1.0], [0.3, 0.4, 0.99, 0.0], [0.0, 0.9, 0.0, 0.0]]
    )
    b = batch(scores, [4, 3, 2, 1], [True, True, False, False])
    # Peaks within the mask: failures 0.9 and 0.6, successes 0.4 and 0.
    hinges = [1 - 0.9 + 0.4, 1 - 0.9, 1 - 0.6 + 0.4, 1 - 0.6]
    assert float(inter_loss(scores, b)) == pytest.approx(np.mean(hinges))
    # The steepest rises: 0.2 -> 0.9, and 0.5 -> 0.6, not the padding's 0.5 -> 1.
    assert onset_index(scores, b.mask).tolist()[:2] == [2, 1]
    # 0.85 - 0.15 is beyond the margin; 0.55 - 0.5 falls short by 0.45.
    assert float(intra_loss(scores, b)) == pytest.approx((0.0 + 0.45) / 2, abs=1e-6)
    assert float(intra_loss(scores[2:], batch(scores[2:], [2, 1], [False, True]))) == 0.0


def test_onset_loss_by_hand():
    logits = torch.tensor([[0.0, np.log(3.0)], [0.0, -50.0]])
    begun, dated = [[0, 1], [1, 1]], [[1, 1], [1, 0]]
    b = batch(logits, [2, 2], [True, False], begun, dated)
    after = (-np.log(0.75) + np.log(2)) / 2  # the undated -50 is not counted
    assert float(onset_loss(logits, b, 0.0)) == pytest.approx(0.5 * (after + np.log(2)), rel=1e-5)
    # With smoothing a target is 0.9 or 0.1.
    smooth = (-0.9 * np.log(0.75) - 0.1 * np.log(0.25) + np.log(2)) / 2
    assert float(onset_loss(logits, b, 0.2)) == pytest.approx(0.5 * (smooth + np.log(2)), rel=1e-5)


# -- what they train on ---------------------------------------------------------------------------


def test_episodes_are_cut_where_a_success_of_the_task_could_have_ended():
    lengths = [9, 5, 4, 7, 8]
    data = LabelledEpisodes(
        [np.zeros((n, 2), np.float32) for n in lengths],
        np.array([True, False, False, True, False]),
        [7, None, None, 2, None],
        groups=["a", "a", "a", "b", "c"],
    )
    cut = data.cut()
    # Group b has no success: the longest of all, 8, is no limit to 7.
    assert [len(x) for x in cut.embeddings] == [5, 5, 4, 7, 8]
    assert cut.onset == [5, None, None, 2, None]
    padded = pad(cut, list(cut.embeddings))
    assert padded.begun.sum() == 7 - 2  # the first failure begins after its cut
    np.testing.assert_array_equal(padded.mask.sum(axis=1), [5, 5, 4, 7, 8])


def test_a_failure_of_unknown_onset_is_dated_at_its_end_only():
    data = LabelledEpisodes([np.zeros((3, 2))] * 2, np.array([True, False]), [None, None])
    padded = pad(data, list(data.embeddings))
    np.testing.assert_array_equal(padded.begun, [[0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(padded.dated, [[0, 0, 1], [1, 1, 1]])


def test_classes_are_split_and_mixed():
    failed = np.arange(50) % 5 == 0
    rng = np.random.default_rng(0)
    train, held = split(failed, 0.2, rng)
    assert sorted([*train, *held]) == list(range(50))
    assert failed[held].sum() == 2
    seen = list(minibatches(failed, train, 8, rng))
    assert sorted(np.concatenate(seen)) == sorted(train)
    assert all(0 < failed[rows].sum() < len(rows) for rows in seen)
    np.testing.assert_allclose(class_weights(failed)[[0, 1]], [2.5, 0.625])
    with pytest.raises(ValueError, match="1 failed episodes; at least 2"):
        split(np.array([True, False, False]), 0.2, rng)


def test_action_features_by_hand():
    first = np.zeros((2, 4, 2), np.float32)
    first[1] = [2.0, 4.0]
    np.testing.assert_allclose(
        action_features(PolicyOutput(first, np.zeros(1)), np.zeros((0, 2)), None),
        [0, 0, 1, 2, 0, 0],
    )
    second = np.tile(np.arange(4, dtype=np.float32)[:, None], (1, 2))[None]
    got = action_features(PolicyOutput(second, np.zeros(1)), np.zeros((2, 2)), first[1])
    # Two moments are planned twice: 0 and 1 now, 2 and 4 before.
    gap = np.sqrt([(2.0**2 + 1.0**2) / 2, (4.0**2 + 3.0**2) / 2])
    np.testing.assert_allclose(got, [1.5, 1.5, 0, 0, *gap], rtol=1e-6)
    whole = action_features(PolicyOutput(second, np.zeros(1)), np.zeros((4, 2)), first[1])
    np.testing.assert_array_equal(whole[4:], 0)


def test_projection_has_unit_components():
    rng = np.random.default_rng(0)
    x = (rng.normal(0, 1, (500, 3)) @ rng.normal(0, 1, (3, 10)) + 4).astype(np.float32)
    actions = rng.normal(2, 5, (500, 2))
    projection = Projection.fit(x, actions, 8)
    out = projection(x, actions)
    assert out.shape == (500, projection.dims) == (500, 5)  # the rank is 3
    np.testing.assert_allclose(out.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(out.std(axis=0), 1, atol=1e-3)
    again = Projection.from_weights(projection.weights())
    np.testing.assert_array_equal(again(x, actions), out)


# -- labelled episodes ----------------------------------------------------------------------------


def stored(chunks=4, samples=3, **changes):
    """A stored episode of two action dimensions, one inference every second step."""
    rng = np.random.default_rng(0)
    header = EpisodeHeader("s", "lift", "lift it", 0, 0, False)
    arrays = {
        "step": 2 * np.arange(chunks),
        "samples": rng.normal(size=(chunks, samples, 5, 2)).astype(np.float32),
        "embedding": rng.normal(size=(chunks, 6)).astype(np.float32),
    }
    return Episode(header, {"action": np.zeros((2 * chunks, 2), np.float32)}, arrays | changes)


def test_stored_episodes_are_labelled_by_how_they_ended():
    data = LabelledEpisodes.from_episodes([stored(), stored()], [3, None])
    assert list(data.failed) == [True, True]
    assert data.groups == ["s/lift", "s/lift"]
    assert data.onset == [2, None]  # step 3 is first seen at the inference of step 4
    assert LabelledEpisodes.from_episodes([stored()], [8]).onset == [4]  # after the last one
    # One sample has no spread; three have, and are asked for.
    np.testing.assert_array_equal(data.actions[0][:, 2:4], 0)
    several = LabelledEpisodes.from_episodes([stored()], samples=3)
    assert several.samples == 3
    assert (several.actions[0][:, 2:4] > 0.1).all()
    np.testing.assert_array_equal(several.actions[0][:, :2], data.actions[0][:, :2])
    some = LabelledEpisodes.from_episodes([stored()] * 3, [1, 2, 3], samples=2).take([2, 0])
    assert (some.onset, some.samples, len(some)) == ([2, 1], 2, 2)
    assert some.cut().samples == 2


def test_episodes_that_were_rewound_are_refused():
    with pytest.raises(ValueError, match=r"episodes\[1\] lacks \[\] or was rewound"):
        LabelledEpisodes.from_episodes([stored(), stored(segment=np.array([0, 0, 1, 1]))])
    without = stored()
    del without.chunks["embedding"]
    with pytest.raises(ValueError, match=r"lacks \['embedding'\]"):
        LabelledEpisodes.from_episodes([without])
    for samples in (0, 4):
        with pytest.raises(ValueError, match=f"samples is {samples}, episodes"):
            LabelledEpisodes.from_episodes([stored()], samples=samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"failed": np.array([True])}, "failed: 1 entries for 2 episodes"),
        ({"onset": [1]}, "onset: 1 entries for 2"),
        ({"groups": ["a"] * 3}, "groups: 3 entries for 2"),
        ({"actions": [np.zeros((3, 6))]}, "actions: 1 entries for 2"),
        ({"actions": [np.zeros((3, 6)), np.zeros((2, 6))]}, r"actions\[1\]: 2 rows for 3"),
        ({"onset": [None, 4]}, r"onset\[1\]: 4 is outside an episode of 3"),
        ({"onset": [-1, None]}, r"onset\[0\]: -1 is outside"),
        ({"embeddings": [np.zeros((3, 2)), np.zeros((3, 4))]}, "with one D, got"),
        ({"embeddings": [np.zeros((3, 2)), np.zeros((0, 2))]}, "C >= 1"),
        ({"embeddings": [np.zeros(3), np.zeros(3)]}, "C >= 1"),
        ({"embeddings": [], "failed": np.zeros(0, bool)}, "C >= 1"),
    ],
)
def test_labelled_episodes_say_what_is_wrong(changes, message):
    good = {"embeddings": [np.zeros((3, 2))] * 2, "failed": np.array([True, False])}
    with pytest.raises(ValueError, match=message):
        LabelledEpisodes(**(good | changes))
