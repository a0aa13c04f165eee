"""Reduced visual meshes: the same picture at policy resolution for a fraction of the triangles.

A software renderer is bound by triangles, and LIBERO's scenes hold 300,000 of them for pictures of
128 pixels. :func:`reduce_scene` rewrites a scene's XML so that every large mesh which only visible
geoms use is replaced by a reduced copy, with a texture painted anew for it, made once and cached
under a hash of its content (:mod:`regrasp.sim.simplify` makes them). Collision geoms keep their own
meshes, and robosuite scenes compute inertia from collision geoms alone, so the physics is
untouched; :func:`reduce_scene` refuses scenes of which that is not true.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from regrasp.sim.mesh import encode_msh, read_mesh
from regrasp.sim.simplify import repaint, simplify

#: Raise it when reduced meshes change for the same input, so that cached ones are rebuilt.
_VERSION = 4


@dataclass(frozen=True)
class LiteConfig:
    """How far visual meshes are reduced.

    Attributes:
        max_faces: meshes with more faces are reduced to this many, at most.
        robot_faces: the same for the robot's own links, which are many and mostly flat.
        texture: about how wide and high the new texture of a reduced mesh is, in texels.
        cache: folder for reduced meshes; ``REGRASP_CACHE`` or ``~/.cache/regrasp`` when None.
    """

    max_faces: int = 500
    robot_faces: int = 150
    texture: int = 512
    cache: Path | None = None

    def folder(self) -> Path:
        """The mesh cache, created if missing."""
        root = self.cache or Path(os.environ.get("REGRASP_CACHE", Path.home() / ".cache/regrasp"))
        folder = root / "meshes"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class Reduced:
    """Files of a reduced mesh; ``texture`` is None where the original's material is kept."""

    mesh: Path
    texture: Path | None


def reduce_scene(xml: str, config: LiteConfig | None = None) -> str:
    """A scene's XML with its large visual meshes replaced by reduced ones.

    Args:
        xml: MJCF with absolute mesh and texture paths, as robosuite's ``get_xml`` returns.
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
    meshes = {str(mesh.get("name")): mesh for mesh in root.iter("mesh")}
    for name, geoms in _visual_geoms(root).items():
        path = meshes[name].get("file") if name in meshes else None
        if path is None:
            continue
        limit = config.robot_faces if name.startswith("robot") else config.max_faces
        _replace(root, meshes[name], geoms, limit, config)
    _drop_unused(root)
    return ElementTree.tostring(root, encoding="unicode")


def _visual_geoms(root: ElementTree.Element) -> dict[str, list[ElementTree.Element]]:
    """Mesh name -> its geoms, for the meshes which only visible geoms use."""
    users: dict[str, list[ElementTree.Element]] = defaultdict(list)
    solid: set[str] = set()
    for geom in root.iter("geom"):
        mesh = geom.get("mesh")
        if mesh:
            users[mesh].append(geom)
            ghost = geom.get("contype") == "0" and geom.get("conaffinity") == "0"
            if not ghost or geom.get("group") == "0":
                solid.add(mesh)
    return {mesh: geoms for mesh, geoms in users.items() if mesh not in solid}


def _replace(
    root: ElementTree.Element,
    mesh: ElementTree.Element,
    geoms: list[ElementTree.Element],
    limit: int,
    config: LiteConfig,
) -> None:
    """Point a mesh and its geoms to a reduced copy; one mesh for each material that it wears."""
    asset = root.find("asset")
    assert asset is not None  # the mesh is in it
    path, name = Path(str(mesh.get("file"))), str(mesh.get("name"))
    by_material: dict[str | None, list[ElementTree.Element]] = defaultdict(list)
    for geom in geoms:
        by_material[geom.get("material")].append(geom)
    for number, (material, wearers) in enumerate(by_material.items()):
        worn, picture = _material(root, material)
        files = reduced_files(path, picture, limit, config)
        target = mesh
        if number:
            target = ElementTree.SubElement(asset, "mesh", dict(mesh.attrib))
            target.set("name", f"{name}_{number}")
        target.set("file", str(files.mesh))
        for geom in wearers:
            geom.set("mesh", str(target.get("name")))
        if files.texture is None or worn is None:
            continue
        label = f"{target.get('name')}_lite"
        attributes = {"type": "2d", "name": label, "file": str(files.texture)}
        ElementTree.SubElement(asset, "texture", attributes)
        ElementTree.SubElement(
            asset, "material", {**worn.attrib, "name": label, "texture": label, "texrepeat": "1 1"}
        )
        for geom in wearers:
            geom.set("material", label)


def _material(
    root: ElementTree.Element, name: str | None
) -> tuple[ElementTree.Element | None, Path | None]:
    """A material and the file of its flat texture, where it has one that can be painted anew."""
    for material in root.iter("material"):
        if name is None or material.get("name") != name:
            continue
        for texture in root.iter("texture"):
            if texture.get("name") == material.get("texture"):
                file = texture.get("file")
                flat = texture.get("type") == "2d" and file is not None
                return material, Path(str(file)) if flat else None
        return material, None
    return None, None


def _drop_unused(root: ElementTree.Element) -> None:
    """Remove materials and textures that nothing wears any more; they cost time to load."""
    asset = root.find("asset")
    if asset is None:
        return
    worn = {element.get("material") for element in root.iter()}
    for material in asset.findall("material"):
        if material.get("name") not in worn:
            asset.remove(material)
    used = {material.get("texture") for material in root.iter("material")}
    for texture in asset.findall("texture"):
        if texture.get("type") != "skybox" and texture.get("name") not in used:
            asset.remove(texture)


def reduced_files(path: Path, texture: Path | None, max_faces: int, config: LiteConfig) -> Reduced:
    """The cached reduced copy of a mesh file, or ``path`` itself when it is small enough."""
    content = path.read_bytes()
    picture = b"" if texture is None else texture.read_bytes()
    sizes = struct.pack("<iii", _VERSION, max_faces, config.texture)
    digest = hashlib.sha256(sizes)
    for part in (content, picture):
        digest.update(hashlib.sha256(part).digest())
    folder, key = config.folder(), digest.hexdigest()[:24]
    target, painted = folder / f"{key}.msh", folder / f"{key}.png"
    keep = folder / f"{key}.keep"
    if target.exists():
        return Reduced(target, painted if painted.exists() else None)
    if keep.exists():
        return Reduced(path, None)
    mesh = read_mesh(path)
    if len(mesh.faces) <= max_faces:
        keep.touch()
        return Reduced(path, None)
    reduced = simplify(mesh, max_faces)
    if texture is not None and mesh.uv is not None:
        reduced, colours = repaint(reduced, mesh, _read_picture(texture), config.texture)
        _write_atomically(painted, _encode_png(colours))
    # Last, because its presence says that the texture is there too.
    _write_atomically(target, encode_msh(reduced))
    return Reduced(target, None if reduced.uv is None else painted)


def _read_picture(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _encode_png(picture: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "png")
    return buffer.getvalue()


def _write_atomically(target: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, target)
