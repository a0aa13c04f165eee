"""How right diagnoses are, over all episodes, with intervals.

No episode is left out of any mean. An answer that is :class:`Unparseable` is wrong about whether
the episode failed, whatever the truth; and where a failure is answered by it or by "did not fail",
every other metric takes its worst value for that episode.

Intervals are 95 % percentile bootstrap over episodes, or over groups of episodes that are not
independent (the same scene and seed at several severities).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.results import Figure
from regrasp.relabel.diagnose.answer import LEVELS, Answer, Diagnosis

#: Metres and radians of one unit of LIBERO's action, in which shift, turn and gripper compare.
ACTION_UNITS = np.array([0.05] * 3 + [0.5] * 3 + [1.0])

#: An onset this near, in control steps, is found (half a second at 20 Hz).
NEAR = 10

#: Columns of the confusion that are no failure type.
NONE, UNPARSEABLE = "none", "unparseable"


@dataclass(frozen=True)
class Scores:
    """What :func:`score` answers.

    Attributes:
        figures: metric -> value and interval; those of ``_FAILURE_UNITS`` only where the truth has
            a failure.
        truths: rows of the confusion: types of the truth, and ``none`` for successes.
        answers: its columns: every type in truth or answers, ``none``, ``unparseable``.
        confusion: how many episodes, int64 ``[rows, columns]``.
    """

    figures: dict[str, Figure]
    truths: tuple[str, ...]
    answers: tuple[str, ...]
    confusion: np.ndarray


#: Metrics over the episodes that failed, and their units. All are means but the type's accuracy,
#: which is the mean over types.
_FAILURE_UNITS = {
    "type_macro_accuracy": "balanced accuracy",
    "subtask_accuracy": "share",
    "interval_iou": "IoU",
    "onset_error": "control steps",
    "onset_within_10": "share",
    "severity_error": "levels",
    "delta_cosine": "cosine",
    "delta_magnitude": "ratio, smaller over larger",
}


def score(
    answers: Sequence[Answer],
    truths: Sequence[Diagnosis],
    lengths: Sequence[int],
    *,
    groups: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Scores:
    """Compare answers with the truth, episode by episode.

    Args:
        answers: what was said of each episode.
        truths: what is true of it.
        lengths: its control steps; the worst error of an onset depends on it.
        groups: which episodes are resampled together; each by itself when None.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        ``parsed`` (share of answers that are a diagnosis), ``detection_balanced_accuracy`` (mean
        over failures and successes, where there are both), and over the failures:
        ``type_macro_accuracy`` (mean over the types in the truth), ``subtask_accuracy`` (the same
        words), ``interval_iou``, ``onset_error``, ``onset_within_10``, ``severity_error``,
        ``delta_cosine`` and ``delta_magnitude`` of the delta action in action units, the latter
        the smaller length over the larger one, so that too short and too long do not cancel.

    Raises:
        ValueError: if there are no episodes, or not as many of everything.
    """
    sizes = {len(answers), len(truths), len(lengths), len(groups or answers)}
    if len(sizes) > 1 or not answers:
        raise ValueError(
            f"score: {len(answers)} answers, {len(truths)} truths, {len(lengths)} lengths, "
            f"{len(groups or answers)} groups; as many of each are needed, and at least one"
        )
    weights = _resample(groups or range(len(answers)), resamples, seed)
    failed = np.array([truth.failed for truth in truths])
    read = np.array([isinstance(answer, Diagnosis) for answer in answers], float)
    found = np.array([_detects(a, t) for a, t in zip(answers, truths, strict=True)], float)
    figures = {
        "parsed": _figure(read, weights, unit="share"),
        "detection_balanced_accuracy": _figure(found, weights, failed, unit="balanced accuracy"),
    }
    rows = [
        _failure(answer, truth, length)
        for answer, truth, length in zip(answers, truths, lengths, strict=True)
        if truth.failed
    ]
    if rows:
        weights = weights[:, failed]
        types = np.array([truth.type for truth in truths if truth.failed])
        for name, unit in _FAILURE_UNITS.items():
            values = np.array([row[name] for row in rows])
            classes = types if name == "type_macro_accuracy" else None
            figures[name] = _figure(values, weights, classes, unit=unit)
    return Scores(figures, *_confusion(answers, truths))


def compare(
    answers: Mapping[str, Sequence[Answer]],
    truths: Sequence[Diagnosis],
    lengths: Sequence[int],
    *,
    groups: Sequence[Hashable] | None = None,
) -> dict[str, Figure]:
    """Figures of several answerers on the same episodes, by one measure.

    Args:
        answers: prefix of its figures (``""``, ``"constant_"``, ``"text_only_"``) -> answers.
        truths, lengths, groups: as in :func:`score`.
    """
    return {
        f"{prefix}{name}": figure
        for prefix, said in answers.items()
        for name, figure in score(said, truths, lengths, groups=groups).figures.items()
    }


def _detects(answer: Answer, truth: Diagnosis) -> bool:
    return isinstance(answer, Diagnosis) and answer.failed == truth.failed


def _failure(answer: Answer, truth: Diagnosis, length: int) -> dict[str, float]:
    """How right an answer is about an episode that failed."""
    if not isinstance(answer, Diagnosis) or not answer.failed:
        return {
            "type_macro_accuracy": 0.0,
            "subtask_accuracy": 0.0,
            "interval_iou": 0.0,
            "onset_error": float(max(truth.start, length - 1 - truth.start)),
            "onset_within_10": 0.0,
            "severity_error": float(max(truth.severity - LEVELS[0], LEVELS[-1] - truth.severity)),
            "delta_cosine": -1.0,
            "delta_magnitude": 0.0,
        }
    error = abs(answer.start - truth.start)
    cosine, magnitude = _delta(np.array(answer.delta), np.array(truth.delta))
    return {
        "type_macro_accuracy": float(answer.type == truth.type),
        "subtask_accuracy": float(answer.subtask == truth.subtask),
        "interval_iou": _iou(answer, truth),
        "onset_error": float(error),
        "onset_within_10": float(error <= NEAR),
        "severity_error": float(abs(answer.severity - truth.severity)),
        "delta_cosine": cosine,
        "delta_magnitude": magnitude,
    }


def _iou(a: Diagnosis, b: Diagnosis) -> float:
    """Intersection over union of two intervals of control steps, both ends included."""
    both = min(a.end, b.end) - max(a.start, b.start) + 1
    either = (a.end - a.start + 1) + (b.end - b.start + 1) - max(both, 0)
    return max(both, 0) / either


def _delta(said: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """Cosine and smaller-over-larger length of two delta actions ``[7]``, in action units.

    Where both say to stay, they agree fully; where one does, they have nothing in common.
    """
    said, true = said / ACTION_UNITS, true / ACTION_UNITS
    short, long = sorted((float(np.linalg.norm(said)), float(np.linalg.norm(true))))
    if short == 0.0:
        return (1.0, 1.0) if long == 0.0 else (0.0, 0.0)
    return float(said @ true) / (short * long), short / long


def _resample(groups: Sequence[Hashable], resamples: int, seed: int) -> np.ndarray:
    """How often each episode is drawn in each resample of the groups, ``[R, n]``."""
    names = list(dict.fromkeys(groups))
    index = {name: i for i, name in enumerate(names)}
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=resamples)
    return drawn[:, [index[group] for group in groups]].astype(float)


def _figure(
    values: np.ndarray, weights: np.ndarray, classes: np.ndarray | None = None, *, unit: str
) -> Figure:
    """Mean of ``values`` ``[n]``, or mean over the means in each class, with its interval."""
    if classes is None:
        classes = np.zeros(len(values), int)
    everyone = np.concatenate([np.ones((1, len(values))), weights])
    means = []
    for name in np.unique(classes):
        mine = everyone[:, classes == name]
        with np.errstate(invalid="ignore"):  # a resample without this class says nothing of it
            means.append(mine @ values[classes == name] / mine.sum(axis=1))
    over = np.stack(means)
    known = np.isfinite(over)
    known_any = known.any(axis=0)
    mean = np.where(known, over, 0.0).sum(axis=0)[known_any] / known.sum(axis=0)[known_any]
    low, high = np.percentile(mean[1:], [2.5, 97.5])
    return Figure(float(mean[0]), float(low), float(high), len(values), unit)


def _confusion(
    answers: Sequence[Answer], truths: Sequence[Diagnosis]
) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
    """Rows, columns and counts."""
    true = [truth.type if truth.failed else NONE for truth in truths]
    said = [
        (answer.type if answer.failed else NONE) if isinstance(answer, Diagnosis) else UNPARSEABLE
        for answer in answers
    ]
    types = sorted({*true, *said} - {NONE, UNPARSEABLE})
    rows = tuple(t for t in (*types, NONE) if t in true)
    columns = (*types, NONE, UNPARSEABLE)
    counts = np.zeros((len(rows), len(columns)), np.int64)
    for t, s in zip(true, said, strict=True):
        counts[rows.index(t), columns.index(s)] += 1
    return rows, columns, counts
