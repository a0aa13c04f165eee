"""Semantic failures: the hand does well what was not asked for.

They are plans, not disturbances: :func:`wrong_plan` gives what the actor pursues instead, in the
same scene, and the words for it. A plan is wrong or it is not, so these have severity 1 only.
:class:`Distractor` is the exception: the scene is changed under an actor that does not look, by a
distance.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mujoco
import numpy as np
from regrasp.sim.experts.base import rotation_z
from regrasp.sim.experts.collect import alternative_goals
from regrasp.sim.experts.scene import Scene as Privileged
from regrasp.sim.experts.tasks import Goal, make_expert
from regrasp.sim.failures.actors import Actor, ExpertActor, ScriptActor
from regrasp.sim.failures.base import Injection
from regrasp.sim.failures.wording import say, say_step
from regrasp.sim.perturb import AtStep, Scene, Trigger
from regrasp.sim.tasks import LiberoTask, get_task, task_names

#: Kinds of object that others can be put onto and stay (measured with the experts), and endings of
#: the names of such places on fixtures.
_FLAT = {
    "akita_black_bowl",
    "butter",
    "chocolate_pudding",
    "cookies",
    "cream_cheese",
    "glazed_rim_porcelain_ramekin",
    "plate",
}
_TOPS = ("_cook_region", "_top_side")

#: Kinds that are slid, not lifted: they cannot be put onto things.
_SLID = {"plate"}

#: Kinds that hold other things: never taken for what is to be moved.
_HOLDERS = {"basket", "plate"}

#: Control steps after which a script gives a skill up.
_PATIENCE = 120


@dataclass(frozen=True)
class WrongPlan:
    """What an actor pursues in place of its task.

    Attributes:
        kind: the type of failure.
        goal: the predicates it brings about; None where it runs the task's own skills wrongly.
        order: which of the own expert's skills it runs, in this order; None with a goal.
        told: an instruction that means this plan; empty where there is none.
        words: ``what`` is wrong and ``amount``, in plain words.
    """

    kind: str
    goal: tuple[Goal, ...] | None
    order: tuple[int, ...] | None
    told: str
    words: dict[str, str]

    def actor(self, env: Any) -> Actor:
        """Whoever carries it out."""
        if self.order is None:
            return ExpertActor(env, self.goal)
        expert = make_expert(env)
        skills = [expert.skills[i] for i in self.order]
        return ScriptActor(expert, skills, [_PATIENCE] * len(skills))

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable."""
        goal = None if self.goal is None else [list(state) for state in self.goal]
        order = None if self.order is None else list(self.order)
        return {"kind": self.kind, "goal": goal, "order": order, "told": self.told}

    def achieved(self, scene: Privileged) -> bool:
        """Whether what it pursues is the case; always so for a script, which pursues no state."""
        return self.goal is None or all(scene.holds(goal) for goal in self.goal)


def wrong_plan(env: Any, kind: str, rng: np.random.Generator) -> WrongPlan | None:
    """A wrong plan for an environment's task, or None where its scene offers none.

    Args:
        env: a LIBERO environment, reset.
        kind: one of :data:`PLANS`.
        rng: chooses among what the scene offers.
    """
    offers = PLANS[kind](env)
    return offers[int(rng.integers(len(offers)))] if offers else None


def _own(env: Any) -> list[Goal]:
    return [tuple(state) for state in env.problem.parsed_problem["goal_state"]]


def _movable(env: Any, goal: Goal) -> bool:
    return goal[0].lower() in ("in", "on") and goal[1] in env.problem.objects_dict


def _kind(name: str) -> str:
    return name.rpartition("_")[0]


def _possible(env: Any, plans: Sequence[WrongPlan]) -> list[WrongPlan]:
    """Those of ``plans`` that an expert is written for."""
    found = []
    for plan in plans:
        try:
            make_expert(env, plan.goal)
        except ValueError:
            continue
        found.append(plan)
    return found


def _replaced(env: Any, kind: str, old: Goal, new: Goal, what: str) -> WrongPlan:
    """The task's own goals with one of them replaced."""
    goal = tuple(new if state == old else state for state in _own(env))
    told = {tuple(g): words for g, words in _asked_instead(env)}.get(goal, "")
    return WrongPlan(kind, goal, None, told, {"what": what, "amount": "completely"})


def _wrong_object(env: Any) -> list[WrongPlan]:
    """Another object (one of the same kind where there is one), or another drawer."""
    involved = {name for state in _own(env) for name in state}
    plans = []
    for old in _own(env):
        if _movable(env, old):
            names = [n for n in sorted(env.problem.objects_dict) if n not in involved]
            names = [n for n in names if _kind(n) not in _HOLDERS]
            twins = [n for n in names if _kind(n) == _kind(old[1])]
            new = [(old[0], name, *old[2:]) for name in twins or names]
        else:
            levels = ("top", "middle", "bottom")
            here = next((level for level in levels if f"_{level}_region" in old[-1]), None)
            new = [(old[0], old[1].replace(here, x)) for x in levels if here and x != here]
        for goal in new:
            what = f"it handles {_other(goal[1], old[1])} instead of the {say(old[1])}"
            plans.append(_replaced(env, "wrong_object", old, goal, what))
    return _possible(env, plans)


def _other(name: str, right: str) -> str:
    """What is taken for ``right``, in words that tell the two apart."""
    return f"the {'other ' if say(name) == say(right) else ''}{say(name)}"


def _wrong_target(env: Any) -> list[WrongPlan]:
    """The right object, put onto something else."""
    sites = [s for s in sorted(env.problem.object_sites_dict) if s.endswith(_TOPS)]
    plans = []
    for old in _own(env):
        if not _movable(env, old) or _kind(old[1]) in _SLID:
            continue
        moved = {state[1] for state in _own(env)}
        places = [
            n for n in sorted(env.problem.objects_dict) if _kind(n) in _FLAT - {_kind(old[1])}
        ]
        places = [n for n in [*places, *sites] if n not in moved and n != old[2]]
        for place in places:
            what = f"it puts the {say(old[1])} on {_other(place, old[2])}"
            what += f" instead of the {say(old[2])}"
            plans.append(_replaced(env, "wrong_target", old, ("on", old[1], place), what))
    return _possible(env, plans)


def _scripts(kind: str, orders: Sequence[tuple[tuple[int, ...], str]]) -> list[WrongPlan]:
    return [WrongPlan(kind, None, o, "", {"what": w, "amount": "completely"}) for o, w in orders]


def _steps(env: Any) -> list[str]:
    """The expert's sub-tasks."""
    return [skill.name for skill in make_expert(env).skills]


def _wrong_order(env: Any) -> list[WrongPlan]:
    """Two successive sub-tasks, swapped."""
    names = _steps(env)
    orders = []
    for i in range(len(names) - 1):
        order = list(range(len(names)))
        order[i], order[i + 1] = order[i + 1], order[i]
        first, then = say_step(names[i + 1]), say_step(names[i])
        orders.append((tuple(order), f"it wants to {first} too soon: '{then}' comes before it"))
    return _scripts("wrong_order", orders)


def _skipped_step(env: Any) -> list[WrongPlan]:
    """One sub-task left out."""
    names = _steps(env)
    if len(names) < 2:
        return []
    orders = []
    for i, name in enumerate(names):
        order = tuple(j for j in range(len(names)) if j != i)
        orders.append((order, f"it leaves out the step '{say_step(name)}'"))
    return _scripts("skipped_step", orders)


def _wrong_instruction(env: Any) -> list[WrongPlan]:
    """Another task of the same scene, in the benchmark's words."""
    plans = []
    for goal, told in _asked_instead(env):
        words = {"what": f"it does what '{told}' asks for", "amount": "completely"}
        plans.append(WrongPlan("wrong_instruction", tuple(goal), None, told, words))
    return _possible(env, plans)


#: Type -> what a scene offers for it.
PLANS = {
    "wrong_object": _wrong_object,
    "wrong_target": _wrong_target,
    "wrong_order": _wrong_order,
    "skipped_step": _skipped_step,
    "wrong_instruction": _wrong_instruction,
}


def _asked_instead(env: Any) -> list[tuple[tuple[Goal, ...], str]]:
    """Goals and instructions of other tasks in the same scene."""
    try:
        return [(tuple(goal), told) for goal, told in alternative_goals(env)]
    except ValueError:
        return list(_siblings(env.task))


@functools.lru_cache(maxsize=64)
def _siblings(task: LiberoTask) -> tuple[tuple[tuple[Goal, ...], str], ...]:
    """Other tasks of the suite whose scene holds the same things at the same places."""
    scene, goal = _read(task.suite, task.name)
    found = []
    for name in task_names(task.suite):
        other, asked = _read(task.suite, name)
        if other == scene and asked != goal:
            found.append((asked, get_task(task.suite, name).instruction))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _read(suite: str, name: str) -> tuple[frozenset[tuple[str, ...]], tuple[Goal, ...]]:
    """What lies where, and the goal, of a problem file."""
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    problem = robosuite_parse_problem(str(get_task(suite, name).bddl))
    scene = frozenset(tuple(state) for state in problem["initial_state"])
    return scene, tuple(tuple(state) for state in problem["goal_state"])


@dataclass(frozen=True)
class Distractor(Injection):
    """Another object stands beside the target, or in its place."""

    kind: ClassVar[str] = "distractor"
    family: ClassVar[str] = "semantic"
    definition: ClassVar[str] = (
        "Another object stands nearer to the target than it did, by up to the whole way: then it "
        "is in the target's very place, with the target next to it."
    )
    when: Trigger = field(default_factory=AtStep)

    #: Gap between the two where they stand side by side, beyond their sizes, metres.
    _GAP: ClassVar[float] = 0.008

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Which object, as a share of those there are."""
        return {"pick": float(rng.random())}

    def applies(self, scene: Scene) -> bool:
        """Whether another object stands on what the target stands on."""
        view = Privileged(scene.env)
        view.update()
        return bool(_distractors(view, scene))

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Move both objects, if there is room for it; else nothing happens."""
        view = Privileged(scene.env)
        view.update()
        others = _distractors(view, scene)
        if scene.target is None or not others or self.severity == 0.0:
            return
        other = others[int(drawn["pick"] * len(others))]
        places = self._places(view, scene.target, other)
        if places is not None:
            for name, place in zip((scene.target, other), places, strict=True):
                _put(scene.env, view, name, place)
            scene.env.edited()

    def _places(
        self, view: Privileged, target: str, other: str
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Where the two go, world x and y; None where there is no room."""
        here, both = view.pos(target)[:2], (target, other)
        way = view.pos(other)[:2] - here
        distance = float(np.linalg.norm(way))
        room = _radius(view, target) + _radius(view, other) + self._GAP
        for turn in np.linspace(0.0, 2 * np.pi, 8, endpoint=False):
            side = rotation_z(turn)[:2, :2] @ way / distance
            # One side for all severities: free from where the target may end to where it begins.
            aside = here - side * room
            if _free(view, here, here + side * distance, _radius(view, other), both) and _free(
                view, here, aside, _radius(view, target), both
            ):
                near = (1.0 - self.severity) * distance
                return here - side * max(0.0, room - near), here + side * near
        return None

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What explanations are made of."""
        amount = f"{100 * self.severity:.0f} % of the way to the target"
        return {"what": "another object stands where the hand goes", "amount": amount}


def _distractors(view: Privileged, scene: Scene) -> list[str]:
    """Movable objects that are no part of the goal and stand on what the target stands on."""
    if scene.target is None:
        return []
    problem = scene.env.problem
    goal = {name for state in problem.parsed_problem["goal_state"] for name in state}
    foot = view.hull(scene.target)[:, 2].min()
    found = []
    for name in sorted(problem.objects_dict):
        level = abs(view.hull(name)[:, 2].min() - foot) < 0.01
        if name not in goal and _kind(name) not in _HOLDERS and level:
            found.append(name)
    return found


def _radius(view: Privileged, name: str) -> float:
    """Radius about its body frame that an object needs in the plane, metres."""
    return float(np.linalg.norm((view.hull(name) - view.pos(name))[:, :2], axis=1).max())


def _free(
    view: Privileged, start: np.ndarray, end: np.ndarray, radius: float, ignore: tuple[str, ...]
) -> bool:
    """Whether nothing but the table is within ``radius`` of the way between places ``[2]``."""
    foot = min(float(view.hull(name)[:, 2].min()) for name in ignore)
    return view.top_along(start, end, radius, ignore) < foot + 0.01


def _put(env: Any, view: Privileged, name: str, place: np.ndarray) -> None:
    """Move an object to a place ``[2]`` in the plane, at rest, unturned."""
    joint = int(env.model.body_jntadr[view.body(name)])
    assert env.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE
    address, dof = int(env.model.jnt_qposadr[joint]), int(env.model.jnt_dofadr[joint])
    env.data.qpos[address : address + 2] = place
    env.data.qvel[dof : dof + 6] = 0.0
