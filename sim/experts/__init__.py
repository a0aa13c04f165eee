"""Scripted experts that solve LIBERO tasks from privileged state through ordinary actions."""

from regrasp.sim.experts.base import Expert, Phase
from regrasp.sim.experts.collect import (
    Disturbance,
    NoiseConfig,
    alternative_goals,
    rollout_expert,
)
from regrasp.sim.experts.tasks import make_expert

__all__ = [
    "Disturbance",
    "Expert",
    "NoiseConfig",
    "Phase",
    "alternative_goals",
    "make_expert",
    "rollout_expert",
]
