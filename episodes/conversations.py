"""Failure episodes as pictures with questions and answers, to fine-tune vision-language models on.

Two layouts: LLaVA (``{id, image, conversations: [{from, value}]}``) and ShareGPT (``{messages:
[{role, content}], images: [...]}`` with a ``dataset_info.json``, as LLaMA-Factory reads it). Frames
are tiled into one picture a sample, time to the right and cameras downwards, as AHA tiles them;
each tile's control step is told in the question, so that an answer can say when.

The questions cover what the public sets ask: AHA's verdict with reason, RoboFAC's eight types,
ViFailback's fields of diagnosis and correction, LabRobFail's six capabilities. The wordings are
this project's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode, EpisodeHeader

Layout = Literal["llava", "sharegpt"]

#: Everything an answer is made of: the episode's header. None: the question makes no sense there.
Answer = Callable[[EpisodeHeader], str | None]


@dataclass(frozen=True)
class Question:
    """One type of question.

    Attributes:
        source: the set that asks it, and what it is called there.
        text: the question.
        answer: from the header of a nominal or failure episode to the answer, or None.
    """

    source: str
    text: str
    answer: Answer


def _failed(header: EpisodeHeader) -> bool:
    return header.extra["role"] == "failure"


def _of_failure(key: str, form: str = "{}") -> Answer:
    """An answer that only failures have, from one field of ``extra``."""
    return lambda h: form.format(h.extra[key]) if _failed(h) else None


def _yes_no(header: EpisodeHeader) -> str:
    return "no" if _failed(header) else "yes"


def _verdict(header: EpisodeHeader) -> str:
    return f"no, {header.extra['explanation']}" if _failed(header) else "yes"


def _plan(header: EpisodeHeader) -> str | None:
    """The sub-tasks in order; only of what went well, for a wrong plan has others."""
    if _failed(header):
        return None
    return "; ".join(f"{i + 1}. {words}" for i, (_, words) in enumerate(header.extra["subtasks"]))


def _when(header: EpisodeHeader) -> str | None:
    if not _failed(header):
        return None
    extra = header.extra
    return f"from step {extra['first_effect_step']} to step {extra['predicate_fail_step']}"


def _delta(header: EpisodeHeader) -> str | None:
    """The correction as a motion of the hand in the world frame."""
    correction = header.extra.get("correction") if _failed(header) else None
    if not correction:
        return None
    x, y, z, a, b, c, grip = correction["delta"]
    move = f"move ({100 * x:+.1f}, {100 * y:+.1f}, {100 * z:+.1f}) cm"
    turn = ", ".join(f"{np.rad2deg(v):+.0f}" for v in (a, b, c))
    return f"{move}, turn ({turn}) degrees, gripper {'open' if grip < 0 else 'closed'}"


def _marks(header: EpisodeHeader) -> str | None:
    """The correction's marks on the front camera's frame, in thousandths of the picture."""
    correction = header.extra.get("correction") if _failed(header) else None
    if not correction:
        return None
    marks = correction["marks"]["agentview"]
    points = [[[round(1000 * v) for v in place] for place in mark["places"]] for mark in marks]
    return json.dumps(
        [{"kind": m["kind"], "points": p} for m, p in zip(marks, points, strict=True)]
    )


def _correction_step(header: EpisodeHeader) -> str | None:
    correction = header.extra.get("correction") if _failed(header) else None
    return f"step {correction['step']}" if correction else None


def _can_be_mended(header: EpisodeHeader) -> str | None:
    if not _failed(header):
        return None
    return "yes" if header.extra["recovery"]["mends"] else "no"


def _avoid(header: EpisodeHeader) -> str | None:
    if not _failed(header):
        return None
    return f"before step {header.extra['injection_step']}"


_WHY = "Why did it fail? Explain the cause and what came of it."
_DO = "What should the robot do now to mend it?"

#: Name -> question. A name is ``<source>.<type>``.
QUESTIONS: dict[str, Question] = {
    "aha.verdict": Question(
        "AHA: verdict with reason", "Did the robot succeed? Say yes, or no and why.", _verdict
    ),
    "robofac.task_identification": Question(
        "RoboFAC", "Which task is the robot performing?", lambda h: h.instruction
    ),
    "robofac.task_planning": Question(
        "RoboFAC", "Which sub-tasks does this task consist of, in order?", _plan
    ),
    "robofac.failure_detection": Question(
        "RoboFAC, LabRobFail, ViFailback", "Was the task completed? Answer yes or no.", _yes_no
    ),
    "robofac.failure_identification": Question(
        "RoboFAC, LabRobFail, ViFailback", "Which type of failure is it?", _of_failure("type")
    ),
    "robofac.failure_locating": Question(
        "RoboFAC, ViFailback", "In which sub-task did it fail?", _of_failure("subtask")
    ),
    "robofac.failure_explanation": Question(
        "RoboFAC, ViFailback", _WHY, _of_failure("explanation")
    ),
    "robofac.high_level_correction": Question(
        "RoboFAC, ViFailback, LabRobFail", _DO, _of_failure("correction_text")
    ),
    "robofac.low_level_correction": Question(
        "RoboFAC, ViFailback", "How should the hand move in the next second to mend it?", _delta
    ),
    "vifailback.avoidance_keyframe": Question(
        "ViFailback", "Until when could the failure still be avoided?", _avoid
    ),
    "vifailback.correction_keyframe": Question(
        "ViFailback", "At which step should the correction begin?", _correction_step
    ),
    "vifailback.visual_correction": Question(
        "ViFailback",
        "Which marks on the front camera's last frame show the correction? Give JSON, 0 to 1000.",
        _marks,
    ),
    "vifailback.recoverable": Question(
        "ViFailback: human intervention", "Can the robot mend this by itself?", _can_be_mended
    ),
    "labrobfail.task_understanding": Question(
        "LabRobFail", "What is the robot asked to do?", lambda h: h.instruction
    ),
    "labrobfail.temporal_localization": Question(
        "LabRobFail", "During which control steps did it go wrong?", _when
    ),
    "labrobfail.severity": Question(
        "LabRobFail", "How severe is the failure, from 1 to 4?", _of_failure("level")
    ),
}


def export_conversations(
    store: EpisodeStore,
    out: Path,
    layout: Layout = "llava",
    questions: Sequence[str] = tuple(QUESTIONS),
    frames: int = 8,
) -> int:
    """Write the nominal and failure episodes of a store as conversations.

    Args:
        store: made by ``regrasp failures generate``.
        out: a new or empty folder: ``images/`` and ``<layout>.json`` are written.
        layout: ``llava`` or ``sharegpt``.
        questions: names of :data:`QUESTIONS`.
        frames: pictures of each camera in a tiling, the first and the last step among them.

    Returns:
        How many questions were written.

    Raises:
        FileExistsError: ``out`` holds something.
        KeyError: an unknown question.
    """
    unknown = set(questions) - set(QUESTIONS)
    if unknown:
        raise KeyError(f"questions: unknown {sorted(unknown)}; there are {sorted(QUESTIONS)}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; export into a new folder")
    (out / "images").mkdir(parents=True)
    records = list(_records(store, out, questions, frames))
    form = {"llava": _as_llava, "sharegpt": _as_sharegpt}[layout]
    (out / f"{layout}.json").write_text(json.dumps([form(r) for r in records], indent=1))
    if layout == "sharegpt":
        info = {
            "regrasp_failures": {
                "file_name": "sharegpt.json",
                "formatting": "sharegpt",
                "columns": {"messages": "messages", "images": "images"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "content",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                },
            }
        }
        (out / "dataset_info.json").write_text(json.dumps(info, indent=1))
    return len(records)


def tile(episode: Episode, frames: int) -> tuple[np.ndarray, list[int]]:
    """Frames of all cameras in one picture, and the control step of each column.

    Returns:
        uint8 ``[cameras H, frames W, 3]``, and the steps.
    """
    cameras = sorted(key for key in episode.steps if key.startswith("image/"))
    rows = np.unique(np.linspace(0, len(episode) - 1, frames).round().astype(int))
    strips = [np.concatenate(list(episode.steps[camera][rows]), axis=1) for camera in cameras]
    return np.concatenate(strips, axis=0), [int(row) for row in rows]


def _records(
    store: EpisodeStore, out: Path, questions: Sequence[str], frames: int
) -> Iterator[dict[str, Any]]:
    """One record a question, with the picture written."""
    from PIL import Image

    for number, header in enumerate(store.headers):
        if header.extra.get("role") not in ("nominal", "failure"):
            continue
        picture, steps = tile(store.load(number), frames)
        name = f"images/{number:06d}.png"
        Image.fromarray(picture).save(out / name)
        shown = f"Steps shown, left to right: {', '.join(map(str, steps))}."
        for key in questions:
            answer = QUESTIONS[key].answer(header)
            if answer is not None:
                asked = QUESTIONS[key].text
                # Who is asked which task this is must not be told.
                if not key.endswith(("task_identification", "task_understanding")):
                    asked = f"The robot was asked to {header.instruction}. {asked}"
                yield {
                    "id": f"{number:06d}/{key}",
                    "image": name,
                    "question": f"{shown} {asked}",
                    "answer": answer,
                }


def _as_llava(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": record["id"],
        "image": record["image"],
        "conversations": [
            {"from": "human", "value": f"<image>\n{record['question']}"},
            {"from": "gpt", "value": record["answer"]},
        ],
    }


def _as_sharegpt(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"<image>{record['question']}"},
            {"role": "assistant", "content": record["answer"]},
        ],
        "images": [record["image"]],
    }
