"""A zarr format-2 array on disk that grows along its first axis and survives a kill at any byte.

The files are ordinary zarr format 2 (``.zarray``, ``.zgroup``, one file a chunk), so that any zarr
library reads them. Written here rather than through zarr's own API for two reasons: every file is
replaced atomically, and one random row costs one small read and one decompression (about 50 us)
where the library's asynchronous path costs about a millisecond.

Source: zarr storage specification version 2; https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import Blosc
from numcodecs.registry import get_codec

#: Bytes of one uncompressed chunk: four 128x128 RGB frames. Measured on LIBERO frames: LZ4 over
#: four frames halves the size of a static camera's single frames, and a random frame still
#: decompresses in about 50 us; eight frames a chunk save 1 % more and cost twice the time.
CHUNK_BYTES = 4 * 128 * 128 * 3
MAX_CHUNK_ROWS = 4096


def write_atomic(path: Path, data: bytes, scratch: Path) -> None:
    """Replace ``path`` by ``data``; a reader or a kill sees the old file or the new one, whole.

    Args:
        path: the file.
        data: its whole new content.
        scratch: an existing directory on the same file system for the file being written.
    """
    temporary = scratch / f"{os.getpid()}"
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_group(path: Path, scratch: Path) -> None:
    """Make ``path`` a zarr group; harmless where it is one already."""
    path.mkdir(parents=True, exist_ok=True)
    if not (path / ".zgroup").exists():
        write_atomic(path / ".zgroup", b'{"zarr_format": 2}', scratch)


class GrowingArray:
    """Rows of one dtype and shape. ``len(array)`` is what ``.zarray`` says, see :meth:`refresh`.

    Attributes:
        path: the array's directory.
        dtype: of the rows; little-endian, bool, integer or float.
        row_shape: shape of one row.
        chunk_rows: rows in one chunk file.
    """

    def __init__(self, path: str | Path):
        """Open an existing array; ValueError for what format 2 allows and this class does not."""
        self.path = Path(path)
        meta = json.loads((self.path / ".zarray").read_text())
        for field, supported in (("zarr_format", (2,)), ("order", ("C",)), ("filters", (None, []))):
            if meta[field] not in supported:
                raise ValueError(
                    f"{self.path}/.zarray: {field}={meta[field]!r}; only {supported[0]!r} is read"
                )
        if list(meta["chunks"][1:]) != list(meta["shape"][1:]):
            raise ValueError(
                f"{self.path}/.zarray: chunks={meta['chunks']} of shape={meta['shape']}; "
                "only chunks along the first axis are read"
            )
        self._meta = meta
        self.dtype = np.dtype(meta["dtype"])
        self.row_shape: tuple[int, ...] = tuple(meta["shape"][1:])
        self.chunk_rows: int = meta["chunks"][0]
        self._codec = None if meta["compressor"] is None else get_codec(meta["compressor"])
        self._suffix = (meta.get("dimension_separator", ".") + "0") * len(self.row_shape)

    @classmethod
    def create(
        cls,
        path: str | Path,
        dtype: np.dtype,
        row_shape: Sequence[int],
        scratch: Path,
        *,
        compressed: bool = True,
    ) -> GrowingArray:
        """Make an empty array at ``path``, whose parent is a group.

        Raises:
            ValueError: for a dtype that is not bool, integer or float.
        """
        dtype = np.dtype(dtype).newbyteorder("<")
        if dtype.kind not in "buif":
            raise ValueError(f"{path}: dtype {dtype}; store bool, integer or float arrays")
        row_bytes = max(1, dtype.itemsize * math.prod(row_shape))
        chunk_rows = max(1, min(MAX_CHUNK_ROWS, CHUNK_BYTES // row_bytes))
        # Bytes are pictures, where a byte shuffle does nothing; a block spanning the chunk lets
        # LZ4 find the previous frame. Floats shrink with a shuffle, and are read rarely.
        codec = (
            Blosc("lz4", clevel=9, shuffle=Blosc.NOSHUFFLE, blocksize=chunk_rows * row_bytes)
            if dtype.itemsize == 1
            else Blosc("zstd", clevel=1, shuffle=Blosc.SHUFFLE)
        )
        meta = {
            "zarr_format": 2,
            "shape": [0, *row_shape],
            "chunks": [chunk_rows, *row_shape],
            "dtype": dtype.str,
            "compressor": codec.get_config() if compressed else None,
            "fill_value": False if dtype.kind == "b" else 0,
            "order": "C",
            "filters": None,
        }
        path = Path(path)
        path.mkdir()
        write_atomic(path / ".zarray", json.dumps(meta, indent=2).encode(), scratch)
        return cls(path)

    def __len__(self) -> int:
        return int(self._meta["shape"][0])

    def refresh(self) -> GrowingArray:
        """Read the length again, which another process may have changed."""
        self._meta["shape"] = json.loads((self.path / ".zarray").read_text())["shape"]
        return self

    def resize(self, rows: int, scratch: Path) -> None:
        """Set the length, atomically; rows beyond what was written read as zero."""
        meta: dict[str, Any] = {**self._meta, "shape": [rows, *self.row_shape]}
        write_atomic(self.path / ".zarray", json.dumps(meta, indent=2).encode(), scratch)
        self._meta = meta

    def write(self, start: int, rows: np.ndarray, scratch: Path) -> None:
        """Write ``rows`` at ``start``, keeping the rows before it; the length stays as it is.

        What was stored behind the last written row of the last chunk is dropped.
        """
        rows = np.ascontiguousarray(rows, self.dtype)
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"{self.path}: rows {rows.shape[1:]}; the array has {self.row_shape}")
        stop = start + len(rows)
        for chunk in range(start // self.chunk_rows, -(-stop // self.chunk_rows)):
            first = chunk * self.chunk_rows
            low, high = max(start, first), min(stop, first + self.chunk_rows)
            block = np.zeros((self.chunk_rows, *self.row_shape), self.dtype)
            if low > first:
                block[: low - first] = self._chunk(chunk)[: low - first]
            block[low - first : high - first] = rows[low - start : high - start]
            data = block.tobytes() if self._codec is None else self._codec.encode(block)
            write_atomic(self._file(chunk), data, scratch)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop`` (exclusive), ``[stop - start, *row_shape]``.

        Not bounded by ``len``: a caller that knows how much is committed may read it while
        another process extends the array.
        """
        out = np.empty((stop - start, *self.row_shape), self.dtype)
        for chunk in range(start // self.chunk_rows, -(-stop // self.chunk_rows)):
            first = chunk * self.chunk_rows
            low, high = max(start, first), min(stop, first + self.chunk_rows)
            out[low - start : high - start] = self._chunk(chunk)[low - first : high - first]
        return out

    def gather(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows in any order, ``[*rows.shape, *row_shape]``; each needed chunk is decoded once."""
        rows = np.asarray(rows)
        if out is None:
            out = np.empty((*rows.shape, *self.row_shape), self.dtype)
        flat_out = out.reshape(-1, *self.row_shape)
        chunk_of, within = np.divmod(rows.ravel(), self.chunk_rows)
        order = np.argsort(chunk_of, kind="stable")
        last, block = -1, None
        for position in order.tolist():
            chunk = int(chunk_of[position])
            if block is None or chunk != last:
                last, block = chunk, self._chunk(chunk)
            flat_out[position] = block[within[position]]
        return out

    def _file(self, chunk: int) -> Path:
        return self.path / f"{chunk}{self._suffix}"

    def _chunk(self, chunk: int) -> np.ndarray:
        """One whole decoded chunk, ``[chunk_rows, *row_shape]``; zeros where no file is."""
        try:
            with open(f"{self.path}/{chunk}{self._suffix}", "rb", buffering=0) as file:
                data = file.read()
        except FileNotFoundError:
            return np.zeros((self.chunk_rows, *self.row_shape), self.dtype)
        if self._codec is not None:
            data = self._codec.decode(data)
        return np.frombuffer(data, self.dtype).reshape(self.chunk_rows, *self.row_shape)
