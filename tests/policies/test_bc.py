import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.policies.bc import BCConfig, Trainer, fit_statistics
from regrasp.policies.data import NO_AUGMENTATION, Augmentation, Windows
from regrasp.policies.small_vla import SmallVLA
from regrasp.policies.vla import VLA

QUICK = BCConfig(
    minutes=0, steps=6, batch=8, threads=1, validation_windows=64, validation_every=10, warmup=2
)


def test_learns_where_the_named_ball_is(toy_store, tmp_path, tiny):
    config = replace(QUICK, steps=160, batch=32, warmup=15, lr=2e-3, ema=0.98)
    trainer = Trainer(tmp_path, [toy_store], model=tiny, config=config)
    before = trainer.validate()
    after = trainer.run()
    # The goal is the ball after the named one: some 20 cm from the gripper and from the others.
    assert before["goal_cm"] > 15
    assert after["goal_cm"] < 7
    assert after["flow"] < 0.5 * before["flow"]
    assert after["action_error"] < 0.6 * before["action_error"]


def test_resumed_run_equals_unbroken_run(toy_store, tmp_path, tiny):
    unbroken = Trainer(tmp_path / "a", [toy_store], model=tiny, config=QUICK)
    unbroken.run()
    first = Trainer(tmp_path / "b", [toy_store], model=tiny, config=QUICK)
    batches = first.windows.batches(QUICK.batch, QUICK.seed, QUICK.augmentation)
    for _ in range(3):
        first.train_step(*next(batches)[:2])
    batches.close()
    first.save()
    second = Trainer(tmp_path / "b", [toy_store], model=tiny, config=QUICK)
    assert second.step == 3
    second.run()
    for name, value in unbroken.averaged().items():
        torch.testing.assert_close(value, second.averaged()[name], rtol=0, atol=0)


def test_killed_training_continues(toy_store, tmp_path, tiny):
    code = (
        "import sys; from pathlib import Path; from regrasp.policies.bc import *;"
        "from regrasp.policies.vla import VLAConfig;"
        f"m = VLAConfig.from_json({tiny.to_json()!r});"
        "c = BCConfig(minutes=0, steps=100000, batch=8, threads=1, validation_windows=64,"
        "validation_every=10, checkpoint_seconds=0.5);"
        f"Trainer({str(tmp_path)!r}, [{str(toy_store)!r}], model=m, config=c).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    trainer = Trainer(tmp_path, [toy_store], model=tiny, config=replace(QUICK, steps=100000))
    assert trainer.step > 0
    assert trainer.seconds > 0
    lines = JsonLines(tmp_path / "log.jsonl").read()
    assert all(np.isfinite(v) for line in lines for v in line.values())


def test_other_stores_do_not_resume(toy_store, tmp_path, tiny):
    Trainer(tmp_path, [toy_store], model=tiny, config=QUICK).save()
    with pytest.raises(ValueError, match=r"begun with \{'stores': .*use another folder"):
        Trainer(tmp_path, [toy_store, toy_store], model=tiny, config=QUICK)


def test_fine_tuning_keeps_statistics_and_starts_from_the_policy(toy_store, tmp_path, tiny):
    first = Trainer(tmp_path / "a", [toy_store], model=tiny, config=QUICK)
    first.run()
    second = Trainer(
        tmp_path / "b", [toy_store], config=QUICK, init=tmp_path / "a" / "policy", weights=[1.0]
    )
    saved = SmallVLA.load(tmp_path / "a" / "policy").model.state_dict()
    for name, value in second.model.state_dict().items():
        torch.testing.assert_close(value, saved[name])


def test_frozen_encoder_does_not_move(toy_store, tmp_path, tiny):
    trainer = Trainer(tmp_path, [toy_store], model=tiny, config=replace(QUICK, freeze_encoder=True))
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.run()
    moved = {k for k, v in trainer.model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved
    assert all(name.startswith("expert.") for name in moved)


def test_loss_ignores_padding_and_is_not_diluted_by_it(toy_store, tiny):
    windows = Windows([toy_store], tiny, validation_every=10)
    inputs, labels = windows.batch(16, np.random.default_rng(0), NO_AUGMENTATION)
    model = VLA(tiny)
    fit_statistics(model, [toy_store], windows.instructions)
    valid = torch.zeros_like(labels.valid)
    valid[:, 0] = True
    garbage = labels.action.clone()
    garbage[:, 1:] = 1e3

    def direct(action, mask):
        generator = torch.Generator().manual_seed(0)
        return model.losses(inputs, labels._replace(action=action, valid=mask), 1, generator)[0][
            "direct"
        ].item()

    clean = direct(labels.action, valid)
    assert direct(garbage, valid) == pytest.approx(clean)
    # The first action's own error, over 16 x 1 entries and not 16 x 4.
    encoded = model.encode(inputs)
    action = (labels.action - model.action_center) / model.action_scale
    assert clean == pytest.approx((encoded.direct - action)[:, 0].abs().mean().item(), rel=1e-4)


def test_shifted_pictures_keep_their_labels(toy_store, tiny):
    """The ball is where the label says, in the picture as shown, after any shift."""
    windows = Windows([toy_store], tiny, validation_every=10)
    augmentation = Augmentation(shift=4, gain=0.0, tint=0.0, offset=0.0)
    inputs, labels = windows.batch(32, np.random.default_rng(1), augmentation)
    blocks = inputs.images[0].permute(0, 2, 3, 1).unflatten(-1, (2, 2, 3))
    image = blocks.permute(0, 1, 3, 2, 4, 5).reshape(32, 64, 64, 3)
    assert inputs.shift.abs().max() == pytest.approx(4 * 2 / 64)
    checked = 0
    for i, (u, v) in enumerate(labels.pixels[:, 0, 0]):
        if abs(u) < 0.9 and abs(v) < 0.9:
            x, y = round(((u + 1) * 32 - 0.5).item()), round(((v + 1) * 32 - 0.5).item())
            grey = torch.full((3,), 120 / 127.5 - 1)
            checked += 1
            assert (image[i, y, x] - grey).abs().max() > 0.2
    assert checked > 20


def test_stores_are_drawn_by_weight_and_labels_may_be_missing(toy_store, tmp_path, tiny):
    plain = EpisodeStore.create(tmp_path / "plain")
    for episode in [EpisodeStore.open(toy_store)[i] for i in range(12)]:
        for key in ("aux", "phase"):
            episode.steps.pop(key)
        episode.steps["expert_action"] = episode.steps["action"] * 0 + 0.5
        plain.append(episode)
    windows = Windows(
        [toy_store, tmp_path / "plain"], tiny, weights=[3.0, 1.0], validation_every=10
    )
    _, labels = windows.batch(400, np.random.default_rng(0), NO_AUGMENTATION)
    from_plain = (labels.action == 0.5).all(dim=(1, 2))
    assert 60 < from_plain.sum() < 140
    assert torch.isnan(labels.offsets[from_plain]).all()
    assert torch.isfinite(labels.offsets[~from_plain]).all()
    only_plain = Windows([tmp_path / "plain"], tiny, validation_every=10)
    _, labels = only_plain.batch(8, np.random.default_rng(0), NO_AUGMENTATION)
    assert labels.offsets is None
    assert labels.pixels is None
    assert labels.phase is None


def test_chunks_stop_at_disturbances_and_may_be_whole_labels(toy_store, tmp_path, tiny):
    store = EpisodeStore.create(tmp_path / "s")
    for episode in [EpisodeStore.open(toy_store)[i] for i in range(10)]:
        steps = np.arange(len(episode))
        episode.steps["segment"] = (steps >= 6).astype(np.int64)
        episode.steps["action"] = np.repeat(steps[:, None], 7, axis=1).astype(np.float32)
        store.append(episode)
    windows = Windows([tmp_path / "s"], tiny, validation_every=10)
    _, labels = windows.batch(64, np.random.default_rng(0), NO_AUGMENTATION)
    first = labels.action[:, 0, 0]
    for step, action, valid in zip(first, labels.action[..., 0], labels.valid, strict=True):
        # A chunk from step 4 may use steps 4 and 5; step 6 answers a disturbance it cannot see.
        end = 6 if step < 6 else 12
        assert valid.tolist() == [bool(step + k < end) for k in range(4)]
        assert (action[valid] == step + torch.arange(4)[valid]).all()
    chunks = EpisodeStore.create(tmp_path / "c")
    for episode in [store[i] for i in range(10)]:
        episode.steps.pop("segment")
        own = np.arange(len(episode), dtype=np.float32)[:, None, None]
        episode.steps["expert_chunk"] = np.tile(100 + own, (1, 4, 7)).astype(np.float32)
        chunks.append(episode)
    windows = Windows([tmp_path / "c"], tiny, validation_every=10)
    _, labels = windows.batch(64, np.random.default_rng(0), NO_AUGMENTATION)
    assert labels.valid.all()
    assert (labels.action >= 100).all()
    assert (labels.action == labels.action[:, :1]).all()
