"""The vector environment: episodes by index, a watchdog, shared memory, no automatic reset."""

import functools
import time
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import toy
from regrasp.sim import make_env
from regrasp.sim.vector import Start, VectorEnv

STAY = np.zeros((3, 7))


def command(value, steps=1):
    chunk = np.zeros((steps, 7))
    chunk[0, 0] = value
    return chunk


@pytest.fixture(scope="module")
def vector():
    with VectorEnv(toy.Toy, 2, step_timeout_s=3.0, recycle_after=1000) as vector:
        yield vector


def test_each_index_runs_the_episode_it_was_given(vector):
    outcomes = vector.reset({0: Start(("a",), 4, seed=1), 1: Start(("b",), 9, seed=2)})
    assert [outcomes[i].info["name"] for i in (0, 1)] == ["a", "b"]
    assert [outcomes[i].info["seed"] for i in (0, 1)] == [1, 2]
    assert [outcomes[i].observation["state"][1] for i in (0, 1)] == [4, 9]
    stepped = vector.step_chunk({1: STAY})
    assert list(stepped) == [1]
    assert stepped[1].chunk.executed == 3
    assert vector.latest()["state"].tolist() == [[0, 4], [3, 9]]
    assert (stepped[1].observation["camera"] == 3).all()
    kept = stepped[1].observation["camera"]
    vector.step_chunk({1: STAY})
    assert (kept == 3).all(), "outcomes are copies"
    assert (vector.latest()["camera"][1] == 6).all()


def test_every_step_or_no_step_can_be_rendered(vector):
    vector.reset({0: Start(("a",), 0)})
    every = vector.step_chunk({0: STAY}, "all")[0].chunk
    assert [int(o["state"][0]) for o in every.observations] == [1, 2, 3]
    none = vector.step_chunk({0: STAY}, "none")[0]
    assert none.chunk.observations == []
    assert list(none.observation) == ["state"]
    assert none.observation["state"][0] == 6
    blind = vector.reset({0: Start(("a",), 5, render=False)})[0].observation
    assert list(blind) == ["state"]


def test_an_ended_episode_is_not_reset_behind_the_callers_back(vector):
    vector.reset({0: Start(("a",), 2)})
    ended = vector.step_chunk({0: command(toy.Toy.SUCCEED, 3)})[0]
    assert ended.chunk.terminated
    assert ended.chunk.executed == 1
    again = vector.step_chunk({0: STAY})[0]
    assert again.observation["state"].tolist() == [4, 2]


@pytest.mark.parametrize(
    ("verb", "reason"), [(toy.Toy.DIE, "SIGSEGV"), (toy.Toy.HANG, "no answer within 3 s")]
)
def test_a_lost_worker_is_replaced_and_the_other_episode_goes_on(vector, verb, reason):
    start = Start(("a",), 6, seed=3)
    vector.reset({0: start, 1: Start(("b",), 7)})
    vector.step_chunk({0: STAY, 1: STAY})
    replaced = vector.replaced
    outcomes = vector.step_chunk({0: command(verb), 1: STAY})
    assert reason in outcomes[0].lost
    assert outcomes[0].start == start
    assert outcomes[1].lost is None
    assert outcomes[1].observation["state"].tolist() == [6, 7]
    assert vector.replaced == replaced + 1
    with pytest.raises(RuntimeError, match="reset it first"):
        vector.step_chunk({0: STAY})
    restarted = vector.reset({0: outcomes[0].start})[0]
    assert restarted.observation["state"].tolist() == [0, 6]
    assert vector.step_chunk({0: STAY, 1: STAY})[1].observation["state"].tolist() == [9, 7]


def test_an_environment_that_cannot_be_built_is_lost_after_two_tries(vector):
    replaced = vector.replaced
    outcome = vector.reset({0: Start(("unbuildable",))})[0]
    assert "SIGKILL" in outcome.lost
    assert vector.replaced == replaced + 2
    assert vector.reset({0: Start(("a",), 1)})[0].lost is None


def test_exceptions_reach_the_caller_and_the_pipes_stay_in_step(vector):
    vector.reset({0: Start(("a",), 0), 1: Start(("b",), 0)})
    with pytest.raises(RuntimeError, match="told to raise"):
        vector.step_chunk({0: command(toy.Toy.RAISE), 1: STAY})
    assert vector.step_chunk({0: STAY, 1: STAY})[1].observation["state"][0] == 6
    with pytest.raises(ValueError, match="finite"):
        vector.step_chunk({0: np.full((1, 7), np.nan)})
    with pytest.raises(ValueError, match="max_chunk"):
        vector.step_chunk({0: np.zeros((17, 7))}, "all")
    with pytest.raises(IndexError, match="there are 2"):
        vector.step_chunk({2: STAY})
    with pytest.raises(ValueError, match="the others"):
        vector.reset({1: Start(("big", 5))})
    with pytest.raises(RuntimeError, match="reset it first"):
        vector.step_chunk({1: STAY})


def test_snapshots_move_between_workers(vector):
    vector.reset({0: Start(("a",), 1), 1: Start(("a",), 2)})
    vector.step_chunk({0: STAY})
    vector.restore({1: vector.snapshot([0])[0]})
    assert vector.step_chunk({1: STAY})[1].observation["state"].tolist() == [6, 1]


def test_workers_are_renewed_and_closing_twice_frees_the_memory():
    vector = VectorEnv(toy.Toy, 1, recycle_after=2)
    pids = [vector.reset({0: Start(("a",), k)})[0].info["pid"] for k in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    name = vector._memory.name
    vector.close()
    vector.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)
    with pytest.raises(RuntimeError, match="closed"):
        vector.reset({0: Start(("a",))})


def test_environments_step_at_the_same_time():
    with VectorEnv(toy.Toy, 2) as vector:
        vector.reset({i: Start(("a", 4, 0.2), 0) for i in range(2)})
        begin = time.monotonic()
        vector.step_chunk({i: STAY for i in range(2)})
        assert 0.6 <= time.monotonic() - begin < 1.0


def test_real_libero_in_a_worker_equals_libero_here():
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 7))
    cameras = {"agentview": (64, 64)}
    env = make_env("libero_object", 0, cameras=cameras)
    first, _ = env.reset(seed=3, options={"init_state": 2})
    chunk = env.step_chunk(actions)
    with VectorEnv(functools.partial(make_env, cameras=cameras), 1) as vector:
        there = vector.reset({0: Start(("libero_object", 0), 2, seed=3)})[0]
        stepped = vector.step_chunk({0: actions})[0]
    for key, value in first.items():
        assert np.array_equal(value, there.observation[key]), key
    assert np.array_equal(chunk.states, stepped.chunk.states)
    for key, value in chunk.observations[-1].items():
        assert np.array_equal(value, stepped.observation[key]), key
    env.close()
