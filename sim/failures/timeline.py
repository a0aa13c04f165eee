"""When a failure began, when it first showed, and when it was one: steps of a rollout."""

from __future__ import annotations

import numpy as np
from regrasp.sim.failures.rollout import Checkpoint, Trace
from regrasp.sim.failures.stages import Stage

#: What counts as leaving the nominal rollout: metres for hand, objects and fingers, radians for the
#: hand, metres or radians for joints; control steps for which fingers must touch otherwise.
_MOVED, _FINGERS, _TURNED, _JOINT, _TOUCHED = 0.01, 0.005, 0.15, 0.01, 3

#: Motion within a control step below which an object is at rest, metres.
_REST = 0.001

#: Control steps for which objects may go on moving before a failed state is taken as it is.
_WAIT = 20


def divergence(trace: Trace, nominal: Trace) -> int | None:
    """The first step at which an actor wants something else; None where it never does."""
    n = min(len(trace), len(nominal))
    differs = (trace.wanted[:n] != nominal.wanted[:n]).any(1)
    if differs.any():
        return int(np.argmax(differs))
    return n if len(trace) > n else None


def first_effect_step(trace: Trace, nominal: Trace) -> int | None:
    """The first step at which hand, objects, joints or contacts are not the nominal's."""
    rows = np.minimum(np.arange(len(trace)), len(nominal) - 1)
    hand = np.linalg.norm(trace.state[:, :3] - nominal.state[rows, :3], axis=1) > _MOVED
    turn = np.linalg.norm(trace.state[:, 3:6] - nominal.state[rows, 3:6], axis=1) > _TURNED
    fingers = np.abs(trace.state[:, 6:] - nominal.state[rows, 6:]).sum(1) > _FINGERS
    apart = trace.objects[..., :3] - nominal.objects[rows][..., :3]
    objects = (np.linalg.norm(apart, axis=2) > _MOVED).any(1)
    joints = (np.abs(trace.joints - nominal.joints[rows]) > _JOINT).any(1)
    touch = _lasting((trace.touch != nominal.touch[rows]).any(1), _TOUCHED)
    shows = hand | turn | fingers | objects | joints | touch
    return int(np.argmax(shows)) if shows.any() else None


def predicate_fail_step(trace: Trace, nominal: Trace) -> int:
    """From here on some goal's stage stays below what the nominal has got to by that step.

    The nominal's stage counts from when it is first reached: contacts that flicker lose nothing.
    Coming late to an object is no failure yet: not having it when it should be held is.
    """
    rows = np.minimum(np.arange(len(trace)), len(nominal) - 1)
    got = np.maximum.accumulate(nominal.stage, axis=0)[rows]
    behind = ((trace.stage < got) & (got > Stage.REACHED)).any(1)
    kept_up = np.flatnonzero(~behind)
    return min(int(kept_up[-1]) + 1 if len(kept_up) else 0, len(trace) - 1)


def failed_state(trace: Trace, step: int) -> Checkpoint:
    """A checkpoint soon after ``step``: the first at which every object is at rest.

    What falls is waited for, not what is carried about: past :data:`_WAIT` steps, the first of all.
    """
    later = sorted(s for s in trace.checkpoints if s >= step) or [max(trace.checkpoints)]
    for s in later:
        row = s - trace.start
        moved = trace.objects[row] - trace.objects[max(row - 1, 0)]
        if s <= step + _WAIT and np.linalg.norm(moved[:, :3], axis=1).max() < _REST:
            return trace.checkpoints[s]
    return trace.checkpoints[later[0]]


def _lasting(flags: np.ndarray, steps: int) -> np.ndarray:
    """Where ``flags`` ``[T]`` begin to hold for ``steps`` rows in a row."""
    padded = np.concatenate([flags, np.zeros(steps, bool)])
    return np.all([padded[i : i + len(flags)] for i in range(steps)], axis=0)
