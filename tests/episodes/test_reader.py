"""Training windows: content, padding, uniformity, speed."""

import time

import numpy as np
import pytest
from regrasp.episodes.reader import WindowReader
from regrasp.episodes.store import EpisodeStore

from .synthetic import make_episode


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = EpisodeStore.create(tmp_path_factory.mktemp("reader") / "s")
    for seed in range(12):
        store.append(make_episode(seed))
    return store


def expected(store, batch, b, horizon, history):
    """Window ``b`` of a batch, built the slow and obvious way."""
    episode = store[int(batch["episode"][b])]
    t, last = int(batch["step"][b]), len(episode) - 1
    window = {}
    for key in ("image/agentview", "image/wrist", "state"):
        window[key] = np.stack([episode.steps[key][max(0, t - h)] for h in range(history)][::-1])
    window["action"] = np.stack([episode.steps["action"][min(t + h, last)] for h in range(horizon)])
    window["mask"] = np.array([t + h <= last for h in range(horizon)])
    return window


@pytest.mark.parametrize(("in_memory", "threads"), [(False, 1), (False, 3), (True, 1), (True, 2)])
def test_every_window_is_right(store, in_memory, threads):
    reader = WindowReader(store, horizon=6, history=3, in_memory=in_memory, threads=threads)
    assert len(reader) == store.num_steps
    batch = reader.gather(np.arange(len(reader)))
    assert batch["image/wrist"].dtype == np.uint8
    assert batch["action"].shape == (len(reader), 6, 7)
    for b in range(0, len(reader), 3):
        for key, value in expected(store, batch, b, 6, 3).items():
            np.testing.assert_array_equal(batch[key][b], value, err_msg=key)
    assert batch["mask"].sum() == sum(
        min(6, len(e) - t) for e in store for t in range(len(e))
    )  # no window reaches into the next episode


def test_chosen_episodes(store):
    reader = WindowReader(store, horizon=4, episodes=lambda header: header.success)
    assert 0 < len(reader.headers) < len(store)
    assert all(header.success for header in reader.headers)
    batch = reader.gather(np.arange(len(reader)))
    for b in range(0, len(reader), 7):
        source = store[int(reader.episodes[batch["episode"][b]])]
        np.testing.assert_array_equal(batch["state"][b, 0], source.steps["state"][batch["step"][b]])
    reversed_order = WindowReader(store, horizon=4, episodes=[5, 2], in_memory=True)
    got = reversed_order.gather(np.array([0, len(reversed_order) - 1]))
    np.testing.assert_array_equal(got["image/wrist"][0, 0], store[5].steps["image/wrist"][0])
    np.testing.assert_array_equal(got["image/wrist"][1, 0], store[2].steps["image/wrist"][-1])


def test_draw_is_uniform_over_windows(store):
    reader = WindowReader(store, horizon=1, observation_keys=["state"])
    batch = reader.sample(200_000, np.random.default_rng(0))
    starts = np.concatenate([[0], store.episode_ends[:-1]])
    counts = np.bincount(starts[batch["episode"]] + batch["step"], minlength=len(reader))
    expect = 200_000 / len(reader)
    chi2 = ((counts - expect) ** 2 / expect).sum()
    freedom = len(reader) - 1
    assert abs(chi2 - freedom) < 4 * np.sqrt(2 * freedom)


def test_batches_depend_on_seed_and_index_only(store):
    reader = WindowReader(store, horizon=4)

    def first(n, **kwargs):
        stream = reader.batches(8, **kwargs)
        got = [next(stream) for _ in range(n)]
        stream.close()
        return got

    one = first(5, seed=3)
    many = first(5, seed=3, workers=3, depth=7)
    resumed = first(2, seed=3, start=3)
    for a, b in [*zip(one, many, strict=True), *zip(one[3:], resumed, strict=True)]:
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
    assert not np.array_equal(one[0]["step"], one[1]["step"])
    assert not np.array_equal(one[0]["step"], first(1, seed=4)[0]["step"])


def test_failure_in_the_prefetch_thread_reaches_the_caller(store, monkeypatch):
    reader = WindowReader(store, horizon=4)
    monkeypatch.setattr(reader, "gather", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(reader.batches(4, seed=0))


def test_errors(store):
    with pytest.raises(ValueError, match="horizon=0"):
        WindowReader(store, horizon=0)
    with pytest.raises(KeyError, match="image/front"):
        WindowReader(store, horizon=1, observation_keys=["image/front"])
    with pytest.raises(ValueError, match="none of the 12"):
        WindowReader(store, horizon=1, episodes=[])
    with pytest.raises(IndexError, match=f"there are {store.num_steps}"):
        WindowReader(store, horizon=1).gather(np.array([10_000]))


def test_fast_in_memory(tmp_path):
    store = EpisodeStore.create(tmp_path / "s")
    for seed in range(3):
        store.append(make_episode(seed, steps=150, size=128))
    reader = WindowReader(store, horizon=16, in_memory=True)
    stream = reader.batches(64, seed=0)
    next(stream)
    rates = []
    for _ in range(5):  # the best of five, since other work may share the cores
        begin = time.perf_counter()
        for _ in range(10):
            next(stream)
        rates.append(640 / (time.perf_counter() - begin))
    stream.close()
    assert max(rates) > 5_000, f"windows/s: {rates}"
