"""The demo itself, small: real LIBERO, the shipped policy, the shipped monitor."""

import json

import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.scripts import demo
from regrasp.scripts._rollouts import plan_pairs
from regrasp.scripts._summary import pair_up
from regrasp.scripts.report import video_path

COUNTS = demo.Counts(none=2, slip=2, nudge=0, action_noise=0, initial_pose=0, camera_shift=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    args = demo.Args(out=folder / "run", tasks=1, counts=COUNTS, films=1, film_size=64)
    return args, demo.main(args)


def test_plan_is_paired_even_and_repeatable():
    counts = {"none": 20, "slip": 25}
    jobs = plan_pairs(("libero_object",), 10, range(30, 50), counts, 3)
    assert jobs == plan_pairs(("libero_object",), 10, range(30, 50), counts, 3)
    assert len(jobs) == 2 * 45
    for base, supervised in zip(jobs[::2], jobs[1::2], strict=True):
        assert (base.pair, base.seed, base.task, base.init_state) == (
            supervised.pair, supervised.seed, supervised.task, supervised.init_state,
        )  # fmt: skip
        assert (base.arm, supervised.arm) == ("base", "supervised")
    assert len({job.seed for job in jobs}) == 45
    tasks = [job.task for job in jobs[::2] if job.kind == "slip"]
    assert np.bincount(tasks, minlength=10).tolist() == [3] * 5 + [2] * 5
    assert all(30 <= job.init_state < 50 for job in jobs)


def test_demo_writes_its_report_and_result(run):
    args, summary = run
    assert summary.paired.n == 2
    assert summary.unperturbed.n == 2
    store = EpisodeStore.open(args.out / "store")
    assert len(store) == 8
    for pair in pair_up(store.headers):
        assert pair.base.seed == pair.supervised.seed
        assert bool(pair.base.extra["events"]) == (pair.kind == "slip")
    html = (args.out / "report.html").read_text()
    assert html.count("data:video/mp4") == 2
    record = json.loads((args.out / "demo.json").read_text())
    named = {
        "success_base", "success_supervised", "paired_difference", "false_alarm_rate", "alpha",
        "minutes",
    }  # fmt: skip
    assert named <= set(record["figures"])


def test_both_arms_are_one_episode_until_the_first_rewind(run):
    args, _ = run
    store = EpisodeStore.open(args.out / "store")
    assert demo.check_pairing(store, pair_up(store.headers)) == (4, 4)


def test_a_finished_run_is_not_repeated_and_films_are_remade(run):
    args, summary = run
    store = EpisodeStore.open(args.out / "store")
    film = next(
        path
        for header in store.headers
        if (path := video_path(args.out, header.extra["pair"], "base")).exists()
    )
    film.unlink()
    assert demo.main(args) == summary
    assert len(store.refresh()) == 8
    assert film.exists()


def test_another_setting_does_not_continue_a_run(run):
    from dataclasses import replace

    args, _ = run
    with pytest.raises(SystemExit, match="other settings"):
        demo.main(replace(args, tries=1))
