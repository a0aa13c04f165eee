"""The taxonomy: every type of failure that is made here, and what seven others call it.

A name on the right is the nearest type of that taxonomy, so several of ours may share one; where it
has none, there is none. What the types of others are, and how big, was read from their code and
papers as :data:`SOURCES` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from regrasp.sim.experts.base import Phase
from regrasp.sim.failures import control, gripper, offsets, perception, physics, semantic
from regrasp.sim.failures.base import Injection, OnPhase

#: Taxonomy -> (as it is written, where its types were read).
SOURCES: dict[str, tuple[str, str]] = {
    "aha": ("AHA", "NVlabs/AHA, FailGen's code and task files"),
    "failsafe": ("FailSafe", "arXiv 2510.01642v4, as others describe it"),
    "robofac": ("RoboFAC", "arXiv 2505.12224, code and abstract"),
    "reflect": ("REFLECT", "RoboFail's code"),
    "vifailback": ("ViFailback", "arXiv 2512.02787, code and data set page"),
    "labrobfail": ("LabRobFail", "arXiv 2607.23704, as others describe it"),
    "curewm": ("CureWM", "its code"),
}


@dataclass(frozen=True)
class Row:
    """One type of failure.

    Attributes:
        family: ``control``, ``physics``, ``perception`` or ``semantic``.
        definition: one plain sentence.
        phases: in which it begins by default; none where it is a matter of the whole plan.
        aha, failsafe, robofac, reflect, vifailback, labrobfail, curewm: its nearest type in each.
    """

    family: str
    definition: str
    phases: tuple[Phase, ...]
    aha: str = ""
    failsafe: str = ""
    robofac: str = ""
    reflect: str = ""
    vifailback: str = ""
    labrobfail: str = ""
    curewm: str = ""


def injected(cls: type[Injection], **names: str) -> Row:
    """The row of an injection."""
    when = cls().when
    phases = tuple(Phase(p) for p in when.phases) if isinstance(when, OnPhase) else ()
    return Row(cls.family, cls.definition, phases, **names)


def planned(definition: str, **names: str) -> Row:
    """The row of a semantic failure (:mod:`regrasp.sim.failures.semantic`)."""
    return Row("semantic", definition, (), **names)


TAXONOMY: dict[str, Row] = {
    "early_release": injected(
        gripper.EarlyRelease,
        aha="slip",
        robofac="timing error",
        reflect="drop",
        vifailback="gripper state",
        labrobfail="gripper control",
        curewm="premature_release",
    ),
    "late_close": injected(
        gripper.LateClose,
        aha="grasp",
        robofac="timing error",
        vifailback="gripper state",
        labrobfail="gripper control",
    ),
    "weak_grip": injected(
        gripper.WeakGrip,
        aha="grasp",
        robofac="grasping error",
        vifailback="gripper state",
        labrobfail="gripper control",
        curewm="insufficient_grip",
    ),
    "carry_slip": injected(
        gripper.CarrySlip,
        aha="slip",
        robofac="grasping error",
        reflect="drop",
        vifailback="gripper state",
        labrobfail="slippage",
        curewm="carry_slip",
    ),
    "offset_x": injected(
        offsets.OffsetX,
        aha="translation_x",
        failsafe="translation",
        robofac="position deviation",
        vifailback="gripper 6d-pose",
        labrobfail="target positioning",
    ),
    "offset_y": injected(
        offsets.OffsetY,
        aha="translation_y",
        failsafe="translation",
        robofac="position deviation",
        vifailback="gripper 6d-pose",
        labrobfail="target positioning",
    ),
    "offset_z": injected(
        offsets.OffsetZ,
        aha="translation_z",
        failsafe="translation",
        robofac="position deviation",
        vifailback="gripper 6d-pose",
        labrobfail="target positioning",
    ),
    "rotation_x": injected(
        offsets.RotationX,
        aha="rotation_x",
        failsafe="rotation",
        robofac="orientation deviation",
        vifailback="gripper 6d-pose",
        labrobfail="pose control",
    ),
    "rotation_y": injected(
        offsets.RotationY,
        aha="rotation_y",
        failsafe="rotation",
        robofac="orientation deviation",
        vifailback="gripper 6d-pose",
        labrobfail="pose control",
    ),
    "rotation_z": injected(
        offsets.RotationZ,
        aha="rotation_z",
        failsafe="rotation",
        robofac="orientation deviation",
        vifailback="gripper 6d-pose",
        labrobfail="pose control",
    ),
    "approach_offset": injected(
        offsets.ApproachOffset,
        failsafe="translation",
        robofac="position deviation",
        vifailback="gripper 6d-pose",
        labrobfail="target positioning",
    ),
    "place_offset": injected(
        offsets.PlaceOffset,
        failsafe="translation",
        robofac="position deviation",
        vifailback="gripper 6d-pose",
        labrobfail="operation position",
    ),
    "wrist_tilt": injected(
        offsets.WristTilt,
        failsafe="rotation",
        robofac="orientation deviation",
        vifailback="gripper 6d-pose",
        labrobfail="pose control",
        curewm="wrist_tilt",
    ),
    "overshoot": injected(
        control.Overshoot,
        robofac="position deviation",
        vifailback="gripper 6d-pose",
        labrobfail="pose control",
        curewm="approach_overshoot",
    ),
    "oscillation": injected(
        control.Oscillation, labrobfail="pose control", curewm="contact_oscillation"
    ),
    "freeze": injected(
        control.Freeze,
        failsafe="no-op",
        robofac="timing error",
        reflect="failed_action",
        labrobfail="incomplete trajectory",
    ),
    "delay": injected(control.Delay, robofac="timing error"),
    "dropped_actions": injected(
        control.DroppedActions, failsafe="no-op", labrobfail="incomplete trajectory"
    ),
    "repeated_actions": injected(control.RepeatedActions),
    "too_fast": injected(control.TooFast),
    "too_slow": injected(control.TooSlow, labrobfail="incomplete trajectory"),
    "slippery": injected(physics.Slippery, reflect="drop", labrobfail="slippage"),
    "heavy": injected(physics.Heavy, reflect="failed_action"),
    "shoved": injected(physics.Shoved, vifailback="human intervention"),
    "obstacle": injected(physics.Obstacle, reflect="blocking"),
    "joint_damping": injected(physics.JointDamping),
    "stuck_joint": injected(physics.StuckJoint),
    "drawer_friction": injected(physics.DrawerFriction, reflect="failed_action"),
    "camera_moved": injected(perception.CameraMoved, reflect="wrong_perception"),
    "camera_blurred": injected(perception.CameraBlurred, reflect="wrong_perception"),
    "camera_frozen": injected(perception.CameraFrozen, reflect="wrong_perception"),
    "camera_occluded": injected(perception.CameraOccluded, reflect="wrong_perception"),
    "camera_dark": injected(perception.CameraDark, reflect="wrong_perception"),
    "camera_noisy": injected(perception.CameraNoisy, reflect="wrong_perception"),
    "proprioception_biased": injected(perception.ProprioceptionBiased),
    "wrong_object": planned(
        "Another object than the one asked for is handled, otherwise correctly.",
        aha="wrong_object",
        robofac="wrong object",
        vifailback="task planning",
        labrobfail="target positioning",
    ),
    "wrong_target": planned(
        "The right object is brought to another place than the one asked for.",
        vifailback="task planning",
        labrobfail="operation position",
    ),
    "wrong_order": planned(
        "Two steps of the task are done in the wrong order.",
        aha="wrong_sequence",
        vifailback="task planning",
        labrobfail="reversal",
    ),
    "skipped_step": planned(
        "A step of the task is left out.",
        robofac="step omission",
        reflect="missing_step",
        vifailback="task planning",
        labrobfail="omission",
    ),
    "wrong_instruction": planned(
        "Another task of the same scene is done than the one asked for.",
        reflect="ambiguous_plan",
        vifailback="task planning",
    ),
    "distractor": injected(semantic.Distractor, reflect="wrong_perception"),
}


def markdown(rows: Mapping[str, Row] = TAXONOMY) -> str:
    """The taxonomy as a Markdown table, a line a type, with the sources below."""
    head = ["type", "family", "what happens", "begins in", *(name for name, _ in SOURCES.values())]
    lines = [_line(head), _line(["---"] * len(head))]
    for kind, row in rows.items():
        phases = ", ".join(phase.name.lower() for phase in row.phases)
        others = [str(getattr(row, key)) for key in SOURCES]
        lines.append(_line([f"`{kind}`", row.family, row.definition, phases, *others]))
    sources = "; ".join(f"{name}: {source}" for name, source in SOURCES.values())
    return "\n".join([*lines, "", f"Types were read from: {sources}."])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
