"""`regrasp bench sim`: stock LIBERO and ours side by side, in speed, pictures and numbers.

Speed: stock and ours each live in a process of their own and take turns, so that a slow moment of
the machine hits both; every turn gives one ratio, over the same actions from the same state.
Pictures: SSIM of ``lite`` against ``full``. Numbers: the largest difference in positions and
velocities from stock, over the same random actions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.results import Figure, write_result
from regrasp.scripts import _fidelity
from regrasp.sim.vector import Start, VectorEnv
from regrasp.sim.workers import EpisodeError, Worker, run_episodes
from rich.console import Console
from rich.table import Table

#: What is compared.
MEASURES = {
    "physics_ratio": "control steps/s without rendering",
    "pixels_ratio": "control steps/s with two 128x128 cameras at every step; ours lite",
    "chunk_ratio": "ours drawing once per 8-step chunk; stock drawing at every step",
    "two_worker_ratio": "ours, two workers over one, 8-step chunks drawn once",
}

#: (kind, actions) -> control steps/s, and how to end it.
_Side = tuple[Callable[[str, np.ndarray], float], Callable[[], None]]

#: Stock turns are long; ours repeats the same actions so that both turns last about as long.
_REPEATS = {"physics": 4, "pixels": 8, "chunk": 8}


@dataclass(frozen=True)
class Args:
    """Measure stock LIBERO and ours on this machine.

    Attributes:
        suite: suite of the task that is timed.
        task: its index.
        rounds: turns each side gets.
        physics_steps: control steps without rendering in a turn.
        chunks: 8-step chunks with rendering in a turn.
        fidelity_tasks: tasks of each of the four suites that are compared number by number.
        speed_only: leave pictures and numbers out.
        results: directory for ``bench_sim.json``.
    """

    suite: str = "libero_spatial"
    task: int = 0
    rounds: int = 15
    physics_steps: int = 32
    chunks: int = 1
    fidelity_tasks: int = 1
    speed_only: bool = False
    results: Path = Path("docs/results")


def main(args: Args) -> None:
    """Run the comparison, print it and write ``bench_sim.json``."""
    console = Console()
    console.print("building stock LIBERO and ours ...")
    figures = _speed(args, console)
    if not args.speed_only:
        jobs = [(suite, k) for suite in _fidelity.SUITES for k in range(args.fidelity_tasks)]
        console.print("numbers: stock, exact and default over the same actions ...")
        figures |= _fidelity.difference_figures(_all(jobs, _fidelity.differences))
        console.print("pictures: full and lite ...")
        figures |= _fidelity.ssim_figures(
            _all([(suite, 0) for suite in _fidelity.SUITES], _fidelity.similarities)
        )
    protocol = {
        "task": [args.suite, args.task],
        "init_state": 0,
        "measures": MEASURES,
        "rounds": args.rounds,
        "physics_steps": args.physics_steps,
        "chunks": args.chunks,
        "chunk_length": 8,
        "cameras": {"agentview": [128, 128], "wrist": [128, 128]},
        "stock": "libero.libero.envs: ControlEnv without rendering, OffScreenRenderEnv with",
        "stock_renderer_threads": "all cores",
        "our_renderer_threads": 1,
        "backend": os.environ.get("MUJOCO_GL", "egl"),
        "fidelity": None if args.speed_only else _fidelity.PROTOCOL,
        "fidelity_tasks": args.fidelity_tasks,
    }
    path = write_result("bench_sim", _command(args), protocol, [0], figures, args.results)
    table = Table("figure", "value", "95 % interval", "unit")
    for name, figure in figures.items():
        interval = "" if figure.low is None else f"{figure.low:.4g} to {figure.high:.4g}"
        table.add_row(name, f"{figure.value:.4g}", interval, figure.unit)
    console.print(table)
    console.print(f"written to {path}")


def _all(jobs: list[Any], function: Callable[[Any], Any]) -> dict[Any, Any]:
    """job -> result, one after another, each in a fresh process.

    Raises:
        RuntimeError: a job failed; a benchmark with holes is none.
    """
    answers = {}
    for index, answer in run_episodes(jobs, function, workers=1, timeout_s=900.0, recycle_after=1):
        if isinstance(answer, EpisodeError):
            raise RuntimeError(f"{jobs[index]}: {answer.kind} after {answer.attempts}\n{answer}")
        answers[jobs[index]] = answer
    return answers


def _speed(args: Args, console: Console) -> dict[str, Figure]:
    """Ratios and rates; each round's ratio pairs turns that follow one another."""
    rng = np.random.default_rng(0)
    actions = {
        "physics": rng.uniform(-1, 1, (args.physics_steps, 7)),
        "pixels": rng.uniform(-1, 1, (8 * args.chunks, 7)),
    }
    actions["chunk"] = actions["pixels"]
    sides = {side: Worker(_serve_side, (side, args.suite, args.task)) for side in ("stock", "ours")}
    vector = VectorEnv(_two_cameras, 2)
    rates: dict[str, list[float]] = {}
    try:
        for worker in sides.values():
            _answer(worker)
        vector.reset({i: Start((args.suite, args.task)) for i in range(2)})
        snapshots = vector.snapshot([0, 1])
        for turn in range(args.rounds + 1):
            measured = {}
            for kind in ("physics", "pixels"):
                measured[f"stock_{kind}"] = _ask(sides["stock"], kind, actions[kind])
                measured[f"our_{kind}"] = _ask(sides["ours"], kind, actions[kind])
            measured["our_chunk"] = _ask(sides["ours"], "chunk", actions["chunk"])
            for count in (1, 2):
                chunks = dict.fromkeys(range(count), actions["chunk"][:8])
                seconds = 0.0
                for _ in range(2 * _REPEATS["chunk"]):
                    vector.restore(snapshots)
                    begin = time.perf_counter()
                    outcomes = vector.step_chunk(chunks)
                    seconds += time.perf_counter() - begin
                    lost = [outcome.lost for outcome in outcomes.values() if outcome.lost]
                    if lost:
                        raise RuntimeError(f"bench sim: a worker was lost: {lost}")
                measured[f"workers_{count}"] = 2 * _REPEATS["chunk"] * 8 * count / seconds
            if turn:  # the first turn warms caches
                for name, rate in measured.items():
                    rates.setdefault(name, []).append(rate)
                console.print(f"round {turn}/{args.rounds}", end="\r")
    finally:
        vector.close()
        for worker in sides.values():
            worker.stop()
    pairs = {
        "physics_ratio": ("our_physics", "stock_physics"),
        "pixels_ratio": ("our_pixels", "stock_pixels"),
        "chunk_ratio": ("our_chunk", "stock_pixels"),
        "two_worker_ratio": ("workers_2", "workers_1"),
    }
    figures = {name: _ratio(rates[a], rates[b]) for name, (a, b) in pairs.items()}
    return figures | {name: Figure.mean(x, "control steps/s") for name, x in rates.items()}


def _two_cameras(suite: str, task: int) -> Any:
    from regrasp.sim import make_env

    return make_env(suite, task, mode="lite", horizon=1_000_000)


def _ask(worker: Worker, kind: str, actions: np.ndarray) -> float:
    worker.connection.send((kind, actions))
    return _answer(worker)


def _answer(worker: Worker) -> Any:
    try:
        return worker.connection.recv()
    except EOFError as error:
        raise RuntimeError(f"bench sim: a side ended: {worker.cause_of_death()}") from error


def _serve_side(connection: Connection, side: str, suite: str, task: int) -> None:
    """One side's process: answers (kind, actions) with control steps/s."""
    run, close = {"stock": _stock, "ours": _ours}[side](suite, task)
    connection.send("ready")
    try:
        while True:
            kind, actions = connection.recv()
            connection.send(run(kind, actions))
    finally:
        close()


def _stock(suite: str, task: int) -> _Side:
    os.environ.pop("LP_NUM_THREADS", None)  # stock draws with all cores, as it does by itself
    from libero.libero.envs import OffScreenRenderEnv
    from libero.libero.envs.env_wrapper import ControlEnv
    from regrasp.sim import get_task

    chosen = get_task(suite, task)
    state = chosen.init_states()[0]
    blind = ControlEnv(
        bddl_file_name=str(chosen.bddl), has_offscreen_renderer=False, use_camera_obs=False
    )
    seeing = OffScreenRenderEnv(
        bddl_file_name=str(chosen.bddl), camera_heights=128, camera_widths=128
    )
    for env in (blind, seeing):
        env.env.ignore_done = True
        env.seed(7)
        env.reset()

    def run(kind: str, actions: np.ndarray) -> float:
        env = blind if kind == "physics" else seeing
        env.set_init_state(state)
        for _ in range(10 if kind == "physics" else 1):
            env.step(_fidelity.SETTLE_ACTION)
        begin = time.perf_counter()
        for action in actions:
            env.step(action)
        return len(actions) / (time.perf_counter() - begin)

    def close() -> None:
        blind.close()
        seeing.close()

    return run, close


def _ours(suite: str, task: int) -> _Side:
    env = _two_cameras(suite, task)
    env.reset(seed=7, options={"init_state": 0})
    start = env.snapshot()

    def run(kind: str, actions: np.ndarray) -> float:
        seconds = 0.0
        for _ in range(_REPEATS[kind]):
            env.restore(start)
            begin = time.perf_counter()
            if kind == "chunk":
                for chunk in actions.reshape(-1, 8, 7):
                    env.step_chunk(chunk)
            else:
                for action in actions:
                    env.step(action, render=kind == "pixels")
            seconds += time.perf_counter() - begin
        return _REPEATS[kind] * len(actions) / seconds

    return run, env.close


def _ratio(ours: list[float], theirs: list[float]) -> Figure:
    """Median of the rounds' ratios; the interval resamples the rounds."""
    ratios = np.array(ours) / np.array(theirs)
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(len(ratios), size=(10_000, len(ratios)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Figure(float(np.median(ratios)), float(low), float(high), len(ratios), "ratio")


def _command(args: Args) -> str:
    """The command with every option that is not the default."""
    words = ["regrasp bench sim"]
    for field in fields(args):
        value = getattr(args, field.name)
        if value != field.default and field.name != "results":
            flag = f"--{field.name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {value}")
    return " ".join(words)
