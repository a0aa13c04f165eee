"""LeRobotDataset v3: written and read by lerobot itself, and given back whole."""

import numpy as np
import pytest
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from regrasp.episodes.lerobot import SIDECAR, export_lerobot, import_lerobot
from regrasp.episodes.reader import WindowReader
from regrasp.episodes.store import EpisodeStore

from .synthetic import assert_equal, make_episode

IMAGES = ("image/agentview", "image/wrist")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = EpisodeStore.create(
        tmp_path_factory.mktemp("lerobot") / "s",
        control_hz=20,
        attrs={"action_names": ["dx", "dy", "dz", "dax", "day", "daz", "gripper"]},
    )
    for seed in range(4):
        store.append(make_episode(seed, size=64, chunks=seed != 1))
    return store


@pytest.fixture(scope="module", params=[True, False], ids=["video", "png"])
def exported(request, store, tmp_path_factory):
    root = tmp_path_factory.mktemp("export") / "d"
    return request.param, export_lerobot(store, root, use_videos=request.param)


def test_lerobot_loads_it(store, exported):
    _, root = exported
    dataset = LeRobotDataset(
        "regrasp/episodes", root=root, delta_timestamps={"action": [h / 20 for h in range(8)]}
    )
    assert dataset.fps == 20
    assert dataset.num_episodes == len(store)
    assert dataset.num_frames == store.num_steps
    assert dataset.features["action"]["names"][-1] == "gripper"
    start, stop = store.bounds(2)
    episode = store[2]
    for t in (0, len(episode) // 2, len(episode) - 1):
        item = dataset[start + t]
        assert item["task"] == episode.header.instruction
        assert item["episode_index"] == 2
        np.testing.assert_array_equal(item["observation.state"], episode.steps["state"][t])
        want = episode.steps["action"][np.minimum(t + np.arange(8), len(episode) - 1)]
        np.testing.assert_array_equal(item["action"], want)
        assert item["action_is_pad"].sum() == max(0, t + 8 - len(episode))
        # The same index is the same window on both sides, which the benchmark relies on.
        window = WindowReader(store, horizon=8).gather(np.array([start + t]))
        np.testing.assert_array_equal(item["action"], window["action"][0])
        np.testing.assert_array_equal(~item["action_is_pad"].numpy(), window["mask"][0])
        picture = item["observation.images.wrist"]
        assert picture.shape == (3, 64, 64)
        truth = torch.from_numpy(episode.steps["image/wrist"][t]).permute(2, 0, 1) / 255
        assert (picture - truth).abs().mean() < 0.02
    assert stop - start == len(episode)


def test_back_again(store, exported, tmp_path):
    use_videos, root = exported
    again = import_lerobot(root, tmp_path / "again")
    assert again.attrs == store.attrs
    assert again.control_hz == store.control_hz
    assert len(again) == len(store)
    for got, want in zip(again, store, strict=True):
        assert_equal(got, want, skip=IMAGES if use_videos else ())
        for key in IMAGES:
            difference = np.abs(got.steps[key].astype(int) - want.steps[key])
            assert difference.mean() < (4 if use_videos else 1e-9), key
            # Not merely similar pictures: each frame is nearest to its own original.
            if use_videos:
                flat = want.steps[key].reshape(len(want), -1).astype(int)
                shown = got.steps[key].reshape(len(want), -1).astype(int)
                error = np.abs(shown[:, None] - flat[None]).mean(axis=2)
                np.testing.assert_array_equal(error.argmin(axis=1), np.arange(len(want)))


def test_a_foreign_dataset_imports(store, exported, tmp_path):
    _, root = exported
    sidecar = root / SIDECAR
    hidden = sidecar.rename(tmp_path / "hidden")
    try:
        again = import_lerobot(root, tmp_path / "again", suite="other")
    finally:
        hidden.rename(sidecar)
    assert [h.instruction for h in again.headers] == [h.instruction for h in store.headers]
    assert {h.suite for h in again.headers} == {"other"}
    np.testing.assert_array_equal(again[3].steps["state"], store[3].steps["state"])
    np.testing.assert_array_equal(again[3].steps["phase"][:, 0], store[3].steps["phase"])
    assert again[3].steps["image/wrist"].shape == store[3].steps["image/wrist"].shape


def test_errors(store, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"info\.json"):
        import_lerobot(tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="no episodes"):
        export_lerobot(store, tmp_path / "d", episodes=[])
    odd = EpisodeStore.create(tmp_path / "odd", control_hz=12.5)
    odd.append(make_episode(0))
    with pytest.raises(ValueError, match=r"control_hz=12\.5"):
        export_lerobot(odd, tmp_path / "d")
