"""The episode store: a zarr directory that many workers append to and a kill cannot break.

Layout (zarr format 2, readable by any zarr library; the first two lines are diffusion_policy's
replay buffer)::

    data/<key>          [T_total, ...]  one row a control step, episodes one after another
    meta/episode_ends   int64 [N]       cumulative steps; its length is the number of episodes
    chunks/<key>        [C_total, ...]  one row a policy inference
    meta/chunk_ends     int64 [N]       cumulative inferences
    headers.jsonl                       one EpisodeHeader a line
    meta/header_ends    int64 [N]       cumulative bytes of headers.jsonl
    .zattrs                             format name, version, control rate, the creator's attributes

An append holds an exclusive lock (``flock``, which the kernel frees when its holder dies), writes
data behind the committed end, and commits by one atomic rename of ``meta/episode_ends/.zarray``.
A process killed anywhere before that rename loses the episode it was writing and nothing else:
what lies behind the committed end is ignored, and overwritten by the next append. Power loss is
not covered, since nothing waits for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .types import Episode, EpisodeHeader
from .zarr2 import GrowingArray, write_atomic, write_group

FORMAT = "regrasp.episodes"
VERSION = 1
_ENDS = ("chunk_ends", "header_ends", "episode_ends")  # the last one written is the commit


class EpisodeStore(Sequence[Episode]):
    """Episodes on disk; a sequence of :class:`Episode`. Use :meth:`create` or :meth:`open`.

    A store object sees the episodes committed when it was opened, last appended to, or
    :meth:`refresh`-ed. It is not to be shared by threads; each opens its own.

    Attributes:
        path: the directory.
        attrs: the creator's attributes.
        control_hz: control steps a second.
        headers: one :class:`EpisodeHeader` an episode.
        episode_ends: int64 ``[N]``, cumulative control steps.
        chunk_ends: int64 ``[N]``, cumulative policy inferences.
        steps: key -> array on disk over all control steps.
        chunks: key -> array on disk over all policy inferences.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        attrs_file = self.path / ".zattrs"
        if not attrs_file.exists():
            raise FileNotFoundError(
                f"no episode store at {self.path}; EpisodeStore.create(path) makes one"
            )
        attrs = json.loads(attrs_file.read_text())
        if attrs.get("format") != FORMAT or attrs.get("version") != VERSION:
            raise ValueError(
                f"{attrs_file}: format={attrs.get('format')!r}, version={attrs.get('version')!r}; "
                f"this reads {FORMAT!r} version {VERSION}"
            )
        self.control_hz: float = attrs["control_hz"]
        self.attrs: dict[str, Any] = attrs["attrs"]
        self._scratch = self.path / ".scratch"
        self._ends_on_disk = {
            name: GrowingArray(self.path / "meta" / name)
            for name in ("episode_ends", "chunk_ends", "header_ends")
        }
        self.headers: list[EpisodeHeader] = []
        self._header_bytes = 0
        self.steps: dict[str, GrowingArray] = {}
        self.chunks: dict[str, GrowingArray] = {}
        self.refresh()

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        control_hz: float = 20.0,
        attrs: Mapping[str, Any] | None = None,
        exist_ok: bool = False,
    ) -> EpisodeStore:
        """Make an empty store; atomic, so that many workers may call it with ``exist_ok``.

        Args:
            path: the directory; its parents are made.
            control_hz: control steps a second.
            attrs: JSON-serialisable facts about the whole store (state and action names, ...).
            exist_ok: open the store that is there instead of raising FileExistsError.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        scratch = building / ".scratch"
        scratch.mkdir(parents=True)
        for group in (building, building / "data", building / "chunks", building / "meta"):
            write_group(group, scratch)
        for name in _ENDS:
            GrowingArray.create(
                building / "meta" / name, np.dtype(np.int64), (), scratch, compressed=False
            )
        (building / "headers.jsonl").touch()
        record = {
            "format": FORMAT,
            "version": VERSION,
            "control_hz": float(control_hz),
            "attrs": dict(attrs or {}),
        }
        write_atomic(building / ".zattrs", json.dumps(record, indent=2).encode(), scratch)
        try:
            # Succeeds onto an empty directory too, fails onto one with anything in it.
            os.rename(building, path)
        except OSError as error:
            shutil.rmtree(building)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if not exist_ok or not (path / ".zattrs").exists():
                raise FileExistsError(
                    f"{path} exists; open it with EpisodeStore.open, or give an unused path"
                ) from error
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> EpisodeStore:
        """Open an existing store, first dropping what a killed writer left behind the last commit.

        Where the directory is read-only or another process is writing, nothing is dropped; the
        leftovers are then ignored.
        """
        store = cls(path)
        try:
            with store._lock(blocking=False):
                store._trim()
        except BlockingIOError:
            return store.refresh()  # whoever writes now overwrites the leftovers
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
        return store

    def __len__(self) -> int:
        return len(self.episode_ends)

    @property
    def num_steps(self) -> int:
        """Control steps in all committed episodes."""
        return int(self.episode_ends[-1]) if len(self) else 0

    def bounds(self, index: int) -> tuple[int, int]:
        """First and one-past-last row of episode ``index`` in ``data/<key>``."""
        return _bounds(self.episode_ends, self._index(index))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        """Episode ``index`` (negative counts from the end), or a list of them for a slice."""
        if isinstance(index, slice):
            return [self.load(i) for i in range(*index.indices(len(self)))]
        return self.load(index)

    def load(self, index: int, keys: Sequence[str] | None = None) -> Episode:
        """Episode ``index``, with only the step arrays named in ``keys`` if given.

        An episode without inferences has no chunk arrays.
        """
        index = self._index(index)
        names = list(self.steps) if keys is None else list(keys)
        unknown = set(names) - set(self.steps)
        if unknown:
            raise KeyError(f"no step arrays {sorted(unknown)}; the store has {sorted(self.steps)}")
        start, stop = _bounds(self.episode_ends, index)
        first, last = _bounds(self.chunk_ends, index)
        return Episode(
            header=self.headers[index],
            steps={key: self.steps[key].read(start, stop) for key in names},
            chunks={key: array.read(first, last) for key, array in self.chunks.items()}
            if last > first
            else {},
        )

    def refresh(self) -> EpisodeStore:
        """See what others have committed since; returns the store."""
        n = len(self._ends_on_disk["episode_ends"].refresh())
        self.episode_ends = self._ends_on_disk["episode_ends"].read(0, n)
        self.chunk_ends = self._ends_on_disk["chunk_ends"].read(0, n)
        end = int(self._ends_on_disk["header_ends"].read(n - 1, n)[0]) if n else 0
        with open(self.path / "headers.jsonl", "rb") as file:
            file.seek(self._header_bytes)
            text = file.read(end - self._header_bytes)
        self.headers += [EpisodeHeader.from_json(json.loads(line)) for line in text.splitlines()]
        self._header_bytes = end
        # Before the first commit there is no schema, whatever a failed append left behind.
        if not n:
            self.steps = {}
        elif not self.steps:
            self.steps = _arrays(self.path / "data")
        if not n or not self.chunk_ends[-1]:
            self.chunks = {}
        elif not self.chunks:
            self.chunks = _arrays(self.path / "chunks")
        return self

    def append(self, episode: Episode) -> int:
        """Add an episode and return its index. Safe from many processes and threads at once.

        The first episode fixes the step keys, dtypes and row shapes; the first one with
        inferences those of the chunk arrays.

        Raises:
            ValueError: for an empty episode, keys or shapes unlike the store's, dtypes that zarr
                cannot hold, or a header that JSON cannot hold.
        """
        if len(episode) == 0:
            raise ValueError("EpisodeStore.append: an episode of 0 steps; it needs at least one")
        line = _header_line(episode.header)
        chunk_rows = len(next(iter(episode.chunks.values()))) if episode.chunks else 0
        with self._lock():
            self.refresh()
            self._check(episode.steps, self.steps, "steps")
            if chunk_rows:
                self._check(episode.chunks, self.chunks, "chunks")
            n, start = len(self), self.num_steps
            first = int(self.chunk_ends[-1]) if n else 0
            if not self.steps:
                self.steps = self._make_arrays("data", episode.steps)
            if chunk_rows and not self.chunks:
                self.chunks = self._make_arrays("chunks", episode.chunks)
            self._extend(self.steps, start, episode.steps)
            if chunk_rows:
                self._extend(self.chunks, first, episode.chunks)
            with open(self.path / "headers.jsonl", "r+b") as file:
                file.truncate(self._header_bytes)
                file.seek(self._header_bytes)
                file.write(line)
            ends = {
                "chunk_ends": first + chunk_rows,
                "header_ends": self._header_bytes + len(line),
                "episode_ends": start + len(episode),
            }
            for name in _ENDS:
                array = self._ends_on_disk[name]
                array.write(n, np.array([ends[name]], np.int64), self._scratch)
                array.resize(n + 1, self._scratch)
            self.refresh()
        return n

    def _extend(
        self, arrays: Mapping[str, GrowingArray], start: int, rows: Mapping[str, np.ndarray]
    ) -> None:
        for key, array in arrays.items():
            array.write(start, rows[key], self._scratch)
            array.resize(start + len(rows[key]), self._scratch)

    def _make_arrays(self, group: str, rows: Mapping[str, np.ndarray]) -> dict[str, GrowingArray]:
        """Create the arrays of ``group``, replacing what a killed first append may have left."""
        root = self.path / group
        shutil.rmtree(root)
        write_group(root, self._scratch)
        for key, value in rows.items():
            parts = key.split("/")
            if not all(parts) or any(part.startswith(".") for part in parts):
                raise ValueError(f"EpisodeStore: key {key!r}; use names joined by single slashes")
            for depth in range(1, len(parts)):
                write_group(root.joinpath(*parts[:depth]), self._scratch)
            GrowingArray.create(root / key, value.dtype, value.shape[1:], self._scratch)
        return {key: GrowingArray(root / key) for key in sorted(rows)}

    def _check(
        self, rows: Mapping[str, np.ndarray], arrays: Mapping[str, GrowingArray], what: str
    ) -> None:
        """ValueError unless ``rows`` has the keys, dtypes and row shapes of ``arrays``."""
        if not arrays:
            return
        if set(rows) != set(arrays):
            raise ValueError(
                f"EpisodeStore.append: episode.{what} lacks {sorted(set(arrays) - set(rows))} and "
                f"adds {sorted(set(rows) - set(arrays))}; the store at {self.path} has "
                f"{sorted(arrays)}"
            )
        for key, value in rows.items():
            array = arrays[key]
            if value.shape[1:] != array.row_shape or value.dtype != array.dtype:
                raise ValueError(
                    f"EpisodeStore.append: episode.{what}[{key!r}] is {value.dtype} rows of "
                    f"{value.shape[1:]}; the store has {array.dtype} rows of {array.row_shape}"
                )

    def _trim(self) -> None:
        """Cut every array to the last commit. Needs the lock."""
        self.refresh()
        n = len(self)
        lengths = [(self.steps, self.num_steps)]
        lengths.append((self.chunks, int(self.chunk_ends[-1]) if n else 0))
        lengths.append((self._ends_on_disk, n))
        for arrays, length in lengths:
            for array in arrays.values():
                if len(array.refresh()) != length:
                    array.resize(length, self._scratch)

    @contextmanager
    def _lock(self, blocking: bool = True) -> Iterator[None]:
        """Hold the store's writer lock; BlockingIOError if not ``blocking`` and it is held."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            self._scratch.mkdir(exist_ok=True)
            for leftover in self._scratch.iterdir():  # of a killed writer: only we write now
                leftover.unlink()
            yield
        finally:
            os.close(descriptor)  # frees the lock

    def _index(self, index: int) -> int:
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"episode {index} of a store with {n} episodes")
        return index % n


def _bounds(ends: np.ndarray, index: int) -> tuple[int, int]:
    return (int(ends[index - 1]) if index else 0), int(ends[index])


def _arrays(root: Path) -> dict[str, GrowingArray]:
    """Every array below a group, by its path from there."""
    found = sorted(root.rglob(".zarray"))
    return {str(file.parent.relative_to(root)): GrowingArray(file.parent) for file in found}


def _header_line(header: EpisodeHeader) -> bytes:
    try:
        return json.dumps(header.to_json(), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"EpisodeHeader is not JSON-serialisable: {error}") from error
