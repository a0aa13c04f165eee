"""Faster variants of the shipped policy, and what their decisions cost.

A :class:`Candidate` says how a :class:`~regrasp.policies.small_vla.SmallVLA` is made cheaper:

- fewer flow steps: the action expert runs once a step;
- a longer part of each chunk executed before the next decision;
- smaller pictures: shrunk before the network, which then runs on fewer cells. Its weights do not
  depend on the picture's size, but were trained at one;
- weights and sums in bfloat16, or linear layers in int8 (weights by output channel, activations by
  the range they have at the time).

What a decision costs is the processor time of one inference divided by the actions executed of it
(:func:`decision_costs`). ``torch.compile`` is not among the variants: it works here, but each new
process compiles for minutes.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from regrasp.episodes.types import Observation, PolicyOutput
from regrasp.policies.protocol import Policy
from regrasp.policies.small_vla import SmallVLA
from regrasp.policies.vla import VLA
from torch import Tensor, nn

Weights = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True)
class Candidate:
    """One way to run a policy faster.

    Attributes:
        name: of the candidate.
        execute: actions executed of each chunk.
        flow_steps: Euler steps from noise to action.
        image_size: pixels a side that the network sees, a multiple of 8; None for its own.
        weights: "fp32" as they are, "bf16" or "int8".
    """

    name: str
    execute: int = 8
    flow_steps: int = 5
    image_size: int | None = None
    weights: Weights = "fp32"

    def apply(self, policy: SmallVLA) -> Policy:
        """The accelerated policy; ``policy`` itself is not changed.

        Raises:
            ValueError: for a picture that is larger than the policy's or no multiple of 8, and
                what :class:`SmallVLA` raises for ``execute`` and ``flow_steps``.
        """
        model = CONVERSIONS[self.weights](policy.model)
        if self.image_size is not None:
            own = policy.model.config.image_size
            if self.image_size > own:
                raise ValueError(
                    f"Candidate.image_size: {self.image_size} must be at most the policy's {own}"
                )
            model = _resized(policy.model, self.image_size, CONVERSIONS[self.weights])
        fast = SmallVLA(
            model,
            control_hz=policy.spec.control_hz,
            flow_steps=self.flow_steps,
            execute=self.execute,
            meta=policy.meta,
        )
        return fast if self.image_size is None else Shrunk(fast, policy)


#: The variants that `regrasp certify` tries: each change alone, then together.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("flow3", flow_steps=3),
    Candidate("flow2", flow_steps=2),
    Candidate("flow1", flow_steps=1),
    Candidate("chunk12", execute=12),
    Candidate("chunk16", execute=16),
    Candidate("image96", image_size=96),
    Candidate("image64", image_size=64),
    Candidate("bf16", weights="bf16"),
    Candidate("int8", weights="int8"),
    Candidate("flow1+int8", flow_steps=1, weights="int8"),
    Candidate("flow2+chunk12", flow_steps=2, execute=12),
    Candidate("flow1+chunk12", flow_steps=1, execute=12),
    Candidate("flow2+chunk16", flow_steps=2, execute=16),
    Candidate("flow1+chunk16", flow_steps=1, execute=16),
    Candidate("flow1+chunk16+image96", flow_steps=1, execute=16, image_size=96),
    Candidate("flow1+chunk16+image64", flow_steps=1, execute=16, image_size=64),
)


class Shrunk:
    """A policy shown smaller pictures than it is given.

    Attributes:
        spec: of the policy it stands for, with its own chunk: the robot's cameras stay as they are.
    """

    def __init__(self, inner: SmallVLA, original: SmallVLA) -> None:
        self.inner = inner
        self.spec = replace(original.spec, chunk=inner.spec.chunk)

    def reset(self, seed: int) -> None:
        """See :class:`~regrasp.policies.protocol.Policy`."""
        self.inner.reset(seed)

    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """See :class:`~regrasp.policies.protocol.Policy`."""
        return self.inner.infer([self._shrink(o) for o in observations], num_samples)

    def _shrink(self, observation: Observation) -> Observation:
        size = self.inner.model.config.image_size
        images = dict(observation.images)
        for camera, shape in self.spec.cameras.items():
            image = images.get(camera)
            if image is None or image.shape != (*shape, 3) or image.dtype != np.uint8:
                found = "missing" if image is None else f"{image.dtype} {image.shape}"
                raise ValueError(
                    f"observation.images[{camera!r}]: {found}; must be uint8 {(*shape, 3)}"
                )
            images[camera] = shrink(image, size)
        return replace(observation, images=images)


def shrink(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 ``[H, W, 3]`` to ``[size, size, 3]``, low-passed first (bilinear, antialiased)."""
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float()
    small = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return small[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).numpy()


class Bfloat16(nn.Module):
    """A module in bfloat16 between float32 inputs and outputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, *inputs: Any) -> Any:
        """The module's answer to the inputs."""
        return _cast(self.inner(*_cast(inputs, torch.bfloat16)), torch.float32)

    def prepare(self, memory: Tensor) -> Any:
        """The action expert's keys and values; they stay in bfloat16."""
        return self.inner.prepare(memory.bfloat16())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating tensor in nested tuples and lists as ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _as_is(model: VLA) -> VLA:
    return model


def _bf16(model: VLA) -> VLA:
    """Encoder and expert in bfloat16; normalisation and the sum over flow steps in float32."""
    model = copy.deepcopy(model)
    model.encoder, model.expert = Bfloat16(model.encoder), Bfloat16(model.expert)
    return model


def _int8(model: VLA) -> VLA:
    """Linear layers in int8; convolutions stay."""
    from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

    with warnings.catch_warnings():
        # torch points to a package of its own for this; the versions we allow all still have it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig})


#: How the weights of a network are converted; each leaves the one given as it is.
CONVERSIONS: dict[str, Callable[[VLA], VLA]] = {"fp32": _as_is, "bf16": _bf16, "int8": _int8}


def _resized(model: VLA, size: int, convert: Callable[[VLA], VLA]) -> VLA:
    """The same weights in a network for pictures of ``size``, converted."""
    small = VLA(replace(model.config, image_size=size))
    small.load_state_dict(model.state_dict())
    return convert(small.eval().requires_grad_(False))


def decision_costs(
    policies: Mapping[str, Policy],
    observation: Observation,
    *,
    rounds: int = 30,
    repeats: int = 3,
) -> dict[str, np.ndarray]:
    """Milliseconds of processor time a control step, of every policy side by side.

    In each round every policy decides ``repeats`` times in turn; the round's cost is its quickest.
    Rounds interleave, so that what slows the machine down slows all of them; compare by round.
    Processor time of one thread, so that other programs do not count as the policy's.

    Args:
        policies: name -> policy; ``spec.chunk`` actions of each decision are executed.
        observation: what they look at.
        rounds: of the comparison, after one that warms up.
        repeats: decisions a round.

    Returns:
        name -> float64 ``[rounds]``.
    """
    if rounds < 1 or repeats < 1:
        raise ValueError(f"decision_costs: rounds={rounds}, repeats={repeats}; at least 1 each")
    costs = {name: np.empty(rounds + 1) for name in policies}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for i in range(rounds + 1):
            for name, policy in policies.items():
                best = min(_decide(policy, observation) for _ in range(repeats))
                costs[name][i] = 1e3 * best / policy.spec.chunk
    finally:
        torch.set_num_threads(threads)
    return {name: cost[1:] for name, cost in costs.items()}


def _decide(policy: Policy, observation: Observation) -> float:
    """Seconds of this thread's processor time for one decision."""
    start = time.thread_time()
    policy.infer([observation])
    return time.thread_time() - start
