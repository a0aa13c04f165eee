"""What a diagnosis model learns from and is tested on, out of a store of verified failures.

A *clip* is what the model is shown as one episode:

- a failure, up to some time after it has failed;
- the nominal rollout of its context: a success;
- the failure up to the failed state, then the recovery: a success too, for the task was achieved in
  the end. Without these, anything odd would mean "failed".

Failures in the store run on to a fixed time, so that by its length alone an episode would give
itself away. A clip of a failure therefore gets the length of one of its context's successes, drawn
by the sample's name: it is cut, or its last picture stays (the robot does stand still then).

Splits are by context (task, initial state, seed, driver), so that no context is in two:

- ``tasks``: tasks that no model is trained on, two of each suite;
- ``states``: initial states that none is trained on;
- ``types``: contexts with a failure of a held-out type, on a third of the initial states. Only
  failures of held-out types count there;
- ``train``: the rest. Everywhere but in ``types``, failures of held-out types are left out.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import EpisodeHeader
from regrasp.relabel.diagnose.answer import LONGEST, SUCCESS, Diagnosis
from regrasp.relabel.diagnose.labels import HELD_OUT_TYPES, VISIBLE

#: Suite -> indices of the tasks that are held out.
HELD_OUT_TASKS: dict[str, tuple[int, ...]] = {
    "libero_object": (6, 8),
    "libero_spatial": (4, 7),
    "libero_goal": (1, 9),
    "libero_10": (1, 6),
}

#: Initial states that are held out, of the 30 that failures are made on.
HELD_OUT_STATES = (9, 19, 29)

SPLITS = ("train", "tasks", "states", "types", "natural")

#: Control steps at least that a failure is shown after it has failed.
_AFTER = 5

#: Control steps for which a success is held at the end of a rollout; the last is not always shown.
_STAY = 10


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` (excluded) of one episode of a store."""

    episode: int
    start: int
    stop: int


@dataclass(frozen=True)
class Clip:
    """What is shown as one episode, and what is true of it.

    Attributes:
        key: a name of its own.
        store: where its pictures are.
        parts: rows of the store's episodes, one after the other.
        length: control steps; beyond the parts' end the last picture stays.
        instruction: the task in words.
        context: what it shares with other clips; one context is in one split.
        split: one of :data:`SPLITS`.
        role: ``failure``, ``nominal``, ``recovery``.
        kind: the type that was injected; empty for a success.
        truth: the right answer.
    """

    key: str
    store: str
    parts: tuple[Part, ...]
    length: int
    instruction: str
    context: str
    split: str
    role: str
    kind: str
    truth: Diagnosis

    def rows(self, steps: np.ndarray) -> list[tuple[int, int]]:
        """(episode, row) of the store for each control step of ``steps``."""
        starts = np.cumsum([0, *(part.stop - part.start for part in self.parts)])
        found = []
        for step in np.minimum(steps, starts[-1] - 1):
            i = int(np.searchsorted(starts, step, side="right")) - 1
            part = self.parts[i]
            found.append((part.episode, part.start + int(step - starts[i])))
        return found


def truth_of(header: EpisodeHeader) -> Diagnosis:
    """The right answer about a failure sample, from its header alone.

    Without a correction that was proven, the answer's motion is none, and its words say why.
    """
    extra = header.extra
    kind = extra["type"]
    start, end = extra["first_effect_step"], extra["predicate_fail_step"]
    correction = extra["correction"]
    delta = tuple(float(x) for x in correction["delta"]) if correction else (0.0,) * 7
    return Diagnosis(
        True,
        VISIBLE.get(kind, kind),
        min(start, end),
        end,
        extra["subtask"],
        extra["level"],
        f"{kind}: {extra['explanation']}"[:LONGEST].strip(),
        extra["correction_text"][:LONGEST].strip(),
        delta,
    )


def split_of(suite: str, task: int, init_state: int, kinds: Iterable[str]) -> str:
    """The split of a context.

    Args:
        suite, task, init_state: which; the task's index in its suite.
        kinds: types of its failures.
    """
    if task in HELD_OUT_TASKS.get(suite, ()):
        return "tasks"
    if init_state in HELD_OUT_STATES:
        return "states"
    if init_state % 3 == 1 and set(kinds) & set(HELD_OUT_TYPES):
        return "types"
    return "train"


def clips_of(stores: Sequence[str | Path]) -> list[Clip]:
    """All clips of stores made by ``regrasp failures generate``, in their order.

    Several stores may hold the same contexts; a sample that is in two counts once.

    Raises:
        ValueError: there is no failure in them.
    """
    groups: dict[str, list[_Row]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for path in stores:
        store = EpisodeStore.open(path)
        for index, header in enumerate(store.headers):
            first, last = store.bounds(index)
            context = f"{header.extra['context']}/{header.extra.get('driver', 'expert')}"
            name = str(header.extra.get("sample", context))
            if (name, header.extra["role"]) not in seen:
                seen.add((name, header.extra["role"]))
                groups[context].append(_Row(str(path), index, last - first, header))
    clips = [clip for context, rows in groups.items() for clip in _context(context, rows)]
    if not any(clip.truth.failed for clip in clips):
        raise ValueError(f"clips_of: no failures in {[str(p) for p in stores]}")
    return clips


def natural_clips(path: str | Path) -> list[Clip]:
    """Clips of a store made by ``regrasp failures natural``: what a policy did by itself.

    A failure is cut to the length of some success of the same suite, where it has gone wrong by
    then. Nobody knows its type; its truth is that it failed, when, and at what.
    """
    store = EpisodeStore.open(path)
    lengths: dict[str, list[int]] = defaultdict(list)
    rows = []
    for index, header in enumerate(store.headers):
        first, last = store.bounds(index)
        rows.append(_Row(str(path), index, last - first, header))
        if header.success:
            lengths[header.suite].append(last - first)
    return [_natural(row, lengths[row.header.suite]) for row in rows]


def balanced(clips: Sequence[Clip]) -> list[int]:
    """Indices of ``clips``, some more than once: half failures, and classes less unequal.

    A visible class is drawn by the square root of how often it occurs (the rare ones are repeated,
    four times at most); nominal rollouts and recoveries are repeated until they are as many as
    each other and, together, as the failures.
    """
    counts: dict[str, list[int]] = defaultdict(list)
    for i, clip in enumerate(clips):
        counts[clip.truth.type or clip.role].append(i)
    failing = {name: rows for name, rows in counts.items() if clips[rows[0]].truth.failed}
    most = max((len(rows) for rows in failing.values()), default=0)
    chosen: list[int] = []
    for rows in failing.values():
        chosen += _repeated(rows, min(round((most * len(rows)) ** 0.5), 4 * len(rows)))
    going = [rows for name, rows in counts.items() if name not in failing]
    for rows in going:
        chosen += _repeated(rows, max(1, sum(map(len, failing.values())) // len(going)))
    return chosen


@dataclass(frozen=True)
class _Row:
    """One episode of a store."""

    store: str
    index: int
    length: int
    header: EpisodeHeader

    @property
    def role(self) -> str:
        return self.header.extra["role"]


def _context(context: str, rows: Sequence[_Row]) -> list[Clip]:
    """The clips of one context that are of use in its split."""
    failures = {row.header.extra["sample"]: row for row in rows if row.role == "failure"}
    header = rows[0].header
    kinds = [row.header.extra["type"] for row in failures.values()]
    split = split_of(header.suite, header.extra["task_index"], header.init_state, kinds)
    kept = {
        name: row
        for name, row in failures.items()
        if (row.header.extra["type"] in HELD_OUT_TYPES) == (split == "types")
    }
    common = {"instruction": header.instruction, "context": context, "split": split}
    clips = [_nominal(row, common) for row in rows if row.role == "nominal"]
    for row in rows:
        name = row.header.extra.get("sample")
        if row.role == "recovery" and name in kept:
            clips.append(_recovered(kept[name], row, common))
    lengths = [clip.length for clip in clips]
    return clips + [_failure(row, lengths, common) for row in kept.values()]


def _nominal(row: _Row, common: Mapping[str, Any]) -> Clip:
    key = f"{common['context']}/nominal"
    length = max(1, row.length - int(_rng(key).integers(_STAY - 1)))
    parts = (Part(row.index, 0, length),)
    return Clip(key, row.store, parts, length, role="nominal", kind="", truth=SUCCESS, **common)


def _recovered(failed: _Row, row: _Row, common: Mapping[str, Any]) -> Clip:
    """The failure up to the failed state, and then the way out."""
    key = f"{row.header.extra['sample']}/recovery"
    turn = min(row.header.extra["start"] - failed.header.extra["start"], failed.length)
    stop = max(1, row.length - int(_rng(key).integers(_STAY - 1)))
    both = (Part(failed.index, 0, turn), Part(row.index, 0, stop))
    parts = tuple(part for part in both if part.stop > part.start)
    length = sum(part.stop - part.start for part in parts)
    if failed.store != row.store:
        raise ValueError(f"{key}: failure and recovery are in two stores")
    return Clip(key, row.store, parts, length, role="recovery", kind="", truth=SUCCESS, **common)


def _natural(row: _Row, lengths: Sequence[int]) -> Clip:
    """What a policy did; ``lengths`` are those of its successes."""
    h, length, truth = row.header, row.length, SUCCESS
    key = h.extra["sample"]
    if not h.success:
        onset, subtask = h.extra["onset_step"], h.extra["subtask"]
        truth = Diagnosis(True, "unknown", onset, onset, subtask, 4, "unknown", "unknown")
        fitting = [n for n in lengths if onset + _AFTER < n <= row.length] or [length]
        length = fitting[int(_rng(key).integers(len(fitting)))]
    return Clip(
        key,
        row.store,
        (Part(row.index, 0, length),),
        length,
        h.instruction,
        h.extra["context"],
        "natural",
        "nominal" if h.success else "failure",
        "",
        truth,
    )


def _failure(row: _Row, lengths: Sequence[int], common: Mapping[str, Any]) -> Clip:
    """A failure at the length of a success, but shown until it has failed."""
    key, truth = row.header.extra["sample"], truth_of(row.header)
    least = truth.end + 1 + _AFTER
    fitting = [n for n in lengths if n >= least] or [max(least, row.length)]
    length = fitting[int(_rng(key).integers(len(fitting)))]
    parts = (Part(row.index, 0, min(row.length, length)),)
    kind = row.header.extra["type"]
    return Clip(key, row.store, parts, length, role="failure", kind=kind, truth=truth, **common)


def _rng(key: str) -> np.random.Generator:
    """The same for the same name, in any process."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))


def _repeated(rows: Sequence[int], count: int) -> list[int]:
    """``rows`` over and over, ``count`` of them but each at least once."""
    return [rows[i % len(rows)] for i in range(max(count, len(rows)))]
