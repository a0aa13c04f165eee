"""What a diagnosis calls a failure: the class that can be seen, and the type that was injected.

Pictures do not tell all 41 types apart, not even to a person. A hand that comes late, because its
actions were delayed, or dropped, or its joints are stiff, looks the same; so do a hand that was
sent three centimetres aside and one that believed to be three centimetres aside. So the model is
asked for a *visible class* (``type:`` in its answer), and begins ``why:`` with the type that it
takes to be the cause (``why: carry_slip: the object slipped ...``). Both are scored, and a type
that was never trained on still has a class that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regrasp.relabel.diagnose.answer import Answer, Diagnosis

#: Visible class -> (what one sees, the types that look so).
CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "lost_grip": (
        "The object leaves the fingers, or does not come with them.",
        ("early_release", "weak_grip", "carry_slip", "slippery", "heavy"),
    ),
    "off_position": (
        "The hand is beside where it should be.",
        (
            "offset_x",
            "offset_y",
            "offset_z",
            "approach_offset",
            "place_offset",
            "overshoot",
            "proprioception_biased",
        ),
    ),
    "off_rotation": (
        "The hand is turned or tilted.",
        ("rotation_x", "rotation_y", "rotation_z", "wrist_tilt"),
    ),
    "bad_timing": (
        "The arm or the fingers move at the wrong time or pace: late, stopped, shaking, too fast.",
        (
            "late_close",
            "delay",
            "freeze",
            "dropped_actions",
            "repeated_actions",
            "too_fast",
            "too_slow",
            "oscillation",
            "joint_damping",
            "stuck_joint",
        ),
    ),
    "scene_changed": (
        "Something other than the robot moves, is in the way, or is held fast.",
        ("shoved", "obstacle", "distractor", "drawer_friction"),
    ),
    "bad_view": (
        "The pictures themselves are wrong.",
        (
            "camera_moved",
            "camera_blurred",
            "camera_frozen",
            "camera_occluded",
            "camera_dark",
            "camera_noisy",
        ),
    ),
    "wrong_plan": (
        "The robot does something else than it was told.",
        ("wrong_object", "wrong_target", "wrong_order", "skipped_step", "wrong_instruction"),
    ),
}

#: Type -> its visible class.
VISIBLE = {kind: name for name, (_, kinds) in CLASSES.items() for kind in kinds}

#: Types that no model is trained on: one of each visible class, from all four families. Each class
#: keeps others to be learned from.
HELD_OUT_TYPES = (
    "carry_slip",
    "offset_y",
    "rotation_z",
    "dropped_actions",
    "obstacle",
    "camera_noisy",
    "wrong_target",
)


def cause_of(answer: Answer) -> str:
    """The type that an answer gives as the cause; empty where it gives none that there is."""
    if not isinstance(answer, Diagnosis):
        return ""
    kind = answer.why.partition(": ")[0]
    return kind if kind in VISIBLE else ""


def by_cause(answers: Sequence[Answer]) -> list[Answer]:
    """Answers with the cause in place of the visible class, to be scored type by type.

    A failure without a known cause is called ``unknown``, which no truth is.
    """
    return [
        replace(answer, type=cause_of(answer) or "unknown")
        if isinstance(answer, Diagnosis) and answer.failed
        else answer
        for answer in answers
    ]
