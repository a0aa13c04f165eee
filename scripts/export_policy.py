"""``regrasp train export``: a trained policy in fp16, with the record of how it was made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from regrasp.episodes.jsonlines import JsonLines
from regrasp.episodes.results import git_commit, machine_info
from rich.console import Console

#: Lines of the training log kept beside the weights, at most.
_LOG_LINES = 200


@dataclass(frozen=True)
class Args:
    """Write a policy as it is shipped in the package.

    Attributes:
        run: folder of a finished ``regrasp train bc``.
        out: folder to write; the package's own weights by default.
        commands: every command that made it, data included, in order.
    """

    run: Path = Path("runs/bc")
    out: Path = Path("policies/weights")
    commands: tuple[str, ...] = ()


def main(args: Args) -> None:
    """Write weights, configuration, commands and a thinned training log."""
    from regrasp.policies.small_vla import SmallVLA

    policy = SmallVLA.load(args.run / "policy")
    policy.meta = {
        **policy.meta,
        "commands": list(args.commands),
        "commit": git_commit("."),
        "machine": machine_info(),
    }
    policy.save(args.out, half=True)
    shipped = SmallVLA.load(args.out)
    lines = JsonLines(args.run / "log.jsonl").read()
    kept = [line for line in lines if "validation/flow" in line]
    train = [line for line in lines if "flow" in line]
    kept += train[:: max(1, len(train) // (_LOG_LINES - len(kept)))]
    kept.sort(key=lambda line: line["step"])
    (args.out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    size = sum(file.stat().st_size for file in args.out.iterdir())
    Console().print(f"{args.out}: policy {shipped.hash()}, {size / 1e6:.1f} MB")
