"""Jobs for the tests of the work queue: they compute, raise, hang, or die."""

import os
import signal
import time
from pathlib import Path

SEEN: list[object] = []


def act(job):
    verb, value = job
    SEEN.append(value)
    if verb == "square":
        return value * value, os.getpid(), len(SEEN)
    if verb == "raise":
        raise ValueError(f"job {value} is wrong")
    if verb == "hang":
        time.sleep(1000)
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "die_once":
        marker = Path(value)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "second try"
    if verb == "environment":
        return {key: os.environ[key] for key in ("OMP_NUM_THREADS", "MUJOCO_GL")}
    if verb == "unpicklable":
        return lambda: None
    raise AssertionError(verb)


class Unloadable:
    """Pickles here; unpickling fails in the worker."""

    def __reduce__(self):
        return (_explode, ())

    def __call__(self, job):
        return job


def _explode():
    raise RuntimeError("cannot be loaded in a worker")
