"""Reduced visual meshes: the same picture at policy resolution for a fraction of the triangles.

A software renderer is bound by triangles, and LIBERO's scenes hold 300,000 of them for pictures of
128 pixels. :func:`reduce_scene` rewrites a scene's XML so that every large mesh which only visible
geoms use is replaced by a reduced copy, made once and cached under a hash of its content. Collision
geoms keep their own meshes, and robosuite scenes compute inertia from collision geoms alone, so the
physics is untouched; :func:`reduce_scene` refuses scenes of which that is not true.

Reduction is quadric edge collapse (fast-simplification). Texture coordinates and normals are
carried over from the nearest point of the original surface, corner by corner, so that texture seams
survive.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Raise it when reduced meshes change for the same input, so that cached ones are rebuilt.
_VERSION = 3


@dataclass(frozen=True)
class LiteConfig:
    """How far visual meshes are reduced.

    Attributes:
        max_faces: meshes with more faces are reduced to this many, at most.
        robot_faces: the same for the robot's own links, which are many and mostly flat.
        cache: folder for reduced meshes; ``REGRASP_CACHE`` or ``~/.cache/regrasp`` when None.
    """

    max_faces: int = 500
    robot_faces: int = 150
    cache: Path | None = None

    def folder(self) -> Path:
        """The mesh cache, created if missing."""
        root = self.cache or Path(os.environ.get("REGRASP_CACHE", Path.home() / ".cache/regrasp"))
        folder = root / "meshes"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Mesh:
    """A triangle mesh with per-corner attributes.

    Attributes:
        vertices: float ``[V, 3]``.
        faces: int ``[F, 3]``.
        uv: float ``[F, 3, 2]`` in MuJoCo's orientation, or None.
        normals: float ``[F, 3, 3]``, or None.
    """

    vertices: np.ndarray
    faces: np.ndarray
    uv: np.ndarray | None
    normals: np.ndarray | None


def reduce_scene(xml: str, config: LiteConfig | None = None) -> str:
    """A scene's XML with its large visual meshes replaced by reduced ones.

    Args:
        xml: MJCF with absolute mesh paths, as robosuite's ``get_xml`` returns.
        config: how far to reduce.

    Raises:
        ValueError: visible geoms contribute to inertia here, so replacing them would change the
            physics.
    """
    config = config or LiteConfig()
    root = ElementTree.fromstring(xml)
    compiler = root.find("compiler")
    if compiler is None or compiler.get("inertiagrouprange") != "0 0":
        raise ValueError(
            "reduce_scene: the scene's compiler inertiagrouprange is "
            f"{None if compiler is None else compiler.get('inertiagrouprange')!r}; '0 0' is needed "
            "so that visual geoms carry no inertia"
        )
    solid: set[str] = set()
    visual: set[str] = set()
    for geom in root.iter("geom"):
        mesh = geom.get("mesh")
        if mesh:
            ghost = geom.get("contype") == "0" and geom.get("conaffinity") == "0"
            hidden_group = geom.get("group") == "0"
            (visual if ghost and not hidden_group else solid).add(mesh)
    for element in root.iter("mesh"):
        name, path = element.get("name"), element.get("file")
        if name and name in visual and name not in solid and path:
            limit = config.robot_faces if name.startswith("robot") else config.max_faces
            element.set("file", str(reduced_mesh(Path(path), limit, config.folder())))
    return ElementTree.tostring(root, encoding="unicode")


def reduced_mesh(path: Path, max_faces: int, folder: Path) -> Path:
    """The cached reduced copy of a mesh file, or ``path`` itself when it is small enough."""
    content = path.read_bytes()
    key = hashlib.sha256(content + struct.pack("<ii", _VERSION, max_faces)).hexdigest()[:24]
    target = folder / f"{key}.msh"
    keep = folder / f"{key}.keep"
    if target.exists():
        return target
    if keep.exists():
        return path
    mesh = read_mesh(path)
    if len(mesh.faces) <= max_faces:
        keep.touch()
        return path
    _write_atomically(target, _encode_msh(simplify(mesh, max_faces)))
    return target


def simplify(mesh: Mesh, max_faces: int) -> Mesh:
    """Quadric edge collapse to about ``max_faces`` with attributes from the original surface."""
    import fast_simplification

    welded, index = np.unique(mesh.vertices.round(9), axis=0, return_inverse=True)
    faces = index.reshape(-1)[mesh.faces]
    real = (np.diff(np.sort(faces, axis=1), axis=1) > 0).all(axis=1)
    points, triangles = fast_simplification.simplify(
        welded.astype(np.float32),
        faces[real].astype(np.int32),
        target_reduction=max(0.0, 1.0 - max_faces / len(faces)),
        agg=5.0,
    )
    points = points.astype(float)
    corners = points[triangles]
    centre = corners.mean(axis=1, keepdims=True)
    # A corner on a texture seam belongs to two charts; slightly inside its face it belongs to one.
    probe = (0.9 * corners + 0.1 * centre).reshape(-1, 3)
    owner, weights = _nearest_on_surface(mesh, probe)

    def carry(attribute: np.ndarray) -> np.ndarray:
        picked = np.einsum("nk,nkd->nd", weights, attribute[owner])
        return picked.reshape(len(triangles), 3, -1)

    source = mesh.normals if mesh.normals is not None else _smooth_normals(mesh)
    normals = carry(source)
    length = np.linalg.norm(normals, axis=-1, keepdims=True)
    uv = None if mesh.uv is None else carry(mesh.uv)
    return Mesh(points, triangles, uv, normals / np.maximum(length, 1e-9))


def _nearest_on_surface(mesh: Mesh, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Face index ``[N]`` and barycentric weights ``[N, 3]`` of the nearest surface point."""
    from scipy.spatial import cKDTree

    tri = mesh.vertices[mesh.faces].astype(float)
    count = min(12, len(tri))
    _, near = cKDTree(tri.mean(axis=1)).query(points, k=count)
    near = near.reshape(len(points), count)
    a, b, c = (tri[near][:, :, k] for k in range(3))
    ab, ac, ap = b - a, c - a, points[:, None] - a
    d00, d01, d11 = (ab * ab).sum(-1), (ab * ac).sum(-1), (ac * ac).sum(-1)
    d20, d21 = (ap * ab).sum(-1), (ap * ac).sum(-1)
    det = np.maximum(d00 * d11 - d01 * d01, 1e-20)
    v = np.clip((d11 * d20 - d01 * d21) / det, 0.0, 1.0)
    w = np.clip((d00 * d21 - d01 * d20) / det, 0.0, 1.0)
    over = np.maximum(v + w, 1.0)
    v, w = v / over, w / over
    closest = a + v[..., None] * ab + w[..., None] * ac
    best = ((closest - points[:, None]) ** 2).sum(-1).argmin(axis=1)
    row = np.arange(len(points))
    v, w = v[row, best], w[row, best]
    return near[row, best], np.stack([1.0 - v - w, v, w], axis=1)


def _smooth_normals(mesh: Mesh) -> np.ndarray:
    """Per-corner normals ``[F, 3, 3]``: area-weighted over neighbours within 40 degrees."""
    welded, index = np.unique(mesh.vertices.round(9), axis=0, return_inverse=True)
    faces = index.reshape(-1)[mesh.faces]
    tri = welded[faces]
    face_normal = np.cross(tri[:, 1] - tri[:, 0], tri[:, 2] - tri[:, 0])
    unit = face_normal / np.maximum(np.linalg.norm(face_normal, axis=1, keepdims=True), 1e-12)
    summed = np.zeros_like(welded)
    for k in range(3):
        np.add.at(summed, faces[:, k], face_normal)
    summed /= np.maximum(np.linalg.norm(summed, axis=1, keepdims=True), 1e-12)
    smooth = summed[faces]
    sharp = (smooth * unit[:, None]).sum(-1, keepdims=True) < np.cos(np.deg2rad(40.0))
    return np.where(sharp, unit[:, None], smooth)


def read_mesh(path: Path) -> Mesh:
    """Read an OBJ, STL or legacy MuJoCo MSH file.

    Raises:
        ValueError: the file's suffix is another.
    """
    suffix = path.suffix.lower()
    if suffix == ".msh":
        return _decode_msh(path.read_bytes())
    if suffix == ".obj":
        return _decode_obj(path.read_text())
    if suffix == ".stl":
        import trimesh

        loaded = trimesh.load(path, process=False)
        return Mesh(np.asarray(loaded.vertices), np.asarray(loaded.faces), None, None)
    raise ValueError(f"read_mesh: {path.name} has suffix {suffix!r}; .obj, .stl or .msh is needed")


def _decode_obj(text: str) -> Mesh:
    vertices: list[list[float]] = []
    uvs: list[list[float]] = []
    normals: list[list[float]] = []
    corners: list[list[list[int]]] = []
    for line in text.splitlines():
        word = line.split()
        if not word:
            continue
        if word[0] == "v":
            vertices.append([float(x) for x in word[1:4]])
        elif word[0] == "vt":
            uvs.append([float(word[1]), 1.0 - float(word[2])])  # MuJoCo flips OBJ's v
        elif word[0] == "vn":
            normals.append([float(x) for x in word[1:4]])
        elif word[0] == "f":
            split = [[*w.split("/"), "", ""][:3] for w in word[1:]]
            ring = [[int(x) if x else 0 for x in parts] for parts in split]
            corners.extend([ring[0], ring[k], ring[k + 1]] for k in range(1, len(ring) - 1))
    index: np.ndarray = np.array(corners, np.int64).reshape(-1, 3, 3)
    sizes = np.array([len(vertices), len(uvs), len(normals)])
    index = np.where(index < 0, index + sizes, index - 1)
    uv = np.array(uvs)[index[..., 1]] if uvs and (index[..., 1] >= 0).all() else None
    normal = np.array(normals)[index[..., 2]] if normals and (index[..., 2] >= 0).all() else None
    return Mesh(np.array(vertices), index[..., 0], uv, normal)


def _decode_msh(content: bytes) -> Mesh:
    nv, nn, nt, nf = struct.unpack_from("<4i", content)
    floats = np.frombuffer(content, "<f4", 3 * nv + 3 * nn + 2 * nt, 16).astype(float)
    faces = np.frombuffer(content, "<i4", 3 * nf, 16 + 4 * floats.size).reshape(-1, 3)
    vertices, normals, uvs = np.split(floats, [3 * nv, 3 * (nv + nn)])
    return Mesh(
        vertices.reshape(-1, 3),
        faces.astype(np.int64),
        uvs.reshape(-1, 2)[faces] if nt else None,
        normals.reshape(-1, 3)[faces] if nn else None,
    )


def _encode_msh(mesh: Mesh) -> bytes:
    """Legacy MSH has one index for position, normal and texture: each corner gets its own."""
    vertices = mesh.vertices[mesh.faces].reshape(-1, 3)
    normals = mesh.normals.reshape(-1, 3) if mesh.normals is not None else np.zeros((0, 3))
    uv = mesh.uv.reshape(-1, 2) if mesh.uv is not None else np.zeros((0, 2))
    faces = np.arange(len(vertices), dtype="<i4")
    header = struct.pack("<4i", len(vertices), len(normals), len(uv), len(mesh.faces))
    body = [vertices, normals, uv]
    return header + b"".join(x.astype("<f4").tobytes() for x in body) + faces.tobytes()


def _write_atomically(target: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, target)
