"""Privileged view of a LIBERO scene: poses, shapes, contacts, obstacles and goal predicates.

All positions are metres in the world frame. Shapes come from collision geometry only.
"""

from __future__ import annotations

import itertools
from typing import Any

import mujoco
import numpy as np
from scipy.spatial import ConvexHull

_CORNERS = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))


def _geom_points(model: mujoco.MjModel, geom: int) -> np.ndarray:
    """Points that span a geom's convex hull, in the geom's frame, ``[N, 3]``."""
    kind, size = model.geom_type[geom], model.geom_size[geom]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        start, count = model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]
        return model.mesh_vert[start : start + count].astype(float)
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        angles = np.linspace(0.0, 2 * np.pi, 24, endpoint=False)
        ring = np.stack([np.cos(angles), np.sin(angles)], 1) * size[0]
        return np.concatenate([np.c_[ring, np.full(24, s * size[1])] for s in (-1, 1)])
    half = model.geom_aabb[geom, 3:]
    return model.geom_aabb[geom, :3] + _CORNERS * half


class Scene:
    """The state of one environment as the experts see it; call :meth:`update` once a step.

    Args:
        env: a LIBERO environment with ``model``, ``data``, ``problem`` and ``eef_pose()``.

    Attributes:
        eef: grip site position ``[3]``.
        eef_rot: grip site orientation ``[3, 3]``.
        width: distance between the finger pads, 0 to 0.08.
        finger_speed: closing speed of the fingers, m/s (absolute).
        last_gripper: gripper command of the previous step.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.problem = env.problem
        self.last_gripper = -1.0
        self._bind()

    def _bind(self) -> None:
        model, data = self.env.model, self.env.data
        self.model, self.data = model, data
        self._solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        self._root = np.zeros(model.ngeom, np.int64)
        self._body_geoms: dict[int, np.ndarray] = {}
        robot = np.zeros(model.ngeom, bool)
        fingers: dict[str, list[int]] = {"left": [], "right": []}
        for geom in range(model.ngeom):
            body = int(model.geom_bodyid[geom])
            name = model.body(body).name
            if name in ("gripper0_leftfinger", "gripper0_finger_joint1_tip"):
                fingers["left"].append(geom)
            if name in ("gripper0_rightfinger", "gripper0_finger_joint2_tip"):
                fingers["right"].append(geom)
            robot[geom] = name.startswith(("robot0", "gripper0", "mount0"))
            self._root[geom] = model.body_rootid[body]
        self._robot = robot
        self._finger = {side: np.array(geoms) for side, geoms in fingers.items()}
        names = ("gripper0_finger_joint1", "gripper0_finger_joint2")
        self._finger_q = [int(model.joint(n).qposadr[0]) for n in names]
        self._finger_v = [int(model.joint(n).dofadr[0]) for n in names]
        self._hulls: dict[str, np.ndarray] = {}
        # The few geoms that a hand can meet: solid, not the robot, not a plane.
        plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        self._obstacles = np.flatnonzero(self._solid & ~robot & ~plane)
        self._obstacle_root = self._root[self._obstacles]

    def reset(self) -> None:
        """Start of an episode: rebind if the environment rebuilt its model."""
        self.last_gripper = -1.0
        if self.env.model is not self.model or self.env.data is not self.data:
            self._bind()

    def update(self) -> None:
        """Read the present state."""
        model, data = self.model, self.data
        self.eef, self.eef_rot = self.env.eef_pose()
        q = [data.qpos[i] for i in self._finger_q]
        self.width = float(q[0] - q[1])
        self.finger_speed = float(abs(data.qvel[self._finger_v[0]] - data.qvel[self._finger_v[1]]))
        count = data.ncon
        contact = data.contact.geom[:count] if count else np.zeros((0, 2), np.int64)
        self._contact = np.asarray(contact, np.int64)
        geoms = self._obstacles
        rot = data.geom_xmat[geoms].reshape(-1, 3, 3)
        centre = data.geom_xpos[geoms] + np.einsum("gij,gj->gi", rot, model.geom_aabb[geoms, :3])
        half = np.einsum("gij,gj->gi", np.abs(rot), model.geom_aabb[geoms, 3:])
        self._low, self._high = centre - half, centre + half

    # Objects

    def body(self, name: str) -> int:
        """Root body of an object or fixture."""
        return int(self.problem.obj_body_id[name])

    def pos(self, name: str) -> np.ndarray:
        """Position of an object's body frame (what the predicates test)."""
        return self.data.xpos[self.body(name)].copy()

    def rot(self, name: str) -> np.ndarray:
        """Orientation of an object's body frame ``[3, 3]``."""
        return self.data.xmat[self.body(name)].reshape(3, 3).copy()

    def geoms(self, body: int) -> np.ndarray:
        """Solid geoms of a body and everything attached to it."""
        if body not in self._body_geoms:
            model = self.model
            found = []
            for geom in np.flatnonzero(self._solid):
                up = int(model.geom_bodyid[geom])
                while up > 0 and up != body:
                    up = int(model.body_parentid[up])
                if up == body:
                    found.append(int(geom))
            self._body_geoms[body] = np.array(found, np.int64)
        return self._body_geoms[body]

    def hull(self, name: str) -> np.ndarray:
        """World positions of the object's convex hull vertices ``[N, 3]``."""
        if name not in self._hulls:
            body = self.body(name)
            rot, origin = self.data.xmat[body].reshape(3, 3), self.data.xpos[body]
            parts = []
            for geom in self.geoms(body):
                to_world = self.data.geom_xmat[geom].reshape(3, 3)
                world = _geom_points(self.model, geom) @ to_world.T + self.data.geom_xpos[geom]
                parts.append((world - origin) @ rot)
            points = np.concatenate(parts)
            self._hulls[name] = points[ConvexHull(points).vertices]
        return self._hulls[name] @ self.rot(name).T + self.pos(name)

    def site(self, name: str) -> np.ndarray:
        """Position of a site ``[3]``."""
        return np.array(self.problem.sim.data.get_site_xpos(name), float)

    def top_of(self, geoms: np.ndarray) -> float:
        """Height of the highest point of some solid geoms, metres."""
        return float(self._high[np.isin(self._obstacles, geoms), 2].max())

    # Contacts

    def touching(self, first: np.ndarray, second: np.ndarray) -> bool:
        """Whether any geom of the one set touches any of the other."""
        a, b = self._contact[:, 0], self._contact[:, 1]
        # A mask over all geoms: np.isin sorts, and this is asked several times a control step.
        one, other = np.zeros((2, self.model.ngeom), bool)
        one[first] = True
        other[second] = True
        return bool(((one[a] & other[b]) | (other[a] & one[b])).any())

    def fingers_on(self, geoms: np.ndarray) -> int:
        """How many of the two fingers touch one of ``geoms``."""
        return sum(self.touching(self._finger[side], geoms) for side in ("left", "right"))

    def supported(self, name: str) -> bool:
        """Whether the object touches anything but the robot and itself."""
        own = self.geoms(self.body(name))
        a, b = self._contact[:, 0], self._contact[:, 1]
        mine = np.zeros(self.model.ngeom, bool)
        mine[own] = True
        in_a, in_b = mine[a], mine[b]
        other = np.where(in_a, b, a)
        return bool(((in_a ^ in_b) & ~self._robot[other]).any())

    # Obstacles

    def top_along(
        self, start: np.ndarray, end: np.ndarray, radius: float, ignore: tuple[str, ...] = ()
    ) -> float:
        """Greatest height of anything within ``radius`` of the horizontal segment, metres.

        Args:
            start: one end, only x and y are used.
            end: the other end.
            radius: half width of the corridor.
            ignore: names of objects that do not count.
        """
        skip = np.isin(self._obstacle_root, [self.body(name) for name in ignore])
        low, high = self._low[:, :2] - radius, self._high[:, :2] + radius
        begin = np.asarray(start)[:2]
        way = np.asarray(end)[:2] - begin
        safe = np.where(np.abs(way) < 1e-9, 1e-9, way)
        t1, t2 = (low - begin) / safe, (high - begin) / safe
        enter = np.minimum(t1, t2).max(1)
        leave = np.maximum(t1, t2).min(1)
        hit = (enter <= leave) & (leave >= 0.0) & (enter <= 1.0) & ~skip
        return float(self._high[hit, 2].max()) if hit.any() else -1.0

    def inside(self, points: np.ndarray, ignore: tuple[str, ...] = ()) -> int:
        """How many of ``points`` ``[N, 3]`` lie in the bounding box of a solid geom.

        Args:
            points: world positions.
            ignore: names of objects that do not count.
        """
        skip = np.isin(self._obstacle_root, [self.body(name) for name in ignore])
        middle, reach = points.mean(0), np.ptp(points, axis=0) / 2
        far = ((self._low > middle + reach) | (self._high < middle - reach)).any(1)
        hit = np.zeros(len(points), bool)
        for geom in self._obstacles[~skip & ~far]:
            rot = self.data.geom_xmat[geom].reshape(3, 3)
            local = (points - self.data.geom_xpos[geom]) @ rot - self.model.geom_aabb[geom, :3]
            hit |= (np.abs(local) < self.model.geom_aabb[geom, 3:]).all(1)
        return int(hit.sum())

    # Goals

    def holds(self, predicate: tuple[str, ...]) -> bool:
        """Truth of a BDDL predicate such as ``("In", "milk_1", "basket_1_contain_region")``."""
        return bool(self.problem._eval_predicate([predicate[0].lower(), *predicate[1:]]))
