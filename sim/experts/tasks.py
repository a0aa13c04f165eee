"""From a goal predicate to the skill that brings it about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from regrasp.sim.experts.articulated import CloseDrawer, Drawer, OpenDrawer, TurnKnob
from regrasp.sim.experts.base import Expert, Skill
from regrasp.sim.experts.grasps import TIP, Around, GraspRule, Rim
from regrasp.sim.experts.pick_place import PickPlace, Place
from regrasp.sim.experts.push import DragAside
from regrasp.sim.experts.scene import Scene

Goal = tuple[str, ...]


def _category(name: str) -> str:
    """``alphabet_soup_1`` -> ``alphabet_soup``."""
    return name.rsplit("_", 1)[0]


#: Goals that :func:`skills_for` knows.
KNOWN = ("In a basket", "In a drawer", "On an object", "On a site", "Open", "Close", "Turnon")

#: How the region sites of drawers end.
_DRAWERS = ("_top_region", "_middle_region", "_bottom_region")

#: Kinds of object that are round about their upright axis.
ROUND = {"alphabet_soup", "tomato_sauce", "wine_bottle"}

#: Kinds that other things are put into.
HOLLOW = {"akita_black_bowl"}

#: Kinds that are taken by the knob of their lid.
KNOB = {"moka_pot"}

#: Kinds that are taken by the rim.
RIM = {"akita_black_bowl", "plate", "porcelain_mug", "white_yellow_mug", "red_coffee_mug"}


def _grasp_for(env: Any, name: str) -> GraspRule:
    kind = _category(name)
    if kind in RIM:
        return Rim(drawer=_drawer_of(env, name))
    if kind in KNOB:
        return Around(depth=0.012, round_=True, band=0.010)
    return Around(round_=kind in ROUND)


def _is_drawer(region: str) -> bool:
    return "cabinet" in region and region.endswith(_DRAWERS)


def _drawer_of(env: Any, name: str) -> str | None:
    """The cabinet in whose drawer an object starts, if it does."""
    for state in env.problem.parsed_problem["initial_state"]:
        if state[1] == name and _is_drawer(state[-1]):
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


def _into_drawer(name: str, drawer: Drawer, goal: Goal) -> Place:
    def spot(scene: Scene) -> np.ndarray:
        # The middle of what is not under the cabinet: the part of the drawer pulled out.
        out = scene.site(drawer.region) - drawer.opening(scene) * 0.004
        out[2] -= 0.03 - _bottom_offset(scene, name)
        return out

    # The outer finger has no room inside: the hand stays above the drawer's wall.
    return Place(spot, goal, hand_floor=lambda s: drawer.wall_top(s) + TIP + 0.004)


def _slid_to(name: str, site: str, goal: Goal) -> Place:
    def spot(scene: Scene) -> np.ndarray:
        out = scene.site(site)
        out[2] += _bottom_offset(scene, name) + 0.006  # the region's site lies in the table
        return out

    return Place(spot, goal, slide=True)


def _onto_object(name: str, support: str, goal: Goal) -> Place:
    def spot(scene: Scene) -> np.ndarray:
        out = scene.pos(support)
        out[2] += _bottom_offset(scene, name)
        return out

    if _category(support) in HOLLOW:
        # There is no room to open the fingers below the rim.
        return Place(spot, goal, hand_floor=lambda s: s.hull(support)[:, 2].max() + TIP - 0.004)
    return Place(spot, goal)


def _onto_site(name: str, site: str, goal: Goal, aside: float) -> Place:
    def spot(scene: Scene) -> np.ndarray:
        out = scene.site(site) + np.array([aside, 0.0, 0.0])
        out[2] += _bottom_offset(scene, name)
        return out

    return Place(spot, goal)


def _aside(goal: Goal, goals: Sequence[Goal]) -> float:
    """Where on a site that several objects share one of them goes: along x, metres."""
    sharing = [g for g in goals if g[0].lower() == "on" and g[-1] == goal[-1]]
    return (sharing.index(goal) - (len(sharing) - 1) / 2) * 0.09


def skills_for(env: Any, goal: Goal, goals: Sequence[Goal]) -> list[Skill]:
    """The skills that make ``goal`` true, in order; first those that make it possible.

    Args:
        env: a LIBERO environment.
        goal: the predicate.
        goals: every predicate that shall hold in the end, this one among them.

    Raises:
        ValueError: no expert is written for this predicate and these objects.
    """
    verb, names = goal[0].lower(), goal[1:]
    objects, fixtures = env.problem.objects_dict, env.problem.fixtures_dict
    target = names[-1]
    drawer = Drawer(target) if _is_drawer(target) else None
    if verb == "open" and drawer:
        return [OpenDrawer(drawer, goal)]
    if verb == "close" and drawer:
        return [CloseDrawer(drawer, goal)]
    if verb == "turnon" and target in fixtures:
        return [TurnKnob(target, goal)]
    if verb in ("in", "on") and names[0] in objects:
        name = names[0]
        grasp = _grasp_for(env, name)
        if _category(name) == "plate":
            return [PickPlace(name, grasp, _slid_to(name, target, goal))]
        if verb == "in" and drawer:
            place = _into_drawer(name, drawer, goal)
            first = OpenDrawer(drawer, ("open", target), until=goal)
            return [DragAside(name, drawer, goal), first, PickPlace(name, grasp, place)]
        if verb == "in" and target.startswith("basket"):
            return [PickPlace(name, grasp, _into_basket(name, target, goal))]
        if verb == "on":
            if target in objects:
                return [PickPlace(name, grasp, _onto_object(name, target, goal))]
            place = _onto_site(name, target, goal, _aside(goal, goals))
            return [PickPlace(name, grasp, place)]
    raise ValueError(f"goal {goal}: no expert is written for it; known are {', '.join(KNOWN)}")


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
    # What is put inside something goes in before that is shut.
    ordered = sorted((tuple(state) for state in goal), key=lambda g: g[0].lower() == "close")
    skills = [skill for state in ordered for skill in skills_for(env, state, ordered)]
    return Expert(Scene(env), skills)
