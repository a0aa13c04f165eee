"""The work queue: every job is answered once, whatever its worker does."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import worker_jobs
from regrasp.sim.workers import EpisodeError, run_episodes


def answers(jobs, **settings):
    settings = {"workers": 2, "timeout_s": 60.0, **settings}
    pairs = list(run_episodes(jobs, worker_jobs.act, **settings))
    assert sorted(index for index, _ in pairs) == list(range(len(jobs)))
    return dict(pairs)


def test_results_are_keyed_by_job_and_do_not_depend_on_the_number_of_workers():
    jobs = [("square", k) for k in range(7)] + [("environment", 0)]
    one, two = answers(jobs, workers=1), answers(jobs, workers=2)
    assert one[7] == two[7]
    assert one[7]["OMP_NUM_THREADS"] == "1"
    assert one[7]["MUJOCO_GL"] in ("egl", "osmesa")
    assert (
        [one[k][0] for k in range(7)] == [two[k][0] for k in range(7)] == [k * k for k in range(7)]
    )
    assert len({one[k][1] for k in range(7)}) == 1


def test_no_jobs_no_workers():
    assert answers([]) == {}


def test_an_exception_a_death_and_a_hang_leave_the_other_jobs_alone(tmp_path):
    jobs = [
        ("square", 2),
        ("raise", 3),
        ("die", 4),
        ("hang", 5),
        ("die_once", str(tmp_path / "marker")),
        ("unpicklable", 6),
        ("square", 7),
    ]
    got = answers(jobs, timeout_s=2.0)
    assert got[0][0] == 4
    assert got[6][0] == 49
    assert got[4] == "second try"
    assert isinstance(got[1], EpisodeError)
    assert got[1].kind == "exception"
    assert "job 3 is wrong" in got[1].reason
    assert got[1].attempts == 1
    assert (got[2].kind, got[2].attempts) == ("died", 2)
    assert "SIGKILL" in got[2].reason
    assert (got[3].kind, got[3].attempts) == ("timeout", 2)
    assert got[5].kind == "exception"


def test_workers_are_renewed():
    got = answers([("square", k) for k in range(4)], workers=1, recycle_after=2)
    assert got[0][1] == got[1][1] != got[2][1] == got[3][1]
    assert max(got[k][2] for k in range(4)) == 2


def test_affinity_keeps_a_key_in_one_worker():
    jobs = [("square", k) for k in (1, 2) for _ in range(4)]
    got = answers(jobs, affinity=lambda job: job[1])
    assert len({got[k][1] for k in range(4)}) == 1 or len({got[k][1] for k in range(4, 8)}) == 1


def test_a_function_that_does_not_load_stops_the_run(monkeypatch):
    with pytest.raises(RuntimeError, match="failed to start"):
        list(run_episodes([1], worker_jobs.Unloadable(), workers=1, timeout_s=30.0))
    with pytest.raises(ValueError, match="module-level"):
        run_episodes([1], lambda job: job, workers=1, timeout_s=30.0)
    with pytest.raises(ValueError, match="positive"):
        run_episodes([1], worker_jobs.act, workers=0, timeout_s=30.0)


def test_closing_the_iterator_stops_the_workers():
    running = run_episodes([("square", 1), ("hang", 2)], worker_jobs.act, workers=2, timeout_s=60.0)
    index, (_, pid, _) = next(running)
    assert index == 0
    running.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_workers_end_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, worker_jobs\n"
        "from regrasp.sim.workers import run_episodes\n"
        "if __name__ == '__main__':\n"
        "    run = run_episodes([('square', 1), ('square', 1), ('hang', 2)], worker_jobs.act,\n"
        "                       workers=1, timeout_s=100)\n"
        "    print(next(run)[1][1], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    pid = int(parent.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.05)
                continue
        break
    else:
        pytest.fail(f"worker {pid} outlived its parent")
