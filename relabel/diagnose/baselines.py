"""What one can answer without looking: a diagnosis model has to be clearly better than these.

:func:`constant_answer` knows the training answers alone. The other baseline is a model of the same
architecture that is trained and asked with blank pictures (:attr:`FrameChoice.blank`), and so
knows the instruction and how long the episode was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from regrasp.relabel.diagnose.answer import LEVELS, Diagnosis
from regrasp.relabel.diagnose.metrics import ACTION_UNITS, NEAR


def constant_answer(truths: Sequence[Diagnosis]) -> Diagnosis:
    """The one answer that does best on the failures among ``truths``.

    It always says "failed": the balanced accuracy of detection is 1/2 whatever a constant says,
    and all else is scored on failures. Each field is chosen for its own metric: the commonest
    type, sub-task and words, the median severity and length, the onset with most others near.

    Raises:
        ValueError: if there is no failure among them.
    """
    failures = [truth for truth in truths if truth.failed]
    if not failures:
        raise ValueError("constant_answer: no failure among the truths; at least one is needed")
    starts = np.array([f.start for f in failures])
    candidates = np.unique(starts)
    near = [(np.abs(starts - c) <= NEAR).sum() for c in candidates]
    start = int(candidates[int(np.argmax(near))])
    span = int(np.median([f.end - f.start for f in failures]))
    middle = float(np.median([f.severity for f in failures]))
    severity = min(LEVELS, key=lambda level: abs(level - middle))
    mean = np.mean([np.array(f.delta) / ACTION_UNITS for f in failures], axis=0) * ACTION_UNITS
    fingers = Counter(f.delta[6] for f in failures).most_common(1)[0][0]
    return Diagnosis(
        True,
        Counter(f.type for f in failures).most_common(1)[0][0],
        start,
        start + span,
        Counter(f.subtask for f in failures).most_common(1)[0][0],
        severity,
        Counter(f.why for f in failures).most_common(1)[0][0],
        Counter(f.correction for f in failures).most_common(1)[0][0],
        (*(float(x) for x in mean[:6]), fingers),
    )


def constant_answers(answer: Diagnosis, lengths: Sequence[int]) -> list[Diagnosis]:
    """``answer`` for episodes of these lengths, its interval cut off at their last step."""
    return [
        replace(answer, start=min(answer.start, n - 1), end=min(answer.end, n - 1)) for n in lengths
    ]
