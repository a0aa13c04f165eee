"""The small diagnosis model's two stages: truths of moments, encoder, language model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from failure_store import CONTEXTS, write_store
from regrasp.relabel.diagnose.dataset import clips_of
from regrasp.relabel.diagnose.dense import UNKNOWN, dense_of
from regrasp.relabel.diagnose.encoder import (
    Encoded,
    EncoderConfig,
    Teacher,
    disturbed,
    train_encoder,
)
from regrasp.relabel.diagnose.frames import FrameChoice
from regrasp.relabel.diagnose.labels import CLASSES, VISIBLE
from regrasp.relabel.diagnose.language import (
    CAUSE,
    CLASS,
    FAILED,
    WHEN,
    LanguageConfig,
    Lessons,
    Prompts,
    Student,
    train_language,
    tried,
)
from regrasp.relabel.diagnose.pictures import Pictures, moments
from regrasp.relabel.diagnose.tiny import TinySize, build
from regrasp.scripts.train_diagnose import training_texts
from regrasp.training.run import Schedule
from scipy.spatial.transform import Rotation

CHOICE = FrameChoice(frames=5, size=24, count_by="moment")
SIZE = TinySize(
    patch=6, shuffle=2, vision_width=32, vision_layers=1, text_width=32, text_layers=1,
    vocabulary=400,
)  # fmt: skip
QUICK = Schedule(steps=30, lr=3e-3, warmup=2, threads=1, ema=0.9)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("stages") / "store")


@pytest.fixture(scope="module")
def pictures(store):
    return Pictures(store.parent / "pictures.npy", clips_of([store]), CHOICE)


@pytest.fixture
def model(pictures):
    return build(training_texts(pictures), tuple(CLASSES), choice=CHOICE, size=SIZE)


def test_truths_of_moments_are_those_of_the_store(store, pictures):
    from regrasp.episodes.store import EpisodeStore

    opened, dense = EpisodeStore.open(store), dense_of(pictures.clips, CHOICE.frames)
    for i, clip in enumerate(pictures.clips):
        for m, (episode, row) in enumerate(clip.rows(moments(clip.length, CHOICE.frames))):
            steps = opened.load(episode).steps
            state, points = steps["state"][row], steps["points"][row]
            measures = dense.measures[i, m]
            np.testing.assert_allclose(measures[:3], state[:3])
            matrix = Rotation.from_rotvec(state[3:6]).as_matrix()
            np.testing.assert_allclose(measures[3:9].reshape(3, 2), matrix[:, :2], atol=1e-6)
            np.testing.assert_allclose(measures[9:11], state[6:8])
            np.testing.assert_allclose(measures[11:14], points[:3] - state[:3], atol=1e-6)
            np.testing.assert_allclose(measures[14:17], points[3:] - state[:3], atol=1e-6)
            assert measures[17] == steps["progress"][row]
            assert dense.success[i, m] == steps["success"][row]
            assert dense.phase[i, m] == steps["phase"][row]


def test_wrong_from_where_it_shows_and_unknown_while_it_is_mended(pictures):
    dense = dense_of(pictures.clips, CHOICE.frames)
    fine = len(CLASSES)
    for i, clip in enumerate(pictures.clips):
        shown = moments(clip.length, CHOICE.frames)
        if clip.role == "nominal":
            assert (dense.wrong[i] == 0).all()
            assert (dense.kind[i] == fine).all()
            continue
        wrong = dense.wrong[i]
        if clip.role == "failure":
            np.testing.assert_array_equal(wrong, (shown >= clip.truth.start).astype(int))
            expected = list(CLASSES).index(VISIBLE[clip.kind])
            assert set(dense.kind[i][wrong == 1]) == {expected}
        else:
            mended = shown >= clip.parts[0].stop
            assert set(wrong[mended][:-1]) <= {UNKNOWN}
            assert wrong[-1] == 0
            assert wrong[0] == 0
        assert (dense.kind[i][wrong == 0] == fine).all()
    assert len(CONTEXTS) == sum(clip.role == "nominal" for clip in pictures.clips)


def test_store_without_points_is_refused(store, tmp_path):
    from regrasp.episodes.store import EpisodeStore

    old = EpisodeStore.create(tmp_path / "old")
    for i in range(2):
        episode = EpisodeStore.open(store).load(i)
        steps = {k: v for k, v in episode.steps.items() if k != "points"}
        old.append(replace(episode, steps=steps))
    with pytest.raises(ValueError, match=r"\['points'\]"):
        dense_of(clips_of([tmp_path / "old"]), CHOICE.frames)


def test_prompt_without_pictures_is_what_the_processor_writes(pictures, model):
    prompts = Prompts(model)
    for i in (0, 3):
        question = pictures.question(i, np.random.default_rng(i))
        tokens = prompts.question(pictures.pose(i, pictures.chosen(i), ()))
        assert tokens == prompts.question(question)  # the same words at whatever moments
        assert tokens == model.inputs([question])["input_ids"][0].tolist()


def test_student_sees_what_the_model_sees(pictures, model, tmp_path):
    """Logits from stored features, against the model on pictures; float32, one clip at a time."""
    model.model.eval()
    torch.manual_seed(0)
    file = tmp_path / "features.npy"
    features = Encoded(file, model, pictures).features.astype(np.float32)
    prompts = Prompts(model)
    lessons = Lessons(prompts, pictures, features, dense_of(pictures.clips, CHOICE.frames))
    student = Student(model, prompts)
    for i in (1, 2):
        batch = lessons.batch([i])
        with torch.inference_mode():
            logits, heads = student(batch)
            inputs = model.inputs([pictures.question(i)])
            inputs["input_ids"] = batch.tokens
            inputs["attention_mask"] = batch.mask
            whole = model.model(**inputs).logits[:, -batch.labels.shape[1] - 1 : -1]
        # The stored features are rounded: bfloat16 in the encoder, float16 in the file.
        torch.testing.assert_close(logits, whole, atol=0.05, rtol=0.05)
        assert heads["wrong"].shape == (1, CHOICE.frames, 2)


def test_heads_are_at_the_end_of_their_moment(pictures, model, tmp_path):
    """What a later moment shows does not change them; what their own shows does."""
    model.model.eval()
    features = Encoded(tmp_path / "f.npy", model, pictures).features.astype(np.float32)
    prompts = Prompts(model)
    dense = dense_of(pictures.clips, CHOICE.frames)
    student = Student(model, prompts)
    lessons = Lessons(prompts, pictures, features, dense)
    changed = features.copy()
    at = 2  # the third moment shown, and its last camera
    changed[0, 2 * at, -1] += 1.0
    others = Lessons(prompts, pictures, changed, dense)
    with torch.inference_mode():
        before, after = (student(x.batch([0]))[1]["progress"][0, :, 0] for x in (lessons, others))
    assert torch.equal(before[:at], after[:at])
    assert (before[at:] != after[at:]).all()


def test_roles_of_an_answers_tokens(pictures, model):
    prompts = Prompts(model)
    failure = next(i for i, clip in enumerate(pictures.clips) if clip.truth.failed)
    steps = moments(pictures.clips[failure].length, CHOICE.frames)[::2]
    text = pictures.answer(failure, steps)
    tokens, roles = prompts.answer(text)
    assert tokens[-1] == model.tokenizer.eos_token_id
    said = {
        role: model.tokenizer.decode([t for t, r in zip(tokens, roles, strict=True) if r == role])
        for role in (FAILED, CLASS, WHEN, CAUSE)
    }
    clip = pictures.clips[failure]
    assert said[FAILED].strip() == "yes"
    assert said[CLASS].strip() == clip.truth.type
    assert said[WHEN].strip() == text.split("\n")[2].removeprefix("steps: ")
    assert said[CAUSE].strip().rstrip(":") == clip.kind
    _, roles = prompts.answer("failed: no")
    assert set(roles) == {0, FAILED}


def test_both_stages_learn_and_go_on_where_they_were(pictures, tmp_path):
    def fresh():
        return build(training_texts(pictures), tuple(CLASSES), choice=CHOICE, size=SIZE)

    dense = dense_of(pictures.clips, CHOICE.frames)
    first = EncoderConfig(schedule=QUICK, batch=8, bf16=False)
    second = LanguageConfig(schedule=replace(QUICK, steps=150), batch=8, drop=0.0, bf16=False)
    model, losses = fresh(), []
    untrained = Teacher(model, (np.zeros(18), np.ones(18))).vision.state_dict()
    before = {name: value.clone() for name, value in untrained.items()}
    train_encoder(tmp_path / "e", model, pictures, dense, first, lambda **k: losses.append(k))
    assert losses[-1]["measures"] < losses[0]["measures"]
    after = model.model.model.vision_model.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items())

    again = fresh()  # a finished run: its weights come back
    train_encoder(tmp_path / "e", again, pictures, dense, first)
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name

    features = Encoded(tmp_path / "features.npy", model, pictures).features
    prompts = Prompts(model)
    lessons, rows = Lessons(prompts, pictures, features, dense), list(range(len(pictures)))
    found: list[dict] = []
    train_language(tmp_path / "l", model, lessons, rows, second, check=rows, checked=found.append)
    start = tried(Student(again, prompts), lessons, rows, second)
    assert found[-1]["answer"] < 0.5 * start["answer"]
    assert 0 <= found[-1]["onset"] <= 1
    frozen = model.model.model.vision_model.state_dict()
    assert all(torch.equal(value, frozen[name]) for name, value in after.items())


def test_features_of_other_clips_are_refused(pictures, model, tmp_path):
    np.save(tmp_path / "f.npy", np.zeros((3, 9, 2, 16, 32), np.float16))
    with pytest.raises(ValueError, match="holds 3 clips"):
        Encoded(tmp_path / "f.npy", model, pictures)


def test_disturbed_moves_and_tints_each_picture_by_itself():
    rng = np.random.default_rng(0)
    pictures = np.random.default_rng(1).integers(40, 200, (6, 2, 24, 24, 3), dtype=np.uint8)
    np.testing.assert_array_equal(disturbed(pictures, 0, 0.0, rng), pictures)
    moved = disturbed(pictures, 3, 0.0, rng)
    for i, k in np.ndindex(6, 2):
        inner = moved[i, k, 3:-3, 3:-3]
        places = [
            (y, x)
            for y in range(7)
            for x in range(7)
            if np.array_equal(pictures[i, k, y : y + 18, x : x + 18], inner)
        ]
        assert len(places) == 1
    tinted = disturbed(pictures, 0, 0.2, rng).astype(float)
    assert len({round(float(x), 3) for x in tinted.mean(axis=(2, 3, 4)).ravel()}) == 12
