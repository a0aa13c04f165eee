"""``regrasp certify`` on real episodes, small; and where the truth is known, its promise."""

import json
import math
import pickle

import numpy as np
import pytest
from regrasp.episodes.results import read_result
from regrasp.monitors.certify import Design
from regrasp.scripts import certify, certify_study

#: The shipped policy solves it from every training state.
ARGS = certify.Args(
    suites=("libero_object",),
    tasks=1,
    candidates=("chunk16",),
    max_rounds=2,
    reference_rounds=1,
    check=1,
    workers=1,
    result="certify",
)


def here(console, jobs, done, function, **options):
    """Instead of worker processes, which take longer to start than these episodes take."""
    return [function(pickle.loads(pickle.dumps(job))) for job in jobs if job.key not in done]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("certify")
        patch.chdir(folder)
        patch.setattr(certify, "run_missing", here)
        certify.main(ARGS)
        yield folder, read_result("certify", folder / "docs/results")


def test_result_has_its_figures(run):
    folder, record = run
    figures = record["figures"]
    assert {"speedup", "confidence", "preserved", "rollouts_saved"} <= set(figures)
    assert figures["confidence"].value == 0.95
    assert figures["chunk16.speedup"].low > 1.2
    assert figures["chunk16.certified"].value == 0  # two trials certify nothing
    assert (figures["speedup"].value, figures["preserved"].value) == (1.0, 1.0)
    rows = [json.loads(line) for line in (folder / "runs/certify/rollouts.jsonl").open()]
    assert len({row["key"] for row in rows}) == len(rows)
    # The log also holds the held-out check: one rollout, as the reference is deployed.
    assert figures["rollouts"].value == len(rows) - 1


def test_it_goes_on_where_it_was_stopped_and_refuses_another_design(run, monkeypatch):
    folder, record = run
    monkeypatch.chdir(folder)

    def nothing(console, jobs, *others, **options):
        raise AssertionError(f"{jobs} were run before")

    monkeypatch.setattr(certify, "run_missing", nothing)
    certify.main(ARGS)
    assert read_result("certify", folder / "docs/results")["figures"] == record["figures"]
    with pytest.raises(SystemExit, match="another policy or design"):
        certify.main(certify.Args(eps=0.1))


def test_the_promise_where_the_truth_is_known():
    """Tolerance: 4 binomial standard errors of delta at 100 trials."""
    args = certify_study.Args(trials=100)
    design = Design(tasks=tuple(f"task{t}" for t in range(20)), states=tuple(range(30)))
    allowed = args.delta + 4 * math.sqrt(args.delta * (1 - args.delta) / args.trials)
    for name, scenario in certify_study.scenarios(args.eps, args.tasks).items():
        found = certify_study.sequential(scenario, design, args.trials, 0)
        over = certify_study.violations(scenario, found.chosen, args.eps)
        assert over.mean() <= allowed
        assert np.mean(found.broken) <= allowed
        estimate = certify_study.at_once(scenario, lambda k, n: k <= args.eps * n, 2, 100, 0)
        uncertified = certify_study.violations(scenario, estimate.chosen, args.eps)
        assert uncertified.mean() > 0.4, name
    # The last scenario is the ladder: its good candidates are found, with few rollouts.
    assert (found.chosen >= 0).mean() > 0.95
    assert found.rollouts.mean() < 700
