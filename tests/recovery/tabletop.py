"""A kinematic pick-and-place table behind the real interfaces, quick enough to run thousands of
times: a hand that moves as told, an object it can grasp, push, drop and be robbed of, a bin."""

from dataclasses import dataclass

import numpy as np
from regrasp.episodes.types import LIBERO_ACTION, LIBERO_STATE, Observation, PolicyOutput
from regrasp.policies.protocol import PolicySpec

BIN = np.array([0.25, 0.2])
TABLE = 0.0
HOME = np.array([0.0, 0.0, 0.3, np.pi, 0.0, 0.0])


@dataclass
class Result:
    states: np.ndarray
    executed: int
    terminated: bool
    truncated: bool


class Tabletop:
    """The hand moves 0.05 m an action; the gripper needs three steps to close or open."""

    instruction = "put the cube in the bin"

    def __init__(self, seed=0, slip_at=None, horizon=400):
        rng = np.random.default_rng(seed)
        self.hand = HOME.copy()
        self.width = 0.08
        self.object = np.array([*rng.uniform(-0.15, 0.0, 2), TABLE])
        self.held = False
        self.slip_at, self.horizon, self.t = slip_at, horizon, 0
        self.slip_to = rng.uniform(-0.15, -0.05, 2)

    @property
    def state(self):
        fingers = [self.width / 2, -self.width / 2]
        return np.concatenate([self.hand, fingers]).astype(np.float32)

    @property
    def success(self):
        return (
            not self.held
            and np.linalg.norm(self.object[:2] - BIN) < 0.04
            and self.object[2] <= TABLE
        )

    def observation(self, render=True):
        images = {}
        if render:
            image = np.zeros((64, 64, 3), np.uint8)
            row, col = np.clip(((self.object[:2] + 0.4) * 80).astype(int), 0, 63)
            image[row, col] = 255
            images["scene"] = image
        return Observation(images, self.state, self.instruction, self.t / 20)

    def step_chunk(self, actions, render="none"):
        states = []
        for action in actions:
            self._step(np.asarray(action, np.float64))
            states.append(self.state)
            if self.success or self.t >= self.horizon:
                break
        return Result(np.stack(states), len(states), self.success, self.t >= self.horizon)

    def _step(self, action):
        self.t += 1
        move = np.clip(action[:3], -1, 1) * 0.05
        self.hand[:3] += move
        self.hand[2] = max(self.hand[2], TABLE)
        near = np.linalg.norm(self.hand[:3] - self.object) < 0.03
        stop = 0.02 if self.held or (near and action[6] > 0) else 0.0
        self.width = float(np.clip(self.width - 0.03 * np.sign(action[6]), stop, 0.08))
        if action[6] > 0 and near and self.width <= 0.02:
            self.held = True
        if action[6] < 0:
            self.held = False
        if self.held:
            self.object = self.hand[:3].copy()
        else:
            self.object[2] = TABLE
        if self.held and self.slip_at is not None and self.object[2] > self.slip_at:
            self.held, self.slip_at = False, None
            self.object = np.array([*self.slip_to, TABLE])


class StalePlanner:
    """Looks where the object is once, at reset, then follows its plan blindly: it goes on to the
    bin with an empty hand. Its embedding says how far the object is from where it ought to be."""

    spec = PolicySpec({"scene": (64, 64)}, LIBERO_STATE, LIBERO_ACTION, chunk=12, control_hz=20.0)

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)
        self.seed, self.phase, self.plan = seed, 0, None
        self.resets = getattr(self, "resets", 0) + 1

    def infer(self, observations, num_samples=1):
        return [self._one(o, num_samples) for o in observations]

    def _one(self, observation, num_samples):
        pixels = np.argwhere(observation.images["scene"][..., 0] > 0)
        seen = (pixels[0] + 0.5) / 80 - 0.4
        if self.plan is None:
            self.plan = self._search(seen)
        chunk = np.zeros((self.spec.chunk, 7), np.float32)
        hand, phase = observation.state[:3].astype(np.float64), self.phase
        for i in range(self.spec.chunk):
            target, gripper = self.plan[phase]
            delta = np.clip((target - hand) / 0.05, -1, 1)
            chunk[i] = [*delta, 0, 0, 0, gripper]
            hand = hand + delta * 0.05
            if np.linalg.norm(target - hand) < 1e-3 and phase < len(self.plan) - 1:
                phase += 1
            if i == 5:
                self.phase = phase  # the loop executes six and asks again
        noise = self.rng.normal(0, 1e-3, (num_samples, *chunk.shape))
        carrying = float(observation.state[6] < 0.03 and observation.state[2] > 0.1)
        distance = np.linalg.norm(np.append(seen, TABLE) - observation.state[:3])
        embedding = np.array([carrying * distance, *self.rng.normal(0, 0.01, 3)], np.float32)
        samples = chunk[None] + noise * (np.arange(7) < 6)
        return PolicyOutput(samples.astype(np.float32), embedding)

    def _search(self, seen):
        """Down on the pixel, close, up, over the bin, down, open."""
        above, bin_ = np.array([*seen, 0.15]), np.array([*BIN, 0.0])
        at = np.array([*seen, TABLE])
        return [
            (above, -1.0),
            (at, -1.0),
            *[(at, 1.0)] * 5,
            (np.array([*seen, 0.2]), 1.0),
            (np.array([*BIN, 0.2]), 1.0),
            (bin_, 1.0),
            (np.array([*BIN, 0.001]), -1.0),
            (np.array([*BIN, 0.1]), -1.0),
        ]
