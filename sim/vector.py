"""Many environments in worker processes, with observations in shared memory and a watchdog.

There is no automatic reset: which episode runs where is the caller's choice (:class:`Start`), so
that no initial state is skipped because of how the episode before it ended (lerobot#4152). Every
call has a time limit. A worker that dies or hangs is replaced, its episode is reported as lost, and
the other workers' episodes go on.
"""

from __future__ import annotations

import collections
import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Literal

import numpy as np
from regrasp.sim.env import ChunkResult
from regrasp.sim.snapshot import Snapshot
from regrasp.sim.workers import Worker

#: key -> (shape, dtype name) of one observation.
Layout = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Start:
    """Which episode to run.

    Attributes:
        task: the factory's arguments, (suite, task) for :func:`regrasp.sim.make_env`.
        init_state: index of the initial state.
        seed: as in the environment's ``reset``.
        render: whether the first observation has pictures.
    """

    task: tuple[Any, ...]
    init_state: int = 0
    seed: int | None = None
    render: bool = True


@dataclass(frozen=True)
class Outcome:
    """What one environment answered.

    Attributes:
        start: the episode it belongs to.
        observation: the newest observation, as copies; without pictures where none were asked for.
        info: the environment's info after a reset, else empty.
        chunk: what happened in ``step_chunk``; None after a reset.
        lost: None, or how the worker ended: the episode is gone, and its index must be reset.
    """

    start: Start
    observation: dict[str, np.ndarray]
    info: dict[str, Any]
    chunk: ChunkResult | None = None
    lost: str | None = None


@dataclass
class _Seat:
    worker: Worker
    start: Start | None = None
    episodes: int = 0
    buffer: str | None = None  # name of the shared memory that the worker writes to


class VectorEnv:
    """``count`` environments, each in a process of its own.

    Args:
        factory: picklable; ``factory(*start.task)`` builds an environment with the interface of
            :class:`regrasp.sim.LiberoEnv` (``reset``, ``step_chunk``, ``observation_space``,
            ``snapshot``, ``restore``, ``close``). It is called in the worker, so that no OpenGL
            context exists before. All its environments have the same observation space.
        count: how many.
        step_timeout_s: seconds for a chunk, snapshot or restore.
        reset_timeout_s: seconds for building an environment, and again for its reset.
        recycle_after: episodes after which a worker is renewed, before simulators leak.
        keep: built environments a worker keeps; the least recently used is closed.
        max_chunk: longest chunk that may be rendered at every step.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        count: int,
        *,
        step_timeout_s: float = 60.0,
        reset_timeout_s: float = 180.0,
        recycle_after: int = 50,
        keep: int = 2,
        max_chunk: int = 16,
    ) -> None:
        if count < 1 or keep < 1 or recycle_after < 1:
            raise ValueError(
                f"VectorEnv: count={count}, keep={keep}, recycle_after={recycle_after}; "
                "all must be at least 1"
            )
        self._factory, self._keep, self._max_chunk = factory, keep, max_chunk
        self._step_timeout_s, self._reset_timeout_s = step_timeout_s, reset_timeout_s
        self._recycle_after = recycle_after
        self._memory: SharedMemory | None = None
        self._layout: Layout = {}
        self._arrays: dict[str, np.ndarray] = {}
        self.replaced = 0
        self._closed = False
        self._seats: list[_Seat] = []
        try:
            for index in range(count):
                self._seats.append(_Seat(self._hire(index)))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._seats)

    def reset(self, starts: Mapping[int, Start]) -> dict[int, Outcome]:
        """Start episodes on some of the environments; the others keep theirs.

        A worker that dies or hangs here is replaced and tried once more; then the episode is lost.

        Raises:
            RuntimeError: the environment raised; the message has its traceback.
            ValueError: the observation space differs from the other environments'.
        """
        self._check(starts)
        outcomes = self._try_reset(starts)
        again = {index: starts[index] for index, outcome in outcomes.items() if outcome.lost}
        return {**outcomes, **(self._try_reset(again) if again else {})}

    def _try_reset(self, starts: Mapping[int, Start]) -> dict[int, Outcome]:
        for index in starts:
            seat = self._seats[index]
            if seat.episodes >= self._recycle_after:
                seat.worker.stop()
                self._seats[index] = seat = _Seat(self._hire(index))
            seat.start = None  # until it has really begun
            seat.episodes += 1
        built = self._ask(
            {index: ("build", start.task) for index, start in starts.items()}, self._reset_timeout_s
        )
        for answer in built.values():
            if not isinstance(answer, str):
                self._allocate(answer[0])
        ready = [index for index, answer in built.items() if not isinstance(answer, str)]
        requests = {}
        for index in ready:
            seat, start = self._seats[index], starts[index]
            options = {"init_state": start.init_state, "render": start.render}
            requests[index] = ("reset", start.seed, options, self._attachment(seat))
        answers = {**built, **self._ask(requests, self._reset_timeout_s)}
        outcomes = {}
        for index, answer in answers.items():
            if isinstance(answer, str):
                outcomes[index] = Outcome(starts[index], {}, {}, lost=answer)
            else:
                keys, info = answer
                self._seats[index].start = starts[index]
                outcomes[index] = Outcome(starts[index], self._copy(index, keys, 0), info)
        return outcomes

    def step_chunk(
        self,
        actions: Mapping[int, np.ndarray],
        render: Literal["last", "all", "none"] = "last",
    ) -> dict[int, Outcome]:
        """Execute an action chunk ``[h, A]`` on some of the environments, at the same time.

        Raises:
            RuntimeError: an index without a running episode, or the environment raised.
            ValueError: a chunk that is not ``[h, A]`` or has numbers that are not finite, or one
                longer than ``max_chunk`` with ``render="all"``.
        """
        self._check(actions)
        requests, starts = {}, {}
        for index, chunk in actions.items():
            starts[index] = self._running(index)
            chunk = np.asarray(chunk, np.float64)
            if chunk.ndim != 2 or len(chunk) == 0 or not np.isfinite(chunk).all():
                raise ValueError(
                    f"step_chunk: actions of index {index} have shape {chunk.shape}; "
                    "[h, A] of finite numbers, h >= 1, is needed"
                )
            if render == "all" and len(chunk) > self._max_chunk:
                raise ValueError(
                    f"step_chunk: {len(chunk)} actions with render='all'; max_chunk is "
                    f"{self._max_chunk}"
                )
            requests[index] = ("step", chunk, render)
        outcomes = {}
        for index, answer in self._ask(requests, self._step_timeout_s).items():
            start = starts[index]
            if isinstance(answer, str):
                outcomes[index] = Outcome(start, {}, {}, lost=answer)
                self._seats[index].start = None
                continue
            keys, chunk = answer
            count = len(keys)
            pictures = [self._copy(index, keys[k], count - 1 - k) for k in range(count)]
            latest = pictures[-1] if pictures else {"state": chunk.states[-1]}
            outcomes[index] = Outcome(start, latest, {}, replace(chunk, observations=pictures))
        return outcomes

    def snapshot(self, indices: Iterable[int]) -> dict[int, Snapshot]:
        """The exact states of running episodes, by index.

        Raises:
            RuntimeError: a worker was lost; the message says how.
        """
        return self._all({index: ("snapshot",) for index in indices})

    def restore(self, snapshots: Mapping[int, Snapshot]) -> None:
        """Return to snapshots of the same tasks, taken from whichever index or process.

        Raises:
            RuntimeError: a worker was lost; the message says how.
        """
        self._all({index: ("restore", snapshot) for index, snapshot in snapshots.items()})

    def _all(self, requests: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        self._check(requests)
        for index in requests:
            self._running(index)
        answers = self._ask(requests, self._step_timeout_s)
        lost = {index: answer for index, answer in answers.items() if isinstance(answer, str)}
        for index in lost:
            self._seats[index].start = None
        if lost:
            raise RuntimeError(f"VectorEnv: lost episodes {lost}; reset them")
        return {index: answer[0] for index, answer in answers.items()}

    def latest(self) -> dict[str, np.ndarray]:
        """The newest observation of every environment, key -> ``[count, ...]``, without a copy.

        The arrays are the shared memory itself: the next call overwrites them. Rows of environments
        that were last asked for no picture hold an older one.
        """
        return {key: array[:, 0] for key, array in self._arrays.items()}

    def close(self) -> None:
        """End the workers and free the shared memory; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for seat in self._seats:
            seat.worker.connection.close()
        for seat in self._seats:
            seat.worker.stop()
        self._arrays = {}
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # the caller still holds arrays of `latest`
                self._memory.close()
            self._memory.unlink()
            self._memory = None

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hire(self, index: int) -> Worker:
        return Worker(_serve_env, (index, self._factory, self._keep))

    def _check(self, indices: Iterable[int]) -> None:
        if self._closed:
            raise RuntimeError("VectorEnv: it is closed")
        wrong = [index for index in indices if not 0 <= index < len(self._seats)]
        if wrong:
            raise IndexError(f"VectorEnv: no environments {wrong}; there are {len(self._seats)}")

    def _running(self, index: int) -> Start:
        start = self._seats[index].start
        if start is None:
            raise RuntimeError(f"VectorEnv: environment {index} has no episode; reset it first")
        return start

    def _ask(self, requests: Mapping[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]:
        """Send each request; index -> its answer (a tuple), or the way the worker ended (a str)."""
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {}
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for index, request in requests.items():
            connection = self._seats[index].worker.connection
            try:
                connection.send(request)
                waiting[connection] = index
            except (BrokenPipeError, ConnectionResetError):
                answers[index] = self._replace(index, None)
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                index = waiting.pop(connection)
                try:
                    kind, *answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    answers[index] = self._replace(index, None)
                    continue
                if kind == "error":
                    errors[index] = answer[0]
                answers[index] = tuple(answer)
            if not ready:
                for index in waiting.values():
                    answers[index] = self._replace(index, f"no answer within {timeout_s:g} s")
                break
        if errors:
            details = "\n".join(f"environment {i}: {text}" for i, text in sorted(errors.items()))
            raise RuntimeError(f"VectorEnv: an environment raised\n{details}")
        return {index: answers[index] for index in requests}

    def _replace(self, index: int, reason: str | None) -> str:
        worker = self._seats[index].worker
        reason = reason or worker.cause_of_death()
        worker.kill()
        self._seats[index] = _Seat(self._hire(index), self._seats[index].start)
        self.replaced += 1
        return reason

    def _allocate(self, layout: Layout) -> None:
        if self._memory is not None:
            if layout != self._layout:
                raise ValueError(
                    f"VectorEnv: this environment observes {layout}, the others {self._layout}"
                )
            return
        self._layout = layout
        size = _total_size(layout, len(self._seats), self._max_chunk)
        self._memory = SharedMemory(create=True, size=size)
        self._arrays = _view(self._memory, layout, len(self._seats), self._max_chunk)

    def _attachment(self, seat: _Seat) -> tuple[Any, ...] | None:
        if self._memory is None or seat.buffer == self._memory.name:
            return None
        seat.buffer = self._memory.name
        return (self._memory.name, self._layout, len(self._seats), self._max_chunk)

    def _copy(self, index: int, keys: Iterable[str], slot: int) -> dict[str, np.ndarray]:
        return {key: self._arrays[key][index, slot].copy() for key in keys}


def _total_size(layout: Layout, count: int, slots: int) -> int:
    return sum(
        count * slots * int(np.prod(shape)) * np.dtype(dtype).itemsize + 64
        for shape, dtype in layout.values()
    )


def _view(memory: SharedMemory, layout: Layout, count: int, slots: int) -> dict[str, np.ndarray]:
    """key -> ``[count, slots, ...]``; slot 0 is the newest observation."""
    arrays: dict[str, np.ndarray] = {}
    offset = 0
    for key, (shape, dtype) in layout.items():
        offset += -offset % 64
        full = (count, slots, *shape)
        arrays[key] = np.ndarray(full, dtype, memory.buf, offset)
        offset += arrays[key].nbytes
    return arrays


def _serve_env(connection: Connection, index: int, factory: Callable[..., Any], keep: int) -> None:
    """A worker's loop: one answer a request, until the pipe closes."""
    built: collections.OrderedDict[tuple[Any, ...], Any] = collections.OrderedDict()
    memory: SharedMemory | None = None
    arrays: dict[str, np.ndarray] = {}
    env: Any = None
    reply: tuple[Any, ...]

    def write(observations: list[dict[str, np.ndarray]]) -> list[list[str]]:
        for k, observation in enumerate(observations):
            for key, value in observation.items():
                arrays[key][index, len(observations) - 1 - k] = value
        return [list(observation) for observation in observations]

    try:
        while True:
            verb, *arguments = connection.recv()
            try:
                if verb == "build":
                    task = arguments[0]
                    if task not in built:
                        while len(built) >= keep:
                            built.popitem(last=False)[1].close()
                        built[task] = factory(*task)
                    built.move_to_end(task)
                    env = built[task]
                    spaces = env.observation_space.spaces
                    layout = {k: (tuple(s.shape), str(s.dtype)) for k, s in spaces.items()}
                    reply = ("built", layout)
                elif verb == "reset":
                    seed, options, attachment = arguments
                    if attachment is not None:
                        name, layout, count, slots = attachment
                        memory = SharedMemory(name)
                        arrays = _view(memory, layout, count, slots)
                    observation, info = env.reset(seed=seed, options=options)
                    reply = ("reset", write([observation])[0], info)
                elif verb == "step":
                    chunk = env.step_chunk(*arguments)
                    keys = write(chunk.observations)
                    reply = ("stepped", keys, replace(chunk, observations=[]))
                elif verb == "snapshot":
                    reply = ("snapshot", env.snapshot())
                elif verb == "restore":
                    env.restore(arguments[0])
                    reply = ("restored", None)
                else:
                    raise ValueError(f"unknown request {verb!r}")
            except Exception:
                reply = ("error", traceback.format_exc())
            connection.send(reply)
    finally:
        for open_env in built.values():
            open_env.close()
        arrays.clear()
        if memory is not None:
            memory.close()
