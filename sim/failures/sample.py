"""A kept failure as episodes: what a store, an export or a model gets to see of it.

A sample is up to two episodes of one store, joined by ``extra["sample"]``: the failure itself and,
where a way out was found and holds, the recovery from the failed state. The nominal rollout of a
context is an episode too, once for all its failures: what going well looks like.

Per step: ``image/<camera>`` (what the actor got to see before the action), ``state``, ``action``
(executed), ``nominal_action`` (what the actor wanted), ``phase``, ``progress`` (mean stage of the
goals, 0 to 1), ``success``, and ``points`` (where the thing of the sub-task is and where it shall
go, world, metres ``[6]``). Everything else is in the header's ``extra``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from regrasp.episodes.results import library_versions
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.sim.failures.explain import correct, explain, hopeless
from regrasp.sim.failures.gates import cell_seed
from regrasp.sim.failures.recover import ACTORS_FAULT
from regrasp.sim.failures.rollout import Robot, Trace, draw
from regrasp.sim.failures.stages import Stage
from regrasp.sim.failures.symbols import Symbol, marks_of
from regrasp.sim.failures.verdicts import CellResult, Failure
from regrasp.sim.failures.wording import say_step, thing_of

#: Severity levels, mild to severe.
LEVELS = 4


def sample_id(result: CellResult, failure: Failure) -> str:
    """A name that is the same in every run with the same seed."""
    cell = (result.suite, result.task, result.init_state, result.seed, result.kind)
    return "/".join(str(part) for part in (*cell, f"{failure.severity:g}"))


def context_id(result: CellResult) -> str:
    """The name of the nominal rollout that a sample's failures are measured against."""
    cell = (result.suite, result.task, result.init_state, result.seed)
    return "/".join(str(part) for part in cell)


def level(severity: float) -> int:
    """A severity in (0, 1] as one of :data:`LEVELS` levels."""
    return max(1, math.ceil(severity * LEVELS))


def nominal_episode(env: Any, result: CellResult) -> Episode:
    """The nominal rollout of a cell, drawn."""
    robot = _at_start(env, result)
    extra = {
        "role": "nominal",
        "context": context_id(result),
        "subtasks": _subtasks(result.nominal),
    }
    return _episode(env, result, result.nominal, draw(robot, result.nominal), True, extra)


def failure_episodes(env: Any, result: CellResult, failure: Failure) -> list[Episode]:
    """The failure and, where a way out was found and holds, the recovery; both drawn.

    Raises:
        RuntimeError: a rollout did not repeat itself bit for bit.
    """
    extra = describe(result, failure)
    robot = _at_start(env, result, failure)
    pictures = draw(robot, failure.trace)
    if extra["correction"] is not None:
        env.restore(failure.checkpoint.physics)
        symbols = [Symbol.from_json(symbol) for symbol in extra["correction"]["symbols"]]
        extra["correction"]["marks"] = {
            camera: [mark.to_json() for mark in marks_of(env, camera, symbols)]
            for camera in env.config.cameras
        }
    episodes = [_episode(env, result, failure.trace, pictures, False, {"role": "failure", **extra})]
    found = failure.recovery.trace
    if found is not None and failure.recovery.mends:
        robot.restore(failure.checkpoint.robot)
        robot.lift(ACTORS_FAULT)
        link = {key: extra[key] for key in ("sample", "context")}
        link |= {"role": "recovery", "subtasks": _subtasks(found)}
        episodes.append(_episode(env, result, found, draw(robot, found), True, link))
    return episodes


def describe(result: CellResult, failure: Failure) -> dict[str, Any]:
    """Everything known of a failure but its arrays, JSON-serialisable."""
    rng = np.random.default_rng([cell_seed(result), round(1000 * failure.severity)])
    trace, failed = failure.trace, failure.predicate_fail_step
    at = min(failed, len(result.nominal) - 1)
    # What the robot was to do then: the nominal's sub-task, for a wrong plan has others.
    subtask = result.nominal.subtask[at]
    words, thing = say_step(subtask), thing_of(subtask)
    recovery = failure.recovery
    correction: dict[str, Any] | None = None
    if recovery.mends:
        correction = correct(failure, words, thing, rng).to_json()
        told = correction["text"]
    else:
        told = hopeless(recovery, words, thing)
    return {
        "sample": sample_id(result, failure),
        "context": context_id(result),
        "type": result.kind,
        "severity": failure.severity,
        "level": level(failure.severity),
        "phase": int(trace.phase[min(failure.injection_step, len(trace) - 1)]),
        "subtask": words,
        "injection_step": failure.injection_step,
        "first_effect_step": failure.first_effect_step,
        "predicate_fail_step": failed,
        "explanation": explain(failure, words, {"thing": thing}, rng),
        "correction_text": told,
        "correction": correction,
        "injection": failure.injection,
        "recovery": {
            "outcome": str(recovery.outcome),
            "mends": recovery.mends,
            "from_step": failure.checkpoint.step,
            "replays": list(recovery.replays),
            "retries": list(recovery.retries),
        },
        "gates": {
            "nominal_succeeds": result.nominal.latched,
            "nominal_sturdy": result.sturdy,
            "fails_for_good": not trace.latched,
            "monotone": not any(
                a.trace is not None and a.trace.latched
                for a in result.attempts
                if a.severity > failure.severity
            ),
            "cause_proven": result.proven,
            "digest": result.digest(),
        },
        "subtasks": _subtasks(trace),
    }


def _at_start(env: Any, result: CellResult, failure: Failure | None = None) -> Robot:
    """The robot where a cell's rollouts begin, with a failure's injection."""
    from regrasp.sim.failures import INJECTIONS

    injections = []
    if failure is not None and result.kind in INJECTIONS:
        injections = [INJECTIONS[result.kind](severity=failure.severity)]
    robot = Robot(env, injections, cell_seed(result))
    robot.reset(seed=result.seed, options={"init_state": result.init_state, "render": False})
    return robot


def _episode(
    env: Any,
    result: CellResult,
    trace: Trace,
    pictures: dict[str, np.ndarray],
    success: bool,
    extra: dict[str, Any],
) -> Episode:
    header = EpisodeHeader(
        result.suite,
        result.task,
        env.task.instruction,
        result.init_state,
        result.seed,
        success,
        perturbation=result.kind if extra["role"] == "failure" else "none",
        failure_label=result.kind if extra["role"] == "failure" else "",
        versions=library_versions(),
        extra={"task_index": env.task.index, "start": trace.start, **extra},
    )
    steps = {f"image/{name}": frames for name, frames in pictures.items()}
    steps |= {
        "state": trace.state,
        "action": trace.executed,
        "nominal_action": trace.wanted,
        "phase": trace.phase.astype(np.int64),
        "progress": (trace.stage.mean(axis=1) / Stage.DONE).astype(np.float32),
        "success": trace.success,
        "points": trace.points.astype(np.float32),
    }
    return Episode(header, steps)


def _subtasks(trace: Trace) -> list[list[Any]]:
    """``[row, words]`` wherever the sub-task changes."""
    names = trace.subtask
    begins = [i for i in range(len(names)) if i == 0 or names[i] != names[i - 1]]
    return [[i, say_step(names[i])] for i in begins]
