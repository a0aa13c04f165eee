"""A LIBERO problem without its slow parts: built once, reset by state, contacts checked in arrays.

LIBERO rebuilds the whole model at every reset. What a rebuild changes, once an initial state is
set, is only where the samplers put the fixtures; :meth:`Scene.place_fixtures` replays those
draws, so that the k-th trial after ``env.seed(s)`` has the fixtures that stock LIBERO gives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
from regrasp.sim.lite import LiteConfig, reduce_scene
from regrasp.sim.render import RenderMode
from regrasp.sim.tasks import LiberoTask

#: robosuite draws placements by rejection; a scene that fails this often is at fault.
_MAX_PLACEMENT_TRIES = 100


@dataclass
class _Stream:
    """The trials of one seed, drawn so far.

    Attributes:
        random: state of NumPy's global stream after the last draw.
        rebuilds: how often stock LIBERO has built the model by then.
        placed: each trial's (body_pos, body_quat, the solver's warm start that its reset leaves).
    """

    random: Any
    rebuilds: int = 1
    placed: list[tuple[np.ndarray, ...]] = field(default_factory=list)


class Scene:
    """The robosuite environment of one task, its model, and its fixture placements.

    Attributes:
        problem: LIBERO's own environment object, used for its model, predicates and samplers.
        model, data: MuJoCo's structures, shared with ``problem.sim``.
    """

    def __init__(
        self, task: LiberoTask, mode: RenderMode = "lite", lite: LiteConfig | None = None
    ) -> None:
        outside = np.random.get_state()  # noqa: NPY002 - robosuite draws from the global stream
        self.problem = _build(task, mode, lite)
        self.model: mujoco.MjModel = self.problem.sim.model._model
        self.data: mujoco.MjData = self.problem.sim.data._data
        self._home = (self.model.body_pos.copy(), self.model.body_quat.copy())
        self._samplers = list(self.problem.object_property_initializers)
        self._streams: dict[int, _Stream] = {}
        self.problem.hard_reset = False
        self.problem.reset()
        np.random.set_state(outside)  # noqa: NPY002
        self.reset_qpos = self.data.qpos.copy()

    def place_fixtures(self, seed: int, trial: int) -> None:
        """Put the fixtures where stock LIBERO has them in trial ``trial`` after ``seed(seed)``."""
        if seed not in self._streams:
            self._streams[seed] = _Stream(np.random.RandomState(seed).get_state())
        stream = self._streams[seed]
        while len(stream.placed) <= trial:
            self._draw(stream)
        self.model.body_pos[:], self.model.body_quat[:], self._warm_start = stream.placed[trial]

    def _draw(self, stream: _Stream) -> None:
        """The next trial's fixtures, from LIBERO's global random stream."""
        from robosuite.utils.errors import RandomizationError

        outside = np.random.get_state()  # noqa: NPY002 - robosuite draws from the global stream
        np.random.set_state(stream.random)  # noqa: NPY002
        try:
            for _ in range(_MAX_PLACEMENT_TRIES):
                stream.rebuilds += 1
                # Stock LIBERO appends its joint samplers anew at every rebuild and draws them all.
                self.problem.object_property_initializers = self._samplers * stream.rebuilds
                self.model.body_pos[:], self.model.body_quat[:] = self._home
                try:
                    self.problem.reset()
                except RandomizationError:
                    continue
                placed = (self.model.body_pos, self.model.body_quat, self.data.qacc_warmstart)
                stream.placed.append(tuple(x.copy() for x in placed))
                return
        finally:
            stream.random = np.random.get_state()  # noqa: NPY002
            np.random.set_state(outside)  # noqa: NPY002
            self.problem.object_property_initializers = self._samplers
        raise RuntimeError(
            f"{self.problem.bddl_file_name}: no valid object placement in "
            f"{_MAX_PLACEMENT_TRIES} tries"
        )

    def set_state(self, state: np.ndarray) -> None:
        """Set a flattened ``[1 + nq + nv]`` state on freshly reset data, kinematics current.

        Call :meth:`place_fixtures` before: the solver starts where stock's does after its reset.

        Raises:
            ValueError: the state's length is not the model's.
        """
        nq, nv = self.model.nq, self.model.nv
        if state.shape != (1 + nq + nv,):
            raise ValueError(
                f"initial state has shape {state.shape}; this scene needs ({1 + nq + nv},)"
            )
        self.data.time = state[0]
        self.data.qpos[:] = state[1 : 1 + nq]
        self.data.qvel[:] = state[1 + nq :]
        self.data.qacc_warmstart[:] = self._warm_start
        mujoco.mj_forward(self.model, self.data)


def _build(task: LiberoTask, mode: RenderMode, lite: LiteConfig | None) -> Any:
    """LIBERO's problem object for a task."""
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import get_problem_info

    base = TASK_MAPPING[get_problem_info(str(task.bddl))["problem_name"]]
    # Stock rebuilds simulation and renderer at each reset; each runs a pass before it is posed.
    return build_problem(
        base, (str(task.bddl),), mode, lite, passes=2, initialization_noise=None, hard_reset=True
    )


def build_problem(
    base: Any,
    arguments: tuple[Any, ...],
    mode: RenderMode,
    lite: LiteConfig | None,
    *,
    passes: int = 0,
    **options: Any,
) -> Any:
    """A robosuite problem without its own renderer and camera observations.

    Its meshes are reduced but in ``full`` mode, and its contacts are checked in arrays.

    Args:
        base: the problem's class.
        arguments: positional arguments of it.
        mode, lite: how visual meshes are reduced.
        passes: forward passes in the model's default pose at each reset, which leave their trace in
            the solver's warm start.
        options: further keyword arguments of it.
    """
    import robosuite
    from robosuite.utils.binding_utils import MjSim

    def _initialize_sim(self: Any, xml_string: str | None = None) -> None:
        xml = xml_string or self.model.get_xml()
        self.sim = MjSim.from_xml_string(xml if mode == "full" else reduce_scene(xml, lite))
        self.sim.forward()
        self.initialize_time(self.control_freq)

    def _reset_internal(self: Any) -> None:
        for _ in range(passes):
            self.sim.forward()
        base._reset_internal(self)

    def check_contact(self: Any, geoms_1: Any, geoms_2: Any = None) -> bool:
        pairs = self.sim.data._data.contact.geom
        if not len(pairs):
            return False
        first = _geom_mask(self, geoms_1)[pairs]
        if geoms_2 is None:
            return bool(first.any())
        second = _geom_mask(self, geoms_2)[pairs]
        return bool(((first[:, 0] & second[:, 1]) | (first[:, 1] & second[:, 0])).any())

    # The class keeps its name: LIBERO checks it against the problem file.
    fast = type(
        base.__name__,
        (base,),
        {
            "_initialize_sim": _initialize_sim,
            "_reset_internal": _reset_internal,
            "check_contact": check_contact,
            "__module__": __name__,
        },
    )
    return fast(
        *arguments,
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        gripper_types="default",
        use_camera_obs=False,
        has_offscreen_renderer=False,
        control_freq=20,
        ignore_done=True,
        camera_names=["agentview", "robot0_eye_in_hand"],
        **options,
    )


def _geom_mask(problem: Any, geoms: Any) -> np.ndarray:
    """Boolean ``[ngeom]`` of a geom name, a list of them, or a robosuite model's contact geoms."""
    names = (geoms,) if isinstance(geoms, str) else tuple(getattr(geoms, "contact_geoms", geoms))
    cache = problem.__dict__.setdefault("_geom_masks", {})
    if names not in cache:
        model = problem.sim.model._model
        mask = np.zeros(model.ngeom, bool)
        for name in names:
            index = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_GEOM, name)
            if index >= 0:
                mask[index] = True
        cache[names] = mask
    return cache[names]
