"""Does a recovery help? Two arms on the same episodes, compared pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from regrasp.episodes.results import wilson


@dataclass(frozen=True)
class Paired:
    """A 2 x 2 table of paired outcomes.

    Attributes:
        both: episodes that succeed in both arms.
        rescued: fail in the base arm, succeed in the treated one.
        harmed: succeed in the base arm, fail in the treated one.
        neither: fail in both.
    """

    both: int
    rescued: int
    harmed: int
    neither: int

    @classmethod
    def count(cls, base: Sequence[bool], treated: Sequence[bool]) -> Paired:
        """Count pairs; episode i of one arm is episode i of the other."""
        b, t = np.asarray(base, dtype=bool), np.asarray(treated, dtype=bool)
        if b.shape != t.shape or b.ndim != 1 or not len(b):
            raise ValueError(f"Paired.count: base {b.shape} and treated {t.shape}; give the same n")
        return cls(
            int((b & t).sum()), int((~b & t).sum()), int((b & ~t).sum()), int((~b & ~t).sum())
        )

    @property
    def n(self) -> int:
        """Pairs."""
        return self.both + self.rescued + self.harmed + self.neither

    @property
    def difference(self) -> float:
        """Success of the treated arm less that of the base arm."""
        return (self.rescued - self.harmed) / self.n

    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference: Newcombe's method 10 (Statist. Med. 17, 1998).

        Wilson limits of both rates, combined with their correlation phi; unlike the bootstrap it
        keeps a width when no pair is harmed.
        """
        e, f, g, h = self.both, self.rescued, self.harmed, self.neither
        n = self.n
        p_treated, p_base = (e + f) / n, (e + g) / n
        l1, u1 = wilson(e + f, n)
        l2, u2 = wilson(e + g, n)
        product = (e + f) * (g + h) * (e + g) * (f + h)
        cross = e * h - f * g
        if product == 0:
            phi = 0.0
        elif cross > n / 2:
            phi = (cross - n / 2) / math.sqrt(product)
        else:
            phi = 0.0 if cross >= 0 else cross / math.sqrt(product)
        low = math.sqrt(
            (p_treated - l1) ** 2 - 2 * phi * (p_treated - l1) * (u2 - p_base) + (u2 - p_base) ** 2
        )
        high = math.sqrt(
            (p_base - l2) ** 2 - 2 * phi * (p_base - l2) * (u1 - p_treated) + (u1 - p_treated) ** 2
        )
        return self.difference - low, self.difference + high

    def p_value(self) -> float:
        """Exact two-sided McNemar test: 1.0 where no pair is discordant."""
        discordant = self.rescued + self.harmed
        few = min(self.rescued, self.harmed)
        tail = sum(math.comb(discordant, k) for k in range(few + 1)) / 2**discordant
        return min(1.0, 2.0 * tail)
