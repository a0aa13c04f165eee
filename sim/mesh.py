"""Triangle meshes with per-corner attributes, and the files that hold them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np


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


def encode_msh(mesh: Mesh) -> bytes:
    """Legacy MSH has one index for position, normal and texture: each corner gets its own."""
    vertices = mesh.vertices[mesh.faces].reshape(-1, 3)
    normals = mesh.normals.reshape(-1, 3) if mesh.normals is not None else np.zeros((0, 3))
    uv = mesh.uv.reshape(-1, 2) if mesh.uv is not None else np.zeros((0, 2))
    faces = np.arange(len(vertices), dtype="<i4")
    header = struct.pack("<4i", len(vertices), len(normals), len(uv), len(mesh.faces))
    body = [vertices, normals, uv]
    return header + b"".join(x.astype("<f4").tobytes() for x in body) + faces.tobytes()
