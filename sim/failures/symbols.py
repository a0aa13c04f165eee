"""Corrections drawn on a frame: where to go, what to turn, what the fingers should do.

The symbols follow ViFailback's idea (a correction that a person or a model sees at a glance), drawn
from simulator state: world points go through the MuJoCo camera that took the picture, so a symbol
sits where the thing is, in whatever orientation the family's policies see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

SymbolKind = Literal["move", "target", "wrong", "open", "close", "turn"]

#: One colour a kind, so that pictures can be read without a legend.
COLOURS: dict[SymbolKind, tuple[int, int, int]] = {
    "move": (60, 220, 60),
    "target": (60, 220, 60),
    "wrong": (240, 50, 50),
    "open": (250, 200, 40),
    "close": (250, 200, 40),
    "turn": (70, 150, 255),
}


@dataclass(frozen=True)
class Symbol:
    """One mark.

    Attributes:
        kind: ``move`` (arrow between two points), ``target`` (circle and cross on a point),
            ``wrong`` (cross), ``open`` and ``close`` (fingers, beside a point), ``turn`` (arc
            around a point, anticlockwise in the picture for a positive ``amount``).
        points: world positions, metres, ``[N, 3]``: two for ``move``, one otherwise.
        amount: of ``turn``, radians.
    """

    kind: SymbolKind
    points: tuple[tuple[float, float, float], ...]
    amount: float = 0.0

    def __post_init__(self) -> None:
        wanted = 2 if self.kind == "move" else 1
        if self.kind not in COLOURS or len(self.points) != wanted:
            raise ValueError(
                f"Symbol: kind {self.kind!r} with {len(self.points)} points; one of "
                f"{sorted(COLOURS)} is needed, with two points for 'move' and one otherwise"
            )

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; :meth:`from_json` inverts it."""
        return {"kind": self.kind, "points": [list(p) for p in self.points], "amount": self.amount}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Symbol:
        """Rebuild a symbol."""
        return cls(data["kind"], tuple(tuple(p) for p in data["points"]), data["amount"])


@dataclass(frozen=True)
class Mark:
    """A symbol as one camera sees it.

    Attributes:
        kind, amount: as of :class:`Symbol`.
        places: x to the right and y down, each 0 to 1 across the picture.
    """

    kind: SymbolKind
    places: tuple[tuple[float, float], ...]
    amount: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; :meth:`from_json` inverts it."""
        return {"kind": self.kind, "places": [list(p) for p in self.places], "amount": self.amount}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Mark:
        """Rebuild a mark."""
        return cls(data["kind"], tuple(tuple(p) for p in data["places"]), data["amount"])


def marks_of(env: Any, camera: str, symbols: Sequence[Symbol]) -> list[Mark]:
    """Symbols as a camera sees them in the environment's present state.

    Those behind the camera are left out; points outside the picture are moved to where they leave
    it.
    """
    marks = []
    for symbol in symbols:
        places = project(env, camera, np.array(symbol.points))
        if np.isfinite(places).all():
            inside = np.clip(places, 0.0, 1.0).round(4).tolist()
            marks.append(Mark(symbol.kind, tuple((x, y) for x, y in inside), symbol.amount))
    return marks


def project(env: Any, camera: str, points: np.ndarray) -> np.ndarray:
    """Where world points appear in a camera's picture as policies see it.

    Args:
        env: an environment (:class:`regrasp.sim.base.SimEnv`), in the state to be drawn.
        camera: one of its cameras.
        points: float ``[N, 3]``, metres.

    Returns:
        float ``[N, 2]``: x to the right and y down, each 0 to 1 across the picture, also outside
        it; NaN for a point behind the camera.
    """
    from regrasp.sim.base import CAMERAS

    height, width = env.config.cameras[camera]
    index = env.model.camera(CAMERAS[camera]).id
    offset = np.asarray(points, float) - env.data.cam_xpos[index]
    right, up, back = (offset @ env.data.cam_xmat[index].reshape(3, 3)).T
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 1.0 / (2.0 * np.tan(np.deg2rad(env.model.cam_fovy[index]) / 2.0)) / -back
    # The renderer's rows begin at the bottom; the family then turns or mirrors the picture.
    place = np.stack([0.5 + right * scale * height / width, 0.5 + up * scale], axis=1)
    place[back >= 0] = np.nan
    column, row = _orientation(env)
    flipped = place.copy()
    flipped[:, 0] = place[:, 0] if column else 1.0 - place[:, 0]
    flipped[:, 1] = place[:, 1] if row else 1.0 - place[:, 1]
    return flipped


def _orientation(env: Any) -> tuple[bool, bool]:
    """Whether columns and rows of a picture run as the renderer's do (left to right, upwards)."""
    marked = np.zeros((2, 2, 3), np.uint8)
    marked[0, 1] = 1  # second column
    marked[1, 0] = 2  # second row
    marked[1, 1] = 3
    seen = env._orient(marked)[..., 0]
    if seen[0, 0] not in (0, 1, 2, 3) or abs(int(seen[0, 1]) - int(seen[0, 0])) != 1:
        raise ValueError("project: this environment's pictures are turned by a right angle")
    return bool(seen[0, 0] in (0, 2)), bool(seen[0, 0] in (0, 1))


def draw_marks(picture: np.ndarray, marks: Sequence[Mark], scale: int = 3) -> np.ndarray:
    """A picture with marks on it.

    Args:
        picture: uint8 ``[H, W, 3]``, as the marks' camera took it.
        marks: what to draw, in this order.
        scale: the picture is enlarged this many times first, so that lines are fine.

    Returns:
        uint8 ``[scale H, scale W, 3]``.
    """
    height, width = picture.shape[:2]
    image = Image.fromarray(picture)
    image = image.resize((width * scale, height * scale), Image.Resampling.BICUBIC)
    canvas = ImageDraw.Draw(image)
    size = np.array([width, height]) * scale - 1
    for mark in marks:
        _DRAW[mark.kind](canvas, np.array(mark.places) * size, mark, 4 * scale)
    return np.asarray(image)


def _arrow(canvas: ImageDraw.ImageDraw, places: np.ndarray, mark: Mark, radius: float) -> None:
    begin, end = places
    colour = COLOURS[mark.kind]
    length = float(np.linalg.norm(end - begin))
    along = (end - begin) / max(length, 1e-6)
    across = np.array([-along[1], along[0]])
    head = min(radius * 1.4, max(length, radius * 0.5))
    base = end - along * head
    canvas.line([*begin, *base], fill=colour, width=max(2, int(radius / 5)))
    tips = [end, base + across * head / 2, base - across * head / 2]
    canvas.polygon([tuple(map(float, tip)) for tip in tips], fill=colour)


def _target(canvas: ImageDraw.ImageDraw, places: np.ndarray, mark: Mark, radius: float) -> None:
    x, y = places[0]
    colour, width = COLOURS[mark.kind], max(2, int(radius / 6))
    canvas.ellipse([x - radius, y - radius, x + radius, y + radius], outline=colour, width=width)
    canvas.line([x - radius / 2, y, x + radius / 2, y], fill=colour, width=width)
    canvas.line([x, y - radius / 2, x, y + radius / 2], fill=colour, width=width)


def _cross(canvas: ImageDraw.ImageDraw, places: np.ndarray, mark: Mark, radius: float) -> None:
    x, y = places[0]
    colour, width = COLOURS[mark.kind], max(2, int(radius / 4))
    canvas.line([x - radius, y - radius, x + radius, y + radius], fill=colour, width=width)
    canvas.line([x - radius, y + radius, x + radius, y - radius], fill=colour, width=width)


def _fingers(canvas: ImageDraw.ImageDraw, places: np.ndarray, mark: Mark, radius: float) -> None:
    """Two bars with arrow heads: apart for ``open``, together for ``close``."""
    x, y = places[0]
    colour, width = COLOURS[mark.kind], max(2, int(radius / 5))
    outward = 1.0 if mark.kind == "open" else -1.0
    for side in (-1.0, 1.0):
        bar = x + side * radius * 0.6
        canvas.line([bar, y - radius, bar, y + radius], fill=colour, width=width)
        tip = bar + side * outward * radius * 0.8
        half = radius * 0.3
        canvas.polygon([(tip, y), (bar, y - half), (bar, y + half)], fill=colour)


def _turn(canvas: ImageDraw.ImageDraw, places: np.ndarray, mark: Mark, radius: float) -> None:
    x, y = places[0]
    colour, width = COLOURS[mark.kind], max(2, int(radius / 6))
    sweep = float(np.clip(np.rad2deg(abs(mark.amount)), 30, 300))
    canvas.arc([x - radius, y - radius, x + radius, y + radius], -sweep, 0, colour, width)
    # Pillow's angles run clockwise from the right: the arc ends at 0 and begins at -sweep.
    at = -np.deg2rad(sweep) if mark.amount > 0 else 0.0
    tip = np.array([x, y]) + radius * np.array([np.cos(at), np.sin(at)])
    onward = np.array([-np.sin(at), np.cos(at)]) * (-1.0 if mark.amount > 0 else 1.0)
    outward = np.array([np.cos(at), np.sin(at)])
    head = radius * 0.5
    corners = [tip + onward * head, tip + outward * head / 2, tip - outward * head / 2]
    canvas.polygon([tuple(map(float, corner)) for corner in corners], fill=colour)


_DRAW: dict[SymbolKind, Any] = {
    "move": _arrow,
    "target": _target,
    "wrong": _cross,
    "open": _fingers,
    "close": _fingers,
    "turn": _turn,
}
