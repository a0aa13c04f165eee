"""The text form of a diagnosis: exact both ways, and nothing else is a diagnosis."""

import math
from dataclasses import replace

import pytest
from regrasp.relabel.diagnose.answer import SUCCESS, Diagnosis, Unparseable, parse

TYPES = ("early_release", "slip")
FAILURE = Diagnosis(
    failed=True,
    type="early_release",
    start=37,
    end=60,
    subtask="place the milk in the basket",
    severity=3,
    why="the gripper opened while it carried the milk",
    correction="grasp the milk again",
    delta=(0.012, -0.03, 0.0, 0.0, math.radians(5), -math.radians(10), 1.0),
)


def read(text, steps=100):
    return parse(text, types=TYPES, steps=steps)


@pytest.mark.parametrize(
    "diagnosis",
    [SUCCESS, FAILURE, replace(FAILURE, start=0, end=0), replace(FAILURE, delta=(0.0,) * 7)],
)
def test_round_trip_is_exact(diagnosis):
    assert read(diagnosis.text) == diagnosis
    assert read(f"\n {diagnosis.text}\n") == diagnosis


def test_round_trip_rounds_to_millimetres_and_degrees():
    exact = replace(FAILURE, delta=(0.01234, -0.0004, 0.0, 0.3, 0.001, 0.0, -1.0))
    back = read(exact.text)
    assert back.delta == pytest.approx((0.012, 0.0, 0.0, math.radians(17), 0.0, 0.0, -1.0))
    assert back.text == exact.text  # no "-0"


def without(key):
    return "\n".join(x for x in FAILURE.text.split("\n") if not x.startswith(f"{key}:"))


def with_line(key, value):
    lines = FAILURE.text.split("\n")
    return "\n".join(f"{key}: {value}" if x.startswith(f"{key}:") else x for x in lines)


MALFORMED = {
    "nothing": ("", "empty"),
    "space": ("  \n ", "empty"),
    "prose": ("The robot dropped the milk.", "first line"),
    "neither yes nor no": (with_line("failed", "maybe"), "first line"),
    "other case": (FAILURE.text.replace("failed: yes", "failed: Yes"), "first line"),
    "success with more": ("failed: no\ntype: slip", "followed"),
    "failure without more": ("failed: yes", "0 lines"),
    "cut short": (FAILURE.text[:-40], "right"),
    "twice": (FAILURE.text + "\n" + FAILURE.text, "15 lines"),
    "more at the end": (FAILURE.text + "\nso much for that", "8 lines"),
    "order": (
        "failed: yes\n" + "\n".join(reversed(FAILURE.text.split("\n")[1:])),
        "begins with 'type: '",
    ),
    **{f"no {k}": (without(k), "6 lines") for k in ("type", "steps", "severity", "why", "delta")},
    "unknown type": (with_line("type", "gremlins"), "unknown type"),
    "part of a type": (with_line("type", "release"), "unknown type"),
    "a type and more": (with_line("type", "slip, early_release"), "unknown type"),
    "empty type": (with_line("type", ""), "unknown type"),
    "no interval": (with_line("steps", "37"), "two numbers"),
    "negative": (with_line("steps", "-3-60"), "two numbers"),
    "fraction": (with_line("steps", "3.5-60"), "two numbers"),
    "leading zero": (with_line("steps", "037-60"), "two numbers"),
    "out of order": (with_line("steps", "60-37"), "no interval"),
    "past the end": (with_line("steps", "37-100"), "ends with step 99"),
    "severity 0": (with_line("severity", "0"), "severity"),
    "severity 5": (with_line("severity", "5"), "severity"),
    "severity in words": (with_line("severity", "high"), "severity"),
    "empty subtask": (with_line("subtask", ""), "subtask"),
    "empty why": (with_line("why", ""), "why"),
    "endless why": (with_line("why", "so " * 200 + "it is"), "why"),
    "empty correction": (with_line("do", ""), "correction"),
    "six numbers": (with_line("delta", "+12 -30 +0 mm +0 +5 deg close"), "delta"),
    "no units": (with_line("delta", "+12 -30 +0 +0 +5 -10 close"), "delta"),
    "no sign": (with_line("delta", "12 -30 +0 mm +0 +5 -10 deg close"), "delta"),
    "not a number": (with_line("delta", "+nan -30 +0 mm +0 +5 -10 deg close"), "delta"),
    "huge": (with_line("delta", "+12345 -30 +0 mm +0 +5 -10 deg close"), "delta"),
    "fingers": (with_line("delta", "+12 -30 +0 mm +0 +5 -10 deg squeeze"), "delta"),
}


@pytest.mark.parametrize(("text", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_a_diagnosis_is_unparseable_and_says_why(text, reason):
    answer = read(text)
    assert isinstance(answer, Unparseable), answer
    assert reason in answer.reason
    assert answer.text == text


@pytest.mark.parametrize(
    "wrong",
    [
        {"failed": False},
        {"type": "Early Release"},
        {"start": -1},
        {"start": 61},
        {"severity": 0},
        {"severity": 5},
        {"why": ""},
        {"why": "two\nlines"},
        {"subtask": " padded"},
        {"correction": "x" * 301},
        {"delta": (0.0,) * 6},
        {"delta": (math.nan,) + (0.0,) * 6},
        {"delta": (math.inf,) + (0.0,) * 6},
        {"delta": (10.0,) + (0.0,) * 6},
        {"delta": (0.0,) * 6 + (0.5,)},
    ],
)
def test_a_wrong_diagnosis_cannot_be_made(wrong):
    with pytest.raises(ValueError, match="Diagnosis"):
        replace(FAILURE, **wrong)


def test_every_diagnosis_that_can_be_made_can_be_read():
    """What one line may hold includes every character that Python breaks lines at, or none."""
    for character in ("\r", "\v", "\f", "\x1c", "\x85", "\u2028"):
        with pytest.raises(ValueError, match="one line"):
            replace(FAILURE, why=f"one{character}two")
    odd = replace(FAILURE, why="don't: 'ü' | 100 %, steps: 1-2")
    assert read(odd.text) == odd
    far = replace(FAILURE, start=999_998, end=999_999, delta=(9.99,) * 6 + (0.0,))
    assert read(far.text, steps=1_000_000).end == 999_999
