"""The world model: it learns what actions lead to, budgets match, optimism is counted right."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pushes import SIZE, STRIDE, fill
from regrasp.episodes.results import read_result
from regrasp.relabel.world_model import WorldModel, WorldModelConfig
from regrasp.relabel.world_model_data import ARMS, Rollouts, choose, split_tasks
from regrasp.relabel.world_model_metrics import Outcomes, compare, nearness
from regrasp.relabel.world_model_training import WorldTrainer, WorldTraining, losses
from regrasp.scripts import eval_world_model, train_world_model

TINY = WorldModelConfig(size=SIZE, thumbnail=4, stride=STRIDE, width=4, latent=16)
SHORT = WorldTraining(steps=150, batch=8, targets=2, lr=3e-3, warmup=5, threads=1)
CAMERAS = ("agentview", "wrist")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("pushes") / "store")


@pytest.fixture(scope="module")
def rollouts(store):
    return Rollouts(store, range(len(store)), CAMERAS)


def test_shapes_of_what_is_imagined_and_read():
    model = WorldModel(TINY)
    pixels = torch.zeros(3, 2, SIZE, SIZE, 3, dtype=torch.uint8)
    latents = model.imagine(model.encode(pixels, torch.zeros(3, 8)), torch.zeros(3, 5, STRIDE, 7))
    assert latents.shape == (3, 5, 16)
    read = model.read(latents)
    assert read.success.shape == (3, 5)
    assert read.state.shape == (3, 5, 8)
    assert read.thumbnails.shape == (3, 5, 2, 3, 4, 4)
    assert model.outcome(pixels, torch.zeros(3, 8), torch.zeros(3, 5, STRIDE, 7)).shape == (3, 5)


def test_a_saved_model_imagines_the_same(tmp_path):
    model = WorldModel(TINY).eval()
    model.save(tmp_path)
    pixels = torch.randint(0, 255, (2, 2, SIZE, SIZE, 3), dtype=torch.uint8)
    given = (pixels, torch.randn(2, 8), torch.randn(2, 5, STRIDE, 7))
    assert torch.equal(WorldModel.load(tmp_path).outcome(*given), model.outcome(*given))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        WorldModelConfig(size=40)


def test_tasks_are_held_out_whole(store):
    split = split_tasks(store.headers, 0.2, 0)
    assert len(split.train) == len(split.held_out) == 1
    assert set(split.train).isdisjoint(split.held_out)
    with pytest.raises(ValueError, match="two at least"):
        split_tasks(store.headers[:4], 0.2, 0)


def test_budgets_match_and_only_one_arm_has_failures(store):
    tasks = split_tasks(store.headers, 0.2, 0).train
    chosen = {arm: choose(store.headers, tasks, arm, 0, 0) for arm in ARMS}
    won = {arm: [store.headers[i].success for i in ids] for arm, ids in chosen.items()}
    assert len(won["success_only"]) == len(won["counterfactual"]) == 12
    assert all(won["success_only"])
    assert sum(won["counterfactual"]) == 6
    with pytest.raises(ValueError, match="budget of 13"):
        choose(store.headers, tasks, "success_only", 13, 0)
    with pytest.raises(ValueError, match="there are"):
        choose(store.headers, tasks, "both", 0, 0)


def test_a_batch_pairs_chunks_with_the_rows_after_them(rollouts):
    batch = rollouts.batch(64, 2, np.random.default_rng(0))
    assert batch.target.min() >= 1
    # A row's goal is that after the chunk before it.
    after = batch.success.gather(1, batch.target - 1)
    assert torch.equal(after, batch.held[:, 1:])
    assert torch.equal(batch.real.sum(1).long(), batch.target[:, -1] + 1)
    # The square's place tells where in its episode a row is.
    first, last = batch.state[:, 0, 0], batch.state[:, -1, 0]
    speed = (last - first) / batch.target[:, -1]
    assert set(speed.tolist()) == {1.0, 3.0}


def test_padding_has_no_part_in_the_loss(rollouts):
    model = WorldModel(TINY)
    batch = rollouts.batch(8, 2, np.random.default_rng(1))
    assert batch.real.min() == 0
    other = torch.where(batch.real > 0, batch.success, 1 - batch.success)
    one, two = (losses(model, b, SHORT)["goal"] for b in (batch, replace(batch, success=other)))
    assert one == two


def test_it_learns_what_actions_lead_to(rollouts, tmp_path):
    model = WorldTrainer(tmp_path, lambda: WorldModel(TINY), rollouts, SHORT).run()
    score = eval_world_model.imagine(model, rollouts)
    won = np.array([header.success for header in rollouts.headers])
    assert score[won].min() > 0.5 > score[~won].max()


def test_a_resumed_run_is_an_unbroken_one(rollouts, tmp_path):
    config = replace(SHORT, steps=6)

    def trainer(name):
        return WorldTrainer(tmp_path / name, lambda: WorldModel(TINY), rollouts, config)

    whole = trainer("whole").run()
    cut = trainer("cut")
    for _ in range(3):
        cut.train_step()
    cut.save()
    resumed = trainer("cut")
    assert resumed.step == 3
    for name, value in resumed.run().state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    with pytest.raises(ValueError, match="batch"):
        WorldTrainer(tmp_path / "cut", lambda: WorldModel(TINY), rollouts, replace(config, batch=4))


def test_training_for_a_time_is_refused():
    with pytest.raises(ValueError, match="same number of steps"):
        replace(SHORT, minutes=5.0)


def outcomes(score):
    success = np.array([True, True, False, False, True, False])
    return Outcomes(np.array(score), success, ["a", "a", "a", "a", "b", "b"])


def test_statistics_by_hand():
    figures = compare({"m": outcomes([0.9, 0.4, 0.6, 0.1, 0.2, 0.3])})
    value = {name.removesuffix(".m"): figure.value for name, figure in figures.items()}
    assert value["optimism"] == pytest.approx(1 / 3)
    assert value["success_believed"] == pytest.approx(1 / 3)
    assert value["gap"] == pytest.approx(1.5 / 3 - 1.0 / 3)
    # Pairs ranked right: 0.9 beats all three, 0.4 two, 0.2 one.
    assert value["auroc"] == pytest.approx(6 / 9)
    assert value["auroc_within"] == pytest.approx(3 / 5)


def test_ties_count_half_and_a_constant_is_no_better_than_chance():
    figures = compare({"m": outcomes([1.0] * 6)})
    assert figures["auroc.m"].value == figures["auroc_within.m"].value == 0.5
    assert figures["optimism.m"].value == 1.0
    assert figures["gap.m"].value == 0.0


def test_an_imagined_end_is_compared_with_real_ends_of_its_own_set():
    ends = np.array([[0.0], [1.0], [0.4], [9.0]])
    imagined = np.array([[0.25], [0.75], [0.9], [0.0]])
    success = np.array([True, False, False, True])
    score = nearness(imagined, ends, success, ["a", "a", "a", "b"])
    # 0.15 to the nearest failure and 0.25 to the success.
    assert score[0] == pytest.approx(0.15 / 0.4)
    assert score[1] == pytest.approx(0.25 / 1.0)
    assert score[2] == pytest.approx(0.1 / 1.0)
    assert np.isnan(score[3])


def test_two_models_are_compared_on_the_same_resamples():
    worse, better = outcomes([1.0] * 6), outcomes([0.9, 0.8, 0.1, 0.2, 0.7, 0.1])
    figures = compare({"success_only": worse, "counterfactual": better})
    assert figures["optimism.difference"].value == -1.0
    # Better in every beginning, so in every resample.
    assert figures["optimism.difference"].high == -1.0
    with pytest.raises(ValueError, match="different executions"):
        compare({"a": worse, "b": replace(better, success=~better.success)})
    with pytest.raises(ValueError, match="end alike"):
        replace(worse, success=np.ones(6, bool))


def test_commands_train_both_and_compare_them(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = train_world_model.Args(
        store=store.path,
        out=tmp_path / "run",
        training=replace(SHORT, steps=4),
        width=4,
        latent=16,
    )
    train_world_model.main(args)
    about = json.loads((tmp_path / "run/counterfactual/arm.json").read_text())
    assert about["episodes"] == 12
    assert about["failures"] == 6
    eval_world_model.main(eval_world_model.Args(run=args.out, store=store.path))
    figures = read_result("world_model")["figures"]
    assert {f"optimism.{arm}" for arm in (*ARMS, "difference")} <= set(figures)
    assert 0.0 <= figures["latent.auroc_within.counterfactual"].value <= 1.0
    assert figures["auroc_within.action_distance"].value == 1.0
    assert figures["optimism.success_only"].n == 6
    assert figures["episodes.success_only"].value == 12
