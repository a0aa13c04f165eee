"""LeRobot's own evaluation runs the shipped policy in these environments, both by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from lerobot.envs.utils import NEW_ROLLOUT_OPTION
from regrasp.policies.lerobot_plugin import export_to_lerobot
from regrasp.policies.small_vla import SmallVLA
from regrasp.sim.lerobot_env import RegraspLiberoConfig


def test_lerobot_eval_takes_policy_and_environment_by_name(tmp_path: Path) -> None:
    export_to_lerobot(SmallVLA.load(), tmp_path / "policy")
    command = [
        str(Path(sys.executable).parent / "lerobot-eval"),
        f"--policy.path={tmp_path / 'policy'}",
        "--policy.device=cpu",
        "--env.type=regrasp_libero",
        "--env.task=libero_object",
        "--env.task_ids=[0]",
        "--eval.batch_size=1",
        "--eval.n_episodes=1",
        f"--output_dir={tmp_path / 'out'}",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "MUJOCO_GL": "egl"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "eval_info.json").read_text())
    # Task 0 succeeds in all 20 of its held-out episodes; LeRobot must see what our evaluation sees.
    assert report["overall"]["pc_success"] == 100.0
    assert report["overall"]["n_episodes"] == 1


def test_every_initial_state_is_run_once_whatever_resets_in_between() -> None:
    config = RegraspLiberoConfig(task="libero_object", task_ids=[1], first_init_state=3)
    vector = config.create_envs(n_envs=2)["libero_object"][1]
    assert isinstance(vector, gymnasium.vector.SyncVectorEnv)
    seen = []
    for _ in range(2):
        observation, info = vector.reset(options={NEW_ROLLOUT_OPTION: True})
        seen += list(info["init_state"])
        again = vector.envs[0].reset()[1]["init_state"]  # what an autoreset does
        assert again == info["init_state"][0]
    assert seen == [3, 4, 5, 6]
    assert observation["pixels"]["image"].shape == (2, 128, 128, 3)
    assert observation["pixels"]["image2"].dtype == np.uint8
    assert observation["agent_pos"].shape == (2, 8)
    vector.close()


def test_another_control_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="20"):
        RegraspLiberoConfig(fps=30)
