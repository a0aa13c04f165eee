"""``regrasp monitors watch``: what a monitor says, inference by inference; stored or live."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from regrasp.episodes.store import EpisodeStore
from regrasp.episodes.types import Episode
from regrasp.monitors.live import reading_to_json
from regrasp.monitors.runtime import Monitor, replay
from rich.console import Console
from rich.text import Text

#: Cells of the bar of a score; the threshold is where it is full.
BAR = 24


@dataclass(frozen=True)
class Args:
    """Replay a stored episode under a monitor, or follow a live run's log.

    Attributes:
        monitor: folder of the monitor; the shipped one when none. Not asked for with ``follow``.
        store: an episode store whose episodes were recorded with their chunks.
        episode: its index there.
        follow: a log that a running ``MonitorRuntime`` writes (``listen=JsonLines(path).append``);
            ends with ctrl-C, or after ``quiet`` seconds without news.
        quiet: seconds; 0 waits for ever.
        rerun: also write a recording for the rerun viewer to this file, pictures included where the
            store has them.
        viewer: also show it in the viewer now.
        any_policy: replay an episode of another policy or protocol than the monitor's, whose
            thresholds then promise nothing.
    """

    monitor: Path | None = None
    store: Path | None = None
    episode: int = 0
    follow: Path | None = None
    quiet: float = 0.0
    rerun: Path | None = None
    viewer: bool = False
    any_policy: bool = False


def readings(args: Args) -> tuple[Iterator[dict[str, Any]], Episode | None]:
    """What is to be shown, one dict an inference; and the episode, where one is replayed.

    Raises:
        SystemExit: without a store or a log, with both, or for a store without such an episode.
        ValueError: where the monitor belongs to another policy or protocol.
    """
    if args.follow is not None and args.store is None:
        return follow(args.follow, args.quiet), None
    if args.store is None or args.follow is not None:
        raise SystemExit("give either --store to replay from or --follow, a log, but not both")
    store = EpisodeStore.open(args.store)
    if not 0 <= args.episode < len(store):
        raise SystemExit(f"{args.store} has {len(store)} episodes, there is no {args.episode}")
    episode = store.load(args.episode)
    monitor = Monitor.load(args.monitor or shipped(episode))
    if not args.any_policy:
        monitor.check(
            policy_hash=episode.header.policy_hash, protocol_hash=episode.header.protocol_hash
        )
    return (reading_to_json(r) for r in replay(monitor, episode)), episode


def shipped(episode: Episode) -> Path:
    """The shipped monitor of the policy that an episode was recorded with."""
    weights = Path(__file__).parent.parent / "monitors" / "weights"
    for folder in sorted(weights.iterdir()):
        if json.loads((folder / "monitor.json").read_text())["policy_hash"] == (
            episode.header.policy_hash
        ):
            return folder
    raise SystemExit(
        f"no shipped monitor is of policy {episode.header.policy_hash!r}; give --monitor"
    )


def follow(log: Path, quiet: float) -> Iterator[dict[str, Any]]:
    """Lines of a log as they are written; a line is read once it is whole."""
    waited, rest = 0.0, ""
    with log.open() as file:
        while not quiet or waited < quiet:
            piece = file.readline()
            if not piece:
                time.sleep(0.05)
                waited += 0.05
                continue
            rest += piece
            if rest.endswith("\n"):
                yield json.loads(rest)
                waited, rest = 0.0, ""


def line(reading: dict[str, Any]) -> Text:
    """One inference: when, each score as a bar up to its threshold, and the alarm."""
    text = Text(f"{reading['step']:5d}")
    for name, value in reading["scores"].items():
        threshold = reading["thresholds"][name]
        share = 0.0 if threshold is None or threshold <= 0 else value / threshold
        over = name in reading["causes"]
        cells = min(BAR, max(0, math.floor(share * BAR)))
        text.append(f"  {name} ")
        text.append("█" * cells + "░" * (BAR - cells), style="red" if over else "green")
        text.append(f" {value:.3g}")
    if reading["causes"]:
        text.append("  ALARM " + ", ".join(reading["causes"]), style="bold red")
    return text


class Recording:
    """The same in rerun: scores and thresholds as curves, alarms as log lines, and pictures."""

    def __init__(self, file: Path | None, viewer: bool) -> None:
        import rerun as rr

        self.rr = rr
        rr.init("regrasp monitors watch", spawn=viewer)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            rr.save(str(file))

    def close(self) -> None:
        """Write what is still on its way."""
        self.rr.disconnect()

    def pictures(self, episode: Episode) -> None:
        """Every picture of the episode, at its control step."""
        for key, frames in episode.steps.items():
            if key.startswith("image/"):
                for step, frame in enumerate(frames):
                    self.rr.set_time("step", sequence=step)
                    self.rr.log(key, self.rr.Image(np.asarray(frame)))

    def add(self, reading: dict[str, Any]) -> None:
        """One inference."""
        self.rr.set_time("step", sequence=reading["step"])
        for name, value in reading["scores"].items():
            self.rr.log(f"scores/{name}/value", self.rr.Scalars(value))
            threshold = reading["thresholds"][name]
            if threshold is not None:
                self.rr.log(f"scores/{name}/threshold", self.rr.Scalars(threshold))
        if reading["causes"]:
            words = "alarm: " + ", ".join(reading["causes"])
            self.rr.log("alarms", self.rr.TextLog(words, level="WARN"))


def main(args: Args) -> list[dict[str, Any]]:
    """Show it; returns the readings."""
    console = Console()
    source, episode = readings(args)
    recording = None
    if args.rerun is not None or args.viewer:
        recording = Recording(args.rerun, args.viewer)
        if episode is not None:
            recording.pictures(episode)
    if episode is not None:
        header = episode.header
        console.print(f"{header.suite} {header.task}: {header.instruction}", markup=False)
    seen = []
    try:
        for reading in source:
            seen.append(reading)
            console.print(line(reading), soft_wrap=True)
            if recording is not None:
                recording.add(reading)
    except KeyboardInterrupt:
        console.print("stopped")
    if recording is not None:
        recording.close()
    alarms = [r["step"] for r in seen if r["causes"]]
    outcome = "" if episode is None else f"; it {_ended(episode)}"
    first = f"first alarm at step {alarms[0]}" if alarms else "no alarm"
    console.print(f"{len(seen)} inferences, {first}{outcome}")
    if args.rerun is not None:
        console.print(f"rerun {args.rerun}")
    return seen


def _ended(episode: Episode) -> str:
    what = "succeeded" if episode.header.success else "failed"
    return f"{what} after {len(episode)} steps"


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
