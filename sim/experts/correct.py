"""DAgger with branches: what the expert would do from every state that a policy reaches.

A policy that imitates drifts into states its demonstrations never showed (Ross et al. 2011). Here
the policy drives, and each time it looks, the simulator branches: the expert acts for one chunk
from a snapshot, the chunk becomes the label of that look, and the snapshot is restored. So a label
is a whole chunk that was really executed from that state, pictures are rendered once a look, and
the policy's own trajectory is untouched.

States from which even the expert cannot succeed teach nothing. When the policy failed, the last
recoverable look is found by bisection (the expert plays on from snapshots), and later looks are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from regrasp.episodes.types import Episode, EpisodeHeader
from regrasp.sim.experts.base import Expert
from regrasp.sim.experts.tasks import Goal
from regrasp.sim.snapshot import Snapshot

#: Control steps the expert gets to show that a state can still be turned into success.
_RESCUE_STEPS = 200


def label_rollout(
    env: Any,
    expert: Expert,
    policy: Any,
    init_state: int,
    seed: int,
    chunk: int,
    execute: int,
    goal: Sequence[Goal] | None = None,
    instruction: str | None = None,
) -> Episode:
    """Run a policy and label each of its looks with the expert's chunk.

    Args:
        env: a LIBERO environment.
        expert: the expert of ``goal``.
        policy: a :class:`regrasp.policies.protocol.Policy`.
        init_state: which of the benchmark's initial states.
        seed: of the policy's noise and of the fixtures' places.
        chunk: actions in a label (H).
        execute: actions executed of each of the policy's chunks.
        goal: predicates that count as success; the task's own when None.
        instruction: what the policy is told; the task's own when None.

    Returns:
        An episode with one row a look: ``image/<camera>``, ``state``, ``expert_chunk`` float32
        ``[T, H, A]``, ``phase``, ``aux`` (as demonstrations have them). ``header.success`` is the
        policy's own; ``extra`` says how many looks there were and how many were recoverable.
        Without any recoverable look the episode has no steps.
    """
    instruction = instruction or env.task.instruction
    env.reset(seed=seed, options={"init_state": init_state, "render": False})
    policy.reset(seed)
    rows: list[dict[str, Any]] = []
    snapshots: list[Snapshot] = []
    succeeded = False
    while env.steps < env.horizon and not succeeded:
        observation = replace(env.observation(), instruction=instruction)
        snapshot = env.snapshot()
        row = {f"image/{name}": picture for name, picture in observation.images.items()}
        row |= {"state": observation.state, **_branch(env, expert, chunk)}
        rows.append(row)
        snapshots.append(snapshot)
        env.restore(snapshot)
        for action in policy.infer([observation])[0].samples[0][:execute]:
            env.step(np.clip(action, -1.0, 1.0), render=False)
            succeeded = _holds(env, expert, goal)
            if succeeded:
                break
    kept = len(rows) if succeeded else _recoverable(env, expert, goal, snapshots)
    header = EpisodeHeader(
        suite=env.suite,
        task=str(env.task.index),
        instruction=instruction,
        init_state=init_state,
        seed=seed,
        success=succeeded,
        extra={"looks": len(rows), "recoverable": kept, "execute": execute},
    )
    keys = rows[0] if kept else {}
    return Episode(header, {key: np.stack([row[key] for row in rows[:kept]]) for key in keys})


def _branch(env: Any, expert: Expert, length: int) -> dict[str, Any]:
    """The expert's next ``length`` actions from here, executed; and what it is about to do."""
    expert.reset()
    chunk = []
    for k in range(length):
        chunk.append(expert.act(env))
        if k == 0:
            points = [expert.target_pos, expert.goal_pos, env.eef_pose()[0]]
            phase = np.int64(expert.phase)
        env.step(chunk[-1], render=False)
    aux = np.concatenate(points, dtype=np.float32)
    return {"expert_chunk": np.stack(chunk), "phase": phase, "aux": aux}


def _holds(env: Any, expert: Expert, goal: Sequence[Goal] | None) -> bool:
    return env.success if goal is None else all(expert.scene.holds(g) for g in goal)


def _recoverable(
    env: Any, expert: Expert, goal: Sequence[Goal] | None, snapshots: Sequence[Snapshot]
) -> int:
    """How many of the first looks the expert can still turn into success, by bisection."""

    def rescued(snapshot: Snapshot) -> bool:
        env.restore(snapshot)
        expert.reset()
        for _ in range(_RESCUE_STEPS):
            env.step(expert.act(env), render=False)
            if _holds(env, expert, goal):
                return True
        return False

    low, high = 0, len(snapshots)  # the first `low` are recoverable, those from `high` on are not
    while low < high:
        middle = (low + high + 1) // 2
        if rescued(snapshots[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
