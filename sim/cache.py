"""One environment a worker: built when first needed, freed before the next one is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any


class LastEnv:
    """Keeps the environment that was used last.

    A scene takes seconds to build and hundreds of megabytes to hold, so a worker gets jobs of one
    scene in a row and keeps that scene alone. robosuite's objects refer to each other in circles;
    without an explicit collection the last scenes linger until memory runs out.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._env: Any = None

    def get(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """The environment of ``key``: the kept one, or a new one from ``build``."""
        if self._env is None or key != self._key:
            self.close()
            self._env, self._key = build(), key
        return self._env

    def close(self) -> None:
        """Free the kept environment; safe to call twice."""
        if self._env is not None:
            self._env.close()
            self._env = None
            gc.collect()
