"""A tiny environment with LiberoEnv's interface that can be told to hang, die or raise."""

import os
import signal
import time

import gymnasium
import numpy as np
from regrasp.sim.env import ChunkResult


class Toy:
    """The state counts actions; an action's first number is the command."""

    HANG, DIE, RAISE, SUCCEED = 7.0, 8.0, 9.0, 1.0

    def __init__(self, name, size=4, slow=0.0):
        if name == "unbuildable":
            os.kill(os.getpid(), signal.SIGKILL)
        self.name, self.size, self.slow, self.closed = name, size, slow, False
        box = gymnasium.spaces.Box
        self.observation_space = gymnasium.spaces.Dict(
            {
                "camera": box(0, 255, (size, size, 3), np.uint8),
                "state": box(-np.inf, np.inf, (2,), np.float32),
            }
        )
        self.t = 0

    def _observe(self):
        picture = np.full((self.size, self.size, 3), self.t, np.uint8)
        return {"camera": picture, "state": np.array([self.t, self.start], np.float32)}

    def reset(self, *, seed=None, options=None):
        self.t, self.start = 0, options["init_state"]
        observation = self._observe()
        if not options["render"]:
            del observation["camera"]
        return observation, {"pid": os.getpid(), "seed": seed, "name": self.name}

    def step_chunk(self, actions, render="last"):
        observations, states, rewards = [], [], []
        for k, action in enumerate(actions):
            command = action[0]
            if command == self.HANG:
                time.sleep(1000)
            if command == self.DIE:
                os.kill(os.getpid(), signal.SIGSEGV)
            if command == self.RAISE:
                raise ArithmeticError("told to raise")
            time.sleep(self.slow)
            self.t += 1
            now = self._observe()
            states.append(now["state"])
            rewards.append(float(command == self.SUCCEED))
            last = rewards[-1] > 0 or k == len(actions) - 1
            if render == "all" or (render == "last" and last):
                observations.append(now)
            if last:
                break
        done = rewards[-1] > 0
        return ChunkResult(
            observations, np.stack(states), np.array(rewards), len(rewards), done, False
        )

    def snapshot(self):
        return {"t": self.t, "start": self.start}

    def restore(self, snapshot):
        self.t, self.start = snapshot["t"], snapshot["start"]

    def close(self):
        self.closed = True
