"""Counterfactual sets: one beginning, one plan, six ways to spoil it, six severities, all executed.

CureWM's grid, as its code has it: from a moment of a rollout that succeeds,
the same continuation is executed again with the actions changed by a family at a severity, and the
task's predicate labels each. The successes and failures of one beginning form a set: only what is
done differs between them. For that, all six families change actions and nothing else; what changes
the world (as :class:`regrasp.sim.failures.gripper.WeakGrip` does) would give the same actions two
outcomes.

Every execution of a beginning has the same number of steps, so that length does not give the
outcome away. An execution is an episode of a store with one row a frame: ``image/<camera>`` and
``state`` before the row's actions, ``action`` ``[stride, 7]`` as executed, ``phase``, ``progress``
and ``success`` (whether the goal holds after them).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from regrasp.episodes.results import library_versions
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.sim.experts.base import Phase
from regrasp.sim.failures.actors import CommittedActor, ExpertActor, Plan
from regrasp.sim.failures.base import Injection, OnPhase
from regrasp.sim.failures.control import Oscillation, Overshoot
from regrasp.sim.failures.gripper import CarrySlip, EarlyRelease, with_gripper
from regrasp.sim.failures.offsets import WristTilt
from regrasp.sim.failures.rollout import Checkpoint, Robot, Trace, finished, run
from regrasp.sim.failures.stages import Progress, Stage
from regrasp.sim.perturb import Scene, Trigger

#: Control steps in which LIBERO's fingers close from wide open.
TRAVEL = 8


@dataclass(frozen=True)
class InsufficientGrip(Injection):
    """The fingers stop short: their set point stays ``0.9 s`` of the way towards open (CureWM).

    LIBERO's gripper takes the sign of its command and an eighth of the travel a control step, and 0
    leaves it: so the close command is cut off early.
    """

    kind: ClassVar[str] = "insufficient_grip"
    family: ClassVar[str] = "control"
    definition: ClassVar[str] = "The fingers close only part of the way, as little as a tenth."
    when: Trigger = field(default_factory=lambda: OnPhase((Phase.GRASP,)))
    open_share: float = 0.9

    def _allowed(self) -> int:
        """Control steps of closing that get through."""
        return round(TRAVEL * (1.0 - self.open_share * self.severity))

    def act(self, scene: Scene, action: np.ndarray, drawn: Mapping[str, Any], i: int) -> np.ndarray:
        """Let the command through until the fingers are as far closed as they may be."""
        closed = scene.memory.get(self, 0)
        if action[6] <= 0.0:
            scene.memory[self] = max(closed - 1, 0)
            return action
        if closed >= self._allowed() < TRAVEL:
            return with_gripper(action, 0.0)
        scene.memory[self] = min(closed + 1, TRAVEL)
        return action

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how far the fingers closed."""
        amount = f"{100 * self._allowed() / TRAVEL:.0f} % of the way"
        return {"what": "the gripper did not close all the way", "amount": amount}


#: CureWM's six families, each as an injection that changes actions alone.
FAMILIES: dict[str, type[Injection]] = {
    "insufficient_grip": InsufficientGrip,
    "premature_release": EarlyRelease,
    "carry_slip": CarrySlip,
    "contact_oscillation": Oscillation,
    "wrist_tilt": WristTilt,
    "approach_overshoot": Overshoot,
}

#: The family of what is executed unchanged, severity 0 of all six.
NOMINAL = "nominal"

#: Where executions branch off: name -> the first row of the nominal in one of these phases.
BOUNDARIES: dict[str, tuple[int, ...]] = {
    "reached": (Phase.DESCEND, Phase.PUSH, Phase.PULL_OPEN, Phase.PUSH_CLOSED, Phase.TURN),
    "grasped": (Phase.LIFT,),
}


@dataclass(frozen=True)
class Grid:
    """What is executed from every beginning.

    Attributes:
        severities: of each family; 0 is executed once for all of them.
        families: of :data:`FAMILIES`.
        boundaries: of :data:`BOUNDARIES`.
        stride: control steps a frame.
        grace: control steps after the nominal's end, for what is thrown to come to rest.
        stay: control steps for which the goal must hold in a row in the nominal rollout.
    """

    severities: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    families: tuple[str, ...] = tuple(FAMILIES)
    boundaries: tuple[str, ...] = tuple(BOUNDARIES)
    stride: int = 4
    grace: int = 20
    stay: int = 10

    def __post_init__(self) -> None:
        unknown = set(self.families) - set(FAMILIES) | set(self.boundaries) - set(BOUNDARIES)
        if unknown:
            known = sorted([*FAMILIES, *BOUNDARIES])
            raise ValueError(f"Grid: unknown {sorted(unknown)}; there are {known}")

    def cells(self) -> Iterator[tuple[str, float]]:
        """Family and severity of each execution; the unchanged one comes first."""
        yield NOMINAL, 0.0
        for family in self.families:
            for severity in sorted(self.severities):
                if severity > 0.0:
                    yield family, severity


@dataclass(frozen=True)
class Context:
    """A beginning.

    Attributes:
        name: the same in every run with the same seed.
        boundary: of :data:`BOUNDARIES`.
        nominal: the rollout that succeeds.
        moment: where it is branched off.
    """

    name: str
    boundary: str
    nominal: Trace
    moment: Checkpoint


@dataclass(frozen=True)
class Execution:
    """A cell of the grid, executed; ``pictures`` and ``trace`` as of :func:`execute`."""

    context: Context
    family: str
    severity: float
    trace: Trace
    pictures: dict[str, np.ndarray]

    @property
    def success(self) -> bool:
        """Whether the goal holds at the end."""
        return bool(self.trace.success[-1])


def contexts(env: Any, init_state: int, seed: int, grid: Grid) -> list[Context]:
    """The beginnings of one nominal rollout; none where it does not succeed and stay.

    Args:
        env: a LIBERO environment with an expert for its goal.
        init_state: which of the benchmark's initial states.
        seed: of the reset.
        grid: which boundaries.
    """
    robot, actor, progress = Robot(env), ExpertActor(env), Progress(env)
    robot.reset(seed=seed, options={"init_state": init_state, "render": False})
    actor.reset()
    progress.start()
    nominal = run(robot, actor, env.horizon, progress, 1, finished(actor, grid.stay))
    if len(nominal) < grid.stay or not nominal.success[-grid.stay :].all():
        return []
    found = []
    for boundary in grid.boundaries:
        rows = np.flatnonzero(np.isin(nominal.phase, BOUNDARIES[boundary]))
        if len(rows):
            name = f"{env.suite}/{env.task_name}/{init_state}/{seed}/{boundary}"
            moment = nominal.checkpoints[int(rows[0])]
            found.append(Context(name, boundary, nominal, moment))
    return found


def execute(
    env: Any, context: Context, family: str, severity: float, grid: Grid
) -> Execution | None:
    """Execute the continuation of a beginning, changed by a family at a severity.

    Returns:
        the trace, a multiple of ``grid.stride`` long, with a picture of each camera every
        ``stride`` steps; None where the family's moment never came.
    """
    plan = context.nominal.plan
    injections = [] if family == NOMINAL else [FAMILIES[family](severity=severity)]
    if injections and not _comes(injections[0], plan.since(context.moment.step)):
        return None
    robot, progress = Robot(env, injections, cell_seed(context, family)), Progress(env)
    init_state, seed = context.name.split("/")[-3:-1]
    options = {"init_state": int(init_state), "render": False}
    robot.reset(seed=int(seed), options=options)
    progress.start()
    physics, _, history = context.moment.robot
    count = len(injections)
    robot.restore((physics, ([0] * count, [None] * count, []), history))
    actor = _Watching(CommittedActor(plan), grid.stride, context.moment.step)
    actor.recall(actor.actor.memory_at(context.moment.step))
    frames = -(-(len(plan) - context.moment.step + grid.grace) // grid.stride)
    trace = run(robot, actor, frames * grid.stride, progress)
    if injections and not trace.events:
        return None
    pictures = {name: np.stack([seen[name] for seen in actor.seen]) for name in env.config.cameras}
    return Execution(context, family, severity, trace, pictures)


def _comes(injection: Injection, plan: Plan) -> bool:
    """Whether what is left of a plan has a phase in which the injection may begin."""
    phases = injection.when.phases if isinstance(injection.when, OnPhase) else plan.phase
    return bool(np.isin(plan.phase, phases).any())


class _Watching:
    """A follower that keeps a picture now and then; drawing does not touch the physics."""

    def __init__(self, actor: CommittedActor, stride: int, start: int) -> None:
        self.actor, self._stride, self._start = actor, stride, start
        self.seen: list[dict[str, np.ndarray]] = []
        self.phase, self.subtask = actor.phase, actor.subtask

    def reset(self) -> None:
        self.actor.reset()

    def act(self, robot: Any) -> np.ndarray:
        if (robot.scene.step - self._start) % self._stride == 0:
            self.seen.append(robot.observe())
        action = self.actor.act(robot)
        self.phase, self.subtask = self.actor.phase, self.actor.subtask
        return action

    def memory(self) -> Any:
        return self.actor.memory()

    def recall(self, memory: Any) -> None:
        self.actor.recall(memory)


def cell_seed(context: Context, family: str) -> int:
    """Seed of a family's draws: severities share it, so one direction grows; in any process."""
    digest = hashlib.sha256(f"{context.name}/{family}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def cell_name(context: Context, family: str, severity: float) -> str:
    """The name of an execution."""
    return f"{context.name}/{family}/{severity:g}"


def episode(env: Any, execution: Execution, grid: Grid) -> Episode:
    """An execution as an episode with one row a frame (see the module's docstring)."""
    context, trace = execution.context, execution.trace
    init_state, seed = (int(part) for part in context.name.split("/")[-3:-1])
    failed = execution.family if not execution.success else ""
    header = EpisodeHeader(
        env.suite,
        env.task_name,
        env.task.instruction,
        init_state,
        seed,
        execution.success,
        perturbation=execution.family if execution.severity else "none",
        failure_label=failed,
        versions=library_versions(),
        extra={
            "cell": cell_name(context, execution.family, execution.severity),
            "context": context.name,
            "boundary": context.boundary,
            "family": execution.family,
            "severity": execution.severity,
            "task_index": env.task.index,
            "start": context.moment.step,
            "stride": grid.stride,
            "latched": trace.latched,
            "injection": trace.events[0] if trace.events else None,
            "digest": trace.digest(),
        },
    )
    first, last = slice(None, None, grid.stride), slice(grid.stride - 1, None, grid.stride)
    steps = {f"image/{name}": frames for name, frames in execution.pictures.items()}
    steps |= {
        "state": trace.state[first],
        "action": trace.executed.reshape(-1, grid.stride, trace.executed.shape[1]),
        "phase": trace.phase[first].astype(np.int64),
        "progress": (trace.stage[first].mean(axis=1) / Stage.DONE).astype(np.float32),
        "success": trace.success[last],
    }
    return Episode(header, steps)


def execute_all(env: Any, context: Context, grid: Grid) -> tuple[list[Execution], str]:
    """Every cell of the grid from one beginning.

    Returns:
        the executions, and why the beginning is of no use ("" when it is): ``nominal_fails`` when
        the unchanged continuation does not succeed, ``one_outcome`` when nothing fails.
    """
    made: list[Execution] = []
    for family, severity in grid.cells():
        execution = execute(env, context, family, severity, grid)
        if execution is None:
            continue
        if family == NOMINAL and not execution.success:
            return [], "nominal_fails"
        made.append(execution)
    return (made, "") if not all(e.success for e in made) else ([], "one_outcome")
