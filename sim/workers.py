"""Worker processes for simulation: a work queue that survives crashes, hangs and leaks.

Simulators die in ways that no ``except`` sees: a driver aborts after some episodes, a renderer
hangs, memory grows until the kernel kills the process. So work runs in spawned processes (an
OpenGL context does not survive a fork) which are watched, replaced and renewed. Both
:func:`run_episodes` and :class:`regrasp.sim.vector.VectorEnv` stand on :class:`Worker`.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

#: Workers share the cores among themselves; threads inside each would only contend.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LP_NUM_THREADS": "1",
}

#: Seconds a worker gets to leave by itself before it is killed.
_GRACE_S = 5.0

#: Seconds a worker may take to start, before its first job.
_START_S = 120.0

#: Workers that fail one after another before their first job: the set-up is at fault, not a job.
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True)
class EpisodeError:
    """A job that gave no result.

    Attributes:
        kind: ``exception`` (the function raised), ``died`` (its worker ended) or ``timeout``.
        reason: the traceback, how the worker ended, or how long was waited.
        attempts: how often it was tried.
    """

    kind: Literal["exception", "died", "timeout"]
    reason: str
    attempts: int


def run_episodes[Job, Result](
    jobs: Sequence[Job],
    function: Callable[[Job], Result],
    *,
    workers: int,
    timeout_s: float,
    recycle_after: int = 50,
    affinity: Callable[[Job], Hashable] | None = None,
) -> Iterator[tuple[int, Result | EpisodeError]]:
    """Run ``function`` on every job in spawned processes; yield results as they finish.

    Each job gives exactly one pair. Jobs are handed out in order, whatever the number of workers;
    a job that draws random numbers seeds them itself, so its result does not depend on which worker
    ran what before. Closing the iterator stops the workers.

    Args:
        jobs: picklable descriptions of the work.
        function: a picklable (module-level) function of one job. It may keep environments in
            module globals between jobs. An exception is reported, not retried.
        workers: how many processes.
        timeout_s: seconds a job may take, building its environment included. A job whose worker
            hangs or dies is retried once, in a new worker.
        recycle_after: jobs after which a worker is renewed, before simulators leak.
        affinity: key of a job (its task, say). A free worker takes the first job with the key that
            it had last, then one whose key no other worker has, so that fewer environments are
            built. Only the order of the work changes.

    Yields:
        (index into ``jobs``, result or :class:`EpisodeError`).

    Raises:
        ValueError: nonsensical arguments, or a function that cannot be sent to a process.
        RuntimeError: three workers in a row died before they took a job.
    """
    if workers < 1 or timeout_s <= 0 or recycle_after < 1:
        raise ValueError(
            f"run_episodes: workers={workers}, timeout_s={timeout_s}, "
            f"recycle_after={recycle_after}; all must be positive"
        )
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"run_episodes: {function!r} cannot be sent to a process; give a module-level function"
        ) from error
    return _run(jobs, function, workers, timeout_s, recycle_after, affinity)


def _run[Job, Result](
    jobs: Sequence[Job],
    function: Callable[[Job], Result],
    workers: int,
    timeout_s: float,
    recycle_after: int,
    affinity: Callable[[Job], Hashable] | None,
) -> Iterator[tuple[int, Result | EpisodeError]]:
    pending = list(range(len(jobs)))
    keys = [affinity(job) if affinity else None for job in jobs]
    attempts = [0] * len(jobs)
    failed_starts = 0
    pool: list[_Slot] = []
    try:
        while pending or any(slot.job is not None for slot in pool):
            while pending and len(pool) < min(workers, _busy(pool) + len(pending)):
                pool.append(_Slot(Worker(_serve_jobs, (function,))))
            _wait(pool)
            for slot in list(pool):
                message, failure = slot.poll()
                if failure:
                    pool.remove(slot)
                    slot.worker.kill()
                    kind, reason = failure
                    if slot.job is None:
                        failed_starts += not slot.ready
                        if failed_starts >= _MAX_FAILED_STARTS:
                            raise RuntimeError(
                                f"run_episodes: {failed_starts} workers in a row failed to start; "
                                f"the last one: {reason}"
                            )
                    elif attempts[slot.job] < 2:
                        pending.insert(0, slot.job)
                    else:
                        yield slot.job, EpisodeError(kind, reason, attempts[slot.job])
                    continue
                if message is None:
                    continue
                if message[0] == "ready":
                    slot.ready, failed_starts = True, 0
                elif slot.job is not None:
                    index, slot.job = slot.job, None
                    slot.done += 1
                    if message[0] == "ok":
                        yield index, message[1]
                    else:
                        yield index, EpisodeError("exception", message[1], attempts[index])
                if slot.done >= recycle_after or not pending:
                    pool.remove(slot)
                    slot.worker.stop()
                    continue
                others = {s.key for s in pool if s is not slot}
                index = _choose(pending, keys, slot.key, others) if affinity else pending[0]
                pending.remove(index)
                attempts[index] += 1
                slot.give(index, keys[index], jobs[index], timeout_s)
    finally:
        for slot in pool:
            slot.worker.kill() if slot.job is not None else slot.worker.stop()


def _busy(pool: list[_Slot]) -> int:
    return sum(slot.job is not None for slot in pool)


def _choose(pending: list[int], keys: list[Hashable], own: Hashable, others: set[Hashable]) -> int:
    """The first pending job with the worker's own key, else with nobody's, else the first."""
    free = None
    for index in pending:
        if keys[index] == own:
            return index
        if free is None and keys[index] not in others:
            free = index
    return pending[0] if free is None else free


def _wait(pool: list[_Slot]) -> None:
    """Sleep until a worker says something, ends, or is late."""
    left = max(0.0, min(slot.deadline for slot in pool) - time.monotonic())
    wait([x for slot in pool for x in (slot.worker.connection, slot.worker.process.sentinel)], left)


class _Slot:
    """A worker, the job that it has, and until when."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.ready, self.done = worker, False, 0
        self.job: int | None = None
        self.key: Hashable = None
        self.timeout_s = _START_S
        self.deadline = time.monotonic() + _START_S

    def give(self, index: int, key: Hashable, job: Any, timeout_s: float) -> None:
        self.job, self.key, self.timeout_s = index, key, timeout_s
        self.deadline = time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError):  # its death is noticed by the next poll
            self.worker.connection.send(job)

    def poll(self) -> tuple[Any, tuple[Literal["died", "timeout"], str] | None]:
        """(message or None, failure or None)."""
        try:
            if self.worker.connection.poll():
                return self.worker.connection.recv(), None
        except (EOFError, ConnectionResetError):
            return None, ("died", self.worker.cause_of_death())
        if not self.worker.process.is_alive():
            return None, ("died", self.worker.cause_of_death())
        if time.monotonic() >= self.deadline:
            return None, ("timeout", f"no answer within {self.timeout_s:g} s")
        return None, None


def _serve_jobs(connection: Connection, function: Callable[[Any], Any]) -> None:
    connection.send(("ready",))
    while True:
        job = connection.recv()
        try:
            reply = ("ok", function(job))
            connection.send(reply)
        except BrokenPipeError:
            raise
        except Exception:
            connection.send(("error", traceback.format_exc()))


class Worker:
    """A spawned process and the pipe to it.

    The process ignores Ctrl-C (its owner decides), uses one thread, draws with the backend of
    :func:`gl_backend`, and ends when its parent does, however that ended.

    Args:
        target: module-level function called as ``target(connection, *arguments)``.
        arguments: picklable.
    """

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_enter, args=(theirs, target, arguments), daemon=True)
        with _environment({**WORKER_ENVIRONMENT, "MUJOCO_GL": gl_backend()}):
            self.process.start()
        theirs.close()

    def cause_of_death(self) -> str:
        """How the process ended, in words."""
        self.process.join(_GRACE_S)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe without ending"
        if code >= 0:
            return f"exited with status {code}"
        hint = "; perhaps out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def stop(self) -> None:
        """Let the process leave, or kill it after a grace period; safe to call twice."""
        self.connection.close()
        self.process.join(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the process at once; safe to call twice."""
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_GRACE_S)


def _enter(connection: Connection, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner is gone
        target(connection, *arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for a child: a spawned process takes them from its parent at its start."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def gl_backend() -> str:
    """``MUJOCO_GL`` if set; else ``egl`` if it draws within a minute here, else ``osmesa``.

    The trial runs in a process of its own: EGL can hang, and once loaded it excludes OSMesa.
    """
    chosen = os.environ.get("MUJOCO_GL")
    if chosen:
        return chosen
    trial = (
        "from mujoco.egl import GLContext; c = GLContext(8, 8); c.make_current(); c.free(); "
        "print('draws')"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", trial], capture_output=True, text=True, timeout=60
        )
        if "draws" in answer.stdout:
            return "egl"
        problem = answer.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        problem = ["no answer within 60 s"]
    warnings.warn(f"EGL does not work here ({problem}); drawing with OSMesa", stacklevel=2)
    return "osmesa"
