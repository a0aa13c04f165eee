"""Drive the hand back to a checkpoint through the ordinary action interface.

Nothing here touches a simulator: a rewind is a list of waypoints for the hand and a proportional
controller that turns the way to the next one into OSC_POSE deltas, as the policy itself would.
The world is not restored; only the arm is. Poses are those of ``Observation.state``
(``LIBERO_STATE``: metres, axis-angle radians, world frame).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OPEN, CLOSED = -1.0, 1.0


@dataclass(frozen=True)
class Checkpoint:
    """A place the arm can be sent back to.

    Attributes:
        step: control step it was visited at.
        pose: float ``[6]``, hand position and axis-angle orientation.
        label: what verified it ("start", or what the verifier said).
    """

    step: int
    pose: np.ndarray
    label: str


@dataclass(frozen=True)
class RewindConfig:
    """How a rewind moves.

    Attributes:
        holding_width: metres between the fingers above which a hand told to close holds
            something.
        position_step: metres that an action of 1.0 asks for in a control step.
        rotation_step: radians likewise.
        turn_limit: largest rotation component of an action.
        gain: fraction of the remaining way asked for in one control step.
        tolerance: metres at which a waypoint counts as reached.
        angle_tolerance: radians likewise, where the last waypoint is concerned.
        settle: control steps that the gripper is given to open.
        patience: control steps after which an unreachable waypoint is given up.
        stall: control steps without a centimetre of progress after which a detour is tried: an
            arm at a joint's limit or stretched out does not come back the way it is asked to.
        detour: metres that a detour leads aside.
        spacing: metres between the waypoints of a retraced path.
    """

    holding_width: float = 0.006
    position_step: float = 0.05
    rotation_step: float = 0.5
    turn_limit: float = 0.5
    gain: float = 1.0
    tolerance: float = 0.015
    angle_tolerance: float = 0.08
    settle: int = 4
    patience: int = 60
    stall: int = 7
    detour: float = 0.12
    spacing: float = 0.03


@dataclass(frozen=True)
class Waypoint:
    """One leg of a rewind: be at ``pose`` (None: stay) with the gripper commanded so.

    ``settle`` control steps are spent there at least; ``exact`` waits for the orientation too.
    """

    pose: np.ndarray | None
    gripper: float
    settle: int = 0
    exact: bool = False


def rotation_matrix(axis_angle: np.ndarray) -> np.ndarray:
    """Rodrigues' formula: axis-angle ``[3]`` in radians to a rotation matrix ``[3, 3]``."""
    axis_angle = np.asarray(axis_angle, dtype=np.float64)
    angle = float(np.linalg.norm(axis_angle))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = axis_angle / angle
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * (k @ k)


def rotation_between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """World-frame axis-angle ``[3]`` that turns orientation ``start`` into ``end`` (axis-angles).

    Exact up to half a turn; at exactly half a turn, where the axis is ambiguous, either is taken.
    """
    r = rotation_matrix(end) @ rotation_matrix(start).T
    twice_sine = np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])
    sine, cosine = np.linalg.norm(twice_sine) / 2, (np.trace(r) - 1) / 2
    angle = float(np.arctan2(sine, cosine))
    if angle < 1e-9:
        return np.zeros(3)
    if sine > 1e-6:
        return twice_sine / (2 * sine) * angle
    # Half a turn: r = 2 a a^T - I, so any non-zero column of r + I is along the axis.
    outer = r + np.eye(3)
    column = outer[:, int(np.argmax(np.diag(outer)))]
    return column / np.linalg.norm(column) * angle


def holds(state: np.ndarray, last_gripper: float, config: RewindConfig) -> bool:
    """Whether the hand holds something: told to close, its fingers are kept apart."""
    return bool(last_gripper > 0 and abs(state[6]) + abs(state[7]) > config.holding_width)


def plan_rewind(
    states: np.ndarray,
    grippers: np.ndarray,
    target: Checkpoint,
    config: RewindConfig,
    height: float,
) -> list[Waypoint]:
    """Waypoints from where the arm is to a checkpoint.

    An empty hand opens, rises to ``height`` if it is lower, and travels. It rises no further than
    that: a stretched arm that lifts runs into its elbow's limit and is stuck there. A hand that
    holds something first retraces the poses it visited since it closed and opens where it closed:
    the object is put back, not dropped.

    Args:
        states: float ``[T + 1, 8]``, proprioception from the start of the segment until now.
        grippers: float ``[T]``, gripper command of each step between them.
        target: where to go.
        config: how.
        height: metres, world z at which the hand may travel over what stands there; the start
            pose's own, as a rule.
    """
    now = np.asarray(states[-1], dtype=np.float64)
    waypoints: list[Waypoint] = []
    if len(grippers) and holds(now, grippers[-1], config):
        opened = np.flatnonzero(np.asarray(grippers) <= 0)
        closed_at = int(opened[-1]) + 1 if len(opened) else 0
        last = now
        for pose in np.asarray(states[closed_at:-1], dtype=np.float64)[::-1]:
            if np.linalg.norm(pose[:3] - last[:3]) >= config.spacing:
                waypoints.append(Waypoint(pose[:6], CLOSED))
                last = pose
        now = np.asarray(states[closed_at], dtype=np.float64)
        waypoints.append(Waypoint(now[:6], CLOSED, exact=True))
    waypoints.append(Waypoint(None, OPEN, settle=config.settle))
    up = now[:6].copy()
    over = np.asarray(target.pose, dtype=np.float64).copy()
    over[2] = up[2] = max(height, now[2], over[2])
    waypoints.append(Waypoint(up, OPEN))
    waypoints.append(Waypoint(over, OPEN))
    waypoints.append(Waypoint(np.asarray(target.pose, dtype=np.float64), OPEN, exact=True))
    return waypoints


#: Where detours lead, tried in turn: up, to one side, away from the robot's front, to the other.
DETOURS = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])


class Rewind:
    """Feeds the arm one action a control step until the last waypoint is reached.

    Attributes:
        skipped: waypoints given up because the arm did not get there in time.
        detours: detours tried.
    """

    def __init__(self, waypoints: list[Waypoint], config: RewindConfig) -> None:
        self._waypoints = list(waypoints)
        self._config = config
        self._aside: np.ndarray | None = None
        self._spent: int = 0
        self._stalled: int = 0
        self._closest: float = float("inf")
        self.skipped = self.detours = 0

    def action(self, state: np.ndarray) -> np.ndarray | None:
        """The next action, float32 ``[7]``, or None once the rewind is over."""
        config = self._config
        while self._waypoints:
            waypoint = self._waypoints[0]
            delta = np.zeros(6)
            if waypoint.pose is not None:
                delta[:3] = waypoint.pose[:3] - state[:3]
                delta[3:] = rotation_between(state[3:6], waypoint.pose[3:])
            distance, angle = np.linalg.norm(delta[:3]), np.linalg.norm(delta[3:])
            arrived = distance <= config.tolerance and (
                not waypoint.exact or angle <= config.angle_tolerance
            )
            if arrived and self._spent >= waypoint.settle:
                self._next()
                continue
            if self._spent >= config.patience:
                self.skipped += 1
                self._next()
                continue
            self._spent += 1
            # A radian counts as 10 cm: turning on the spot is progress too.
            togo = distance + 0.1 * angle * waypoint.exact
            if togo < self._closest - 0.01:
                self._closest, self._stalled = float(togo), 0
            self._stalled += 1
            if self._aside is None and self._stalled > config.stall and not arrived:
                self._aside = state[:3] + config.detour * DETOURS[self.detours % len(DETOURS)]
                self.detours += 1
            if self._aside is not None:
                delta[:3], delta[3:] = self._aside - state[:3], 0.0
                if self._stalled > 2 * config.stall:
                    self._aside, self._stalled, self._closest = None, 0, np.inf
            delta[:3] *= config.gain / config.position_step
            delta[3:] *= config.gain / config.rotation_step
            # Scaled as a whole, not clipped each by itself, so that the way stays straight.
            delta[:3] /= max(1.0, float(np.abs(delta[:3]).max()))
            # A stretched arm that is asked to turn and to travel at once runs into joint limits:
            # it turns where it is going, and slowly.
            delta[3:] /= max(1.0, float(np.abs(delta[3:]).max()) / config.turn_limit)
            if not waypoint.exact:
                delta[3:] = 0.0
            return np.append(delta, waypoint.gripper).astype(np.float32)
        return None

    def _next(self) -> None:
        self._waypoints.pop(0)
        self._spent = self._stalled = 0
        self._closest = float("inf")
        self._aside = None
