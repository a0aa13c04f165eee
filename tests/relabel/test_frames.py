"""What a model is shown: moments from first to last, each named by its step."""

from dataclasses import replace

import numpy as np
import pytest
from regrasp.relabel.diagnose.frames import (
    FrameChoice,
    ask,
    choose_steps,
    instructions,
    resize,
    to_moments,
    to_steps,
)
from squares import CHOICE, STEPS, TYPES, square_episode

EPISODE = square_episode(0, "turned_blue", 20)


def test_steps_are_even_and_hold_both_ends():
    np.testing.assert_array_equal(choose_steps(41, 5), [0, 10, 20, 30, 40])
    np.testing.assert_array_equal(choose_steps(1, 4), [0, 0, 0, 0])
    assert len(choose_steps(3, 16)) == 16
    with pytest.raises(ValueError, match="length is 0"):
        choose_steps(0, 4)


def test_jitter_keeps_order_and_ends():
    rng = np.random.default_rng(0)
    drawn = np.stack([choose_steps(161, 17, rng) for _ in range(50)])
    assert (np.diff(drawn, axis=1) >= 0).all()
    assert (drawn[:, 0] == 0).all()
    assert (drawn[:, -1] == 160).all()
    assert drawn[:, 8].std() > 1
    assert np.abs(drawn - choose_steps(161, 17)).max() <= 5


def test_question_names_the_step_of_every_picture():
    question = ask(EPISODE, CHOICE)
    steps = choose_steps(STEPS, CHOICE.frames)
    assert question.length == STEPS
    assert len(question.images) == CHOICE.frames * 2
    text = "".join(part.get("text", "<image>") for part in question.content)
    assert "keep the square red. 40 steps, agentview and wrist:\n0:<image><image>\n6:" in text
    for i, step in enumerate(steps):
        assert f"\n{step}:<image><image>" in text
        for j, camera in enumerate(CHOICE.cameras):
            shown = question.images[2 * i + j]
            np.testing.assert_array_equal(shown, EPISODE.steps[f"image/{camera}"][step])
    assert question.messages[0]["role"] == "user"


def test_blank_shows_nothing_and_names_the_same_moments():
    blank, seen = ask(EPISODE, replace(CHOICE, blank=True)), ask(EPISODE, CHOICE)
    assert blank.images == ()
    assert blank.content == tuple(part for part in seen.content if part["type"] == "text")


def test_explanation_names_every_type_and_shows_a_form_that_parses():
    question = ask(EPISODE, replace(CHOICE, explain=True), types=TYPES)
    assert all(name in question.content[-1]["text"] for name in TYPES)
    with pytest.raises(ValueError, match="no failure types"):
        ask(EPISODE, replace(CHOICE, explain=True))
    keys = [line.split(":")[0] for line in instructions(TYPES).split("\n")[1:]]
    assert keys == ["failed", "type", "steps", "subtask", "severity", "why", "do", "delta"]


def test_missing_camera_is_named():
    with pytest.raises(ValueError, match="no camera 'side'; it has \\['agentview', 'wrist'\\]"):
        ask(EPISODE, replace(CHOICE, cameras=("side",)))


def test_resizing_averages():
    stripes = np.zeros((2, 64, 64, 3), np.uint8)
    stripes[:, ::2] = 200
    small = resize(stripes, 16)
    assert small.shape == (2, 16, 16, 3)
    assert small.dtype == np.uint8
    assert np.abs(small[:, 2:-2].astype(int) - 100).max() < 15  # no aliasing to all or nothing
    assert resize(stripes, 64) is stripes


def test_choice_survives_json_and_rejects_nonsense():
    choice = FrameChoice(4, ("wrist",), 64, blank=True)
    assert FrameChoice.from_json(choice.to_json()) == choice
    with pytest.raises(ValueError, match="at least 2 frames"):
        FrameChoice(frames=1)
    with pytest.raises(ValueError, match="at least 2 frames"):
        FrameChoice(cameras=())


def test_answers_in_moments_and_back():
    steps = (0, 10, 20, 30, 40)
    text = "failed: yes\ntype: x\nsteps: 12-36\nwhy: steps: 3-4 were odd"
    spoken = to_moments(text, steps)
    assert spoken == "failed: yes\ntype: x\nsteps: m01-m04\nwhy: steps: 3-4 were odd"
    assert "steps: 10-40" in to_steps(spoken, steps)
    # What is no answer stays as it is, for the parser to refuse.
    assert to_steps("steps: m01-m07", steps) == "steps: m01-m07"
    assert to_steps("steps: 12-36", steps) == "steps: 12-36"
    assert to_moments("failed: no", steps) == "failed: no"


def test_moments_are_named_by_number():
    question = ask(EPISODE, replace(CHOICE, count_by="moment"))
    text = "".join(part.get("text", "<image>") for part in question.content)
    assert "agentview and wrist:m00<image><image>m01<image><image>" in text
    assert question.steps == tuple(choose_steps(STEPS, CHOICE.frames))
    with pytest.raises(ValueError, match="count_by"):
        FrameChoice(count_by="second")
    with pytest.raises(ValueError, match="trained on them"):
        FrameChoice(count_by="moment", explain=True)
