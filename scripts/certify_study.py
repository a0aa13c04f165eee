"""``regrasp certify-study``: does certification keep its promise where the truth is known?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from regrasp.episodes.results import Figure, write_result
from regrasp.monitors.certify import REFERENCE, Design, Trial, certify, fixed_bound, split_error
from rich.console import Console
from rich.table import Table

#: Success of the simulated reference, in every task.
REFERENCE_SUCCESS = 0.9


@dataclass(frozen=True)
class Args:
    """Simulate certification on candidates of known risk.

    Attributes:
        trials: simulated certifications a scenario and selector.
        eps: risk budget.
        delta: allowed chance of a false promise.
        tasks: tasks.
        max_rounds: rounds a candidate gets.
        seed: of the simulation.
        result: also write docs/results/<result>.json.
    """

    trials: int = 1000
    eps: float = 0.15
    delta: float = 0.05
    tasks: int = 20
    max_rounds: int = 15
    seed: int = 0
    result: str | None = None


@dataclass(frozen=True)
class Scenario:
    """Candidates of known risk, the fastest first.

    Attributes:
        risks: P(AIF) of each candidate and task, ``[J, T]``.
        speeds: speed-up of each candidate ``[J]``.
    """

    risks: np.ndarray
    speeds: np.ndarray

    @property
    def risk(self) -> np.ndarray:
        """Mean risk over tasks ``[J]``."""
        return self.risks.mean(axis=1)

    @property
    def names(self) -> list[str]:
        """Of the candidates."""
        return [f"c{j}" for j in range(len(self.speeds))]


def scenarios(eps: float, tasks: int) -> dict[str, Scenario]:
    """Eight candidates each.

    ``at_budget``: all exactly at eps; ``just_over``: all a fifteenth over it; ``uneven``: the same
    mean, all of it in a fifth of the tasks; ``ladder``: the faster the riskier.
    """
    speeds = np.linspace(9.0, 2.0, 8)
    even = np.ones((8, tasks))
    over = eps * 16 / 15
    hard = np.zeros(tasks)
    hard[: max(1, tasks // 5)] = 1.0
    steps = np.array([3.0, 2.0, 1.4, 16 / 15, 0.65, 0.35, 0.15, 0.05]) * eps
    return {
        "at_budget": Scenario(eps * even, speeds),
        "just_over": Scenario(over * even, speeds),
        "uneven": Scenario(over / hard.mean() * hard * even, speeds),
        "ladder": Scenario(steps[:, None] * even, speeds),
    }


class Simulated:
    """Rollouts of a scenario; a :data:`regrasp.monitors.certify.Runner`."""

    def __init__(self, scenario: Scenario, tasks: Sequence[str], rng: np.random.Generator) -> None:
        self.names = scenario.names
        self.column = {task: t for t, task in enumerate(tasks)}
        #: P(a candidate fails | the reference succeeds).
        self.breaks = scenario.risks / REFERENCE_SUCCESS
        self.rng = rng
        self.drawn: dict[Trial, tuple[bool, np.ndarray]] = {}

    def __call__(
        self, name: str, trials: Sequence[Trial], want_reference: Sequence[bool]
    ) -> list[tuple[bool, bool | None]]:
        """See :data:`regrasp.monitors.certify.Runner`."""
        answers: list[tuple[bool, bool | None]] = []
        for trial, want in zip(trials, want_reference, strict=True):
            solved, broken = self._outcome(trial)
            if name == REFERENCE:
                answers.append((solved, None))
            else:
                # What the reference does not solve, no candidate does: it costs most rollouts.
                success = solved and not broken[self.names.index(name)]
                answers.append((success, solved if want and not success else None))
        return answers

    def _outcome(self, trial: Trial) -> tuple[bool, np.ndarray]:
        """Whether the reference succeeds, and which candidates would break it ``[J]``."""
        if trial not in self.drawn:
            solved = bool(self.rng.random() < REFERENCE_SUCCESS)
            chance = self.breaks[:, self.column[trial.task]]
            self.drawn[trial] = solved, self.rng.random(len(self.names)) < chance
        return self.drawn[trial]


@dataclass
class Found:
    """What a selector did in every simulated trial; ``chosen`` is -1 for the reference."""

    chosen: np.ndarray
    rollouts: np.ndarray
    broken: np.ndarray


def sequential(scenario: Scenario, design: Design, trials: int, seed: int) -> Found:
    """:func:`certify` on simulated rollouts."""
    chosen, rollouts, broken = [], [], []
    for i in range(trials):
        rng = np.random.default_rng(np.random.SeedSequence([seed, i]))
        certificate = certify(
            scenario.names,
            replace(design, seed=int(rng.integers(2**31))),
            Simulated(scenario, design.tasks, rng),
        )
        j = -1
        preserved = 1.0
        if certificate.deployed != REFERENCE:
            j = scenario.names.index(certificate.deployed)
            preserved = 1.0 - float(scenario.risk[j]) / REFERENCE_SUCCESS
        chosen.append(j)
        rollouts.append(certificate.rollouts)
        broken.append(
            (j >= 0 and scenario.risk[j] > certificate.risk)
            or preserved < certificate.preserved
            or certificate.reference_low > REFERENCE_SUCCESS
        )
    return Found(np.array(chosen), np.array(rollouts), np.array(broken))


def at_once(
    scenario: Scenario,
    accept: Callable[[int, int], bool],
    rounds: int,
    trials: int,
    seed: int,
) -> Found:
    """All candidates and the reference on ``rounds`` rounds; the fastest accepted is deployed.

    Args:
        scenario: the truth.
        accept: of (AIFs, trials) of one candidate.
        rounds: of every candidate.
        trials: simulated.
        seed: of the simulation.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, rounds]))
    counts = rng.binomial(rounds, scenario.risks, size=(trials, *scenario.risks.shape)).sum(axis=2)
    n = rounds * scenario.risks.shape[1]
    table = np.array([accept(k, n) for k in range(n + 1)])
    accepted = table[counts]
    chosen = np.where(accepted.any(axis=1), accepted.argmax(axis=1), -1)
    cost = (len(scenario.speeds) + 1) * n
    return Found(chosen, np.full(trials, cost), violations(scenario, chosen, np.inf))


def violations(scenario: Scenario, chosen: np.ndarray, eps: float) -> np.ndarray:
    """Which trials deployed a candidate with a risk of eps or more, bool ``[trials]``."""
    return (chosen >= 0) & (scenario.risk[chosen] >= eps - 1e-12)


def speed(scenario: Scenario, chosen: np.ndarray) -> np.ndarray:
    """Speed-up deployed in every trial; 1 for the reference."""
    return np.where(chosen >= 0, scenario.speeds[chosen], 1.0)


def study(args: Args, design: Design, console: Console) -> dict[str, Figure]:
    """Every selector on every scenario."""
    table = Table("scenario", "selector", "over budget", "rollouts", "speed-up")
    figures: dict[str, Figure] = {}
    for name, scenario in scenarios(args.eps, args.tasks).items():
        results = selectors(args, design, scenario)
        if name == "ladder":
            figures |= saved(args, design, scenario, results)
        for selector, found in results.items():
            key = f"{name}.{selector}"
            over = int(violations(scenario, found.chosen, args.eps).sum())
            figures[f"{key}.violations"] = Figure.rate(over, args.trials, "trials over budget")
            figures[f"{key}.rollouts"] = Figure.mean(found.rollouts.tolist(), "rollouts")
            figures[f"{key}.speedup"] = Figure.mean(speed(scenario, found.chosen).tolist(), "ratio")
            if selector in SEQUENTIAL:
                broken = int(found.broken.sum())
                figures[f"{key}.broken"] = Figure.rate(broken, args.trials, "promises broken")
            table.add_row(
                name,
                selector,
                f"{over / args.trials:.3f}",
                f"{found.rollouts.mean():.0f}",
                f"{figures[f'{key}.speedup'].value:.2f}",
            )
    console.print(table)
    return figures


#: Changes of the design that make the sequential selectors.
SEQUENTIAL: dict[str, dict[str, Any]] = {
    "sequential": {},
    "safest_first": {"order": "safest_first"},
    "mean_bet": {"bet": "mean"},
}


def selectors(args: Args, design: Design, scenario: Scenario) -> dict[str, Found]:
    """Every selector on one scenario."""
    found = {
        name: sequential(scenario, replace(design, **changes), args.trials, args.seed)
        for name, changes in SEQUENTIAL.items()
    }
    share = _share(args, design, scenario)

    def run(accept: Callable[[int, int], bool], rounds: int) -> Found:
        return at_once(scenario, accept, rounds, args.trials, args.seed)

    found["fixed_n"] = run(lambda k, n: fixed_bound(k, n, share) <= args.eps, args.max_rounds)
    found["point_estimate_2_rounds"] = run(lambda k, n: k <= args.eps * n, 2)
    found["point_estimate"] = run(lambda k, n: k <= args.eps * n, args.max_rounds)
    return found


def _share(args: Args, design: Design, scenario: Scenario) -> float:
    """Delta of one candidate of the fixed-n selector, split as the sequential one splits it."""
    spent = args.delta * (1.0 - design.reference_share)
    return split_error(spent, len(scenario.speeds))[0]


def saved(
    args: Args, design: Design, scenario: Scenario, results: dict[str, Found]
) -> dict[str, Figure]:
    """Rollouts saved: against all rounds, and against as few as do as well.

    The second comparison is with the smallest fixed n that deploys, on average, a policy as fast.
    """
    spent = results["sequential"].rollouts
    good = speed(scenario, results["sequential"].chosen).mean()
    share = _share(args, design, scenario)
    for rounds in range(1, args.max_rounds + 1):
        found = at_once(
            scenario,
            lambda k, n: fixed_bound(k, n, share) <= args.eps,
            rounds,
            args.trials,
            args.seed,
        )
        if speed(scenario, found.chosen).mean() >= good:
            break
    every = results["fixed_n"].rollouts[0]
    return {
        "rollouts_saved": Figure.mean(1.0 - spent / every, "share"),
        "rollouts_saved_matched": Figure.mean(1.0 - spent / found.rollouts[0], "share"),
        "matched_rounds": Figure(rounds, unit="rounds of the smallest fixed n as good"),
    }


def main(args: Args) -> None:
    """Simulate, print, write the result when asked to."""
    console = Console()
    design = Design(
        tasks=tuple(f"task{t}" for t in range(args.tasks)),
        states=tuple(range(30)),
        eps=args.eps,
        delta=args.delta,
        max_rounds=args.max_rounds,
    )
    figures = study(args, design, console)
    for name in ("rollouts_saved", "rollouts_saved_matched", "matched_rounds"):
        console.print(f"{name}: {figures[name].value:.3f}")
    if args.result:
        command = f"regrasp certify-study --result {args.result}"
        record = {"study": asdict(replace(args, result=None)), "design": asdict(design)}
        path = write_result(args.result, command, record, [args.seed], figures)
        console.print(f"wrote {path}")
