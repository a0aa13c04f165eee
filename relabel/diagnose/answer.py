"""What a diagnosis says, the one text form in which a model says it, and the strict way back.

The text form of a failure is eight lines in this order, of a success the first one alone::

    failed: yes
    type: early_release
    steps: 37-60
    subtask: place the milk in the basket
    severity: 3
    why: the gripper opened while it carried the milk
    do: grasp the milk again and carry it over the basket
    delta: +12 -30 +0 mm +0 +5 -10 deg close

Parsing is strict because lenient parsing flatters: RoboFAC's scorer asks ``pred in ref``, which an
empty prediction satisfies, and AHA's leaves answers that could not be judged out of its mean. Here
whatever is not exactly a diagnosis is :class:`Unparseable`, and that counts as wrong everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

#: Severity levels, mild to severe.
LEVELS = (1, 2, 3, 4)

#: What the fingers shall do, by the action's last entry.
GRIPPER = {-1: "open", 0: "keep", 1: "close"}

#: Longest ``subtask``, ``why`` and ``correction``, in characters.
LONGEST = 300

#: Largest control step.
_LAST = 999_999

_NUMBER = r"([+-]\d{1,4})"
_DELTA = re.compile(
    rf"{_NUMBER} {_NUMBER} {_NUMBER} mm {_NUMBER} {_NUMBER} {_NUMBER} deg (open|keep|close)"
)
_STEPS = re.compile(r"(0|[1-9]\d{0,5})-(0|[1-9]\d{0,5})")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_KEYS = ("type", "steps", "subtask", "severity", "why", "do", "delta")


@dataclass(frozen=True)
class Diagnosis:
    """What happened in one episode and what to do about it. A success has only ``failed``.

    Attributes:
        failed: whether the task was not achieved in the end.
        type: name of the failure type: lower case, digits, underscores.
        start: control step at which it began to go wrong.
        end: control step at which it had gone wrong; not before ``start``.
        subtask: what the robot was at.
        severity: 1 (mild) to 4 (severe).
        why: the cause, one line.
        correction: what to do, one line.
        delta: what to do as a motion of the hand in the world frame: metres ``[3]``, axis-angle in
            radians ``[3]``, gripper (-1 open, 0 keep, 1 close).

    Raises:
        ValueError: if a field is missing, or is not what is said above.
    """

    failed: bool
    type: str = ""
    start: int = 0
    end: int = 0
    subtask: str = ""
    severity: int = 0
    why: str = ""
    correction: str = ""
    delta: tuple[float, ...] = (0.0,) * 7

    def __post_init__(self) -> None:
        if not self.failed:
            said = (self.type, self.start, self.end, self.subtask, self.severity, self.why)
            if any((*said, self.correction, *self.delta)):
                raise ValueError("Diagnosis: failed is False, but it has more to say")
            return
        if not _LABEL.fullmatch(self.type):
            raise ValueError(f"Diagnosis.type is {self.type!r}; a name like early_release is right")
        if not 0 <= self.start <= self.end <= _LAST:
            raise ValueError(f"Diagnosis: from step {self.start} to {self.end} is no interval")
        if self.severity not in LEVELS:
            raise ValueError(f"Diagnosis.severity is {self.severity}; 1 to 4 is right")
        for name in ("subtask", "why", "correction"):
            _check_line(name, getattr(self, name))
        if len(self.delta) != 7 or not all(math.isfinite(x) for x in self.delta):
            raise ValueError(f"Diagnosis.delta is {self.delta}; 7 finite numbers are right")
        if self.delta[6] not in GRIPPER:
            raise ValueError(f"Diagnosis.delta[6] is {self.delta[6]}; -1, 0 or 1 is right")
        if _DELTA.fullmatch(_delta_text(self.delta)) is None:
            raise ValueError(f"Diagnosis.delta is {self.delta}; less than 10 m is right")

    @property
    def text(self) -> str:
        """The text form; :func:`parse` inverts it, to 1 mm and 1 degree."""
        if not self.failed:
            return "failed: no"
        return "\n".join(
            [
                "failed: yes",
                f"type: {self.type}",
                f"steps: {self.start}-{self.end}",
                f"subtask: {self.subtask}",
                f"severity: {self.severity}",
                f"why: {self.why}",
                f"do: {self.correction}",
                f"delta: {_delta_text(self.delta)}",
            ]
        )


#: The diagnosis of an episode that went well.
SUCCESS = Diagnosis(False)


@dataclass(frozen=True)
class Unparseable:
    """An answer that is no diagnosis. It is wrong in every metric.

    Attributes:
        text: what the model wrote.
        reason: what is not right about it.
    """

    text: str
    reason: str


#: What a model's answer comes to.
Answer = Diagnosis | Unparseable


def parse(text: str, *, types: Collection[str], steps: int) -> Answer:
    """The diagnosis that a text is, exactly.

    Args:
        text: what a model wrote; space around it is ignored, nothing else is.
        types: the failure types there are.
        steps: control steps of the episode; an interval beyond its last is wrong.
    """
    try:
        return _parse(text.strip(), types, steps)
    except ValueError as error:
        return Unparseable(text, str(error))


def _parse(text: str, types: Collection[str], steps: int) -> Diagnosis:
    """The diagnosis; ValueError says what is wrong."""
    if not text:
        raise ValueError("empty answer")
    head, *lines = text.split("\n")
    if head not in ("failed: yes", "failed: no"):
        raise ValueError(f"first line is {head!r}; 'failed: yes' or 'failed: no' is right")
    if head == "failed: no":
        if lines:
            raise ValueError("'failed: no' is followed by something")
        return SUCCESS
    if len(lines) != len(_KEYS):
        raise ValueError(f"{len(lines)} lines after 'failed: yes'; {len(_KEYS)} are right")
    said = {}
    for key, line in zip(_KEYS, lines, strict=True):
        if not line.startswith(f"{key}: "):
            raise ValueError(f"line {line!r}; one that begins with '{key}: ' is right")
        said[key] = line.removeprefix(f"{key}: ")
    if said["type"] not in types:
        raise ValueError(f"unknown type {said['type']!r}")
    interval = _STEPS.fullmatch(said["steps"])
    if interval is None:
        raise ValueError(f"steps {said['steps']!r}; two numbers like 37-60 are right")
    start, end = (int(number) for number in interval.groups())
    if end >= steps:
        raise ValueError(f"steps to {end}, but the episode ends with step {steps - 1}")
    if not re.fullmatch("[1-4]", said["severity"]):
        raise ValueError(f"severity {said['severity']!r}; 1 to 4 is right")
    return Diagnosis(
        True,
        said["type"],
        start,
        end,
        said["subtask"],
        int(said["severity"]),
        said["why"],
        said["do"],
        _parse_delta(said["delta"]),
    )


def _delta_text(delta: tuple[float, ...]) -> str:
    """What stands after ``delta:``."""
    shift = " ".join(f"{round(1000 * x):+d}" for x in delta[:3])
    turn = " ".join(f"{round(math.degrees(x)):+d}" for x in delta[3:6])
    return f"{shift} mm {turn} deg {GRIPPER[round(delta[6])]}"


def _parse_delta(text: str) -> tuple[float, ...]:
    """The delta action of its line; ValueError if it is none."""
    found = _DELTA.fullmatch(text)
    if found is None:
        raise ValueError(f"delta {text!r}; one like '+12 -30 +0 mm +0 +5 -10 deg close' is right")
    *numbers, fingers = found.groups()
    shift = [int(number) / 1000 for number in numbers[:3]]
    turn = [math.radians(int(number)) for number in numbers[3:]]
    gripper = next(value for value, word in GRIPPER.items() if word == fingers)
    return (*shift, *turn, float(gripper))


def _check_line(name: str, text: str) -> None:
    """ValueError unless ``text`` is one line of reasonable length without space around it."""
    if not text or len(text) > LONGEST or text != text.strip() or len(text.splitlines()) != 1:
        raise ValueError(
            f"Diagnosis.{name} is {text[:40]!r}; one line of at most {LONGEST} characters is right"
        )
