"""Certified acceleration: the fastest variant of a policy that breaks few of its successes.

After CARE (arXiv 2610.08917; its abstract was read, the tests below are our own). A reference and
an accelerated policy run the same trial: same task, initial state and noise. An
acceleration-induced failure (AIF) is X = 1{the reference succeeds and the accelerated one fails}.
A trial is drawn by task, an equal number of each; a *round* is one trial of each of T tasks, its
states and seeds drawn anew. The risk of a candidate is a = (1/T) sum_t P(X = 1 | task t).

Fixed n. Certify a <= eps when the Clopper-Pearson upper bound at delta of k AIFs in n trials is at
most eps (:func:`fixed_bound`). The bound holds for unequal tasks too (Hoeffding 1956: at the same
mean, equal probabilities have the heaviest binomial tails).

Sequential. A wealth E_0 = 1 bets against H0: a >= eps. In round i, with a stake
lambda_i in [0, 1 / (1 - eps)] that only earlier rounds decide (:func:`stakes`),

    "product":  E_i = E_{i-1} prod_t (1 + lambda_i (eps - X_it))
    "mean":     E_i = E_{i-1} (1 + lambda_i (eps - mean_t X_it))

(Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024). Under
H0 either is a supermartingale, so P(E ever reaches 1 / delta) <= delta (Ville), whenever we look
and for whatever reason we stop. For "mean" this is plain. For "product" it needs the trials of a
round to be independent, as ours are, and the stake to be one for the round; then
E[prod_t] = prod_t (1 + lambda (eps - a_t)) <= (1 + lambda (eps - a))^T <= 1 by the inequality of
arithmetic and geometric means. Trial by trial, within a round or with a stake for each, it would
be none where tasks differ. A round counts for "mean" about as much as one trial, for "product" as
T: it is the default.

Several candidates. Fastest first, the first that is certified is deployed; the chance that any
candidate with a >= eps is ever certified is at most sum_j delta_j, so the deltas share one
(:func:`split_error`). Safest first, the whole delta goes to each in turn, and the first that is not
certified ends the search; the last certified is deployed (fixed-sequence testing).

Giving up on a candidate that will hardly make it (:func:`hopeless`) only ever certifies less, so it
costs power and never validity. The reference runs only where an accelerated rollout failed, once
a trial for all candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from regrasp.episodes.results import clopper_pearson

#: Name of the reference among the policies that a runner runs.
REFERENCE = "reference"

Bet = Literal["product", "mean"]
Order = Literal["fastest_first", "safest_first"]


@dataclass(frozen=True)
class Trial:
    """One initial condition: what both policies of a pair start from.

    Attributes:
        task: name of the task.
        state: number of the initial state.
        seed: of the policy's noise.
    """

    task: str
    state: int
    seed: int


#: Runs one policy on trials. The third argument says for each trial whether the reference is
#: wanted where the policy fails. Returns (success, success of the reference or None) a trial; for
#: REFERENCE itself the second is None.
Runner = Callable[[str, Sequence[Trial], Sequence[bool]], Sequence[tuple[bool, bool | None]]]


@dataclass(frozen=True)
class Design:
    """What is to be certified and how.

    Attributes:
        tasks: names; each has the same weight.
        states: initial states, drawn uniformly with replacement.
        eps: risk budget, the most AIFs a trial.
        delta: the chance that anything promised is false.
        max_rounds: rounds a candidate gets.
        reference_rounds: the first rounds, on which the reference always runs: they bound how
            often it succeeds. At most ``max_rounds``.
        reference_share: part of ``delta`` spent on that bound; the rest is for the candidates.
        order: "fastest_first" (splits delta) or "safest_first" (fixed sequence).
        weights: shares of delta of the candidates, in the order given; equal when None.
        bet: see the module.
        futility: see :func:`hopeless`; 0 never gives up before the rounds run out.
        batch: rounds that a candidate runs at a time. More waste a few rollouts and keep many
            workers busy; the wealth is still looked at after each round.
        seed: of all trials.
    """

    tasks: tuple[str, ...]
    states: tuple[int, ...]
    eps: float = 0.15
    delta: float = 0.05
    max_rounds: int = 15
    reference_rounds: int = 5
    reference_share: float = 0.2
    order: Order = "fastest_first"
    weights: tuple[float, ...] | None = None
    bet: Bet = "product"
    futility: float = 0.1
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        rounds = f"within 1 and max_rounds={self.max_rounds}"
        checks = {
            "tasks": (len(set(self.tasks)) == len(self.tasks) > 0, "different names, at least one"),
            "states": (len(self.states) > 0, "at least one"),
            "eps": (0 < self.eps < 1, "strictly between 0 and 1"),
            "delta": (0 < self.delta < 0.5, "strictly between 0 and 1/2"),
            "max_rounds": (self.max_rounds >= 1, "at least 1"),
            "reference_rounds": (1 <= self.reference_rounds <= self.max_rounds, rounds),
            "reference_share": (0 < self.reference_share < 1, "strictly between 0 and 1"),
            "batch": (self.batch >= 1, "at least 1"),
            "order": (self.order in ("fastest_first", "safest_first"), "one of the two orders"),
            "bet": (self.bet in ("product", "mean"), "'product' or 'mean'"),
            "futility": (0 <= self.futility < 0.5, "at least 0 and below 1/2"),
        }
        for name, (good, right) in checks.items():
            if not good:
                raise ValueError(f"Design.{name} is {getattr(self, name)!r}; it must be {right}")

    def round(self, index: int) -> list[Trial]:
        """The trials of round ``index``, one a task; the same for every candidate."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, index]))
        states = rng.choice(np.asarray(self.states), size=len(self.tasks))
        seeds = rng.integers(2**31, size=len(self.tasks))
        return [
            Trial(task, int(state), int(seed))
            for task, state, seed in zip(self.tasks, states, seeds, strict=True)
        ]


@dataclass(frozen=True)
class Tested:
    """What became of one candidate.

    Attributes:
        name: the candidate.
        certified: whether its risk is promised to be at most eps.
        reason: "certified", "hopeless" (given up) or "rounds" (they ran out).
        delta: its share of the error.
        rounds: rounds run.
        trials: trials run, rounds times tasks.
        failures: AIFs among them.
        bound: anytime-valid upper bound on its risk at its delta; in the order "fastest_first"
            the bounds of all candidates hold together.
        rollouts: rollouts that it caused, those of the reference included.
    """

    name: str
    certified: bool
    reason: str
    delta: float
    rounds: int
    trials: int
    failures: int
    bound: float
    rollouts: int

    @property
    def estimate(self) -> float:
        """AIFs a trial, as counted (biased downwards a little by stopping early)."""
        return self.failures / self.trials


@dataclass(frozen=True)
class Certificate:
    """What is deployed and what is promised of it.

    With probability ``confidence``, over trials like those drawn, all of these hold: the deployed
    candidate's risk is at most ``risk``; the reference succeeds at a rate of at least
    ``reference_low``; so of what the reference solves the deployed candidate solves at least the
    share ``preserved`` = 1 - risk / reference_low.

    Attributes:
        deployed: a candidate, or REFERENCE when none is certified.
        tested: every candidate that was tried, in order.
        confidence: 1 - delta.
        risk: the promised bound on AIFs a trial (0 for the reference).
        reference_successes: in the reference rounds.
        reference_trials: trials of those rounds.
        reference_low: Clopper-Pearson lower bound on the reference's success.
        preserved: lower bound on P(accelerated succeeds | reference succeeds).
        rollouts: all rollouts run, of any policy.
        exhaustive: rollouts of all candidates and the reference on ``max_rounds`` rounds.
    """

    deployed: str
    tested: tuple[Tested, ...]
    confidence: float
    risk: float
    reference_successes: int
    reference_trials: int
    reference_low: float
    preserved: float
    rollouts: int
    exhaustive: int

    @property
    def rollouts_saved(self) -> float:
        """Share of the exhaustive design's rollouts that were not needed."""
        return 1.0 - self.rollouts / self.exhaustive


def fixed_bound(failures: int, trials: int, delta: float) -> float:
    """One-sided upper bound on the risk at ``delta`` from a number of trials fixed beforehand.

    Clopper-Pearson: the risk at which so few failures have probability ``delta``;
    ``fixed_bound(k, n, delta) <= eps`` certifies. With no failure that needs
    n >= log(delta) / log(1 - eps) trials.
    """
    return clopper_pearson(failures, trials, delta)


def reference_bound(successes: int, trials: int, delta: float) -> float:
    """One-sided lower bound on a success rate at ``delta``, as :func:`fixed_bound`."""
    return 1.0 - fixed_bound(trials - successes, trials, delta)


def split_error(
    delta: float, candidates: int, weights: Sequence[float] | None = None
) -> list[float]:
    """Shares of ``delta`` that add up to it: equal, or in proportion to ``weights``."""
    share = np.ones(candidates) if weights is None else np.asarray(weights, dtype=np.float64)
    if share.shape != (candidates,) or not (share > 0).all() or not np.isfinite(share).all():
        raise ValueError(
            f"split_error: weights are {weights}; give {candidates} positive numbers, one a "
            "candidate"
        )
    return [float(part) for part in delta * share / share.sum()]


def stakes(counts: np.ndarray, tasks: int, eps: float | np.ndarray, bet: Bet) -> np.ndarray:
    """The stake of every round and of the next one, each from earlier rounds alone.

    With p the risk estimated before the round, (k + 1/2) / (n + 2 / eps) of k AIFs in n trials
    (a quarter of eps before any), the stake that would grow wealth fastest (Kelly) were p true:

    - "product": (eps - p) / (eps (1 - eps)). The bet is then the likelihood ratio of p and eps.
    - "mean": (eps - p) / (v + (eps - p)^2), v = p (1 - p) / T, to second order.

    Args:
        counts: ``[n]``, AIFs of each round.
        tasks: trials a round (T).
        eps: the risk bet against; several as ``[M, 1]``.
        bet: see the module.

    Returns:
        ``[n + 1]`` or ``[M, n + 1]``, within 0 and 1 / (1 - eps).
    """
    before = np.concatenate([[0.0], np.cumsum(counts)])
    trials = tasks * np.arange(len(before))
    p = (before + 0.5) / (trials + 2.0 / eps)
    gap = eps - p
    if bet == "product":
        stake = gap / (eps * (1.0 - eps))
    else:
        stake = gap / (p * (1.0 - p) / tasks + gap**2)
    return np.clip(stake, 0.0, 1.0 / (1.0 - eps))


def log_wealth(counts: np.ndarray, tasks: int, eps: float | np.ndarray, bet: Bet) -> np.ndarray:
    """log E after every round, ``[n]`` or ``[M, n]``, from the AIFs of each; may be -inf.

    Arguments as :func:`stakes`.
    """
    counts = np.asarray(counts, dtype=np.float64)
    stake = stakes(counts, tasks, eps, bet)[..., :-1]
    with np.errstate(divide="ignore"):  # a lost all-in leaves nothing
        if bet == "product":
            lost = np.log1p(-np.minimum(stake * (1.0 - eps), 1.0))
            # 0 times -inf where the stake was all and no trial failed.
            gain = np.where(counts > 0, counts * lost, 0.0)
            gain = gain + (tasks - counts) * np.log1p(stake * eps)
        else:
            gain = np.log(np.maximum(1.0 + stake * (eps - counts / tasks), 0.0))
    return np.cumsum(gain, axis=-1)


def anytime_bound(counts: np.ndarray, tasks: int, delta: float, bet: Bet) -> float:
    """Upper bound on the risk at ``delta`` that holds at every round at once.

    The largest risk m whose own wealth (against a >= m) never reached 1 / delta: rounded up to the
    next of 1,000 equal steps.
    """
    risks = np.arange(1, 1000)[:, None] / 1000.0
    wealth = log_wealth(counts, tasks, risks, bet)
    possible = np.flatnonzero(wealth.max(axis=-1, initial=-np.inf) < -math.log(delta))
    return float((possible[-1] + 2) / 1000.0) if len(possible) else float(risks[0, 0])


@lru_cache(maxsize=4096)
def _optimistic(failures: int, trials: int, level: float) -> float:
    return reference_bound(failures, trials, level)


def hopeless(counts: np.ndarray, tasks: int, design: Design, delta: float) -> bool:
    """Whether a candidate will hardly be certified in the rounds it has left.

    At an optimistic risk p (lower Clopper-Pearson bound of the AIFs so far, at
    ``design.futility``) log-wealth grows by at most KL(p, eps) a trial, the divergence of the two
    Bernoullis. Hopeless is p >= eps, or when even that growth does not reach 1 / delta in time.
    Sees the past alone.
    """
    rounds = len(counts)
    if design.futility == 0.0 or rounds == 0:
        return False
    p = _optimistic(int(np.sum(counts)), rounds * tasks, design.futility)
    if p >= design.eps:
        return True
    left = (design.max_rounds - rounds) * (tasks if design.bet == "product" else 1)
    growth = _divergence(p, design.eps)
    if design.bet == "mean":  # a round can at best win everything that its stake allows
        growth = -math.log1p(-design.eps)
    wealth = float(log_wealth(counts, tasks, design.eps, design.bet)[-1])
    return wealth + left * growth < -math.log(delta)


def _divergence(p: float, q: float) -> float:
    """KL divergence of Bernoulli(p) from Bernoulli(q), nats."""
    parts = [(p, q), (1.0 - p, 1.0 - q)]
    return sum(a * math.log(a / b) for a, b in parts if a > 0)


@dataclass
class Rollouts:
    """Asks the runner, remembers the reference's outcomes, counts what was run."""

    runner: Runner
    reference: dict[Trial, bool] = field(default_factory=dict)
    spent: int = 0

    def run_reference(self, trials: Sequence[Trial]) -> int:
        """Run the reference where it was not run before; its successes on ``trials``."""
        new = [trial for trial in trials if trial not in self.reference]
        if new:
            found = self.runner(REFERENCE, new, [False] * len(new))
            self.reference |= {t: bool(s) for t, (s, _) in zip(new, found, strict=True)}
            self.spent += len(new)
        return sum(self.reference[trial] for trial in trials)

    def run_pairs(self, candidate: str, trials: Sequence[Trial]) -> list[bool]:
        """Run a candidate, and the reference where it failed; which trials are AIFs.

        Raises:
            ValueError: when the runner did not run the reference where it was asked to.
        """
        wanted = [trial not in self.reference for trial in trials]
        failures = []
        pairs = self.runner(candidate, trials, wanted)
        for trial, want, (success, reference) in zip(trials, wanted, pairs, strict=True):
            self.spent += 1
            if want and not success:
                if reference is None:
                    raise ValueError(
                        f"runner: no outcome of the reference on {trial}, where {candidate!r} "
                        "failed; it must run it there"
                    )
                self.spent += 1
                self.reference[trial] = bool(reference)
            failures.append(not success and self.reference[trial])
        return failures


def certify(candidates: Sequence[str], design: Design, runner: Runner) -> Certificate:
    """Find the fastest candidate whose risk is certified to be at most ``design.eps``.

    Everything is a function of the design and of the runner's answers: run again with answers that
    were kept, it goes on where it was stopped.

    Args:
        candidates: names, the fastest first.
        design: see there.
        runner: runs rollouts, see :data:`Runner`; a simulation in tests, robots otherwise.
    """
    names = list(candidates)
    if len(set(names)) != len(names) or REFERENCE in names or not names:
        raise ValueError(
            f"certify: candidates are {names}; give different names, at least one, and none "
            f"{REFERENCE!r}"
        )
    rollouts = Rollouts(runner)
    first = [trial for i in range(design.reference_rounds) for trial in design.round(i)]
    solved = rollouts.run_reference(first)
    spare = design.delta * design.reference_share
    low = reference_bound(solved, len(first), spare)
    tested, deployed = _search(names, design, rollouts, design.delta - spare)
    risk = 0.0
    if deployed is not None:
        # Safest first, the bounds of single candidates do not hold together; eps does.
        risk = design.eps
        if design.order == "fastest_first":
            risk = min(risk, deployed.bound)
    return Certificate(
        deployed=REFERENCE if deployed is None else deployed.name,
        tested=tuple(tested),
        confidence=1.0 - design.delta,
        risk=risk,
        reference_successes=solved,
        reference_trials=len(first),
        reference_low=low,
        preserved=max(0.0, 1.0 - risk / low) if low > 0 else float(risk == 0.0),
        rollouts=rollouts.spent,
        exhaustive=(len(names) + 1) * design.max_rounds * len(design.tasks),
    )


def _search(
    names: list[str], design: Design, rollouts: Rollouts, delta: float
) -> tuple[list[Tested], Tested | None]:
    """Test candidates in the design's order; those tested, and the one to deploy."""
    fastest_first = design.order == "fastest_first"
    shares = split_error(delta, len(names), design.weights)
    if not fastest_first:
        names, shares = names[::-1], [delta] * len(names)
    tested: list[Tested] = []
    deployed = None
    for name, share in zip(names, shares, strict=True):
        tested.append(run_test(name, share, design, rollouts))
        if tested[-1].certified:
            deployed = tested[-1]
        if tested[-1].certified == fastest_first:
            break
    return tested, deployed


def run_test(name: str, delta: float, design: Design, rollouts: Rollouts) -> Tested:
    """Rounds of one candidate until it is certified, hopeless, or has had them all."""
    tasks, before = len(design.tasks), rollouts.spent
    counts: list[int] = []
    reason = "rounds"
    while len(counts) < design.max_rounds:
        next_rounds = range(len(counts), min(len(counts) + design.batch, design.max_rounds))
        trials = [trial for i in next_rounds for trial in design.round(i)]
        broken = np.reshape(rollouts.run_pairs(name, trials), (-1, tasks))
        counts += [int(count) for count in broken.sum(axis=1)]
        seen = np.array(counts)
        if log_wealth(seen, tasks, design.eps, design.bet).max() >= -math.log(delta):
            reason = "certified"
            break
        if hopeless(seen, tasks, design, delta):
            reason = "hopeless"
            break
    return Tested(
        name=name,
        certified=reason == "certified",
        reason=reason,
        delta=delta,
        rounds=len(counts),
        trials=len(counts) * tasks,
        failures=int(sum(counts)),
        bound=anytime_bound(np.array(counts), tasks, delta, design.bet),
        rollouts=rollouts.spent - before,
    )
