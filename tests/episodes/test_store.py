"""The store: layout, round trips, many writers, and writers killed at any moment."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
import zarr
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.zarr2 import GrowingArray

from .synthetic import assert_equal, make_episode

# Forking keeps 50 kills within seconds. The thread pytest warns of is zarr's idle event loop, which
# the children never use.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def test_roundtrip_and_sequence(tmp_path):
    store = EpisodeStore.create(tmp_path / "s", control_hz=20, attrs={"state": ["x", "y"]})
    episodes = [make_episode(i, chunks=i % 2 == 1) for i in range(7)]
    assert [store.append(e) for e in episodes] == list(range(7))
    again = EpisodeStore.open(tmp_path / "s")
    assert again.attrs == {"state": ["x", "y"]}
    assert len(again) == 7
    assert again.num_steps == sum(map(len, episodes))
    for got, want in zip(again, episodes, strict=True):
        assert_equal(got, want)
    assert_equal(again[-1], episodes[-1])
    assert len(again[2:5]) == 3
    assert again.headers == [e.header for e in episodes]
    assert set(again.load(3, keys=["action"]).steps) == {"action"}
    with pytest.raises(IndexError, match="episode 7"):
        again[7]
    with pytest.raises(KeyError, match="actoin"):
        again.load(0, keys=["actoin"])


def test_plain_zarr_reads_it(tmp_path):
    store = EpisodeStore.create(tmp_path / "s")
    episodes = [make_episode(i) for i in range(5)]
    for episode in episodes:
        store.append(episode)
    root = zarr.open_group(str(tmp_path / "s"), mode="r", zarr_format=2)
    ends = root["meta/episode_ends"][:]
    assert ends.dtype == np.int64
    np.testing.assert_array_equal(ends, np.cumsum([len(e) for e in episodes]))
    for key in episodes[0].steps:
        want = np.concatenate([e.steps[key] for e in episodes])
        np.testing.assert_array_equal(root[f"data/{key}"][:], want)
        assert root[f"data/{key}"].shape[0] == ends[-1]
    samples = np.concatenate([e.chunks["samples"] for e in episodes])
    np.testing.assert_array_equal(root["chunks/samples"][:], samples)
    assert root["meta/chunk_ends"][-1] == len(samples)


def test_what_zarr_wrote_is_read(tmp_path):
    rows = np.random.default_rng(0).integers(0, 255, (23, 4, 3)).astype(np.uint8)
    array = zarr.create_array(
        str(tmp_path / "a"), data=rows, chunks=(5, 4, 3), zarr_format=2, compressors=None
    )
    assert array.shape == rows.shape
    got = GrowingArray(tmp_path / "a")
    np.testing.assert_array_equal(got.read(3, 19), rows[3:19])
    index = np.array([[22, 0], [7, 7]])
    np.testing.assert_array_equal(got.gather(index), rows[index])


def test_bad_episodes_are_refused_and_change_nothing(tmp_path):
    store = EpisodeStore.create(tmp_path / "s")
    bad = make_episode(0)
    bad.steps["name"] = np.array(["a"] * len(bad))
    with pytest.raises(ValueError, match="bool, integer or float"):
        store.append(bad)
    good = make_episode(1)
    store.append(good)
    with pytest.raises(ValueError, match="at least one"):
        store.append(make_episode(0, steps=0))
    missing = make_episode(2)
    del missing.steps["phase"]
    with pytest.raises(ValueError, match="lacks \\['phase'\\]"):
        store.append(missing)
    with pytest.raises(ValueError, match="image/agentview"):
        store.append(make_episode(2, size=16))
    wrong = make_episode(2)
    wrong.header.extra["array"] = np.zeros(2)
    with pytest.raises(ValueError, match="JSON"):
        store.append(wrong)
    store.append(make_episode(3))
    store = EpisodeStore.open(tmp_path / "s")
    assert_equal(store[0], good)
    assert_equal(store[1], make_episode(3))
    assert len(store) == 2


def test_create_twice(tmp_path):
    EpisodeStore.create(tmp_path / "s").append(make_episode(0))
    with pytest.raises(FileExistsError, match="exists"):
        EpisodeStore.create(tmp_path / "s")
    assert len(EpisodeStore.create(tmp_path / "s", exist_ok=True)) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FileExistsError):
        EpisodeStore.create(tmp_path / "other", exist_ok=True)
    with pytest.raises(FileNotFoundError, match="no episode store"):
        EpisodeStore.open(tmp_path / "nothing")
    assert {p.name for p in tmp_path.iterdir()} == {"s", "other"}


def _append_some(path, seeds):
    store = EpisodeStore.create(path, exist_ok=True)
    for seed in seeds:
        store.append(make_episode(seed))


@pytest.mark.parametrize("workers", [6])
def test_many_writer_processes(tmp_path, workers):
    context = multiprocessing.get_context("fork")
    seeds = [range(w * 100, w * 100 + 12) for w in range(workers)]
    processes = [
        context.Process(target=_append_some, args=(tmp_path / "s", chosen)) for chosen in seeds
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = EpisodeStore.open(tmp_path / "s")
    assert sorted(h.seed for h in store.headers) == sorted(s for chosen in seeds for s in chosen)
    for chosen in seeds:  # each worker's own episodes keep their order
        assert [h.seed for h in store.headers if h.seed in chosen] == list(chosen)
    for episode in store:
        assert_equal(episode, make_episode(episode.header.seed))


def test_threads_and_a_reader_meanwhile(tmp_path):
    EpisodeStore.create(tmp_path / "s")
    threads = [
        threading.Thread(target=_append_some, args=(tmp_path / "s", range(t, 60, 3)))
        for t in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store = EpisodeStore.open(tmp_path / "s")
        if len(store):
            assert_equal(store[-1], make_episode(store.headers[-1].seed))
    for thread in threads:
        thread.join()
    assert len(EpisodeStore.open(tmp_path / "s")) == 60


def _append_forever(path, pipe):
    store = EpisodeStore.open(path)
    while True:
        done = store.append(make_episode(len(store)))
        os.write(pipe, done.to_bytes(4, "little"))


def test_killed_writers_lose_at_most_one_episode(tmp_path):
    path = tmp_path / "s"
    EpisodeStore.create(path)
    context = multiprocessing.get_context("fork")
    rng = np.random.default_rng(0)
    interrupted = 0
    for _ in range(50):
        before = len(EpisodeStore.open(path))
        read, write = os.pipe()
        process = context.Process(target=_append_forever, args=(path, write))
        process.start()
        os.close(write)
        time.sleep(0.005 + 0.04 * rng.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        reported = 0
        while data := os.read(read, 65536):
            reported += len(data) // 4
        os.close(read)

        torn = EpisodeStore(path)  # as the kill left it
        interrupted += any(len(a.refresh()) != torn.num_steps for a in torn.steps.values()) or any(
            (path / ".scratch").iterdir()
        )
        # An episode may be committed whose report the kill cut off.
        assert len(torn) - before in (reported, reported + 1)
        store = EpisodeStore.open(path)
        assert len(store) == len(torn)
        for index in range(max(0, before - 1), len(store)):
            assert_equal(store[index], make_episode(index))
        root = zarr.open_group(str(path), mode="r", zarr_format=2)
        if len(store):
            assert root["data/action"].shape[0] == root["meta/episode_ends"][-1]
    assert interrupted >= 5, "the kills never landed inside an append; the test shows nothing"
    count = len(store)
    assert store.append(make_episode(count)) == count
    for index, episode in enumerate(EpisodeStore.open(path)):
        assert_equal(episode, make_episode(index))


@pytest.mark.parametrize("first", [True, False])
def test_kill_before_every_single_write(tmp_path, monkeypatch, first):
    """Stop an append at each of its file replacements in turn; each must leave a whole store."""
    from regrasp.episodes import store as store_module
    from regrasp.episodes import zarr2

    real = zarr2.write_atomic
    stop_at, count, points = 0, 0, 0

    class Killed(BaseException):
        pass

    def dying(path, data, scratch):
        nonlocal count
        if count == stop_at:
            (scratch / "torn").write_bytes(data[: len(data) // 2])
            raise Killed
        count += 1
        real(path, data, scratch)

    path = tmp_path / "s"
    EpisodeStore.create(path)
    committed = 0 if first else 1
    if not first:
        EpisodeStore.open(path).append(make_episode(0, steps=6))
    while True:
        count = 0
        monkeypatch.setattr(zarr2, "write_atomic", dying)
        monkeypatch.setattr(store_module, "write_atomic", dying)
        try:
            # Other keys than those appended after it: an uncommitted schema must not stick.
            victim = make_episode(90, steps=9)
            if first:
                victim.steps["extra"] = np.ones(9)
            EpisodeStore(path).append(victim)
            break
        except Killed:
            points += 1
        finally:
            monkeypatch.setattr(zarr2, "write_atomic", real)
            monkeypatch.setattr(store_module, "write_atomic", real)
        store = EpisodeStore.open(path)
        assert len(store) == committed
        if first:
            assert store.append(make_episode(0, steps=6)) == 0
            path = tmp_path / f"s{points}"
            EpisodeStore.create(path)
        else:
            assert_equal(store[0], make_episode(0, steps=6))
        stop_at += 1
    assert points > 15
    assert len(EpisodeStore.open(path)) == committed + 1


def test_read_only_store_opens(tmp_path, monkeypatch):
    path = tmp_path / "s"
    EpisodeStore.create(path).append(make_episode(0))

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    assert len(EpisodeStore.open(path)) == 1
    with pytest.raises(OSError, match="Read-only"):
        EpisodeStore.open(path).append(make_episode(1))
