"""Counterfactual sets on real LIBERO: one beginning, changed actions, outcomes by the predicate."""

import numpy as np
import pytest
from regrasp.episodes.store import EpisodeStore
from regrasp.sim import make_env
from regrasp.sim.experts.base import CLOSE, OPEN
from regrasp.sim.failures.counterfactuals import (
    FAMILIES,
    NOMINAL,
    Grid,
    InsufficientGrip,
    cell_seed,
    contexts,
    episode,
    execute,
    execute_all,
)
from regrasp.sim.failures.taxonomy import TAXONOMY

GRID = Grid(severities=(0.0, 0.2, 1.0), families=("insufficient_grip", "premature_release"))


@pytest.fixture(scope="module")
def env():
    made = make_env("libero_object", 0, cameras={"agentview": (64, 64), "wrist": (64, 64)})
    yield made
    made.close()


@pytest.fixture(scope="module")
def beginnings(env):
    return contexts(env, 3, 7, GRID)


@pytest.fixture(scope="module")
def executions(env, beginnings):
    made, useless = execute_all(env, beginnings[0], GRID)
    assert useless == ""
    return {(e.family, e.severity): e for e in made}


def test_families_are_those_of_curewm():
    named = {row.curewm for row in TAXONOMY.values() if row.curewm}
    assert named == set(FAMILIES)


def test_a_beginning_is_where_a_phase_begins(beginnings):
    assert [c.boundary for c in beginnings] == ["reached", "grasped"]
    steps = [c.moment.step for c in beginnings]
    assert 0 < steps[0] < steps[1]


def test_unchanged_the_continuation_repeats_the_nominal(executions):
    trace = executions[NOMINAL, 0.0].trace
    nominal = executions[NOMINAL, 0.0].context.nominal
    rest = nominal.physics[trace.start :]
    assert np.array_equal(trace.physics[: len(rest)], rest)
    assert executions[NOMINAL, 0.0].success


def test_only_actions_differ_and_the_predicate_tells_the_outcomes(executions):
    assert len({len(e.trace) for e in executions.values()}) == 1
    first = {e.trace.physics[0].tobytes() for e in executions.values()}
    assert len(first) == 1
    outcomes = {cell: e.success for cell, e in executions.items()}
    assert outcomes["premature_release", 0.2]
    assert not outcomes["premature_release", 1.0]
    assert not outcomes["insufficient_grip", 1.0]


def test_an_execution_repeats_itself(env, executions):
    once = executions["premature_release", 1.0]
    again = execute(env, once.context, "premature_release", 1.0, GRID)
    assert again.trace.digest() == once.trace.digest()
    for name, frames in once.pictures.items():
        assert np.array_equal(again.pictures[name], frames)


def test_a_family_whose_moment_is_over_is_left_out(env, beginnings):
    assert execute(env, beginnings[1], "insufficient_grip", 1.0, GRID) is None


def test_severities_share_a_draw_and_families_do_not(beginnings):
    assert cell_seed(beginnings[0], "carry_slip") != cell_seed(beginnings[0], "wrist_tilt")


def test_an_episode_has_one_row_a_frame(env, executions, tmp_path):
    execution = executions["premature_release", 1.0]
    made = episode(env, execution, GRID)
    store = EpisodeStore.create(tmp_path / "store")
    store.append(made)
    back = store[0]
    assert len(back) * GRID.stride == len(execution.trace)
    assert back.steps["action"].shape == (len(back), GRID.stride, 7)
    assert np.array_equal(back.steps["action"].reshape(-1, 7), execution.trace.executed)
    assert back.steps["image/wrist"].shape == (len(back), 64, 64, 3)
    assert back.header.failure_label == "premature_release"
    assert back.header.extra["context"] == execution.context.name


def closed(severity, commands):
    """The commands that get through an insufficient grip."""

    class Moment:
        memory: dict = {}  # noqa: RUF012 - the scene's part that is used

    injection, out = InsufficientGrip(severity=severity), []
    Moment.memory = {}
    for command in commands:
        action = np.array([0.0] * 6 + [command], np.float32)
        out.append(float(injection.act(Moment, action, {}, len(out))[6]))
    return out


def test_an_insufficient_grip_cuts_the_closing_off():
    commands = [CLOSE] * 12
    assert closed(0.0, commands) == commands
    assert closed(1.0, commands) == [CLOSE] + [0.0] * 11
    # What was opened may be closed again.
    assert closed(1.0, [CLOSE, CLOSE, OPEN, CLOSE, CLOSE]) == [CLOSE, 0.0, OPEN, CLOSE, 0.0]


def test_unknown_families_are_refused():
    with pytest.raises(ValueError, match="premature_release"):
        Grid(families=("early_release",))
