"""Alpha spent over the segments of an episode that recoveries restart.

Each recovery starts the monitor anew, and each start is one more chance of a false alarm: R
segments at alpha each may alarm falsely R alpha of the time. Segment r is given alpha_r with
sum_r alpha_r = alpha, so that by the union bound

    P(any false alarm in any segment) <= alpha,

as far as segment r is exchangeable with the episodes that calibrated it. A segment after a rewind
starts elsewhere than an episode does: calibrate it on such segments where there are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from regrasp.monitors.conformal import conformal_threshold
from regrasp.monitors.thresholds import Constant, Segmented


def spend(alpha: float, segments: int, decay: float = 1.0) -> np.ndarray:
    """alpha_r for each segment, float ``[segments]``, proportional to ``decay ** r``.

    With 1 all segments get the same; with 0.5 the first gets about half of it all, as fits a robot
    that rarely needs a second recovery.
    """
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"spend: alpha is {alpha}; it must lie strictly between 0 and 1")
    if segments < 1 or not 0.0 < decay <= 1.0:
        raise ValueError(
            f"spend: segments is {segments} and decay {decay}; give at least 1, and 0 < decay <= 1"
        )
    shares = float(decay) ** np.arange(segments)
    return alpha * shares / shares.sum()


def calibrate_segments(maxima: Sequence[np.ndarray], alpha: float, decay: float = 1.0) -> Segmented:
    """A threshold for each segment.

    Args:
        maxima: for each segment, float ``[n_r]``: the largest score of each successful calibration
            segment of that kind; give the same array again where only whole episodes are at hand.
        alpha: bound over all segments together.
        decay: see :func:`spend`.
    """
    alphas = spend(alpha, len(maxima), decay)
    return Segmented(
        [
            Constant(conformal_threshold(values, float(share)), float(share), len(values))
            for values, share in zip(maxima, alphas, strict=True)
        ]
    )
