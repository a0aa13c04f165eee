"""What an injected failure is: a perturbation with a severity, a place in the taxonomy, a phase.

An injection is a :class:`regrasp.sim.perturb.Perturbation` (it waits for a trigger, acts on
successive control steps between actor and robot, is undone and recorded) with three more things: a
severity in [0, 1] that scales it, a family in the taxonomy (:mod:`regrasp.sim.failures.taxonomy`),
and the words for what it does. Triggers go by what the actor is doing and by contacts, not by step
counts, so that the same injection means the same in another scene.

Semantic failures are not done to actions but to plans: see :mod:`regrasp.sim.failures.semantic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from regrasp.sim.experts.base import Phase
from regrasp.sim.perturb import TRIGGERS, Perturbation, Scene, Trigger

#: Seconds of a control step.
CONTROL_STEP = 0.05

#: For an injection that lasts until the end.
FOREVER = 1_000_000


@dataclass(frozen=True)
class OnPhase:
    """Once the actor has been in one of ``phases`` for ``after`` control steps in a row."""

    kind: ClassVar[str] = "on_phase"
    phases: tuple[int, ...] = (Phase.CARRY,)
    after: int = 0

    def fires(self, scene: Scene) -> bool:
        """Whether the moment has come."""
        return scene.phase in self.phases and scene.in_phase >= self.after


TRIGGERS[OnPhase.kind] = OnPhase


@dataclass(frozen=True)
class Injection(Perturbation):
    """Base of every injected failure.

    Attributes:
        severity: 0 does nothing, 1 is the most that :attr:`definition` allows.
        family: ``control``, ``physics``, ``semantic`` or ``perception``.
        definition: one plain sentence, with the amount at severity 1.
        steps: control steps it acts on, at severity 1 where the severity is how long it lasts.
    """

    family: ClassVar[str]
    definition: ClassVar[str]
    when: Trigger = field(default_factory=OnPhase)
    steps: int = FOREVER
    severity: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.severity <= 1.0:
            raise ValueError(f"{self.kind}.severity is {self.severity}; 0 to 1 is needed")

    def applies(self, scene: Scene) -> bool:
        """Whether the scene has what it needs: an object, a drawer."""
        return True

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What explanations are made of: ``what`` happened and ``amount``, in plain words."""
        raise NotImplementedError


@dataclass(frozen=True)
class Spell(Injection):
    """Base of what is severe by how long it lasts: ``severity * steps`` control steps."""

    @property
    def duration(self) -> int:
        """Control steps it acts on."""
        return round(self.severity * self.steps)

    def seconds(self) -> str:
        """How long it lasts, in words."""
        return f"{self.duration * CONTROL_STEP:.1f} s"


@dataclass(frozen=True)
class ModelEdit(Injection):
    """Base of what changes the MuJoCo model for as long as it lasts."""

    def write(self, scene: Scene, name: str, index: np.ndarray, value: np.ndarray) -> None:
        """Set ``model.<name>[index]``, a field of :data:`regrasp.sim.snapshot.MODEL_FIELDS`."""
        array = getattr(scene.env.model, name)
        before = scene.memory.get(self, ())
        scene.memory[self] = (*before, (name, index, array[index].copy()))
        array[index] = value

    def end(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Put back what was there."""
        for name, index, value in reversed(scene.memory.pop(self, ())):
            getattr(scene.env.model, name)[index] = value


def unit(rng: np.random.Generator, size: int = 3) -> list[float]:
    """A random direction ``[size]``, JSON-serialisable."""
    direction = rng.normal(size=size)
    return [float(x) for x in direction / np.linalg.norm(direction)]
