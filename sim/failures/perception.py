"""Perception failures: a camera moved, blurred, frozen, occluded, dark or noisy; a biased state.

The world is as it is; what the actor sees of it is not. Nothing here touches the physics, so
whoever looks at nothing (an expert) does exactly what it would have done.

Magnitudes: no public failure generator has these (REFLECT's ``wrong_perception`` is authored in
words); the extents are ours, up to where the picture says next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mujoco
import numpy as np
from regrasp.sim.base import CAMERAS
from regrasp.sim.experts.base import Phase
from regrasp.sim.failures.base import Injection, ModelEdit, OnPhase, Spell, unit
from regrasp.sim.failures.offsets import moved
from regrasp.sim.perturb import Scene, Trigger
from regrasp.sim.transforms import axis_angle_to_quat
from scipy.ndimage import gaussian_filter


def _at_start() -> OnPhase:
    """As soon as anything is done."""
    return OnPhase((Phase.APPROACH,))


@dataclass(frozen=True)
class CameraMoved(ModelEdit):
    """A camera is knocked out of its place.

    Attributes:
        camera: its name here (``agentview``, ``wrist``).
        distance: metres at severity 1.
        angle: radians at severity 1.
    """

    kind: ClassVar[str] = "camera_moved"
    family: ClassVar[str] = "perception"
    definition: ClassVar[str] = "A camera is moved by up to 15 cm and turned by up to 0.2 rad."
    when: Trigger = field(default_factory=_at_start)
    camera: str = "agentview"
    distance: float = 0.15
    angle: float = 0.2

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction and axis, ``[3]`` each."""
        return {"direction": unit(rng), "axis": unit(rng)}

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Move it in the model."""
        model = scene.env.model
        camera = np.array([model.camera(CAMERAS[self.camera]).id])
        by = self.severity * self.distance * np.array(drawn["direction"])
        turned = np.zeros(4)
        turn = axis_angle_to_quat(self.severity * self.angle * np.array(drawn["axis"]))
        mujoco.mju_mulQuat(turned, turn, model.cam_quat[camera[0]])
        self.write(scene, "cam_pos", camera, model.cam_pos[camera] + by)
        self.write(scene, "cam_quat", camera, turned[None])

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how far."""
        amount = f"{100 * self.severity * self.distance:.0f} cm"
        return {"what": f"the {self.camera} camera had been moved", "amount": amount}


@dataclass(frozen=True)
class Picture(Injection):
    """Base of what spoils pictures.

    Attributes:
        cameras: whose; those that the environment does not have are none of them.
    """

    family: ClassVar[str] = "perception"
    when: Trigger = field(default_factory=_at_start)
    cameras: tuple[str, ...] = tuple(CAMERAS)

    def see(
        self, scene: Scene, observation: dict[str, Any], drawn: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Spoil what pictures there are."""
        if self.severity == 0.0:
            return observation
        pictures = {name: observation[name] for name in self.cameras if name in observation}
        return {**observation, **self.spoil(scene, pictures, drawn)}

    def spoil(
        self, scene: Scene, pictures: dict[str, np.ndarray], drawn: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Camera -> uint8 ``[H, W, 3]``, the spoiled ones of those."""
        raise NotImplementedError


@dataclass(frozen=True)
class CameraBlurred(Picture):
    """The cameras are out of focus.

    Attributes:
        blur: standard deviation of the blur at severity 1, as a share of the picture's height.
    """

    kind: ClassVar[str] = "camera_blurred"
    definition: ClassVar[str] = "The pictures are blurred by up to 6 % of their height."
    blur: float = 0.06

    def spoil(
        self, scene: Scene, pictures: dict[str, np.ndarray], drawn: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Blur them."""
        spoiled = {}
        for name, picture in pictures.items():
            sigma = self.severity * self.blur * len(picture)
            spoiled[name] = gaussian_filter(picture, (sigma, sigma, 0.0))
        return spoiled

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how much."""
        amount = f"{100 * self.severity * self.blur:.1f} % of the picture"
        return {"what": "the cameras were out of focus", "amount": amount}


@dataclass(frozen=True)
class CameraFrozen(Picture, Spell):
    """The cameras go on showing what they showed when it began.

    What that was is drawn only when a picture is asked for, from the state kept at the beginning,
    so that it does not depend on who looks when.
    """

    kind: ClassVar[str] = "camera_frozen"
    definition: ClassVar[str] = "The pictures stand still for up to 5 s."
    steps: int = 100

    def begin(self, scene: Scene, drawn: Mapping[str, Any]) -> None:
        """Keep the state."""
        scene.memory[self] = (scene.env.snapshot(), {})

    def spoil(
        self, scene: Scene, pictures: dict[str, np.ndarray], drawn: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """What they showed."""
        state, shown = scene.memory[self]
        if not pictures.keys() <= shown.keys():
            now = scene.env.snapshot()
            scene.env.restore(state)
            shown = scene.env.observe()
            scene.env.restore(now)
            scene.memory[self] = (state, shown)
        return {name: shown[name].copy() for name in pictures}

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and for how long."""
        return {"what": "the pictures stood still", "amount": self.seconds()}


@dataclass(frozen=True)
class CameraOccluded(Picture):
    """Something grey hangs before the lens.

    Attributes:
        most: share of the picture that it covers at severity 1.
    """

    kind: ClassVar[str] = "camera_occluded"
    definition: ClassVar[str] = "A grey box covers up to 60 % of each picture."
    most: float = 0.6

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Where it hangs, as shares of the free height and width, and how bright it is."""
        return {"at": rng.random(2).round(6).tolist(), "grey": int(rng.integers(40, 200))}

    def spoil(
        self, scene: Scene, pictures: dict[str, np.ndarray], drawn: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Cover them."""
        spoiled = {}
        for name, picture in pictures.items():
            size = np.array(picture.shape[:2])
            box = np.round(size * np.sqrt(self.severity * self.most)).astype(int)
            row, column = np.round((size - box) * np.array(drawn["at"])).astype(int)
            spoiled[name] = picture.copy()
            spoiled[name][row : row + box[0], column : column + box[1]] = drawn["grey"]
        return spoiled

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how much."""
        amount = f"{100 * self.severity * self.most:.0f} % of the picture"
        return {"what": "something covered the cameras", "amount": amount}


@dataclass(frozen=True)
class CameraDark(Picture):
    """The light goes out.

    Attributes:
        most: share of the brightness that is lost at severity 1.
    """

    kind: ClassVar[str] = "camera_dark"
    definition: ClassVar[str] = "The pictures lose up to 95 % of their brightness."
    most: float = 0.95

    def spoil(
        self, scene: Scene, pictures: dict[str, np.ndarray], drawn: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Darken them."""
        left = 1.0 - self.severity * self.most
        return {name: np.round(p * left).astype(np.uint8) for name, p in pictures.items()}

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how much."""
        amount = f"{100 * self.severity * self.most:.0f} % of the brightness"
        return {"what": "it was too dark for the cameras", "amount": amount}


@dataclass(frozen=True)
class CameraNoisy(Picture):
    """The pictures are full of noise, another in every control step.

    Attributes:
        sigma: standard deviation at severity 1, grey levels of 255.
    """

    kind: ClassVar[str] = "camera_noisy"
    definition: ClassVar[str] = "White noise of up to 100 grey levels lies over the pictures."
    sigma: float = 100.0

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Seed of the noise."""
        return {"seed": int(rng.integers(2**31))}

    def spoil(
        self, scene: Scene, pictures: dict[str, np.ndarray], drawn: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Add noise that depends on the control step and the camera only."""
        spoiled = {}
        for name, picture in pictures.items():
            rng = np.random.default_rng([drawn["seed"], scene.step, list(CAMERAS).index(name)])
            noise = self.severity * self.sigma * rng.standard_normal(picture.shape, np.float32)
            spoiled[name] = np.clip(np.round(picture + noise), 0, 255).astype(np.uint8)
        return spoiled

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how much."""
        amount = f"{self.severity * self.sigma:.0f} grey levels"
        return {"what": "the pictures were full of noise", "amount": amount}


@dataclass(frozen=True)
class ProprioceptionBiased(Injection):
    """The robot takes its hand to be elsewhere than it is.

    Attributes:
        distance: metres at severity 1.
        angle: radians at severity 1.
    """

    kind: ClassVar[str] = "proprioception_biased"
    family: ClassVar[str] = "perception"
    definition: ClassVar[str] = (
        "The hand's measured pose is off by up to 8 cm in a fixed direction and by up to 0.2 rad."
    )
    when: Trigger = field(default_factory=_at_start)
    distance: float = 0.08
    angle: float = 0.2

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Direction and axis, ``[3]`` each."""
        return {"direction": unit(rng), "axis": unit(rng)}

    def see(
        self, scene: Scene, observation: dict[str, Any], drawn: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Move the measured hand."""
        by = self.severity * self.distance * np.array(drawn["direction"])
        return moved(observation, by, self.severity * self.angle * np.array(drawn["axis"]))

    def words(self, drawn: Mapping[str, Any]) -> dict[str, str]:
        """What happened, and how far."""
        amount = f"{100 * self.severity * self.distance:.1f} cm"
        return {"what": "the robot misjudged where its own hand was", "amount": amount}
