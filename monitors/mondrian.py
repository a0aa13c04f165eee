"""A threshold for each task: the promise then holds in each by itself, not only on average.

A pooled threshold keeps alpha over the calibration's mixture of tasks: an easy task may never
alarm and a hard one three times as often. Within a group the calibration episodes are
exchangeable with a new one of that group, so each group's own conformal threshold keeps alpha
there (Mondrian conformal prediction; Vovk et al., 2005). A group with too few episodes to promise
alpha, or one never seen, gets the pooled threshold, and with it only the promise on average.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from regrasp.monitors.conformal import conformal_rank, conformal_threshold
from regrasp.monitors.thresholds import Constant, Grouped


class PooledGroupsWarning(UserWarning):
    """Some groups have too few episodes for a threshold of their own."""


def calibrate_groups(maxima: Mapping[str, np.ndarray], alpha: float) -> Grouped:
    """Thresholds from the successes of each group.

    Args:
        maxima: group -> float ``[n_g]``, the largest score of each successful episode.
        alpha: bound on P(any alarm | success) in each group.

    Raises:
        ValueError: without any group.
    """
    if not maxima:
        raise ValueError("calibrate_groups: no groups; give at least one")
    pooled = np.concatenate([np.asarray(m, dtype=np.float64) for m in maxima.values()])
    fallback = Constant(conformal_threshold(pooled, alpha), alpha, len(pooled))
    groups, few = {}, []
    for name, values in maxima.items():
        if len(values) and conformal_rank(len(values), alpha) <= len(values):
            groups[name] = Constant(conformal_threshold(values, alpha), alpha, len(values))
        else:
            few.append(f"{name} ({len(values)})")
    if few:
        warnings.warn(
            f"too few successes to promise alpha = {alpha:g} in {', '.join(sorted(few))}: these "
            "groups share the pooled threshold, whose promise holds on average over tasks only",
            PooledGroupsWarning,
            stacklevel=2,
        )
    return Grouped(groups, fallback)
