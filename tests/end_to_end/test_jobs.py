"""The commands' job loop and its log: what failed is tried again, what is finished is not."""

import io
import json

import pytest
from chores import Chore, act, scene_of
from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts import bench_experts
from regrasp.scripts._jobs import run_missing
from regrasp.scripts.collect import execute_jobs
from regrasp.scripts.evaluate import _resume
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


def test_a_log_cut_at_any_byte_loses_the_cut_line_alone(tmp_path):
    rows = [{"key": "a", "instruction": "open the \u2028 drawer\n"}, {"key": "b", "steps": 3}]
    whole = JsonLines(tmp_path / "whole.jsonl")
    assert whole.read() == []
    for row in rows:
        whole.append(row)
    assert whole.read() == rows
    text = whole.path.read_bytes()
    first = text.index(b"\n") + 1
    for cut in range(len(text)):
        log = JsonLines(tmp_path / "cut.jsonl")
        log.path.write_bytes(text[:cut])
        kept = rows[: cut >= first]
        assert log.read() == kept
        log.append({"key": "c"})
        log.append({"key": "d"})
        assert JsonLines(log.path).read() == [*kept, {"key": "c"}, {"key": "d"}]


def test_a_collection_killed_within_a_line_resumes_twice(console, tmp_path):
    out = tmp_path / "store"
    EpisodeStore.create(out)
    jobs = [Chore(key, "drop") for key in "abc"]
    results = execute_jobs(console, out, jobs[:2], act, scene_of, 1)
    log = out / "dropped.jsonl"
    log.write_bytes(log.read_bytes()[:-7])
    # The second's line is lost, so it runs again, and then nothing does.
    assert execute_jobs(console, out, jobs, act, scene_of, 1)[:2] == results
    assert "1 episodes done before, 2 to go" in console.file.getvalue()
    assert [row["key"] for row in execute_jobs(console, out, jobs, act, scene_of, 1)] == [
        "a",
        "b",
        "c",
    ]
    assert "3 episodes done before, 0 to go" in console.file.getvalue()


def test_an_evaluation_killed_within_a_line_resumes_twice(tmp_path):
    record = {"policy": "p", "suites": ("libero_object",)}
    log = _resume(tmp_path, record)
    log.append({"key": "lite/libero_object/0/30", "success": True})
    with log.path.open("a") as file:
        file.write('{"key": "lite/libero_ob')
    _resume(tmp_path, record).append({"key": "lite/libero_object/0/31", "success": False})
    keys = [row["key"] for row in _resume(tmp_path, record).read()]
    assert keys == ["lite/libero_object/0/30", "lite/libero_object/0/31"]
    with pytest.raises(SystemExit, match="another policy or protocol"):
        _resume(tmp_path, record | {"policy": "q"})


def test_the_experts_benchmark_killed_within_a_line_resumes_twice(tmp_path):
    args = bench_experts.Args(
        suites=("libero_object",), tasks=(9,), init_states=2, workers=1, out=tmp_path, result=None
    )
    before = {"key": "libero_object/9/0", "success": True, "steps": 90, "phases": []}
    log = JsonLines(tmp_path / "episodes.jsonl")
    log.append(before)
    with log.path.open("a") as file:
        file.write('{"key": "libero_object/9/1", "succ')
    bench_experts.main(args)
    rows = log.read()
    assert rows[0] == before
    assert [row["key"] for row in rows] == ["libero_object/9/0", "libero_object/9/1"]
    assert rows[1]["success"]
    bench_experts.main(args)
    assert log.read() == rows
