"""Import of robomimic's layout, LIBERO's two layouts, and a real robosuite file."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import robosuite
from regrasp.episodes.robomimic import import_robomimic, quaternion_to_axis_angle
from regrasp.episodes.robomimic_export import export_robomimic
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader
from robosuite.utils.transform_utils import quat2axisangle

RNG = np.random.default_rng(0)


def write_file(path, demos, attrs, masks=None):
    """An HDF5 file with the given demos (name -> {dataset path: array}, attributes)."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update(attrs)
        for name, arrays in demos.items():
            group = data.create_group(name)
            group.attrs["model_file"] = "<mujoco/>"
            group.attrs["num_samples"] = len(arrays["actions"])
            for key, value in arrays.items():
                group[key] = value
        for mask, members in (masks or {}).items():
            file[f"mask/{mask}"] = np.array(members, dtype="S8")
    return path


def robomimic_demo(steps, success):
    quaternions = RNG.standard_normal((steps, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    return {
        "actions": RNG.uniform(-1, 1, (steps, 7)),
        "states": RNG.standard_normal((steps, 32)),
        "rewards": np.arange(steps) >= (steps - 2 if success else steps),
        "dones": np.arange(steps) == steps - 1,
        "obs/agentview_image": RNG.integers(0, 255, (steps, 8, 8, 3), np.uint8),
        "obs/robot0_eef_pos": RNG.standard_normal((steps, 3)),
        "obs/robot0_eef_quat": quaternions,
        "obs/robot0_gripper_qpos": RNG.standard_normal((steps, 2)),
        "obs/object": RNG.standard_normal((steps, 10)),
        "next_obs/object": RNG.standard_normal((steps, 10)),
    }


def test_robomimic(tmp_path):
    demos = {f"demo_{i}": robomimic_demo(5 + i, success=i != 2) for i in (0, 1, 2, 10)}
    attrs = {
        "total": 33,
        "env_args": json.dumps({"env_name": "Lift", "env_type": 1, "env_kwargs": {}}),
    }
    path = write_file(
        tmp_path / "low.hdf5", demos, attrs, {"train": ["demo_0", "demo_10"], "valid": ["demo_1"]}
    )
    store = EpisodeStore.create(tmp_path / "s")
    assert import_robomimic(path, store) == [0, 1, 2, 3]
    assert [h.extra["demo"] for h in store.headers] == ["demo_0", "demo_1", "demo_2", "demo_10"]
    assert [h.success for h in store.headers] == [True, True, False, True]
    assert store.headers[3].extra["masks"] == ["train"]
    assert store.headers[0].task == "Lift"
    demo, episode = demos["demo_10"], store[3]
    np.testing.assert_array_equal(episode.steps["action"], demo["actions"].astype(np.float32))
    np.testing.assert_array_equal(episode.steps["sim_state"], demo["states"])
    np.testing.assert_array_equal(episode.steps["image/agentview"], demo["obs/agentview_image"])
    np.testing.assert_array_equal(episode.steps["obs/object"], demo["obs/object"])
    np.testing.assert_allclose(episode.steps["state"][:, :3], demo["obs/robot0_eef_pos"], rtol=1e-6)
    want = [quat2axisangle(q.copy()) for q in demo["obs/robot0_eef_quat"]]
    np.testing.assert_allclose(episode.steps["state"][:, 3:6], want, atol=1e-5)

    train = EpisodeStore.create(tmp_path / "train")
    import_robomimic(path, train, filter_key="train")
    assert [h.init_state for h in train.headers] == [0, 10]
    with pytest.raises(ValueError, match="'trian'"):
        import_robomimic(path, train, filter_key="trian")


def libero_attrs(**extra):
    return {
        "bddl_file_name": "libero/bddl_files/libero_object/pick_up_the_milk.bddl",
        "problem_info": json.dumps({"language_instruction": list('"pick up the milk"')}),
        **extra,
    }


@pytest.mark.parametrize(("convention", "turned"), [("opengl", True), ("opencv", False)])
def test_libero_dataset(tmp_path, convention, turned):
    demo = {
        "actions": RNG.uniform(-1, 1, (6, 7)),
        "rewards": np.arange(6) == 5,
        "robot_states": RNG.standard_normal((6, 9)),
        "obs/agentview_rgb": RNG.integers(0, 255, (6, 8, 8, 3), np.uint8),
        "obs/eye_in_hand_rgb": RNG.integers(0, 255, (6, 8, 8, 3), np.uint8),
        "obs/ee_states": RNG.standard_normal((6, 6)),
        "obs/gripper_states": RNG.standard_normal((6, 2)),
    }
    path = write_file(
        tmp_path / "l.hdf5", {"demo_0": demo}, libero_attrs(macros_image_convention=convention)
    )
    store = EpisodeStore.create(tmp_path / "s")
    import_robomimic(path, store)
    header, steps = store.headers[0], store[0].steps
    assert (header.suite, header.task, header.instruction) == (
        "libero",
        "pick_up_the_milk",
        "pick up the milk",
    )
    picture = demo["obs/eye_in_hand_rgb"]
    np.testing.assert_array_equal(
        steps["image/wrist"], picture[:, ::-1, ::-1] if turned else picture
    )
    state = np.concatenate([demo["obs/ee_states"], demo["obs/gripper_states"]], axis=1)
    np.testing.assert_array_equal(steps["state"], state.astype(np.float32))


def test_libero_raw_demonstrations(tmp_path):
    demo = {"actions": RNG.uniform(-1, 1, (6, 7)), "states": RNG.standard_normal((6, 92))}
    attrs = libero_attrs(env="Libero_Floor_Manipulation", env_info="{}")
    path = write_file(tmp_path / "demo.hdf5", {"demo_1": demo, "demo_2": demo}, attrs)
    store = EpisodeStore.create(tmp_path / "s")
    assert import_robomimic(path, store, suite="libero_object") == [0, 1]
    assert store.headers[1].instruction == "pick up the milk"
    assert store.headers[1].success
    assert set(store.steps) == {"action", "sim_state"}


def test_a_real_robosuite_file(tmp_path):
    path = Path(robosuite.__file__).parent / "models/assets/demonstrations/lift/demo.hdf5"
    store = EpisodeStore.create(tmp_path / "s")
    import_robomimic(path, store)
    with h5py.File(path) as file:
        assert len(store) == len(file["data"])
        for episode in store:
            demo = file["data"][episode.header.extra["demo"]]
            np.testing.assert_array_equal(episode.steps["sim_state"], demo["states"][:])
    assert store.headers[0].task


def test_not_a_robomimic_file(tmp_path):
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["other"] = np.zeros(3)
    with pytest.raises(ValueError, match="'other'"):
        import_robomimic(tmp_path / "x.hdf5", EpisodeStore.create(tmp_path / "s"))


def test_quaternions():
    assert not quaternion_to_axis_angle(np.array([0, 0, 0, 1.0])).any()
    quarter = np.array([0, 0, np.sin(np.pi / 4), np.cos(np.pi / 4)])
    np.testing.assert_allclose(quaternion_to_axis_angle(quarter), [0, 0, np.pi / 2], atol=1e-12)


def exported(tmp_path):
    """A store with a success and a failure, and the file made of it."""
    rng = np.random.default_rng(0)
    store = EpisodeStore.create(tmp_path / "store")
    for length, label in ((7, ""), (5, "early_release")):
        turn = rng.normal(size=(length, 3))
        turn *= rng.uniform(0.1, 3.0, (length, 1)) / np.linalg.norm(turn, axis=1, keepdims=True)
        state = np.concatenate([rng.normal(size=(length, 3)), turn, np.zeros((length, 2))], axis=1)
        success = np.arange(length) > length - 3 if not label else np.zeros(length, bool)
        header = EpisodeHeader(
            "libero_object", "milk", "take the milk", 3, 1, not label, failure_label=label
        )
        steps = {
            "image/agentview": rng.integers(0, 255, (length, 6, 6, 3), np.uint8),
            "image/wrist": rng.integers(0, 255, (length, 6, 6, 3), np.uint8),
            "state": state.astype(np.float32),
            "action": rng.normal(size=(length, 7)).astype(np.float32),
            "phase": rng.integers(0, 5, length),
            "success": success,
        }
        store.append(Episode(header, steps))
    export_robomimic(store, tmp_path / "demos.hdf5")
    return store, tmp_path / "demos.hdf5"


def test_an_exported_store_comes_back(tmp_path):
    store, file = exported(tmp_path)
    back = EpisodeStore.create(tmp_path / "back")
    assert import_robomimic(file, back, rotate=False) == [0, 1]
    for index in range(2):
        ours, theirs = store.load(index), back.load(index)
        assert theirs.header.success == ours.header.success
        for key in ("image/agentview", "image/wrist", "action"):
            assert np.array_equal(theirs.steps[key], ours.steps[key]), key
        assert np.allclose(theirs.steps["state"], ours.steps["state"], atol=1e-6)
    assert back.load(1).header.extra["masks"] == ["early_release", "failure"]


def test_an_exported_file_has_robomimics_layout(tmp_path):
    import h5py

    store, file = exported(tmp_path)
    with h5py.File(file) as handle:
        data = handle["data"]
        assert data.attrs["total"] == 12
        assert json.loads(data.attrs["env_args"])["env_type"] == 1
        first = data["demo_0"]
        assert first.attrs["num_samples"] == 7
        assert first["rewards"][:].tolist() == [0, 0, 0, 0, 0, 1, 1]
        assert first["dones"][:].tolist() == [0] * 6 + [1]
        assert np.array_equal(
            first["next_obs/robot0_eef_pos"][:-1], first["obs/robot0_eef_pos"][1:]
        )
        assert np.array_equal(first["phase"][:], store.load(0).steps["phase"])
        label = EpisodeHeader.from_json(json.loads(data["demo_1"].attrs["header"])).failure_label
        assert label == "early_release"
    with pytest.raises(FileExistsError):
        export_robomimic(store, file)
