"""Offscreen pictures of a MuJoCo simulation, stock or light.

``full`` is the picture that robosuite draws. ``fine`` draws the reduced meshes of
:mod:`regrasp.sim.lite` with the same reflections and multisampling, several times as fast on
a processor. ``lite`` leaves both out, which is faster again.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping
from typing import Any, Literal, get_args

import mujoco
import numpy as np

RenderMode = Literal["lite", "fine", "full"]

# Many processes draw at once in data collection; one renderer thread each beats contention.
os.environ.setdefault("LP_NUM_THREADS", "1")


class Renderer:
    """Draws the cameras of one model; owns its OpenGL context and frees it once.

    Built lazily by its owner in the process that draws, never before a fork: a context does not
    survive one.

    Args:
        model: the model to draw.
        cameras: MuJoCo camera name -> (height, width) in pixels.
        mode: ``lite``, ``fine`` or ``full``.
    """

    def __init__(
        self, model: mujoco.MjModel, cameras: Mapping[str, tuple[int, int]], mode: RenderMode
    ) -> None:
        if mode not in get_args(RenderMode):
            raise ValueError(f"Renderer: mode is {mode!r}; one of {get_args(RenderMode)} is needed")
        self._cameras = {name: (model.camera(name).id, size) for name, size in cameras.items()}
        height = max(size[0] for size in cameras.values())
        width = max(size[1] for size in cameras.values())
        model.vis.global_.offheight = max(height, model.vis.global_.offheight)
        model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
        if mode != "full":
            model.vis.global_.offheight, model.vis.global_.offwidth = height, width
            _choose_quality(model, multisample=mode == "fine")
        self._model = model
        self._gl: Any = _make_gl_context(width, height)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        if mode != "full":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        if mode == "lite":
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0  # robosuite's collision geoms
        self._option.geomgroup[1] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturb = mujoco.MjvPerturb()
        # Registered after the context made its display, so it runs at exit before the display goes.
        self._finalizer = weakref.finalize(self, _free, self._gl, self._context)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    def render(self, data: mujoco.MjData) -> dict[str, np.ndarray]:
        """Camera name -> uint8 ``[H, W, 3]``, in OpenGL's row order (bottom row first)."""
        if not self._finalizer.alive:
            raise RuntimeError("Renderer.render: this renderer is closed")
        self._gl.make_current()
        pictures = {}
        for name, (camera, (height, width)) in self._cameras.items():
            self._camera.fixedcamid = camera
            mujoco.mjv_updateScene(
                self._model,
                data,
                self._option,
                self._perturb,
                self._camera,
                mujoco.mjtCatBit.mjCAT_ALL,
                self._scene,
            )
            view = mujoco.MjrRect(0, 0, width, height)
            mujoco.mjr_render(view, self._scene, self._context)
            picture = np.empty((height, width, 3), np.uint8)
            mujoco.mjr_readPixels(picture, None, view, self._context)
            pictures[name] = picture
        return pictures

    def close(self) -> None:
        """Free the context; safe to call twice."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def _choose_quality(model: mujoco.MjModel, multisample: bool) -> None:
    """Fewer samples and, for shapes that MuJoCo tessellates itself, fewer triangles."""
    quality = model.vis.quality
    quality.shadowsize = 0
    if not multisample:
        quality.offsamples = 0
    quality.numslices = min(quality.numslices, 16)
    # Stacks divide cylinders lengthwise, which nobody sees, and round shapes, which everybody does.
    # robosuite marks the hand by a sphere of negative alpha, which is never seen.
    shapes = mujoco.mjtGeom
    round_types = (shapes.mjGEOM_SPHERE, shapes.mjGEOM_ELLIPSOID, shapes.mjGEOM_CAPSULE)
    shown = (model.geom_group > 0) & np.isin(model.geom_type, round_types)
    marked = (model.site_rgba[:, 3] > 0) & np.isin(model.site_type, round_types)
    if not (shown.any() or marked.any()):
        quality.numstacks = 2


def _free(gl: Any, context: mujoco.MjrContext) -> None:
    from OpenGL import EGL
    from OpenGL.error import GLError

    try:
        gl.make_current()
        context.free()
        gl.free()
    except GLError as error:
        if error.err not in (EGL.EGL_BAD_DISPLAY, EGL.EGL_NOT_INITIALIZED):
            raise
        # Another library of this process has ended the display (robosuite's own renderer does at
        # exit), and every context went with it; MuJoCo's must not try to free its own again.
        gl._context = None


def _make_gl_context(width: int, height: int) -> Any:
    """MUJOCO_GL's context: ``egl`` (default on Linux without a display) or ``osmesa``."""
    backend = os.environ.get("MUJOCO_GL", "egl")
    if backend == "egl":
        from mujoco.egl import GLContext
    elif backend == "osmesa":
        from mujoco.osmesa import GLContext
    else:
        raise ValueError(f"MUJOCO_GL is {backend!r}; 'egl' or 'osmesa' is needed")
    return GLContext(width, height)
