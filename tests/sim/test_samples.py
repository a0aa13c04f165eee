"""A real failure, from the gates to the episodes that a model learns from."""

import json

import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.sim import make_env
from regrasp.sim.experts.base import Phase
from regrasp.sim.failures import INJECTIONS
from regrasp.sim.failures.explain import Correction, hopeless
from regrasp.sim.failures.gates import Examiner
from regrasp.sim.failures.recover import Outcome, Recovery
from regrasp.sim.failures.sample import (
    context_id,
    describe,
    failure_episodes,
    level,
    nominal_episode,
)
from regrasp.sim.failures.symbols import Mark, draw_marks
from regrasp.sim.failures.wording import say, say_step, thing_of


@pytest.fixture(scope="module")
def env():
    env = make_env("libero_object", 0)
    yield env
    env.close()


@pytest.fixture(scope="module")
def result(env):
    return Examiner(env).examine(4, 7, INJECTIONS["early_release"])


@pytest.fixture(scope="module")
def episodes(env, result):
    return failure_episodes(env, result, result.failures[0])


def test_a_failure_and_its_recovery_are_two_linked_episodes(result, episodes):
    failed, mended = episodes
    assert not failed.header.success
    assert mended.header.success
    assert failed.header.failure_label == failed.header.perturbation == "early_release"
    assert failed.header.extra["sample"] == mended.header.extra["sample"]
    assert mended.header.extra["role"] == "recovery"
    assert mended.header.extra["start"] == failed.header.extra["recovery"]["from_step"]
    assert not failed.steps["success"].any()
    assert mended.steps["success"][-1]
    # The recovery begins where the failure was left: the same proprioception.
    at = mended.header.extra["start"]
    assert np.array_equal(failed.steps["state"][at], mended.steps["state"][0])


def test_what_was_wanted_and_what_was_done_part_at_the_injection(episodes):
    failed = episodes[0]
    extra = failed.header.extra
    apart = (failed.steps["action"] != failed.steps["nominal_action"]).any(axis=1)
    assert np.argmax(apart) == extra["injection_step"]
    assert extra["injection_step"] <= extra["first_effect_step"] <= extra["predicate_fail_step"]
    progress = failed.steps["progress"]
    assert progress[extra["injection_step"]] > progress[-1]
    assert episodes[1].steps["progress"][-1] == pytest.approx(1.0)


def test_everything_said_of_a_failure_is_json_and_the_same_again(result):
    said = describe(result, result.failures[0])
    assert json.dumps(said) == json.dumps(describe(result, result.failures[0]))
    assert "gripper opened" in said["explanation"].lower()
    assert said["explanation"][0].isupper()
    assert "{" not in said["explanation"] + said["correction_text"]
    assert said["subtask"] == "pick and place the alphabet soup"
    assert said["level"] == 4
    assert context_id(result) in said["sample"]


def test_wordings_vary_with_the_severity(result):
    texts = {describe(result, failure)["explanation"] for failure in result.failures}
    assert len(texts) == len(result.failures)


def test_the_delta_is_what_the_recovery_did(result, episodes):
    mended = episodes[1]
    delta = episodes[0].header.extra["correction"]["delta"]
    state = mended.steps["state"]
    lifts = np.flatnonzero(mended.steps["phase"][:21] == Phase.LIFT)
    until = lifts[0] if len(lifts) else 20
    assert delta[:3] == pytest.approx(state[until, :3] - state[0, :3], abs=1e-6)
    assert delta[6] in (-1.0, 1.0)


def test_marks_of_a_correction_sit_on_its_frame(env, result, episodes):
    correction = episodes[0].header.extra["correction"]
    env.restore(result.failures[0].checkpoint.physics)
    for camera in env.config.cameras:
        frame = episodes[0].steps[f"image/{camera}"][correction["step"]]
        assert np.array_equal(env.observe()[camera], frame)
    marks = [Mark.from_json(mark) for mark in correction["marks"]["agentview"]]
    assert {mark.kind for mark in marks} >= {"target"}
    frame = episodes[0].steps["image/agentview"][correction["step"]]
    changed = (draw_marks(frame, marks) != draw_marks(frame, [])).any(axis=-1)
    assert changed.sum() > 100


def test_the_nominal_goes_well_and_all_fit_one_store(env, result, episodes, tmp_path):
    store = EpisodeStore.create(tmp_path / "store")
    nominal = nominal_episode(env, result)
    for episode in (nominal, *episodes):
        store.append(episode)
    assert nominal.header.success
    assert store.load(1).header.extra["context"] == store.load(0).header.extra["context"]


def test_levels_and_words():
    assert [level(s) for s in (0.1, 0.25, 0.5, 0.75, 1.0)] == [1, 1, 2, 3, 4]
    assert say("akita_black_bowl_1") == "black bowl"
    assert say("wooden_cabinet_1_top_region") == "top drawer"
    assert say_step("open wooden_cabinet_1_top") == "open the top drawer"
    assert thing_of("pick and place milk_1") == "the milk"
    step, thing = "pick and place the milk", "the milk"
    assert thing in hopeless(Recovery(Outcome.OUT_OF_REACH), step, thing)
    again = Recovery(Outcome.FOUND, None, (False,) * 5, (True,) * 5)
    assert step in hopeless(again, step, thing)
    assert Correction(3, "Go.", (0.0,) * 7, ()).to_json()["step"] == 3
