"""Fewer triangles under the same looks: reduction, normals and a texture painted anew.

Quadric edge collapse (fast-simplification; Garland and Heckbert 1997) moves corners off the
original surface, so what the surface looked like is looked up again afterwards: for each point of
the reduced surface, the nearest original point *that faces the same way* (a bowl's inside is not
its outside, however thin the wall). Corners get normals that way. Texture coordinates cannot be
carried over corner by corner, because the atlas of a scanned object has hundreds of islands and a
reduced triangle spans several; so the reduced mesh gets an atlas of its own (xatlas), into which
the original's colours are painted texel by texel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from regrasp.sim.mesh import Mesh

#: Opposite directions count as this share of the mesh's diagonal away.
_TURN = 0.1

#: Points by which the original surface is found again.
_SAMPLES = 60_000


def simplify(mesh: Mesh, max_faces: int) -> Mesh:
    """About ``max_faces`` triangles with the original's normals and no texture coordinates."""
    vertices, faces = _weld(mesh.vertices, mesh.faces, 1e-9)
    points, triangles = _collapse(vertices, faces, max_faces)
    cell = 1 / 256
    # Where an edge bounds an open shell nothing collapses; such meshes (sheets of loose parts) are
    # joined at ever coarser points until they do.
    while len(triangles) > 1.1 * max_faces:
        vertices, faces = _weld(mesh.vertices, mesh.faces, cell * _diagonal(mesh.vertices))
        points, triangles = _collapse(vertices, faces, max_faces)
        cell *= 1.5
    surface = Surface(mesh)
    corners = points[triangles]
    # A corner on a crease belongs to two sides; slightly inside its face it belongs to one.
    probe = 0.9 * corners + 0.1 * corners.mean(axis=1, keepdims=True)
    facing = np.repeat(_face_normals(corners)[:, None], 3, axis=1)
    found = surface.nearest(probe.reshape(-1, 3), facing.reshape(-1, 3))
    normals = surface.normals(found).reshape(-1, 3, 3)
    return Mesh(points, triangles, None, normals)


def repaint(
    reduced: Mesh, original: Mesh, texture: np.ndarray, size: int
) -> tuple[Mesh, np.ndarray]:
    """Give a reduced mesh a texture of its own with the original's colours.

    Args:
        reduced: without texture coordinates.
        original: with texture coordinates (first row of the texture at v = 0).
        texture: uint8 ``[H, W, 3]``, the original's; repeats outside [0, 1].
        size: about how wide and high the new texture is.

    Returns:
        the reduced mesh with texture coordinates, and its texture, uint8 ``[h, w, 3]``.
    """
    uv, (height, width) = _unwrap(reduced, size)
    face, weights, row, column = _texels(uv, height, width)
    corners = reduced.vertices[reduced.faces]
    points = np.einsum("nk,nkd->nd", weights, corners[face])
    surface = Surface(original)
    found = surface.nearest(points, _face_normals(corners)[face])
    picture = np.zeros((height, width, 3), np.uint8)
    picture[row, column] = sample(texture, surface.uv(found))
    known = np.zeros((height, width), bool)
    known[row, column] = True
    return replace(reduced, uv=uv), _fill(picture, known)


@dataclass(frozen=True)
class Found:
    """Points on a surface: face ``[N]`` and barycentric weights ``[N, 3]``."""

    face: np.ndarray
    weights: np.ndarray


class Surface:
    """A mesh in which the nearest point that faces a given way can be looked up."""

    def __init__(self, mesh: Mesh) -> None:
        from scipy.spatial import cKDTree

        self._mesh = mesh
        self._corners = mesh.vertices[mesh.faces].astype(float)
        self._facing = _face_normals(self._corners)
        self._smooth = mesh.normals if mesh.normals is not None else smooth_normals(mesh)
        self._turn = _TURN * _diagonal(mesh.vertices)
        # Samples by area, so that a large triangle is found from everywhere on it.
        area = np.linalg.norm(_cross(self._corners), axis=1)
        rng = np.random.default_rng(0)
        count = max(_SAMPLES - len(area), 0)
        drawn = rng.choice(len(area), count, p=area / area.sum())
        self._owner = np.concatenate([np.arange(len(area)), drawn])
        weights = np.concatenate([np.full((len(area), 3), 1 / 3), rng.dirichlet([1, 1, 1], count)])
        spots = np.einsum("nk,nkd->nd", weights, self._corners[self._owner])
        self._tree = cKDTree(np.hstack([spots, self._turn * self._facing[self._owner]]))

    def nearest(self, points: np.ndarray, facing: np.ndarray) -> Found:
        """The surface's points nearest to ``points`` ``[N, 3]`` and facing ``facing`` ``[N, 3]``.

        Distance is measured in position and direction together: turning a unit direction around
        costs as much as a tenth of the mesh's diagonal, twice.
        """
        faces, weights = [], []
        for begin in range(0, len(points), 20_000):
            part = slice(begin, begin + 20_000)
            found = self._nearest(points[part], facing[part])
            faces.append(found.face)
            weights.append(found.weights)
        return Found(np.concatenate(faces), np.concatenate(weights))

    def _nearest(self, points: np.ndarray, facing: np.ndarray) -> Found:
        count = min(8, len(self._owner))
        _, near = self._tree.query(np.hstack([points, self._turn * facing]), k=count)
        near = self._owner[near.reshape(len(points), count)]
        a, b, c = (self._corners[near][:, :, k] for k in range(3))
        ab, ac, ap = b - a, c - a, points[:, None] - a
        d00, d01, d11 = (ab * ab).sum(-1), (ab * ac).sum(-1), (ac * ac).sum(-1)
        d20, d21 = (ap * ab).sum(-1), (ap * ac).sum(-1)
        det = np.maximum(d00 * d11 - d01 * d01, 1e-20)
        v = np.clip((d11 * d20 - d01 * d21) / det, 0.0, 1.0)
        w = np.clip((d00 * d21 - d01 * d20) / det, 0.0, 1.0)
        over = np.maximum(v + w, 1.0)
        v, w = v / over, w / over
        closest = a + v[..., None] * ab + w[..., None] * ac
        turned = self._turn**2 * ((self._facing[near] - facing[:, None]) ** 2).sum(-1)
        best = (((closest - points[:, None]) ** 2).sum(-1) + turned).argmin(axis=1)
        row = np.arange(len(points))
        v, w = v[row, best], w[row, best]
        return Found(near[row, best], np.stack([1.0 - v - w, v, w], axis=1))

    def normals(self, found: Found) -> np.ndarray:
        """Unit shading normals ``[N, 3]``."""
        picked = np.einsum("nk,nkd->nd", found.weights, self._smooth[found.face])
        return picked / np.maximum(np.linalg.norm(picked, axis=1, keepdims=True), 1e-9)

    def uv(self, found: Found) -> np.ndarray:
        """Texture coordinates ``[N, 2]``.

        Raises:
            ValueError: the mesh has none.
        """
        if self._mesh.uv is None:
            raise ValueError("Surface.uv: the mesh has no texture coordinates")
        return np.einsum("nk,nkd->nd", found.weights, self._mesh.uv[found.face])


def smooth_normals(mesh: Mesh) -> np.ndarray:
    """Per-corner normals ``[F, 3, 3]``: area-weighted over neighbours within 40 degrees."""
    welded, index = np.unique(mesh.vertices.round(9), axis=0, return_inverse=True)
    faces = index.reshape(-1)[mesh.faces]
    weighted = _cross(welded[faces])
    unit = weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-12)
    summed = np.zeros_like(welded)
    for k in range(3):
        np.add.at(summed, faces[:, k], weighted)
    summed /= np.maximum(np.linalg.norm(summed, axis=1, keepdims=True), 1e-12)
    smooth = summed[faces]
    sharp = (smooth * unit[:, None]).sum(-1, keepdims=True) < np.cos(np.deg2rad(40.0))
    return np.where(sharp, unit[:, None], smooth)


def sample(texture: np.ndarray, uv: np.ndarray) -> np.ndarray:
    """Bilinear colours ``[N, 3]`` of a repeating texture ``[H, W, 3]`` at ``uv`` ``[N, 2]``."""
    height, width = texture.shape[:2]
    x, y = uv[:, 0] * width - 0.5, uv[:, 1] * height - 0.5
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    fx, fy = (x - left)[:, None], (y - top)[:, None]

    def at(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        return texture[row % height, column % width].astype(float)

    upper = (1 - fx) * at(top, left) + fx * at(top, left + 1)
    lower = (1 - fx) * at(top + 1, left) + fx * at(top + 1, left + 1)
    return ((1 - fy) * upper + fy * lower).round().astype(np.uint8)


def _unwrap(mesh: Mesh, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Texture coordinates ``[F, 3, 2]`` without overlap, and the atlas's (height, width)."""
    import xatlas

    atlas = xatlas.Atlas()
    atlas.add_mesh(mesh.vertices.astype(np.float32), mesh.faces.astype(np.uint32))
    options = xatlas.PackOptions()
    options.resolution, options.padding, options.bilinear = size, 2, True
    atlas.generate(pack_options=options)
    _, index, uv = atlas[0]
    return uv[index].astype(float), (atlas.height, atlas.width)


def _texels(uv: np.ndarray, height: int, width: int) -> tuple[np.ndarray, ...]:
    """Face, barycentric weights, row and column of every texel under a triangle.

    A texel whose middle lies just outside its triangle counts too: it is blended into the edge.
    """
    found = []
    for face, (a, b, c) in enumerate(uv * (width, height)):
        low = np.maximum(np.floor(np.minimum(np.minimum(a, b), c)).astype(int) - 1, 0)
        high = np.ceil(np.maximum(np.maximum(a, b), c)).astype(int) + 1
        high = np.minimum(high, [width, height])
        column, row = (
            x.ravel() for x in np.meshgrid(*(np.arange(*r) for r in zip(low, high, strict=True)))
        )
        ab, ac, ap = b - a, c - a, np.stack([column, row], 1) + 0.5 - a
        det = ab[0] * ac[1] - ab[1] * ac[0]
        if abs(det) < 1e-12:
            continue
        v = (ap[:, 0] * ac[1] - ap[:, 1] * ac[0]) / det
        w = (ab[0] * ap[:, 1] - ab[1] * ap[:, 0]) / det
        weights = np.stack([1 - v - w, v, w], axis=1)
        # The distance of a corner from the opposite edge, in texels, turns weights into distances.
        edges = np.array([np.linalg.norm(c - b), np.linalg.norm(ac), np.linalg.norm(ab)])
        inside = (weights * abs(det) / np.maximum(edges, 1e-9) > -0.75).all(axis=1)
        clipped = np.clip(weights[inside], 0.0, None)
        clipped /= clipped.sum(axis=1, keepdims=True)
        found.append((np.full(inside.sum(), face), clipped, row[inside], column[inside]))
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def _fill(picture: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Unknown texels take the colour of the nearest known one, so that no seam shows."""
    from scipy.ndimage import distance_transform_edt

    nearest = distance_transform_edt(~known, return_distances=False, return_indices=True)
    return picture[tuple(nearest)]


def _collapse(
    vertices: np.ndarray, faces: np.ndarray, max_faces: int
) -> tuple[np.ndarray, np.ndarray]:
    import fast_simplification

    points, triangles = fast_simplification.simplify(
        vertices.astype(np.float32),
        faces.astype(np.int32),
        target_reduction=max(0.0, 1.0 - max_faces / len(faces)),
        agg=5.0,
    )
    return points.astype(float), triangles


def _weld(
    vertices: np.ndarray, faces: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Join vertices of one cell of a grid; faces that this makes flat or doubled are dropped."""
    _, first, index = np.unique(
        np.round(vertices / tolerance), axis=0, return_index=True, return_inverse=True
    )
    joined = index.reshape(-1)[faces]
    real = (np.diff(np.sort(joined, axis=1), axis=1) > 0).all(axis=1)
    joined = joined[real]
    # Turned so that the lowest corner leads: the same triangle seen from behind is another one.
    turn = joined.argmin(axis=1)[:, None] + np.arange(3)
    _, once = np.unique(np.take_along_axis(joined, turn % 3, axis=1), axis=0, return_index=True)
    return vertices[first], joined[np.sort(once)]


def _cross(corners: np.ndarray) -> np.ndarray:
    return np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])


def _face_normals(corners: np.ndarray) -> np.ndarray:
    """Unit normals ``[F, 3]`` of triangles ``[F, 3, 3]``."""
    cross = _cross(corners)
    return cross / np.maximum(np.linalg.norm(cross, axis=1, keepdims=True), 1e-20)


def _diagonal(vertices: np.ndarray) -> float:
    return float(np.linalg.norm(np.ptp(vertices, axis=0)))
