"""The commands' job loop: what failed is told and tried again, what is finished is not."""

import io
import json

import pytest
from chores import Chore, act, scene_of
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts._jobs import run_missing
from regrasp.scripts.collect import execute_jobs
from rich.console import Console

LIMITS = {"workers": 1, "timeout_s": 60.0, "recycle_after": 9, "affinity": scene_of}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=1000)


def test_failures_are_told_as_they_come_and_counted_at_the_end(console):
    jobs = [Chore("a", "keep"), Chore("b", "raise"), Chore("c", "keep"), Chore("d", "keep")]
    results = run_missing(console, jobs, {"d"}, act, **LIMITS)
    assert next(results)["key"] == "a"
    assert "1 episodes done before, 3 to go" in console.file.getvalue()
    assert next(results)["key"] == "c"
    with pytest.raises(SystemExit, match="1 episodes did not run; run the command again"):
        next(results)
    # Brackets in the message arrive as they are.
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("b: ")]
    assert len(told) == 1
    assert "[/b] is wrong" in told[0]


def test_a_collection_tries_again_only_what_did_not_run(console, tmp_path):
    out = tmp_path / "store"
    EpisodeStore.create(out)
    dropped = {"key": "a", "success": False, "kept": False}
    jobs = [Chore("a", "drop"), Chore("b", "raise")]
    with pytest.raises(SystemExit, match="1 episodes did not run"):
        execute_jobs(console, out, jobs, act, scene_of, 1)
    log = out / "dropped.jsonl"
    assert [json.loads(line) for line in log.read_text().splitlines()] == [dropped]

    jobs[1] = Chore("b", "keep")
    kept = {"key": "b", "success": True, "kept": True}
    assert execute_jobs(console, out, jobs, act, scene_of, 1) == [dropped, kept]
    assert "1 episodes done before, 1 to go" in console.file.getvalue()
    assert [json.loads(line) for line in log.read_text().splitlines()] == [dropped]
