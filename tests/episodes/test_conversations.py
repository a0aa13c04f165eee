"""Failure episodes as conversations: what is asked, what is answered, what is never told."""

import json

import numpy as np
import pytest
from PIL import Image
from regrasp.episodes.conversations import QUESTIONS, export_conversations, tile
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader

STEPS = 30
TOLD = "pick up the milk and place it in the basket"


def episode(role, **extra):
    header = EpisodeHeader(
        "libero_object", "milk", TOLD, 0, 1, role != "failure", extra={"role": role, **extra}
    )
    ramp = np.arange(STEPS, dtype=np.uint8)[:, None, None, None]
    frames = np.broadcast_to(ramp, (STEPS, 8, 8, 3))
    return Episode(header, {"image/agentview": frames, "image/wrist": frames + 100})


def failure(**changes):
    extra = {
        "type": "early_release",
        "level": 3,
        "subtask": "pick and place the milk",
        "injection_step": 10,
        "first_effect_step": 12,
        "predicate_fail_step": 17,
        "explanation": "The gripper opened while it carried the milk, so the milk was lost.",
        "correction_text": "Move 3 cm down, then pick and place the milk.",
        "correction": {
            "step": 20,
            "text": "Move 3 cm down, then pick and place the milk.",
            "delta": [0.0, 0.01, -0.03, 0.0, 0.0, 0.5, -1.0],
            "marks": {"agentview": [{"kind": "target", "places": [[0.25, 0.5]], "amount": 0.0}]},
        },
        "recovery": {"outcome": "found", "mends": True},
    }
    return episode("failure", **(extra | changes))


@pytest.fixture
def store(tmp_path):
    store = EpisodeStore.create(tmp_path / "store")
    store.append(episode("nominal", subtasks=[[0, "pick and place the milk"]]))
    store.append(failure())
    lost = {"outcome": "out_of_reach", "mends": False}
    store.append(failure(correction=None, correction_text="Ask for help.", recovery=lost))
    store.append(episode("recovery"))
    return store


def test_a_tiling_shows_time_to_the_right_and_the_ends():
    picture, steps = tile(episode("nominal"), frames=4)
    assert picture.shape == (16, 32, 3)
    assert steps == [0, 10, 19, 29]
    assert picture[0, ::8, 0].tolist() == steps
    assert picture[8, ::8, 0].tolist() == [100 + step for step in steps]


def test_llava_records_and_pictures(store, tmp_path):
    out = tmp_path / "llava"
    count = export_conversations(store, out, "llava", frames=4)
    records = {r["id"]: r for r in json.loads((out / "llava.json").read_text())}
    assert len(records) == count
    assert not any(key.startswith("000003") for key in records)  # a recovery is asked nothing
    said = {key: r["conversations"][1]["value"] for key, r in records.items()}
    assert said["000000/robofac.failure_detection"] == "yes"
    assert said["000001/robofac.failure_detection"] == "no"
    assert said["000001/aha.verdict"].startswith("no, The gripper opened")
    assert said["000001/labrobfail.temporal_localization"] == "from step 12 to step 17"
    assert said["000001/labrobfail.severity"] == "3"
    moved = "move (+0.0, +1.0, -3.0) cm, turn (+0, +0, +29) degrees, gripper open"
    assert said["000001/robofac.low_level_correction"] == moved
    assert said["000002/vifailback.recoverable"] == "no"
    marks = json.loads(said["000001/vifailback.visual_correction"])
    assert marks == [{"kind": "target", "points": [[250, 500]]}]
    for record in records.values():
        with Image.open(out / record["image"]) as image:
            assert image.size == (32, 16)
        assert record["conversations"][0]["value"].startswith("<image>\n")


def test_questions_that_make_no_sense_are_not_asked(store, tmp_path):
    export_conversations(store, tmp_path / "out", "llava")
    records = json.loads((tmp_path / "out" / "llava.json").read_text())
    asked = {number: set() for number in ("000000", "000001", "000002")}
    for record in records:
        number, _, name = record["id"].partition("/")
        asked[number].add(name)
    assert asked["000001"] == set(QUESTIONS) - {"robofac.task_planning"}
    assert "robofac.failure_explanation" not in asked["000000"]
    assert "robofac.low_level_correction" not in asked["000002"]
    assert "robofac.high_level_correction" in asked["000002"]


def test_who_is_asked_for_the_task_is_not_told_it(store, tmp_path):
    export_conversations(store, tmp_path / "out", "llava")
    for record in json.loads((tmp_path / "out" / "llava.json").read_text()):
        asked, answer = (turn["value"] for turn in record["conversations"])
        if answer == TOLD:
            assert TOLD not in asked
        else:
            assert TOLD in asked


def test_sharegpt_says_how_it_is_read(store, tmp_path):
    out = tmp_path / "sharegpt"
    count = export_conversations(store, out, "sharegpt", ["robofac.failure_detection"], 2)
    assert count == 3
    info = json.loads((out / "dataset_info.json").read_text())["regrasp_failures"]
    records = json.loads((out / info["file_name"]).read_text())
    tags, columns = info["tags"], info["columns"]
    for record in records:
        user, assistant = record[columns["messages"]]
        assert user[tags["role_tag"]] == tags["user_tag"]
        assert user[tags["content_tag"]].count("<image>") == len(record[columns["images"]]) == 1
        assert assistant[tags["role_tag"]] == tags["assistant_tag"]


def test_wrong_arguments_are_refused(store, tmp_path):
    with pytest.raises(KeyError, match="robofac"):
        export_conversations(store, tmp_path / "out", "llava", ["robofac.why"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(FileExistsError):
        export_conversations(store, tmp_path / "full")
