"""How good alarms and scores are, with 95 % intervals, and the same with time taken out of it.

The unit is the episode. Notation: F failed and S successful episodes; a failure that alarmed is a
true positive (TP), a success that did not a true negative (TN); alarm_i, onset_i, length_i and
horizon_i are control steps counted from the beginning of episode i. Each metric is one function of
:class:`Outcomes` with its formula, and returns a :class:`~regrasp.episodes.results.Figure`.

Two definitions differ between papers, so ours are said here:

- Detection time is alarm / horizon: alarm time over the episode's own horizon, the most steps
  that its protocol allows, of detected failures alone. FIPER (arXiv 2510.09459) divides by the
  longest episode less one, SAFE (2506.09937) by the episode's own length with misses as 1.
- In simulation a failure ends at the horizon and a success before it. Elapsed time then separates
  them perfectly, and so does any score that only grows. :func:`length_matched` compares a failure
  and a success at equal length, where a clock has an AUROC of exactly 1/2.

Intervals are percentile bootstraps over episodes, failures and successes resampled separately
(stratified by outcome) with a fixed seed. A rate of exactly 0 or 1 has an interval without width;
``Figure.rate`` is then the better one to quote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from regrasp.episodes.results import Figure

#: Bootstrap resamples and their seed.
RESAMPLES, SEED = 2000, 0
#: A detection within this share of the time from onset to end counts as early.
EARLY = 1.0 / 3.0


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What one score and its alarms made of E episodes.

    Attributes:
        scores: float64 ``[C_i]`` an episode, the score after each policy inference.
        steps: int ``[C_i]`` an episode, control step of each inference, increasing.
        failed: bool ``[E]``.
        lengths: int ``[E]``, control steps.
        horizons: int ``[E]``, the most control steps the protocol allows.
        onset: float ``[E]``, control step at which the failure began; nan for successes alone.
        alarms: float ``[E]``, control step of the first alarm; nan where there was none.
        groups: name of each episode's task ``[E]``; lengths are matched within a group.

    Raises:
        ValueError: naming the field and the episode, where anything does not fit.
    """

    scores: Sequence[np.ndarray]
    steps: Sequence[np.ndarray]
    failed: np.ndarray
    lengths: np.ndarray
    horizons: np.ndarray
    onset: np.ndarray
    alarms: np.ndarray
    groups: Sequence[str]

    def __post_init__(self) -> None:
        kinds: dict[str, type] = {"failed": bool, "lengths": np.int64, "horizons": np.int64}
        kinds |= {"onset": np.float64, "alarms": np.float64}
        for name, kind in kinds.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name)).astype(kind))
        for name, number in (("scores", np.float64), ("steps", np.int64)):
            arrays = tuple(np.asarray(a).astype(number) for a in getattr(self, name))
            object.__setattr__(self, name, arrays)
        object.__setattr__(self, "groups", tuple(self.groups))
        sizes = {name: len(getattr(self, name)) for name in self.__dataclass_fields__}
        if len(set(sizes.values())) > 1 or not len(self.failed):
            raise ValueError(f"Outcomes: entries are {sizes}; give one an episode, at least one")
        for field, wrong, right in self._rules():
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                value = getattr(self, field)[i]
                raise ValueError(f"Outcomes.{field}[{i}] is {value}; {right}")

    def _rules(self) -> list[tuple[str, np.ndarray, str]]:
        """(field, bool ``[E]`` of episodes that break the rule, the rule)."""
        steps = [_badly_ordered(s, n) for s, n in zip(self.steps, self.lengths, strict=True)]
        pairs = zip(self.scores, self.steps, strict=True)
        scores = [len(s) != len(t) or not np.isfinite(s).all() for s, t in pairs]
        late = ~((self.onset >= 0) & (self.onset < self.lengths))
        outside = ~((self.alarms >= 0) & (self.alarms < self.lengths))
        return [
            ("lengths", self.lengths < 1, "an episode has at least one control step"),
            ("horizons", self.horizons < self.lengths, "it must be at least the episode's length"),
            ("steps", np.array(steps), "they must increase from 0 or more to below the length"),
            ("scores", np.array(scores), "there must be one finite score an inference"),
            ("onset", ~self.failed & ~np.isnan(self.onset), "it must be nan for a success"),
            ("onset", self.failed & late, "it must be a step of the failed episode"),
            ("alarms", ~np.isnan(self.alarms) & outside, "it must be nan or a step of the episode"),
        ]

    @property
    def alarmed(self) -> np.ndarray:
        """Whether each episode alarmed at all, bool ``[E]``."""
        return ~np.isnan(self.alarms)

    @property
    def maxima(self) -> np.ndarray:
        """The largest score of each episode, float64 ``[E]``."""
        return np.array([score.max() for score in self.scores])


def first_alarm(scores: np.ndarray, steps: np.ndarray, threshold: float) -> float:
    """Control step of the first score above ``threshold``; nan when none is."""
    above = np.flatnonzero(np.asarray(scores) > threshold)
    return float(steps[above[0]]) if len(above) else float("nan")


def tpr(outcomes: Outcomes) -> Figure:
    """TP / F: failures that alarmed."""
    return _estimate(outcomes, lambda f, s: _mean(f, _of_failures(outcomes, outcomes.alarmed)))


def tnr(outcomes: Outcomes) -> Figure:
    """TN / S: successes that never alarmed."""
    return _estimate(outcomes, lambda f, s: _mean(s, _of_successes(outcomes, ~outcomes.alarmed)))


def balanced_accuracy(outcomes: Outcomes) -> Figure:
    """(TPR + TNR) / 2."""
    detected, quiet = _alarm_parts(outcomes)
    return _estimate(outcomes, lambda f, s: (_mean(f, detected) + _mean(s, quiet)) / 2)


def weighted_accuracy(outcomes: Outcomes) -> Figure:
    """(1 - f) TPR + f TNR with f = F / (F + S): the rarer kind of episode weighs more."""
    detected, quiet = _alarm_parts(outcomes)
    share = float(outcomes.failed.mean())
    return _estimate(
        outcomes, lambda f, s: (1 - share) * _mean(f, detected) + share * _mean(s, quiet)
    )


def twa(outcomes: Outcomes) -> Figure:
    """Timestep-wise weighted accuracy: 1/2 [sum over TP of (1 - alarm / horizon) / F + TN / S].

    Never alarming has 1/2, and so has alarming at step 0 of every episode.
    """
    _, quiet = _alarm_parts(outcomes)
    worth = _of_failures(outcomes, _worth(outcomes))
    return _estimate(outcomes, lambda f, s: (_mean(f, worth) + _mean(s, quiet)) / 2)


def detection_time(outcomes: Outcomes) -> Figure:
    """Mean of alarm / horizon over detected failures; ValueError when none was detected."""
    detected = _detected(outcomes, "detection_time")
    time = _of_failures(outcomes, np.nan_to_num(outcomes.alarms) / outcomes.horizons)
    return _estimate(outcomes, lambda f, s: _mean(f * detected, time), n=int(detected.sum()))


def lead_fractions(outcomes: Outcomes) -> np.ndarray:
    """How much of each failure had passed at its alarm, float64 ``[F]``: 0 at once, 1 never.

    (alarm - onset) / (length - onset); 0 for an alarm before the onset, 1 for a miss.
    """
    alarm, onset, end = (
        _of_failures(outcomes, a) for a in (outcomes.alarms, outcomes.onset, outcomes.lengths)
    )
    passed = np.maximum(alarm - onset, 0.0) / (end - onset)
    return np.where(np.isnan(alarm), 1.0, passed)


def lead_fraction(outcomes: Outcomes) -> Figure:
    """Median of :func:`lead_fractions` over all failures, misses as 1; smaller is earlier."""
    lead = lead_fractions(outcomes)
    return _estimate(outcomes, lambda f, s: _median(f, lead), n=len(lead), unit="share of failure")


def early_share(outcomes: Outcomes) -> Figure:
    """Share of all failures with a lead fraction of at most :data:`EARLY`."""
    early = (lead_fractions(outcomes) <= EARLY).astype(np.float64)
    return _estimate(outcomes, lambda f, s: _mean(f, early))


def before_onset_share(outcomes: Outcomes) -> Figure:
    """Share of detected failures whose alarm came before the onset; ValueError for none.

    Such an alarm warns in time or is a false one that happened to be in a failure.
    """
    detected = _detected(outcomes, "before_onset_share")
    before = _of_failures(outcomes, outcomes.alarms) < _of_failures(outcomes, outcomes.onset)
    early = before.astype(np.float64)
    return _estimate(outcomes, lambda f, s: _mean(f * detected, early), n=int(detected.sum()))


def auroc(outcomes: Outcomes) -> Figure:
    """P(largest score of a failure > that of a success) + 1/2 P(equal), over all pairs.

    Where failures last longer this rewards a score for growing; see :func:`length_matched`.
    """
    high, low = (_of(outcomes, outcomes.maxima) for _of in (_of_failures, _of_successes))
    return _pair_estimate(outcomes, _wins(high[:, None], low[None, :]), np.ones((len(high), 1)))


def auroc_alive(outcomes: Outcomes, step: int) -> Figure:
    """AUROC among rollouts that still run at control step ``step``, by their scores up to it.

    Failures that begin later are no failures yet and are left out. All that remain are equally
    old, so a clock has 1/2. ValueError when no failure or no success remains.
    """
    running = outcomes.lengths > step
    begun = _of_failures(outcomes, running) & (_of_failures(outcomes, outcomes.onset) <= step)
    alive = _of_successes(outcomes, running)
    if not begun.any() or not alive.any():
        raise ValueError(
            f"auroc_alive: {int(begun.sum())} failures begun and {int(alive.sum())} successes run "
            f"at step={step}; it must leave some of each"
        )
    so_far = np.array([_max_before(outcomes, i, np.array([step + 1]))[0] for i in _all(outcomes)])
    wins = _wins(_of_failures(outcomes, so_far)[:, None], _of_successes(outcomes, so_far)[None, :])
    return _pair_estimate(outcomes, wins, begun[:, None] & alive[None, :])


@dataclass(frozen=True)
class LengthMatched:
    """What :func:`length_matched` found.

    Attributes:
        auroc: over pairs of equal length.
        tpr: alarms of failures before the cut.
        tnr: successes without an alarm, weighted as the pairs they are in.
        balanced_accuracy: (tpr + tnr) / 2.
        twa: as :func:`twa`; an alarm counts only before the cut.
        pairs: pairs compared.
        excluded: pairs left out because the failure begins only after the cut.
        unmatched: failures without any success in their group, left out.
    """

    auroc: Figure
    tpr: Figure
    tnr: Figure
    balanced_accuracy: Figure
    twa: Figure
    pairs: int
    excluded: int
    unmatched: int


def length_matched(outcomes: Outcomes) -> LengthMatched:
    """The metrics when failures are as short as successes, so that time tells nothing.

    Each failure i is cut to the length of a random success j of its group, and compared with that
    success: only scores and alarms at steps below length_j count. A failure that begins at
    length_j or later is no failure yet, and the draw is dropped. We give the mean over all draws
    exactly, not that of some: with K the set of pairs kept and w_ij = 1 / (successes of the group),

        AUROC = sum_K w_ij (1{m_ij > m_j} + 1/2 1{m_ij = m_j}) / sum_K w_ij,
        TWA   = 1/2 [ sum_K w_ij 1{alarm_i < length_j} (1 - alarm_i / horizon_i)
                      + sum_K w_ij 1{j never alarmed} ] / sum_K w_ij,

    m_ij the largest score of i before length_j and m_j that of j. TPR and TNR are the two sums
    without (1 - alarm / horizon). As both members of a pair are equally long and the same pairs
    make both sums, a clock has AUROC = 1/2 and TPR = 1 - TNR exactly, however many are dropped
    (both episodes of a pair must have been looked at in the same steps, as one policy does), and
    its TWA is at most the 1/2 that never alarming has. So is, in expectation, that of any alarm
    at random.

    Raises:
        ValueError: where no pair can be compared.
    """
    pairs = _match(outcomes)
    failures, successes = np.flatnonzero(outcomes.failed), np.flatnonzero(~outcomes.failed)
    cut_maxima = np.array([_max_before(outcomes, i, pairs.cuts) for i in failures])
    wins = _wins(cut_maxima, outcomes.maxima[successes][None, :])
    hits, quiet, worth = _matched_parts(outcomes, pairs)

    def figure(values: np.ndarray) -> Figure:
        return _pair_estimate(outcomes, values, pairs.kept, _group_of(pairs.same))

    return LengthMatched(
        auroc=figure(wins),
        tpr=figure(hits),
        tnr=figure(quiet),
        balanced_accuracy=figure((hits + quiet) / 2),
        twa=figure((worth + quiet) / 2),
        pairs=int(pairs.kept.sum()),
        excluded=int((pairs.same & ~pairs.kept).sum()),
        unmatched=int((~pairs.same.any(axis=1)).sum()),
    )


def twa_difference(first: Outcomes, second: Outcomes) -> Figure:
    """Length-matched TWA of one monitor less that of another on the same episodes, paired.

    Both are resampled together, so that what is hard for both does not widen the interval.
    ValueError where the episodes differ.
    """
    for field in ("failed", "lengths", "horizons", "groups"):
        if not np.array_equal(getattr(first, field), getattr(second, field)):
            raise ValueError(f"twa_difference: {field} differs; give the same episodes to both")
    pairs = _match(first)
    values = []
    for outcomes in (first, second):
        _, quiet, worth = _matched_parts(outcomes, pairs)
        values.append((worth + quiet) / 2)
    return _pair_estimate(first, values[0] - values[1], pairs.kept, _group_of(pairs.same))


@dataclass(frozen=True)
class _Pairs:
    """Failures ``[F]`` against successes ``[S]``: ``same`` group, ``kept`` ones, the ``cuts``."""

    same: np.ndarray
    kept: np.ndarray
    cuts: np.ndarray


def _match(outcomes: Outcomes) -> _Pairs:
    """The pairs of :func:`length_matched`; ValueError where none can be compared."""
    _need(outcomes, "length_matched")
    groups = np.array(outcomes.groups)
    same = groups[outcomes.failed][:, None] == groups[~outcomes.failed][None, :]
    cuts = _of_successes(outcomes, outcomes.lengths)
    kept = same & (_of_failures(outcomes, outcomes.onset)[:, None] < cuts[None, :])
    if not kept.any():
        raise ValueError(
            f"length_matched: none of {int(same.sum())} pairs of a failure and a success of one "
            "group has the failure begin before the success ends; there is nothing to compare"
        )
    return _Pairs(same, kept, cuts)


def _matched_parts(outcomes: Outcomes, pairs: _Pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every pair ``[F, S]``: failure alarmed in time, success kept quiet, worth of the alarm."""
    in_time = _of_failures(outcomes, outcomes.alarms)[:, None] < pairs.cuts[None, :]
    worth = in_time * _of_failures(outcomes, _worth(outcomes))[:, None]
    quiet = np.broadcast_to(~_of_successes(outcomes, outcomes.alarmed), pairs.kept.shape)
    return in_time.astype(np.float64), quiet.astype(np.float64), worth


def summary(outcomes: Outcomes) -> dict[str, Figure]:
    """Every metric by name; those of detected failures are left out when there are none."""
    matched = length_matched(outcomes)
    figures = {metric.__name__: metric(outcomes) for metric in ALWAYS}
    if (outcomes.alarmed & outcomes.failed).any():
        figures |= {metric.__name__: metric(outcomes) for metric in OF_DETECTED}
    for name in ("auroc", "tpr", "tnr", "balanced_accuracy", "twa"):
        figures[f"{name}_length_matched"] = getattr(matched, name)
    return figures


#: Metrics that any outcomes with failures and successes have.
ALWAYS: tuple[Callable[[Outcomes], Figure], ...] = (
    tpr, tnr, balanced_accuracy, weighted_accuracy, twa, lead_fraction, early_share, auroc,
)  # fmt: skip
#: Metrics of detected failures.
OF_DETECTED: tuple[Callable[[Outcomes], Figure], ...] = (detection_time, before_onset_share)


def _badly_ordered(steps: np.ndarray, length: int) -> bool:
    if not len(steps):
        return True
    return bool(steps[0] < 0 or steps[-1] >= length or (np.diff(steps) <= 0).any())


def _all(outcomes: Outcomes) -> range:
    return range(len(outcomes.failed))


def _of_failures(outcomes: Outcomes, values: np.ndarray) -> np.ndarray:
    return values[outcomes.failed]


def _of_successes(outcomes: Outcomes, values: np.ndarray) -> np.ndarray:
    return values[~outcomes.failed]


def _alarm_parts(outcomes: Outcomes) -> tuple[np.ndarray, np.ndarray]:
    """1 for each failure that alarmed ``[F]``, 1 for each success that did not ``[S]``."""
    alarmed = outcomes.alarmed.astype(np.float64)
    return _of_failures(outcomes, alarmed), 1.0 - _of_successes(outcomes, alarmed)


def _worth(outcomes: Outcomes) -> np.ndarray:
    """1 - alarm / horizon; 0 where there was no alarm, ``[E]``."""
    return np.nan_to_num(1.0 - outcomes.alarms / outcomes.horizons, nan=0.0)


def _detected(outcomes: Outcomes, what: str) -> np.ndarray:
    """Which failures alarmed, bool ``[F]``; ValueError for none."""
    detected = _of_failures(outcomes, outcomes.alarmed)
    if not detected.any():
        raise ValueError(f"{what}: none of {len(detected)} failures alarmed; it has no value")
    return detected


def _max_before(outcomes: Outcomes, i: int, cuts: np.ndarray) -> np.ndarray:
    """Largest score of episode ``i`` at steps below each cut; -inf where there is none."""
    running = np.concatenate([[-np.inf], np.maximum.accumulate(outcomes.scores[i])])
    return running[np.searchsorted(outcomes.steps[i], cuts, side="left")]


def _wins(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (high > low) + 0.5 * (high == low)


def _group_of(same: np.ndarray) -> np.ndarray:
    """Bool ``[G, S]``: the successes of each group that has any failure, from ``[F, S]``."""
    return np.unique(same, axis=0)


def _need(outcomes: Outcomes, what: str) -> None:
    failures = int(outcomes.failed.sum())
    successes = len(outcomes.failed) - failures
    if not failures or not successes:
        raise ValueError(
            f"{what}: {failures} failures and {successes} successes; at least one of each is needed"
        )


@lru_cache(maxsize=8)
def _resamples(failures: int, successes: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each episode is in each resample, ``[1 + R, F]`` and ``[1 + R, S]``.

    The first row is the sample itself: its value is the estimate.
    """
    rng = np.random.default_rng(SEED)
    counts = []
    for n in (failures, successes):
        drawn = rng.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES)
        counts.append(np.concatenate([np.ones((1, n)), drawn]))
    return counts[0], counts[1]


def _mean(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Weighted mean of ``values`` ``[n]`` in each resample ``[1 + R, n]``; nan at no weight."""
    total = weights.sum(axis=1)
    return np.divide(weights @ values, total, out=np.full(len(total), np.nan), where=total > 0)


def _median(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Median of ``values`` ``[n]`` in each resample of n, by how often each was drawn."""
    order = np.argsort(values)
    reached = np.cumsum(weights[:, order], axis=1)
    n = len(values)
    middle = [values[order][(reached > k).argmax(axis=1)] for k in ((n - 1) // 2, n // 2)]
    return (middle[0] + middle[1]) / 2


def _estimate(
    outcomes: Outcomes,
    statistic: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    n: int | None = None,
    unit: str = "",
) -> Figure:
    """The statistic of the sample and its interval from the resamples that have one."""
    _need(outcomes, "metrics")
    failures = int(outcomes.failed.sum())
    values = statistic(*_resamples(failures, len(outcomes.failed) - failures))
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return Figure(float(values[0]), float(low), float(high), n or len(outcomes.failed), unit)


def _pair_estimate(
    outcomes: Outcomes,
    values: np.ndarray,
    kept: np.ndarray,
    groups: np.ndarray | None = None,
) -> Figure:
    """Weighted mean of ``values`` over the pairs kept, both ``[F, S]`` (or broadcast to it).

    Args:
        outcomes: whose pairs they are.
        values: one number a pair.
        kept: which pairs count.
        groups: bool ``[G, S]``: each success then weighs 1 / (successes of its group), counted
            anew in each resample; None weighs all alike.
    """

    def statistic(failures: np.ndarray, successes: np.ndarray) -> np.ndarray:
        weights = successes
        if groups is not None:
            of_group = (successes @ groups.T.astype(np.float64)) @ groups.astype(np.float64)
            weights = np.divide(
                successes, of_group, out=np.zeros_like(successes), where=of_group > 0
            )
        mask = np.broadcast_to(kept, values.shape).astype(np.float64)
        total = ((failures @ mask) * weights).sum(axis=1)
        found = ((failures @ (mask * values)) * weights).sum(axis=1)
        return np.divide(found, total, out=np.full(len(total), np.nan), where=total > 0)

    return _estimate(outcomes, statistic)
