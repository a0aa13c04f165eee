"""Failure scores, one file each; :data:`SCORES` is what an artifact may name."""

from __future__ import annotations

from regrasp.monitors.base import Score
from regrasp.monitors.scores.ace import Ace
from regrasp.monitors.scores.clock import Clock
from regrasp.monitors.scores.combined import Combined
from regrasp.monitors.scores.hide_and_seek import HideAndSeek
from regrasp.monitors.scores.knn import Knn
from regrasp.monitors.scores.logpzo import LogpZo
from regrasp.monitors.scores.mahalanobis import Mahalanobis
from regrasp.monitors.scores.onset import Onset
from regrasp.monitors.scores.reversal import Reversal
from regrasp.monitors.scores.rnd_oe import RndOe
from regrasp.monitors.scores.safe import SafeLstm, SafeMlp
from regrasp.monitors.scores.spread import FlowSpread
from regrasp.monitors.scores.stac import StacKl, StacMmd
from regrasp.monitors.scores.tide import Tide

#: Name -> score.
SCORES: dict[str, type[Score]] = {
    "ace": Ace,
    "clock": Clock,
    "combined": Combined,
    "hide_and_seek": HideAndSeek,
    "knn": Knn,
    "logpzo": LogpZo,
    "mahalanobis": Mahalanobis,
    "onset": Onset,
    "reversal": Reversal,
    "rnd_oe": RndOe,
    "safe_lstm": SafeLstm,
    "safe_mlp": SafeMlp,
    "spread": FlowSpread,
    "stac": StacMmd,
    "stac_kl": StacKl,
    "tide": Tide,
}
