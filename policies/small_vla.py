"""The small VLA as a policy: observations in, action chunks out; saved, loaded and hashed.

A saved policy is a folder: ``config.json`` (format, sizes, how it was trained) and
``model.safetensors`` (weights and normalisation statistics; fp16 when shipped, fp32 in training).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from regrasp.episodes.types import (
    LIBERO_ACTION,
    LIBERO_STATE,
    Observation,
    PolicyOutput,
    StateLayout,
)
from regrasp.policies.protocol import PolicySpec, stack_pictures, stack_states
from regrasp.policies.text import embed_batch
from regrasp.policies.trunk import prepare_image
from regrasp.policies.vla import VLA, Inputs, VLAConfig
from safetensors.torch import load_file, save_file

FORMAT = "regrasp.small_vla"
VERSION = 1
#: The weights in the package.
SHIPPED = Path(__file__).parent / "weights"


class SmallVLA:
    """A :class:`~regrasp.policies.protocol.Policy` around :class:`~regrasp.policies.vla.VLA`.

    ``flow_steps`` and ``execute`` may be changed at any time.

    Attributes:
        model: the network, float32, in eval mode.
        spec: what it needs and gives; ``spec.chunk`` follows ``execute``.
        flow_steps: Euler steps from noise to action; more is finer and slower.
        meta: how it was trained, as ``config.json`` tells it.
    """

    def __init__(
        self,
        model: VLA,
        *,
        control_hz: float = 20.0,
        flow_steps: int = 5,
        execute: int | None = None,
        meta: dict | None = None,
    ) -> None:
        """Wrap a network whose statistics are set.

        Args:
            model: the network; it is put in eval mode.
            control_hz: actions a second.
            flow_steps: see the class.
            execute: actions of a chunk handed out, 1 .. the network's chunk; default all.
            meta: JSON-serialisable notes on the training.

        Raises:
            ValueError: for missing statistics, or an ``execute`` or ``flow_steps`` out of range.
        """
        model.check_statistics()
        self.model = model.eval().requires_grad_(False)
        self.meta = dict(meta or {})
        config = model.config
        size = (config.image_size, config.image_size)
        self.spec = PolicySpec(
            cameras=dict.fromkeys(config.cameras, size),
            state=_layout(LIBERO_STATE, config.state_dim, "state"),
            action=_layout(LIBERO_ACTION, config.action_dim, "action"),
            chunk=config.chunk,
            control_hz=control_hz,
        )
        if execute is not None:
            self.set_execute(execute)
        self.flow_steps = flow_steps
        self.reset(0)

    @property
    def flow_steps(self) -> int:
        """Euler steps from noise to action."""
        return self._flow_steps

    @flow_steps.setter
    def flow_steps(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"SmallVLA.flow_steps: {value} must be at least 1")
        self._flow_steps = int(value)

    def set_execute(self, execute: int) -> None:
        """Hand out the first ``execute`` actions of every chunk from now on."""
        if not 1 <= execute <= self.model.config.chunk:
            raise ValueError(
                f"SmallVLA.execute: {execute} must be within 1 and {self.model.config.chunk}"
            )
        self.spec = replace(self.spec, chunk=int(execute))

    def reset(self, seed: int) -> None:
        """Forget the episode; the same seed and observations then give the same actions."""
        self._generator = torch.Generator().manual_seed(int(seed) % 2**63)

    @torch.inference_mode()
    def infer(
        self, observations: Sequence[Observation], num_samples: int = 1
    ) -> list[PolicyOutput]:
        """One output an observation; one forward of the encoder for all samples.

        Returns:
            ``samples`` ``[num_samples, spec.chunk, 7]``, environment units, not clipped;
            ``embedding`` ``[D]``. ``logprob`` is None: a flow has no cheap one.

        Raises:
            ValueError: for a missing camera, a wrong shape or type, or ``num_samples`` below 1.
        """
        if num_samples < 1:
            raise ValueError(f"SmallVLA.infer: num_samples={num_samples} must be at least 1")
        if not observations:
            return []
        encoded = self.model.encode(self._inputs(observations))
        chunks = self.model.sample(encoded, num_samples, self.flow_steps, self._generator)
        samples = chunks[:, :, : self.spec.chunk].numpy()
        embeddings = encoded.pooled.numpy()
        return [
            PolicyOutput(samples=s.copy(), embedding=e.copy())
            for s, e in zip(samples, embeddings, strict=True)
        ]

    def _inputs(self, observations: Sequence[Observation]) -> Inputs:
        """Check the observations against the specification and stack them."""
        images = [
            prepare_image(torch.from_numpy(stack_pictures(self.spec, observations, camera)))
            for camera in self.spec.cameras
        ]
        state = stack_states(self.spec, observations)
        text = embed_batch([o.instruction for o in observations])
        return Inputs(
            tuple(images),
            torch.from_numpy(state),
            torch.from_numpy(text.tokens),
            torch.from_numpy(text.mask),
            torch.from_numpy(text.index),
        )

    def hash(self) -> str:
        """sha256 of sizes, statistics and weights as they are used (16 hexadecimal digits).

        A policy saved in fp16 and loaded again has another hash than its fp32 original: it is
        another function.
        """
        digest = hashlib.sha256(json.dumps(self.model.config.to_json(), sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: str | Path, *, half: bool = False) -> None:
        """Write the policy; ``half`` stores weights in fp16 (statistics stay fp32)."""
        save_model(folder, self.model, meta=self.meta, control_hz=self.spec.control_hz, half=half)

    @classmethod
    def load(
        cls, folder: str | Path | None = None, *, flow_steps: int = 5, execute: int | None = None
    ) -> SmallVLA:
        """Read a policy; ``None`` is the one shipped in the package.

        ``execute`` is by default half the network's chunk: what lies further ahead was planned
        without seeing it.

        Raises:
            FileNotFoundError: where there is no policy.
            ValueError: for another format or version, or weights that do not fit the sizes.
        """
        model, config = load_model(SHIPPED if folder is None else folder)
        return cls(
            model,
            control_hz=config["control_hz"],
            flow_steps=flow_steps,
            execute=execute or (model.config.chunk + 1) // 2,
            meta=config["meta"],
        )


def save_model(
    folder: str | Path, model: VLA, *, meta: dict, control_hz: float = 20.0, half: bool = False
) -> None:
    """Write ``config.json`` and ``model.safetensors``; each file appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().half().contiguous()
        if half and not name.endswith(("_center", "_scale"))
        else tensor.detach().clone().contiguous()
        for name, tensor in model.state_dict().items()
    }
    part = folder / "model.safetensors.part"
    save_file(tensors, part)
    part.replace(folder / "model.safetensors")
    config = {
        "format": FORMAT,
        "version": VERSION,
        "model": model.config.to_json(),
        "control_hz": control_hz,
        "meta": meta,
    }
    part = folder / "config.json.part"
    part.write_text(json.dumps(config, indent=2) + "\n")
    part.replace(folder / "config.json")


def load_model(folder: str | Path) -> tuple[VLA, dict]:
    """The network (float32) and the whole ``config.json``; errors as :meth:`SmallVLA.load`."""
    folder = Path(folder)
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"no policy at {folder}: {file.name} is missing")
    config = json.loads(file.read_text())
    if config.get("format") != FORMAT or config.get("version") != VERSION:
        raise ValueError(
            f"{file}: format={config.get('format')!r}, version={config.get('version')!r}; "
            f"this reads {FORMAT!r} version {VERSION}"
        )
    model = VLA(VLAConfig.from_json(config["model"]))
    tensors = load_file(folder / "model.safetensors")
    expected = model.state_dict()
    wrong = sorted(set(expected) ^ set(tensors)) + sorted(
        name for name in set(expected) & set(tensors) if expected[name].shape != tensors[name].shape
    )
    if wrong:
        raise ValueError(
            f"{folder / 'model.safetensors'}: tensors missing, unknown or of another shape than "
            f"{file.name} says: {wrong[:5]}"
        )
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    model.check_statistics()
    return model, config


def _layout(known: StateLayout, size: int, what: str) -> StateLayout:
    """LIBERO's layout where it fits, else numbered names without units."""
    if len(known) == size:
        return known
    return StateLayout(tuple(f"{what}_{i}" for i in range(size)), ("?",) * size)
