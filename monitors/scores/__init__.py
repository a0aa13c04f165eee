"""Failure scores, one file each; :data:`SCORES` is what an artifact may name."""

from __future__ import annotations

from regrasp.monitors.base import Score
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.tide import Tide

#: Name -> score.
SCORES: dict[str, type[Score]] = {"clock": Clock, "rnd_oe": RndOe, "tide": Tide}
