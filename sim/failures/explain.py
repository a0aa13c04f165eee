"""A kept failure in words, as a motion, and as marks on a frame: what happened and what to do.

Nothing is guessed: what happened is what was injected and what the stages say came of it, and what
to do is what a recovery did that was proven to work (:mod:`regrasp.sim.failures.recover`). Wordings
vary with a seed, so that a model does not learn one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from regrasp.sim.experts.base import CLOSE, OPEN, Phase
from regrasp.sim.failures.recover import Outcome, Recovery
from regrasp.sim.failures.rollout import Trace
from regrasp.sim.failures.semantic import PLANS
from regrasp.sim.failures.stages import Stage
from regrasp.sim.failures.symbols import Symbol
from regrasp.sim.failures.verdicts import Failure
from scipy.spatial.transform import Rotation

#: Control steps of a recovery that its delta action sums up: one second.
DELTA_STEPS = 20

#: Motions below these are not worth a word: metres and radians.
_SMALL_MOVE, _SMALL_TURN = 0.01, 0.15

_EXPLANATIONS = (
    "While it was to {subtask}, {what}, so {outcome}.",
    "{What} while the robot was to {subtask}; {outcome}.",
    "The robot failed to {subtask}: {what}, and {outcome}.",
    "{Outcome}, because {what} when it was to {subtask}.",
)

_CORRECTIONS = (
    "{motion}, then {subtask}.",
    "To mend it, {motion}; after that {subtask}.",
    "First {motion}. Then {subtask}.",
)

#: What the first steps of a recovery are for.
_PURPOSE = {
    Phase.APPROACH: "to get back over {thing}",
    Phase.DESCEND: "to reach {thing}",
    Phase.GRASP: "to take hold of {thing}",
    Phase.LIFT: "to lift {thing}",
    Phase.CARRY: "to carry {thing} to its place",
    Phase.PLACE: "to set {thing} down",
    Phase.RELEASE: "to let go",
    Phase.REOPEN: "to let go and try again",
    Phase.RETREAT: "to get clear",
}


@dataclass(frozen=True)
class Correction:
    """What to do about a failure.

    Attributes:
        step: control step of the failed state that it starts from.
        text: in words.
        delta: the hand's motion in the recovery's first second, or until it lifts something, world
            frame: metres ``[3]``, axis-angle in radians ``[3]``, and the gripper's command after it
            (-1 opens, 1 closes).
        symbols: the same as marks on that step's frame.
    """

    step: int
    text: str
    delta: tuple[float, ...]
    symbols: tuple[Symbol, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable."""
        marks = [symbol.to_json() for symbol in self.symbols]
        return {"step": self.step, "text": self.text, "delta": list(self.delta), "symbols": marks}


def explain(
    failure: Failure, subtask: str, things: Mapping[str, str], rng: np.random.Generator
) -> str:
    """One sentence: what was being done, what happened, and what came of it.

    Args:
        failure: a kept failure.
        subtask: what the robot was at when it failed, in words ("place the milk in the basket").
        things: ``thing``, what is handled there, in words ("the milk").
        rng: chooses the wording.
    """
    if failure.injection["kind"] in PLANS:
        outcome = "what was asked for was left undone"
    else:
        outcome = outcome_of(failure.trace, failure.predicate_fail_step, things["thing"])
    what, amount = failure.words["what"], failure.words["amount"]
    if failure.injection["kind"] not in PLANS:  # a plan is wrong or it is not
        what = f"{what} ({amount})"
    words = {"subtask": subtask, "what": what, "outcome": outcome}
    words |= {key.capitalize(): _sentence(words[key]) for key in ("what", "outcome")}
    return _pick(_EXPLANATIONS, rng).format(**words)


def outcome_of(trace: Trace, step: int, thing: str) -> str:
    """What the stages of the goal that went wrong say about how it ended."""
    wanting = np.flatnonzero(trace.stage[-1] < Stage.DONE)
    behind = trace.stage[:, wanting[0]] if len(wanting) else trace.stage[:, -1]
    best, last = int(behind.max()), int(behind[-1])
    held = behind[: step + 1].max() >= Stage.GRASPED
    if best <= Stage.NOTHING:
        return f"the hand never got to {thing}"
    if best < Stage.GRASPED:
        return f"{thing} was never taken hold of"
    if last >= Stage.GRASPED:
        return f"{thing} was still in the hand at the end"
    if best >= Stage.ARRIVED and held:
        return f"{thing} ended beside its place"
    return f"{thing} was lost on the way"


def correct(failure: Failure, subtask: str, thing: str, rng: np.random.Generator) -> Correction:
    """What the recovery did, as words, motion and marks.

    Args:
        failure: a kept failure whose recovery was found.
        subtask: what is left to do, in words.
        thing: what is handled, in words.
        rng: chooses the wording.

    Raises:
        ValueError: no recovery was found.
    """
    trace = failure.recovery.trace
    if trace is None:
        raise ValueError(f"correct: the recovery is {failure.recovery.outcome}, not found")
    until = _first_motion(trace)
    begin, end = trace.state[0], trace.state[until]
    move = (end[:3] - begin[:3]).astype(float)
    turn = (Rotation.from_rotvec(end[3:6]) * Rotation.from_rotvec(begin[3:6]).inv()).as_rotvec()
    gripper = float(np.sign(trace.wanted[until, 6]))
    row = min(failure.checkpoint.step - failure.trace.start, len(failure.trace) - 1)
    motion = _motion(move, turn, gripper, float(np.sign(failure.trace.wanted[row, 6])))
    purpose = _PURPOSE.get(Phase(int(trace.phase[until])), "")
    motion = f"{motion} {purpose.format(thing=thing)}".strip()
    text = _pick(_CORRECTIONS, rng).format(motion=motion, subtask=subtask)
    return Correction(
        failure.checkpoint.step,
        _sentence(text),
        tuple(float(x) for x in (*move, *turn, gripper)),
        _symbols(trace, move, turn, gripper),
    )


def _first_motion(trace: Trace) -> int:
    """The row that ends a recovery's first motion: a second, or what comes before it lifts."""
    until = min(DELTA_STEPS, len(trace) - 1)
    lifts = np.flatnonzero(trace.phase[: until + 1] == Phase.LIFT)
    return int(lifts[0]) if len(lifts) and lifts[0] > 0 else until


def hopeless(recovery: Recovery, subtask: str, thing: str) -> str:
    """What to do where no recovery holds, in words: start over where that works, else nothing."""
    if sum(recovery.retries) > len(recovery.retries) / 2:
        return f"Start over: {subtask} as before."
    return {
        Outcome.FOUND: "The way out that was found is too delicate to rely on; ask for help.",
        Outcome.OUT_OF_REACH: f"The arm cannot mend this: {thing} is out of its reach.",
        Outcome.TOPPLED: f"The arm cannot mend this: {thing} has toppled.",
        Outcome.NOT_FOUND: "No way to mend this was found; ask for help.",
    }[recovery.outcome]


def _motion(move: np.ndarray, turn: np.ndarray, gripper: float, before: float) -> str:
    """A motion in words, as the robot sees it: forward is +x, left is +y, up is +z."""
    names = (("forward", "back"), ("left", "right"), ("up", "down"))
    # A hand opens before it moves away, and closes where it has come to.
    parts = ["open the gripper"] if gripper == OPEN != before else []
    ways = [
        f"{100 * abs(amount):.0f} cm {positive if amount > 0 else negative}"
        for amount, (positive, negative) in zip(move, names, strict=True)
        if abs(amount) >= _SMALL_MOVE
    ]
    if ways:
        parts.append("move " + ", ".join(ways))
    angle = float(np.linalg.norm(turn))
    if angle >= _SMALL_TURN:
        parts.append(f"turn the hand by {np.rad2deg(angle):.0f} degrees")
    if gripper == CLOSE != before:
        parts.append("close the gripper")
    if not parts:
        parts.append("hold the gripper closed" if gripper == CLOSE else "wait")
    return " and ".join(parts)


def _symbols(
    trace: Trace, move: np.ndarray, turn: np.ndarray, gripper: float
) -> tuple[Symbol, ...]:
    """Marks for a motion: where to, around what, what the fingers do, and the thing itself."""
    hand = trace.state[0, :3].astype(float)
    there = _point(hand + move)
    marks = [Symbol("target", (_point(trace.points[0, :3]),))]
    if np.linalg.norm(move) >= _SMALL_MOVE:
        marks.append(Symbol("move", (_point(hand), there)))
    if np.linalg.norm(turn) >= _SMALL_TURN:
        marks.append(Symbol("turn", (_point(hand),), float(turn[2])))
    marks.append(Symbol("open" if gripper == OPEN else "close", (there,)))
    return tuple(marks)


def _point(values: np.ndarray) -> tuple[float, float, float]:
    x, y, z = (float(v) for v in values)
    return x, y, z


def _pick(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def _sentence(text: str) -> str:
    """With a capital at the beginning."""
    return text[:1].upper() + text[1:]
