"""Proof that a failure is one, that its cause is its cause, and that it can be mended.

A cell is a task, an initial state, a seed and a type of failure. All of a cell's severities share
one draw, and all rollouts up to the injection are the same, bit for bit. What is kept has passed:

1. The nominal rollout succeeds: the goal comes to hold, and then holds to the end.
2. A follower of it that does not look succeeds too when it is shaken a little: so what fails below
   does not fail because followers do.
3. The injected rollout fails: the goal does not hold at any step up to the nominal's length and a
   grace, of a policy up to the horizon. (A goal that held for a moment counts as success in most
   benchmarks: such are rejected.)
4. Every higher severity fails as well.
5. From the snapshot just before the injection, without it and with nothing else changed, the same
   actor succeeds.

Then an expert looks for a way out of the failed state (:mod:`regrasp.sim.failures.recover`).
Whatever is not kept is counted by reason.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from regrasp.sim.failures.actors import Actor, CommittedActor, ExpertActor
from regrasp.sim.failures.base import Injection
from regrasp.sim.failures.recover import Recovery, ReplayConfig, recover, replayed
from regrasp.sim.failures.rollout import (
    Checkpoint,
    Robot,
    Trace,
    finished,
    joined,
    run,
    stayed,
    succeeds,
)
from regrasp.sim.failures.semantic import WrongPlan, wrong_plan
from regrasp.sim.failures.stages import Progress
from regrasp.sim.failures.timeline import (
    divergence,
    failed_state,
    first_effect_step,
    predicate_fail_step,
)
from regrasp.sim.failures.verdicts import Attempt, CellResult, Failure, Reason

#: An injected failure's class, or the name of a wrong plan.
Kind = type[Injection] | str


@dataclass(frozen=True)
class GateConfig:
    """What the gates ask for.

    Attributes:
        severities: tried, each with the same draw.
        every: control steps between checkpoints.
        delay: control steps from where the failure shows to the failed state to be mended, which is
            what noticing takes.
        sturdy: share of the shaken followers of the nominal that must succeed.
        per_cell: severities kept of those that pass, drawn by the cell's seed; 0 keeps all.
        replay: how trajectories are tried again.
    """

    severities: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    every: int = 5
    delay: int = 10
    sturdy: float = 0.8
    per_cell: int = 0
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class Nominal:
    """A rollout that goes well, and what is known of it.

    Attributes:
        trace: the rollout.
        flaw: why nothing can be measured against it; None when it is sound.
        sturdy: share of its shaken followers that succeed; None until asked for.
    """

    trace: Trace
    flaw: Reason | None
    sturdy: float | None = None


class Examiner:
    """Examines the cells of one environment; the last nominal rollouts are kept.

    Args:
        env: a LIBERO environment with an expert for its goal.
        config: what is asked for.
        policy: instruction (None: the task's own) -> an actor that drives in place of expert and
            follower.
        keep: how many nominal rollouts are remembered.
    """

    def __init__(
        self,
        env: Any,
        config: GateConfig | None = None,
        policy: Callable[[str | None], Actor] | None = None,
        keep: int = 4,
    ) -> None:
        self.env = env
        self.config = config or GateConfig()
        self.progress = Progress(env)
        self._policy = policy
        self._keep = keep
        self._nominals: OrderedDict[tuple[int, int], Nominal] = OrderedDict()
        self._bare = Robot(env)

    def examine(self, init_state: int, seed: int, kind: Kind) -> CellResult:
        """Put one cell through the gates.

        Args:
            init_state: which of the benchmark's initial states.
            seed: of the fixtures' places and of the injection.
            kind: what goes wrong.
        """
        seconds: dict[str, float] = {}
        with _timed(seconds, "nominal"):
            nominal = self.nominal(init_state, seed)
        name = kind if isinstance(kind, str) else kind.kind
        env = self.env
        result = CellResult(env.suite, env.task_name, init_state, seed, name, nominal.trace)
        result.seconds = seconds
        severities = (1.0,) if isinstance(kind, str) else self._severities
        if nominal.flaw is not None:
            _reject(result, severities, nominal.flaw)
        elif isinstance(kind, str):
            self._examine_plan(result, nominal, kind)
        else:
            self._examine_injection(result, nominal, kind)
        return result

    @property
    def _severities(self) -> tuple[float, ...]:
        return tuple(sorted(self.config.severities, reverse=True))

    # The nominal rollout

    def nominal(self, init_state: int, seed: int) -> Nominal:
        """The rollout without failure, from the last ones if it is among them."""
        key = (init_state, seed)
        if key not in self._nominals:
            self._reset(self._bare, init_state, seed)
            self._nominals[key] = self._run_nominal()
            while len(self._nominals) > self._keep:
                self._nominals.popitem(last=False)
        self._nominals.move_to_end(key)
        return self._nominals[key]

    def _run_nominal(self) -> Nominal:
        stay = self.config.replay.stay
        actor: Actor = self._policy(None) if self._policy else ExpertActor(self.env)
        until = finished(actor, stay)
        trace = run(self._bare, actor, self.env.horizon, self.progress, self.config.every, until)
        return Nominal(trace, _flaw(trace.success, stay))

    def _is_sturdy(self, result: CellResult, nominal: Nominal) -> bool:
        """Gate 2; a policy is its own follower, and is taken as it is."""
        if self._policy is not None:
            return True
        if nominal.sturdy is None:
            self._reset(self._bare, result.init_state, result.seed)
            start, plan = self._bare.snapshot(), nominal.trace.plan
            seed, replay = [result.init_state, result.seed], self.config.replay
            verdicts = replayed(self._bare, start, self.progress, plan, seed, replay, len(plan))
            nominal.sturdy = float(np.mean(verdicts))
        return nominal.sturdy >= self.config.sturdy

    def _driver(self, nominal: Nominal) -> Actor:
        """Who drives while things go wrong."""
        return self._policy(None) if self._policy else CommittedActor(nominal.trace.plan)

    def _limit(self, nominal: Nominal) -> int:
        """Control steps after which a failure is for good.

        A follower is at its plan's end then; a policy may try again until the horizon.
        """
        grace = self.config.replay.grace
        return self.env.horizon if self._policy else len(nominal.trace) + grace

    def _reset(self, robot: Robot, init_state: int, seed: int) -> None:
        robot.reset(seed=seed, options={"init_state": init_state, "render": False})
        self.progress.start()

    # Injections

    def _examine_injection(
        self, result: CellResult, nominal: Nominal, kind: type[Injection]
    ) -> None:
        """Gates 3 and 4 over the severities, then what :meth:`_keep` asks."""
        seed = cell_seed(result)
        robots = {s: Robot(self.env, [kind(severity=s)], seed) for s in self._severities}
        driver, most = self._driver(nominal), self._severities[0]
        self._reset(robots[most], result.init_state, result.seed)
        if not _injected(robots[most]).applies(robots[most].scene):
            return _reject(result, self._severities, Reason.NOT_OFFERED)
        branch: Checkpoint | None = None
        for severity, robot in robots.items():
            with _timed(result.seconds, "inject"):
                trace = self._inject(result, nominal, robot, driver, branch)
            if not trace.events:
                return _reject(result, self._severities, Reason.NOT_TRIGGERED)
            branch = trace.checkpoints[trace.events[0]["step"]]
            result.attempts.append(Attempt(severity, _verdict(trace, result), trace))
            if severity == most and result.attempts[0].reason is not None:
                return _reject(result, self._severities[1:], Reason.MILDER)
        assert branch is not None
        self._prove(result, nominal, driver, branch)
        known: dict[bytes, Recovery] = {}
        for attempt in self._chosen(result):
            robot = robots[attempt.severity]
            self._reset(robot, result.init_state, result.seed)
            assert attempt.trace is not None
            event = attempt.trace.events[0]
            words = _injected(robot).words(event["drawn"])
            cause = _Cause(event, words, event["step"], nominal.trace)
            self._keep_failure(result, attempt, robot, cause, known)

    def _chosen(self, result: CellResult) -> list[Attempt]:
        """The attempts to be kept, of those that passed."""
        passed = [a for a in result.attempts if a.reason is None]
        if not 0 < self.config.per_cell < len(passed):
            return passed
        rng = np.random.default_rng(cell_seed(result))
        chosen = rng.choice(len(passed), self.config.per_cell, replace=False)
        return [passed[i] for i in sorted(chosen)]

    def _inject(
        self,
        result: CellResult,
        nominal: Nominal,
        robot: Robot,
        driver: Actor,
        branch: Checkpoint | None,
    ) -> Trace:
        """The injected rollout; all severities have what was before ``branch`` in common."""
        self._reset(robot, result.init_state, result.seed)
        driver.reset()
        if branch is not None:
            robot.restore(branch.robot)
            driver.recall(branch.memory)
        left = self._limit(nominal) - robot.scene.step
        until = stayed(self.config.replay.stay)
        trace = run(robot, driver, left, self.progress, self.config.every, until)
        first = result.attempts[0].trace if result.attempts else None
        return joined(first, trace) if first is not None else trace

    # Wrong plans

    def _examine_plan(self, result: CellResult, nominal: Nominal, kind: str) -> None:
        """A wrong plan: it must reach its own goal, and not the task's."""
        self._reset(self._bare, result.init_state, result.seed)
        plan = wrong_plan(self.env, kind, np.random.default_rng(cell_seed(result)))
        if plan is None:
            return _reject(result, (1.0,), Reason.NOT_OFFERED)
        with _timed(result.seconds, "inject"):
            trace, achieved = self._mislead(nominal, plan)
        began = divergence(trace, nominal.trace)
        if began is None:
            return _reject(result, (1.0,), Reason.NOT_TRIGGERED)
        reason = _verdict(trace, result)
        if reason is None and not achieved:
            reason = Reason.PLAN_FAILS
        result.attempts.append(Attempt(1.0, reason, trace))
        if reason is not None:
            return None
        # Until the plans part both rollouts are the same: the nominal's checkpoint serves.
        branch = nominal.trace.checkpoints[began - began % self.config.every]
        driver = self._driver(nominal)
        if isinstance(driver, CommittedActor):
            branch = replace(branch, memory=driver.memory_at(branch.step))
        self._prove(result, nominal, driver, branch)
        if result.attempts[0].reason is None:
            cause = _Cause(plan.to_json(), plan.words, began, trace)
            self._keep_failure(result, result.attempts[0], self._bare, cause, {})
        return None

    def _mislead(self, nominal: Nominal, plan: WrongPlan) -> tuple[Trace, bool]:
        """Carry a wrong plan out from here; whether it reached its own goal."""
        actor = plan.actor(self.env)
        if self._policy is not None and plan.kind == "wrong_instruction":
            actor = self._policy(plan.told)
        least = self._limit(nominal)
        trace = run(
            self._bare,
            actor,
            max(least, self.env.horizon),
            self.progress,
            self.config.every,
            lambda s: len(s) >= least and getattr(actor, "done", True),
        )
        return trace, plan.achieved(self.progress.scene)

    # What every failure must pass

    def _prove(
        self, result: CellResult, nominal: Nominal, driver: Actor, branch: Checkpoint
    ) -> None:
        """Gates 2 and 5; on failing either, nothing of the cell is kept."""
        if all(a.reason is not None for a in result.attempts):
            return
        with _timed(result.seconds, "sturdy"):
            sturdy = self._is_sturdy(result, nominal)
            result.sturdy = nominal.sturdy
        with _timed(result.seconds, "cause"):
            caused = sturdy and self._succeeds_without(nominal, driver, branch)
            result.proven = caused if sturdy else None
        if not (sturdy and caused):
            reason = Reason.CAUSE_UNPROVEN if sturdy else Reason.NOMINAL_FRAGILE
            result.attempts = [
                Attempt(a.severity, a.reason or reason, a.trace) for a in result.attempts
            ]

    def _succeeds_without(self, nominal: Nominal, driver: Actor, branch: Checkpoint) -> bool:
        """Whether the same actor succeeds from the moment before the cause, without it."""
        self._bare.take_over(branch.physics, branch.step)
        driver.recall(branch.memory)
        left = self._limit(nominal) - branch.step
        return succeeds(self._bare, driver, left, self.config.replay.stay)

    def _keep_failure(
        self,
        result: CellResult,
        attempt: Attempt,
        robot: Robot,
        cause: _Cause,
        known: dict[bytes, Recovery],
    ) -> None:
        """Date the failure, find the way out of it, and keep it."""
        trace, nominal = attempt.trace, result.nominal
        assert trace is not None
        failed = max(cause.began, predicate_fail_step(trace, nominal))
        effect = first_effect_step(trace, nominal)
        shows = failed if effect is None else min(max(cause.began, effect), failed)
        state = failed_state(trace, failed + self.config.delay)
        # The retry begins where the sub-task began that failed.
        names = cause.intended.subtask
        original = cause.intended.plan.since(names.index(names[min(failed, len(names) - 1)]))
        with _timed(result.seconds, "recover"):
            recovery = recover(
                robot,
                state,
                self.progress,
                original,
                [cell_seed(result)],
                self.config.replay,
                known,
            )
        failure = Failure(
            severity=attempt.severity,
            trace=trace,
            injection=cause.injection,
            words=cause.words,
            injection_step=cause.began,
            first_effect_step=shows,
            predicate_fail_step=failed,
            checkpoint=state,
            recovery=recovery,
        )
        result.failures.append(failure)


@dataclass(frozen=True)
class _Cause:
    """What was done, in JSON and in words, when it began, and what the actor meant to do."""

    injection: dict[str, Any]
    words: dict[str, str]
    began: int
    intended: Trace


def cell_seed(result: CellResult) -> int:
    """The seed of a cell's draws: another for every task, state, seed and type, in any process."""
    cell = (result.suite, result.task, result.init_state, result.seed, result.kind)
    return int.from_bytes(hashlib.sha256(repr(cell).encode()).digest()[:6], "big")


def _flaw(success: np.ndarray, stay: int) -> Reason | None:
    """Gate 1: once the goal has held for ``stay`` steps in a row, it holds to the end."""
    if not success.any():
        return Reason.NOMINAL_FAILS
    steady = [t for t in range(len(success)) if stayed(stay)(list(success[: t + 1]))]
    return None if steady and success[steady[0] :].all() else Reason.NOMINAL_LEAVES


def _injected(robot: Robot) -> Injection:
    injection = robot.perturbations[0]
    assert isinstance(injection, Injection)
    return injection


def _reject(result: CellResult, severities: Sequence[float], reason: Reason) -> None:
    result.attempts += [Attempt(severity, reason, None) for severity in severities]


def _verdict(trace: Trace, result: CellResult) -> Reason | None:
    """Gates 3 and 4, given the attempts at higher severities."""
    if trace.success[-1]:
        return Reason.SUCCEEDS
    if trace.latched:
        return Reason.LATCHED
    higher = [a.trace for a in result.attempts]
    return Reason.NON_MONOTONE if any(t is not None and t.latched for t in higher) else None


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the time that the block takes to ``seconds[part]``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start
