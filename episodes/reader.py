"""Random training windows out of an episode store, fast enough that training never waits.

No torch here: a batch is a dict of NumPy arrays, pictures as uint8 ``[..., H, W, 3]``, to be
normalised and transposed where the training runs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .store import EpisodeStore
from .types import EpisodeHeader

#: Arrays with smaller rows than this are always held in memory: 250,000 steps of them are at most
#: 256 MB, and one read from disk costs more than the row is worth.
SMALL_ROW_BYTES = 1024

RESERVED = ("mask", "episode", "step")


class WindowReader:
    """Windows of a store: observations up to step t, and the actions from step t on.

    A window begins at every step of every chosen episode, so a uniform draw over windows is one
    over control steps. Near its ends an episode is padded: observations before its first step
    repeat that step, actions behind its last step repeat that action, and ``mask`` says which
    actions are real.

    Attributes:
        headers: headers of the chosen episodes; ``batch["episode"]`` indexes them.
        episodes: their indices in the store, int64.
        observation_keys: step arrays read at t - history + 1 .. t.
        action_keys: step arrays read at t .. t + horizon - 1.
    """

    def __init__(
        self,
        store: EpisodeStore,
        *,
        horizon: int,
        history: int = 1,
        observation_keys: Sequence[str] | None = None,
        action_keys: Sequence[str] = ("action",),
        episodes: Sequence[int] | Callable[[EpisodeHeader], bool] | None = None,
        in_memory: bool = False,
        threads: int = 1,
    ):
        """Prepare to read the episodes the store shows now.

        Args:
            store: where from.
            horizon: actions in a window (H).
            history: observations in a window.
            observation_keys: default: every ``image/...`` and ``state``.
            action_keys: arrays cut into chunks of ``horizon``.
            episodes: indices into the store, or a predicate on headers; default: all.
            in_memory: hold decompressed pictures in memory (98 kB a step for two 128x128 cameras);
                otherwise they are read and decompressed for each batch.
            threads: threads that load and decompress.

        Raises:
            ValueError: for a horizon or history below 1, no episodes, or a reserved key name.
            KeyError: for a key the store does not have.
        """
        if horizon < 1 or history < 1:
            raise ValueError(
                f"WindowReader: horizon={horizon}, history={history}; both must be >= 1"
            )
        if episodes is None:
            chosen = list(range(len(store)))
        elif callable(episodes):
            chosen = [i for i, header in enumerate(store.headers) if episodes(header)]
        else:
            chosen = [int(i) for i in episodes]
        if not chosen:
            raise ValueError(f"WindowReader: none of the {len(store)} episodes was chosen")
        if observation_keys is None:
            observation_keys = [k for k in store.steps if k.startswith("image/") or k == "state"]
        keys = [*observation_keys, *action_keys]
        for key in keys:
            if key not in store.steps:
                raise KeyError(f"no step array {key!r}; the store has {sorted(store.steps)}")
            if key in RESERVED:
                raise ValueError(f"WindowReader: key {key!r} is taken by the reader's own output")
        self.observation_keys = tuple(observation_keys)
        self.action_keys = tuple(action_keys)
        self.horizon, self.history = horizon, history
        self.episodes = np.array(chosen, np.int64)
        self.headers = [store.headers[i] for i in chosen]
        bounds = np.array([store.bounds(i) for i in chosen], np.int64)
        self._ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
        self._starts = self._ends - (bounds[:, 1] - bounds[:, 0])
        self._shift = bounds[:, 0] - self._starts  # from our rows to the store's
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._threads = threads
        self._arrays = {key: store.steps[key] for key in dict.fromkeys(keys)}
        self._memory: dict[str, np.ndarray] = {}
        for key, array in self._arrays.items():
            row_bytes = array.dtype.itemsize * int(np.prod(array.row_shape))
            if in_memory or row_bytes <= SMALL_ROW_BYTES:
                self._memory[key] = self._load(key, bounds)

    def __len__(self) -> int:
        """Number of windows, which is the number of control steps of the chosen episodes."""
        return int(self._ends[-1])

    def sample(self, batch_size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw windows uniformly with replacement; see :meth:`gather` for what comes back."""
        return self.gather(rng.integers(len(self), size=batch_size))

    def gather(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        """The windows with these indices, ``[B]``, each in ``0 .. len(self) - 1``.

        Returns:
            each observation key ``[B, history, ...]``, newest last; each action key
            ``[B, horizon, ...]``; ``mask`` bool ``[B, horizon]``, False where an action is padding;
            ``episode`` int64 ``[B]``, into :attr:`headers`; ``step`` int64 ``[B]``, the control
            step t within the episode.

        Raises:
            IndexError: for an index out of range.
        """
        windows = np.asarray(windows, np.int64)
        if windows.size and not 0 <= windows.min() <= windows.max() < len(self):
            raise IndexError(
                f"windows {windows.min()}..{windows.max()}; there are {len(self)} from 0"
            )
        episode = np.searchsorted(self._ends, windows, side="right")
        start, end = self._starts[episode, None], self._ends[episode, None]
        ahead = windows[:, None] + np.arange(self.horizon)
        actions = np.minimum(ahead, end - 1)
        observations = np.maximum(windows[:, None] + np.arange(1 - self.history, 1), start)
        shift = self._shift[episode, None]
        batch = {k: self._read(k, observations, shift) for k in self.observation_keys}
        batch |= {k: self._read(k, actions, shift) for k in self.action_keys}
        return batch | {"mask": ahead < end, "episode": episode, "step": windows - start[:, 0]}

    def batches(
        self, batch_size: int, seed: int, *, start: int = 0, depth: int = 4, workers: int = 1
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Endless batches, prepared ahead by threads.

        Batch k depends on ``(seed, k)`` alone: training resumed at ``start=k`` sees what it would
        have seen without the break.

        Args:
            batch_size: windows in a batch.
            seed: of the draw.
            start: index of the first batch.
            depth: batches prepared ahead.
            workers: threads that prepare them.
        """
        with ThreadPoolExecutor(workers) as pool:
            ahead = deque(
                pool.submit(self._batch, batch_size, seed, k) for k in range(start, start + depth)
            )
            for k in itertools.count(start + depth):
                batch = ahead.popleft().result()
                ahead.append(pool.submit(self._batch, batch_size, seed, k))
                yield batch

    def _batch(self, batch_size: int, seed: int, k: int) -> dict[str, np.ndarray]:
        return self.sample(batch_size, np.random.default_rng((seed, k)))

    def _load(self, key: str, bounds: np.ndarray) -> np.ndarray:
        """All rows of the chosen episodes, one after another."""
        array = self._arrays[key]
        rows = np.empty((len(self), *array.row_shape), array.dtype)

        def load(i: int) -> None:
            rows[self._starts[i] : self._ends[i]] = array.read(int(bounds[i, 0]), int(bounds[i, 1]))

        for _ in (self._pool.map if self._pool else map)(load, range(len(bounds))):
            pass
        return rows

    def _read(self, key: str, rows: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Rows ``[B, n]`` of one array, from memory or from disk, ``[B, n, ...]``."""
        if key in self._memory:
            return np.take(self._memory[key], rows, axis=0)
        array, rows = self._arrays[key], rows + shift
        if self._pool is None:
            return array.gather(rows)
        out = np.empty((*rows.shape, *array.row_shape), array.dtype)
        parts = np.array_split(np.arange(len(rows)), self._threads)
        jobs = [
            self._pool.submit(array.gather, rows[p[0] : p[-1] + 1], out[p[0] : p[-1] + 1])
            for p in parts
            if len(p)
        ]
        for job in jobs:
            job.result()
        return out
