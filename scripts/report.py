"""`regrasp report`: turn a demo run into one HTML file that needs nothing else.

The page embeds its data and its films; it opens from a disk, without a network. ``regrasp demo``
calls this at its end; call it again after deleting or adding films in ``<run>/videos``.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from regrasp.episodes.results import Figure
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.scripts._summary import (
    BASE,
    SUPERVISED,
    UNPERTURBED,
    Pair,
    Summary,
    pair_up,
    rewinds,
    summarise,
)

TEMPLATE = Path(__file__).with_name("report.html")

#: Perturbations in words.
KINDS = {
    "none": "unperturbed",
    "slip": "slips from the hand",
    "nudge": "object nudged",
    "action_noise": "action noise burst",
    "initial_pose": "wrong initial pose",
    "camera_shift": "camera shifted",
}


@dataclass(frozen=True)
class Args:
    """Rebuild the report of a run.

    Attributes:
        run: folder of the run.
        out: the HTML file; default ``<run>/report.html``.
    """

    run: tyro.conf.Positional[Path] = Path("runs/demo")
    out: Path | None = None


def main(args: Args) -> Path:
    """Write the report and return its path."""
    path = build_report(args.run, args.out)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return path


def build_report(run: Path, out: Path | None = None) -> Path:
    """Read ``<run>/run.json``, ``<run>/store`` and ``<run>/videos``; write the HTML."""
    facts = json.loads((run / "run.json").read_text())
    store = EpisodeStore.open(run / "store")
    index = {(h.extra["pair"], h.extra["arm"]): i for i, h in enumerate(store.headers)}
    pairs = pair_up(store.headers)
    summary = summarise(pairs, facts["alpha"], facts["n_calibration"])
    rows = []
    for pair in pairs:
        arms = {}
        for arm in (BASE, SUPERVISED):
            keys = ["action", "segment"]
            episode = store.load(index[pair.id, arm], keys)
            arms[arm] = arm_data(episode, video_path(run, pair.id, arm), facts)
        rows.append(
            {
                "id": pair.id,
                "instruction": pair.base.instruction,
                "init_state": pair.base.init_state,
                "perturbation": KINDS[pair.kind],
                "outcome": pair.outcome,
                **arms,
            }
        )
    page = page_data(summary, pairs, rows, facts)
    out = run / "report.html" if out is None else out
    # "</" would end the script element that holds the data.
    data = json.dumps(page, allow_nan=False).replace("</", "<\\/")
    temporary = out.with_suffix(".part")
    temporary.write_text(TEMPLATE.read_text().replace("__DATA__", data))
    os.replace(temporary, out)
    return out


def arm_data(episode: Episode, video: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What the page needs of one episode: scores over time, marks, and its film if there is one."""
    chunks = episode.chunks
    scores = {
        key.removeprefix("score/"): [round(float(v), 6) for v in values]
        for key, values in chunks.items()
        if key.startswith("score/")
    }
    return {
        "success": episode.header.success,
        "steps": len(episode),
        "chunk_steps": chunks["step"].tolist(),
        "segments": chunks["segment"].tolist(),
        "scores": {k: v for k, v in scores.items() if k in facts["thresholds"]},
        "alarms": [
            {"step": e["step"], "causes": e["causes"], "acted": e["acted"]}
            for e in episode.header.interventions
            if e["kind"] == "alarm"
        ],
        "rewinds": [
            {"step": e["step"], "steps": e["steps"], "checkpoint": e["checkpoint"]}
            for e in rewinds(episode.header)
        ],
        "events": [
            {"kind": KINDS[e["kind"]], "step": e["step"], "end": e["end"]}
            for e in episode.header.extra["events"]
        ],
        "video": data_url(video) if video.exists() else None,
        "video_steps_per_second": facts["video_fps"] * facts["video_stride"],
    }


def page_data(
    summary: Summary, pairs: list[Pair], rows: list[dict[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    """Everything the template shows."""
    figures = summary.figures()
    p = summary.paired
    low, high = p.interval()
    difference = f"{100 * p.difference:+.0f} points (95 %: {100 * low:+.0f} to {100 * high:+.0f})"
    inside = summary.band[0] <= summary.false_alarms.value <= summary.band[1]
    return {
        "kicker": f"regrasp demo, {facts['suites']}, policy {facts['policy_hash'][:8]}",
        "headline": (
            f"On {p.n} perturbed episodes the policy alone succeeds in "
            f"{p.both + p.harmed}, with the supervisor in {p.both + p.rescued}."
        ),
        "lead": (
            f"The difference is {difference}. A monitor watches the policy's own outputs; when a "
            "score passes its threshold the arm is driven back and the policy starts again."
        ),
        "rates": [
            _rate("Policy alone", "perturbed episodes", figures["success_base"], "base"),
            _rate("With supervisor", "the same episodes", figures["success_supervised"], "super"),
            _rate("Failures noticed", "of those alone", figures["caught"], "alarm"),
            _rate(
                "False alarms",
                f"{'inside' if inside else 'outside'} the band of {summary.alpha:g}",
                summary.false_alarms,
                "alarm",
            )
            | {"band": summary.band, "mark": summary.alpha},
            _rate("Unperturbed, alone", "success", figures["unperturbed_base"], "base"),
            _rate("Unperturbed, supervised", "success", figures["unperturbed_supervised"], "super"),
        ],
        "paired": {
            "both": p.both,
            "rescued": p.rescued,
            "harmed": p.harmed,
            "neither": p.neither,
        },
        "paired_note": (
            f"Difference {difference}, Newcombe's interval for pairs; exact McNemar "
            f"p = {p.p_value():.2g}. {summary.rewinds} rewinds in {p.n} episodes."
        ),
        "kinds": [
            {
                "kind": KINDS[kind],
                "n": c.n,
                "base": (c.both + c.harmed) / c.n,
                "supervised": (c.both + c.rescued) / c.n,
                "rescued": c.rescued,
            }
            for kind, c in summary.kinds.items()
        ],
        "thresholds": facts["thresholds"],
        "control_hz": facts["control_hz"],
        "pairs": sorted(
            rows,
            key=lambda r: (r["perturbation"] == KINDS[UNPERTURBED], r["base"]["video"] is None),
        ),
        "facts": [
            ["Command", facts["command"]],
            ["Policy", facts["policy_hash"]],
            [
                "Protocol",
                f"{facts['protocol_hash']}: "
                + ", ".join(f"{key} {value}" for key, value in facts["protocol"].items()),
            ],
            [
                "Monitor",
                ", ".join(f"{k} above {v:.4g}" for k, v in facts["thresholds"].items())
                + f"; split-conformal on {facts['n_calibration']} successful episodes, alpha "
                f"{facts['alpha']:g} an episode over all scores together",
            ],
            [
                "False alarms",
                f"{summary.false_alarms.n} unperturbed episodes that the policy solves alone; "
                f"binomial band at alpha {summary.band[0]:.3f} to {summary.band[1]:.3f}, with the "
                f"calibration set's own luck {summary.calibrated_band[0]:.3f} to "
                f"{summary.calibrated_band[1]:.3f}",
            ],
            ["Pairing", facts["pairing"]],
            ["Evaluated on", facts["evaluated_on"]],
            ["Took", f"{facts['minutes']:.1f} minutes on {facts['workers']} workers"],
        ],
    }


def video_path(run: Path, pair: str, arm: str) -> Path:
    """Where the film of an episode lies."""
    return run / "videos" / f"{pair.replace('/', '-')}-{arm}.mp4"


def data_url(path: Path) -> str:
    """A film as a ``data:`` address."""
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()


def encode_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write uint8 frames ``[T, H, W, 3]`` as H.264 that browsers play and seek.

    A key frame every ten makes seeking by dragging quick; sides must be even.
    """
    import imageio_ffmpeg

    frames = np.ascontiguousarray(frames, dtype=np.uint8)
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(f"encode_video: frames are {width} x {height}; both must be even")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.mp4")
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error",
        "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-",
        "-c:v", "libx264", "-pix_fmt", "yuv420p", "-preset", "fast", "-crf", "26", "-g", "10",
        "-movflags", "+faststart", "-threads", "1", str(temporary),
    ]  # fmt: skip
    done = subprocess.run(command, input=frames.tobytes(), capture_output=True)
    if done.returncode:
        raise RuntimeError(f"encode_video: ffmpeg failed on {path}: {done.stderr.decode()}")
    os.replace(temporary, path)


def _rate(label: str, note: str, figure: Figure, colour: str) -> dict[str, Any]:
    return {
        "label": label,
        "note": f"{note}, n = {figure.n}",
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "colour": colour,
    }
