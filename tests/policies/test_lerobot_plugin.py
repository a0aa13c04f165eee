"""LeRobot trains, saves, loads and runs the small VLA, finding it by its own plugin mechanism."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_policy, make_pre_post_processors
from lerobot.utils.import_utils import register_third_party_plugins
from regrasp.episodes.lerobot import export_lerobot
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Observation
from regrasp.policies.bc import fit_statistics
from regrasp.policies.lerobot_plugin import (
    RegraspVLAConfig,
    export_to_lerobot,
)
from regrasp.policies.small_vla import SmallVLA
from regrasp.policies.vla import VLA

import lerobot_policy_regrasp

KEEP = ("image/agentview", "image/wrist", "state", "action")


@pytest.fixture(scope="module")
def dataset(toy_store, tmp_path_factory) -> Path:
    """Five toy episodes as a LeRobotDataset."""
    store = EpisodeStore.create(tmp_path_factory.mktemp("small") / "s")
    for episode in [EpisodeStore.open(toy_store)[i] for i in range(5)]:
        episode.steps = {key: episode.steps[key] for key in KEEP}
        store.append(episode)
    root = tmp_path_factory.mktemp("export") / "d"
    export_lerobot(store, root, repo_id="regrasp/toy", use_videos=False)
    return root


@pytest.fixture(scope="module")
def checkpoint(dataset, tmp_path_factory) -> Path:
    """What ``lerobot-train`` wrote after two steps, the policy found by name."""
    out = tmp_path_factory.mktemp("train") / "run"
    command = [sys.executable, "-m", "lerobot.scripts.lerobot_train"]
    command += ["--dataset.repo_id=regrasp/toy", f"--dataset.root={dataset}"]
    command += ["--policy.type=regrasp_vla", "--policy.device=cpu", "--policy.image_size=64"]
    command += ["--policy.chunk_size=4", "--policy.n_action_steps=2", "--policy.dim=64"]
    command += ["--policy.layers=1", f"--output_dir={out}", "--steps=2", "--save_freq=2"]
    command += ["--batch_size=4", "--num_workers=0", "--log_freq=1", "--wandb.enable=false"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "checkpoints" / "000002" / "pretrained_model"


def test_is_registered_by_discovery():
    register_third_party_plugins()
    registered = PreTrainedConfig.get_choice_class("regrasp_vla")
    assert registered is lerobot_policy_regrasp.RegraspVLAConfig


def test_trained_checkpoint_loads_and_acts(checkpoint, dataset):
    meta = LeRobotDataset("regrasp/toy", root=dataset).meta
    config = PreTrainedConfig.from_pretrained(checkpoint)
    assert isinstance(config, RegraspVLAConfig)
    assert (config.chunk_size, config.n_action_steps) == (4, 2)
    config.pretrained_path = checkpoint
    policy = make_policy(config, ds_meta=meta)
    before, after = make_pre_post_processors(config, pretrained_path=str(checkpoint))
    low = np.minimum(np.asarray(meta.stats["action"]["q01"]), 0)
    assert torch.isfinite(policy.model.action_scale).all()
    assert (policy.model.action_center.numpy() >= low - 1e-3).all()
    item = LeRobotDataset("regrasp/toy", root=dataset)[0]
    batch = before({k: v for k, v in item.items() if k.startswith("observation") or k == "task"})
    actions = [after(policy.select_action(batch)) for _ in range(3)]
    assert all(a.shape == (1, 7) for a in actions)
    assert all(torch.isfinite(a).all() for a in actions)
    assert len(policy._queue) == 1  # the third action began a second chunk of two
    policy.reset()
    assert len(policy._queue) == 0


def test_loss_leaves_padding_out(checkpoint, dataset):
    config = PreTrainedConfig.from_pretrained(checkpoint)
    config.pretrained_path = checkpoint
    policy = make_policy(config, ds_meta=LeRobotDataset("regrasp/toy", root=dataset).meta)
    item = LeRobotDataset("regrasp/toy", root=dataset)[0]
    batch = {k: v[None] for k, v in item.items() if k.startswith("observation")}
    batch |= {"task": [item["task"]], "action": torch.zeros(1, 4, 7)}
    batch["action_is_pad"] = torch.tensor([[False, True, True, True]])

    def direct():
        return policy.forward(batch)[1]["direct"]

    clean = direct()
    batch["action"][:, 1:] = 1e3
    assert direct() == pytest.approx(clean, rel=1e-4)
    batch.pop("action_is_pad")
    assert direct() > 100 * clean


def test_exported_policy_acts_like_the_original(toy_store, tiny, tmp_path, toy_observation):
    torch.manual_seed(0)
    model = VLA(tiny)
    fit_statistics(model, [toy_store], ["reach for the red ball", "reach for the blue ball"])
    torch.nn.init.normal_(model.expert.head.weight, std=0.1)
    ours = SmallVLA(model, execute=2)
    export_to_lerobot(ours, tmp_path)
    config = PreTrainedConfig.from_pretrained(tmp_path)
    config.pretrained_path = tmp_path
    from regrasp.policies.lerobot_plugin import RegraspVLAPolicy

    theirs = RegraspVLAPolicy.from_pretrained(tmp_path, config=config)
    before, after = make_pre_post_processors(config, pretrained_path=str(tmp_path))

    def to_lerobot(observation: Observation) -> dict:
        names = {"agentview": "image", "wrist": "image2"}
        batch = {
            f"observation.images.{names[k]}": torch.from_numpy(v).permute(2, 0, 1) / 255
            for k, v in observation.images.items()
        }
        batch["observation.state"] = torch.from_numpy(observation.state)
        return batch | {"task": observation.instruction}

    ours.reset(0)
    want = ours.infer([toy_observation])[0].samples[0]
    # One stream of noise on both sides.
    noise = torch.Generator().manual_seed(0)
    encoded = theirs.model.encode(theirs._inputs(before(to_lerobot(toy_observation))))
    chunk = theirs.model.sample(encoded, 1, config.flow_steps, noise)[0, 0, :2]
    np.testing.assert_allclose(after(chunk).numpy(), want, atol=1e-5)
