"""From a store of failures to clips: what is true of them, splits, lengths, pictures."""

from __future__ import annotations

import numpy as np
import pytest
from failure_store import write_store
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.relabel.diagnose.answer import Unparseable, parse
from regrasp.relabel.diagnose.dataset import (
    HELD_OUT_TASKS,
    balanced,
    clips_of,
    natural_clips,
    split_of,
    truth_of,
)
from regrasp.relabel.diagnose.frames import FrameChoice, ask
from regrasp.relabel.diagnose.labels import (
    CLASSES,
    HELD_OUT_TYPES,
    VISIBLE,
    by_cause,
    cause_of,
)
from regrasp.relabel.diagnose.pictures import Pictures
from regrasp.sim.failures.taxonomy import TAXONOMY

CHOICE = FrameChoice(frames=4, size=16)


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "failures")


def test_every_type_has_a_visible_class_and_each_class_keeps_types_to_learn():
    assert set(VISIBLE) == set(TAXONOMY)
    for _, kinds in CLASSES.values():
        assert set(kinds) - set(HELD_OUT_TYPES)
    families = {TAXONOMY[kind].family for kind in HELD_OUT_TYPES}
    assert families == {"control", "physics", "perception", "semantic"}


def test_truths_are_answers_that_parse(store):
    clips = clips_of([store])
    assert {clip.role for clip in clips} == {"failure", "nominal", "recovery"}
    for clip in clips:
        answer = parse(clip.truth.text, types=CLASSES, steps=clip.length)
        assert not isinstance(answer, Unparseable), answer
        assert answer.failed == (clip.role == "failure")
        assert cause_of(answer) == clip.kind


def test_a_failure_without_a_way_out_has_no_motion(store):
    headers = EpisodeStore.open(store).headers
    lost = next(h for h in headers if h.extra["role"] == "failure" and not h.extra["correction"])
    truth = truth_of(lost)
    assert truth.delta == (0.0,) * 7
    assert truth.correction == lost.extra["correction_text"]


def test_no_context_is_in_two_splits(store):
    clips = clips_of([store, store])
    assert len({clip.key for clip in clips}) == len(clips)  # a store named twice counts once
    of = {}
    for clip in clips:
        assert of.setdefault(clip.context, clip.split) == clip.split
    assert set(of.values()) == {"train", "tasks", "states", "types"}
    for clip in clips:
        if clip.kind:
            assert (clip.kind in HELD_OUT_TYPES) == (clip.split == "types")


def test_splits():
    assert split_of("libero_goal", HELD_OUT_TASKS["libero_goal"][0], 0, []) == "tasks"
    assert split_of("libero_goal", 0, 9, []) == "states"
    assert split_of("libero_goal", 0, 1, ["freeze", HELD_OUT_TYPES[0]]) == "types"
    assert split_of("libero_goal", 0, 1, ["freeze"]) == "train"
    assert split_of("libero_goal", 0, 2, HELD_OUT_TYPES) == "train"


def test_a_failure_is_as_long_as_a_success_and_is_shown_failing(store):
    clips = clips_of([store])
    for clip in clips:
        if clip.truth.failed:
            lengths = {c.length for c in clips if c.context == clip.context and not c.truth.failed}
            assert clip.length in lengths
            assert clip.truth.end + 5 < clip.length


def test_rows_of_a_recovery_go_on_where_the_failure_was_left(store):
    clip = next(c for c in clips_of([store]) if c.role == "recovery")
    failure, way_out = clip.parts
    rows = clip.rows(np.arange(clip.length + 3))
    turn = failure.stop
    assert rows[turn - 1 : turn + 1] == [(failure.episode, turn - 1), (way_out.episode, 0)]
    assert rows[-1] == rows[-4] == (way_out.episode, way_out.stop - 1)  # the last picture stays


def test_balance(store):
    clips = [clip for clip in clips_of([store]) if clip.split == "train"]
    roles = [clips[i].role for i in balanced(clips)]
    assert set(balanced(clips)) == set(range(len(clips)))
    assert abs(2 * roles.count("failure") - len(roles)) <= 0.2 * len(roles)


def test_cached_pictures_are_the_episodes(store, tmp_path):
    clips = clips_of([store])
    pictures = Pictures(tmp_path / "cache.npy", clips, CHOICE)
    index = next(i for i, clip in enumerate(clips) if clip.role == "nominal")
    clip = clips[index]
    episode = EpisodeStore.open(store).load(clip.parts[0].episode)
    cut = Episode(episode.header, {k: v[: clip.length] for k, v in episode.steps.items()})
    wanted, got = ask(cut, CHOICE), pictures.question(index)
    assert got.content == wanted.content
    assert got.length == wanted.length
    np.testing.assert_array_equal(np.stack(got.images), np.stack(wanted.images))
    moved = pictures.question(index, np.random.default_rng(0))
    assert moved.content != got.content
    assert len(moved.images) == len(got.images)


def test_a_cache_is_used_again_and_one_of_other_clips_is_not(store, tmp_path):
    clips = clips_of([store])
    file = tmp_path / "cache.npy"
    first = Pictures(file, clips, CHOICE)
    made = []
    Pictures(file, clips, CHOICE, lambda done, total: made.append(done))
    assert made == []
    fewer = Pictures(file, clips[1:], CHOICE, lambda done, total: made.append(done))
    assert made == list(range(1, len(clips)))
    one, other = first.question(1), fewer.question(0)
    np.testing.assert_array_equal(np.stack(one.images), np.stack(other.images))


def test_examples_go_on_where_a_run_was_cut(store, tmp_path):
    pictures = Pictures(tmp_path / "cache.npy", clips_of([store]), CHOICE)
    rows = range(len(pictures))
    whole, cut = pictures.examples(rows, 0), pictures.examples(rows, 0, 5)
    first = [next(whole) for _ in range(40)]
    for a, b in zip(first[5:], [next(cut) for _ in range(35)], strict=True):
        assert a.question.content == b.question.content
        assert a.answer == b.answer


def test_answers_by_cause(store):
    clip = next(c for c in clips_of([store]) if c.truth.failed)
    found, other = by_cause([clip.truth, Unparseable("", "empty")])
    assert found.type == clip.kind
    assert isinstance(other, Unparseable)


def test_what_policies_did(tmp_path):
    store = EpisodeStore.create(tmp_path / "natural")
    for i, (success, steps) in enumerate([(True, 30), (False, 60)]):
        extra = {"sample": f"s{i}", "context": f"c{i}", "onset_step": 12, "subtask": "take it"}
        header = EpisodeHeader("libero_object", "t", "do it", 0, 0, success, extra=extra)
        images = np.zeros((steps, 16, 16, 3), np.uint8)
        store.append(Episode(header, {"image/agentview": images}))
    good, bad = natural_clips(store.path)
    assert not good.truth.failed
    assert (bad.truth.start, bad.length) == (12, 30)  # not longer than a success


def test_a_store_without_failures_is_refused(tmp_path):
    EpisodeStore.create(tmp_path / "empty")
    with pytest.raises(ValueError, match="no failures"):
        clips_of([tmp_path / "empty"])
