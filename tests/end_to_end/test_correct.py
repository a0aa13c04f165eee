"""DAgger's data: a policy drives, the expert labels, training takes the labels as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.policies.data import NO_AUGMENTATION, Windows
from regrasp.policies.vla import VLAConfig
from regrasp.scripts.correct import Args, CorrectionJob, correct_one, plan


def test_a_round_of_corrections_becomes_training_windows(tmp_path: Path) -> None:
    args = Args(out=tmp_path / "store", suites=("libero_object",), tasks=(0,), init_states=2)
    EpisodeStore.create(args.out)
    jobs = [CorrectionJob(job, None, args.execute) for job in plan(args)]
    results = [correct_one(job) for job in jobs]
    again = correct_one(jobs[0])
    assert again["key"] == results[0]["key"]
    store = EpisodeStore.open(args.out)
    assert len(store) == sum(result["kept"] for result in results) == 2
    for episode in store:
        chunks = episode.steps["expert_chunk"]
        assert chunks.shape[1:] == (16, 7)
        assert np.abs(chunks).max() <= 1.0
        assert len(episode) == episode.header.extra["recoverable"]
        # One look each eight control steps: the hand has moved between two of them.
        moved = np.linalg.norm(np.diff(episode.steps["state"][:, :3], axis=0), axis=1)
        assert moved.max() > 0.02
        # At the first look both stand at the start: the expert's chunk heads for the target.
        first = episode.steps["aux"][0]
        way = first[:2] - first[6:8]
        assert chunks[0, :4, :2].sum(axis=0) @ way > 0
    windows = Windows([args.out], VLAConfig())
    inputs, labels = windows.batch(4, np.random.default_rng(0), NO_AUGMENTATION)
    assert labels.valid.all()
    assert inputs.state.shape == (4, 8)
