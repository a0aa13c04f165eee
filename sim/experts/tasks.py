"""From a goal predicate to the skill that brings it about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from regrasp.sim.experts.base import Expert, Skill
from regrasp.sim.experts.grasps import Around, GraspRule, Rim
from regrasp.sim.experts.pick_place import PickPlace, Place
from regrasp.sim.experts.scene import Scene

Goal = tuple[str, ...]


def _category(name: str) -> str:
    """``alphabet_soup_1`` -> ``alphabet_soup``."""
    return name.rsplit("_", 1)[0]


#: Kinds of object that are round about their upright axis.
ROUND = {"alphabet_soup", "tomato_sauce", "wine_bottle"}

#: Kinds that are taken by the rim.
RIM = {"akita_black_bowl"}


def _grasp_for(env: Any, name: str) -> GraspRule:
    kind = _category(name)
    if kind in RIM:
        return Rim(drawer=_drawer_of(env, name))
    return Around(round_=kind in ROUND)


def _drawer_of(env: Any, name: str) -> str | None:
    """The cabinet in whose drawer an object starts, if it does."""
    for state in env.problem.parsed_problem["initial_state"]:
        if state[1] == name and state[-1].endswith(("top_region", "middle_region", "bottom_region")):
            return state[-1].rsplit("_", 2)[0]
    return None


def _bottom_offset(scene: Scene, name: str) -> float:
    """Height of the body frame above the object's lowest point."""
    return float(scene.pos(name)[2] - scene.hull(name)[:, 2].min())


def _into_basket(name: str, region: str, goal: Goal) -> Place:
    basket = region.removesuffix("_contain_region")

    def rim(scene: Scene) -> float:
        return float(scene.hull(basket)[:, 2].max())

    def spot(scene: Scene) -> np.ndarray:
        out = scene.site(region)
        out[2] = scene.pos(basket)[2] + 0.01 + _bottom_offset(scene, name)
        return out

    # The hand is wider than the basket: it stays above the walls.
    return Place(spot, goal, tolerance=0.02, hand_floor=lambda s: rim(s) - 0.005, on_contact=False)


def _onto_object(name: str, support: str, goal: Goal) -> Place:
    def spot(scene: Scene) -> np.ndarray:
        out = scene.pos(support)
        out[2] += _bottom_offset(scene, name)
        return out

    return Place(spot, goal)


def _onto_site(name: str, site: str, goal: Goal) -> Place:
    def spot(scene: Scene) -> np.ndarray:
        out = scene.site(site)
        out[2] += _bottom_offset(scene, name)
        return out

    return Place(spot, goal)


def skill_for(env: Any, goal: Goal) -> Skill:
    """The skill that makes ``goal`` true.

    Raises:
        ValueError: no expert is written for this predicate and these objects.
    """
    verb, *names = goal[0].lower(), *goal[1:]
    objects = env.problem.objects_dict
    if verb == "in" and names[0] in objects and names[1].endswith("contain_region"):
        return PickPlace(names[0], _grasp_for(env, names[0]), _into_basket(names[0], names[1], goal))
    if verb == "on" and names[0] in objects:
        onto = _onto_object if names[1] in objects else _onto_site
        return PickPlace(names[0], _grasp_for(env, names[0]), onto(names[0], names[1], goal))
    raise ValueError(f"goal {goal}: no expert is written for it; known are In, On")


def make_expert(env: Any, goal: Sequence[Goal] | None = None) -> Expert:
    """The expert for an environment's own goal, or for another goal in the same scene.

    Args:
        env: a LIBERO environment of :mod:`regrasp.sim`.
        goal: predicates that shall all hold, in the order in which to bring them about, such as
            ``[("In", "milk_1", "basket_1_contain_region")]``; None takes the task's own.

    Raises:
        ValueError: a predicate that no expert is written for.
    """
    if goal is None:
        goal = [tuple(state) for state in env.problem.parsed_problem["goal_state"]]
    return Expert(Scene(env), [skill_for(env, tuple(state)) for state in goal])
