"""Reduced meshes: what they keep of the original's looks, and what becomes of a scene."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image
from regrasp.sim.lite import LiteConfig, reduce_scene, reduced_files
from regrasp.sim.mesh import Mesh, encode_msh, read_mesh
from regrasp.sim.simplify import Surface, repaint, sample, simplify

RED, BLUE = (200, 30, 30), (30, 30, 200)


def cup(sectors=120, rings=40, wall=0.01):
    """A tube with a thin wall, red outside and blue inside, one texture island for each face."""
    angles = np.linspace(0, 2 * np.pi, sectors, endpoint=False)
    heights = np.linspace(0, 1, rings)
    points, faces, colour = [], [], []
    for radius, inside in ((1.0, False), (1.0 - wall, True)):
        base = len(points)
        points += [(radius * np.cos(a), radius * np.sin(a), h) for h in heights for a in angles]
        for k in range(rings - 1):
            for i in range(sectors):
                j = (i + 1) % sectors
                a, b = base + k * sectors + i, base + k * sectors + j
                c, d = a + sectors, b + sectors
                ring = [(a, b, d), (a, d, c)]
                faces += [(x, z, y) for x, y, z in ring] if inside else ring
                colour += [inside, inside]
    uv = np.zeros((len(faces), 3, 2))
    uv[..., 1] = 0.5
    # Islands: each face sits somewhere else in its colour's half of the texture.
    rng = np.random.default_rng(0)
    uv[..., 0] = (0.05 + 0.4 * rng.random(len(faces)) + 0.5 * np.array(colour))[:, None]
    texture = np.zeros((64, 64, 3), np.uint8)
    texture[:, :32], texture[:, 32:] = RED, BLUE
    return Mesh(np.array(points), np.array(faces), uv, None), texture


def outward(mesh):
    """Each face's middle, and whether it faces away from the tube's axis."""
    corners = mesh.vertices[mesh.faces]
    middle = corners.mean(axis=1)
    normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    return middle, (normal[:, :2] * middle[:, :2]).sum(axis=1) > 0


def test_a_thin_wall_keeps_its_two_colours():
    mesh, texture = cup()
    painted, picture = repaint(simplify(mesh, 400), mesh, texture, 256)
    _, outside = outward(painted)
    assert outside.any()
    assert not outside.all()
    colours = sample(picture, painted.uv.mean(axis=1))
    assert np.abs(colours[outside].astype(int) - RED).max() <= 2
    assert np.abs(colours[~outside].astype(int) - BLUE).max() <= 2


def test_corners_of_a_reduced_mesh_are_shaded_like_the_original():
    mesh, _ = cup()
    reduced = simplify(mesh, 400)
    _, outside = outward(reduced)
    corner = reduced.vertices[reduced.faces][..., :2]
    radial = corner / np.linalg.norm(corner, axis=-1, keepdims=True)
    along = (reduced.normals[..., :2] * radial).sum(axis=-1)
    # A facet of the original spans 3 degrees, a probe lies a tenth of a reduced one further in.
    assert (along[outside] > np.cos(np.deg2rad(10))).all()
    assert (along[~outside] < -np.cos(np.deg2rad(10))).all()


def test_a_heap_of_loose_parts_shrinks_too():
    rng = np.random.default_rng(1)
    centres = rng.random((3000, 1, 3))
    points = (centres + 0.02 * rng.random((3000, 3, 3))).reshape(-1, 3)
    heap = Mesh(points, np.arange(9000).reshape(-1, 3), None, None)
    assert 50 < len(simplify(heap, 300).faces) <= 330


def test_a_repeating_texture_is_sampled_beyond_its_edge():
    texture = np.arange(4, dtype=np.uint8).repeat(3).reshape(1, 4, 3) * 50
    uv = np.array([[0.125, 0.5], [1.125, 2.5], [-0.125, -0.5], [0.25, 0.5]])
    assert sample(texture, uv)[:, 0].tolist() == [0, 0, 150, 25]


def test_the_nearest_point_of_a_large_face_is_found():
    square = np.array([[0, 0, 0], [100, 0, 0], [100, 100, 0], [0, 100, 0]], float)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 30)] * 2), -1).reshape(-1, 2)
    crumbs = np.c_[grid, np.full(len(grid), 5.0)]
    strip = np.array([[k, k + 1, k + 30] for k in range(800)]) + 4
    mesh = Mesh(np.vstack([square, crumbs]), np.vstack([[[0, 1, 2], [0, 2, 3]], strip]), None, None)
    found = Surface(mesh).nearest(np.array([[3.0, 2.0, 2.0]]), np.array([[0.0, 0.0, 1.0]]))
    assert found.face[0] == 0
    place = found.weights[0] @ mesh.vertices[mesh.faces[0]]
    assert place == pytest.approx([3, 2, 0])


def test_mesh_files_come_back_as_written(tmp_path):
    mesh, texture = cup(sectors=20, rings=5)
    small, _ = repaint(simplify(mesh, 60), mesh, texture, 64)
    path = tmp_path / "cup.msh"
    path.write_bytes(encode_msh(small))
    back = read_mesh(path)
    corners = small.vertices[small.faces]
    assert back.vertices[back.faces] == pytest.approx(corners, abs=1e-6)
    assert back.uv == pytest.approx(small.uv, abs=1e-6)
    assert back.normals == pytest.approx(small.normals, abs=1e-6)
    with pytest.raises(ValueError, match=r"\.ply"):
        read_mesh(tmp_path / "cup.ply")


@pytest.fixture
def cup_files(tmp_path):
    mesh, texture = cup()
    (tmp_path / "cup.msh").write_bytes(encode_msh(mesh))
    Image.fromarray(texture).save(tmp_path / "red.png")
    Image.fromarray(texture[..., ::-1].copy()).save(tmp_path / "blue.png")
    return tmp_path


def scene(folder, collides="0"):
    return f"""
    <mujoco><compiler inertiagrouprange="0 0"/>
      <asset>
        <texture name="red" type="2d" file="{folder}/red.png"/>
        <texture name="blue" type="2d" file="{folder}/blue.png"/>
        <texture name="sky" type="skybox" builtin="gradient" width="8" height="8"/>
        <material name="red" texture="red" reflectance="0.5"/>
        <material name="blue" texture="blue"/>
        <mesh name="cup" file="{folder}/cup.msh" scale="0.1 0.1 0.1"/>
      </asset>
      <worldbody>
        <geom type="mesh" mesh="cup" material="red" contype="0" conaffinity="0" group="1"/>
        <geom type="mesh" mesh="cup" material="blue" contype="{collides}" conaffinity="0"
              group="1"/>
      </worldbody>
    </mujoco>"""


def test_one_mesh_in_two_materials_becomes_two(cup_files):
    import mujoco

    config = LiteConfig(max_faces=300, texture=128, cache=cup_files / "cache")
    xml = reduce_scene(scene(cup_files), config)
    root = ElementTree.fromstring(xml)
    first, second = root.iter("geom")
    assert first.get("mesh") != second.get("mesh")
    worn = {m.get("name"): m for m in root.iter("material")}
    assert set(worn) == {first.get("material"), second.get("material")}
    assert worn[first.get("material")].get("reflectance") == "0.5"
    assert {t.get("type") for t in root.iter("texture")} == {"2d", "skybox"}
    model = mujoco.MjModel.from_xml_string(xml)
    assert model.mesh_facenum.max() <= 330
    assert model.mesh_scale == pytest.approx(np.full((2, 3), 0.1))


def test_a_mesh_that_collides_is_left_alone(cup_files):
    config = LiteConfig(max_faces=300, cache=cup_files / "cache")
    root = ElementTree.fromstring(reduce_scene(scene(cup_files, collides="1"), config))
    assert [m.get("file") for m in root.iter("mesh")] == [f"{cup_files}/cup.msh"]
    with pytest.raises(ValueError, match="inertiagrouprange"):
        reduce_scene(scene(cup_files).replace("0 0", "0 5"), config)


def test_reduced_files_are_made_once_and_again_when_the_texture_changes(cup_files):
    config = LiteConfig(texture=128, cache=cup_files / "cache")
    arguments = (cup_files / "cup.msh", cup_files / "red.png", 300, config)
    made = reduced_files(*arguments)
    stamp = made.mesh.stat().st_mtime_ns
    assert reduced_files(*arguments) == made
    assert made.mesh.stat().st_mtime_ns == stamp
    other = reduced_files(arguments[0], cup_files / "blue.png", 300, config)
    assert other.mesh != made.mesh
    with Image.open(made.texture) as image:
        assert np.asarray(image)[..., 0].max() == pytest.approx(RED[0], abs=2)
    assert reduced_files(arguments[0], None, 300, config).texture is None
    assert reduced_files(arguments[0], None, 10**6, config).mesh == arguments[0]
