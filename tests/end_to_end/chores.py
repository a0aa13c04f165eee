"""Keyed jobs for the test of the commands' job loop: they succeed, drop out, or raise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chore:
    key: str
    verb: str


def act(chore):
    if chore.verb == "raise":
        raise ValueError(f"[/{chore.key}] is wrong")
    return {"key": chore.key, "success": chore.verb == "keep", "kept": chore.verb == "keep"}


def scene_of(chore):
    return chore.verb
