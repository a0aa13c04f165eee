"""How far our simulation is from stock LIBERO, in numbers and in pictures."""

from __future__ import annotations

import numpy as np
from regrasp.episodes.results import Figure, bootstrap

#: The suites of which tasks are compared.
SUITES = ("libero_object", "libero_spatial", "libero_goal", "libero_10")

#: openpi's settling: stay, gripper open.
SETTLE_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])

PROTOCOL = {
    "init_state": 0,
    "seed": 7,
    "settle_steps": 10,
    "actions": "uniform in [-1, 1], seed 0",
    "difference": "largest absolute difference of qpos (m, rad) and qvel (m/s, rad/s) from stock",
    "exact": "exact=True, from the reset on",
    "default": "exact=False, from stock's state after the settle steps",
    "default_from_reset": "exact=False, from the reset on",
    "ssim": "lite against full, Gaussian-free 7x7 windows, RGB, two cameras, 6 moments an episode",
}

#: (suite, task) -> measure -> number of actions -> difference.
Differences = dict[str, dict[int, float]]

#: After how many actions differences are reported.
HORIZONS = (50, 200)


def differences(job: tuple[str, int]) -> Differences:
    """Largest differences from stock on one task, by measure of :data:`PROTOCOL` and horizon."""
    from libero.libero.envs.env_wrapper import ControlEnv
    from regrasp.sim import get_task, make_env

    suite, task = job
    chosen = get_task(suite, task)
    # With its renderer, as every evaluation has it: building that runs one more forward pass.
    stock = ControlEnv(
        bddl_file_name=str(chosen.bddl), has_offscreen_renderer=True, use_camera_obs=False
    )
    stock.env.ignore_done = True
    stock.seed(7)
    stock.reset()
    stock.set_init_state(chosen.init_states()[0])
    for _ in range(10):
        stock.step(SETTLE_ACTION)
    ours = {
        "exact": make_env(suite, task, exact=True, horizon=1_000_000),
        "default": make_env(suite, task, horizon=1_000_000),
        "default_from_reset": make_env(suite, task, horizon=1_000_000),
    }
    for env in ours.values():
        env.reset(seed=7, options={"init_state": 0, "render": False})
    ours["default"].restore(ours["exact"].snapshot())
    theirs = stock.sim.data
    worst = {name: 0.0 for name in ours}
    result: Differences = {name: {} for name in ours}
    for k, action in enumerate(np.random.default_rng(0).uniform(-1, 1, (max(HORIZONS), 7)), 1):
        stock.step(action)
        for name, env in ours.items():
            env.step(action, render=False)
            apart = max(
                np.abs(env.data.qpos - theirs.qpos).max(), np.abs(env.data.qvel - theirs.qvel).max()
            )
            worst[name] = max(worst[name], float(apart))
            if k in HORIZONS:
                result[name][k] = worst[name]
    for env in (stock, *ours.values()):
        env.close()
    return result


def difference_figures(measured: dict[tuple[str, int], Differences]) -> dict[str, Figure]:
    """The worst task of each suite, and the share of tasks below 1e-12."""
    figures = {}
    for name in ("exact", "default", "default_from_reset"):
        for horizon in HORIZONS:
            values = {job: result[name][horizon] for job, result in measured.items()}
            for suite in SUITES:
                worst = max(value for job, value in values.items() if job[0] == suite)
                count = sum(job[0] == suite for job in values)
                figures[f"{suite}.{name}_difference_{horizon}"] = Figure(
                    worst, n=count, unit="m, rad, m/s or rad/s"
                )
            below = sum(value < 1e-12 for value in values.values())
            figures[f"{name}_below_1e-12_{horizon}"] = Figure.rate(
                below, len(values), "share of tasks"
            )
    return figures


def similarities(job: tuple[str, int]) -> dict[str, dict[str, list[float]]]:
    """Mode -> camera -> SSIM against ``full`` at six moments of one episode."""
    from regrasp.sim import make_env
    from skimage.metrics import structural_similarity

    full = make_env(*job, mode="full")
    reduced = {mode: make_env(*job, mode=mode) for mode in ("lite", "fine")}
    full.reset(seed=7, options={"init_state": 0, "render": False})
    rng = np.random.default_rng(0)
    values: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in full.config.cameras} for mode in reduced
    }
    for _ in range(6):
        theirs = full.observe()
        for mode, env in reduced.items():
            env.restore(full.snapshot())
            ours = env.observe()
            for name, found in values[mode].items():
                found.append(float(structural_similarity(ours[name], theirs[name], channel_axis=2)))
        full.step_chunk(rng.uniform(-1, 1, (15, 7)), "none")
    for env in (full, *reduced.values()):
        env.close()
    return values


def ssim_figures(
    measured: dict[tuple[str, int], dict[str, dict[str, list[float]]]],
) -> dict[str, Figure]:
    """Mean SSIM over everything, of each camera, and the worst; of ``lite`` and ``fine``."""
    result = {}
    for mode, prefix in (("lite", "ssim"), ("fine", "ssim_fine")):
        cameras: dict[str, list[float]] = {}
        for values in measured.values():
            for name, found in values[mode].items():
                cameras.setdefault(name, []).extend(found)
        everything = [x for found in cameras.values() for x in found]
        figures = {prefix: everything} | {f"{prefix}_{k}": v for k, v in sorted(cameras.items())}
        for name, found in figures.items():
            result[name] = Figure(float(np.mean(found)), *bootstrap(found), len(found), "SSIM")
        result[f"{prefix}_worst"] = Figure(min(everything), n=len(everything), unit="SSIM")
    return result
