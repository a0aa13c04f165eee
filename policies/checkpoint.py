"""Training state that survives a kill at any byte: safetensors and JSON, never pickle.

A checkpoint is a folder ``step-<n>`` with ``tensors.safetensors`` (weights, their moving average,
AdamW's moments, the generator's state) and ``state.json``. It is written under another name and
renamed when complete, and only then are older ones removed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_PREFIX = "step-"


def save_training(
    folder: str | Path,
    step: int,
    model: torch.nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    state: dict,
) -> Path:
    """Write a checkpoint and remove the older ones; returns its folder.

    Args:
        folder: where checkpoints of this run live.
        step: optimiser steps done.
        model: the network in training.
        average: name -> moving average of each trainable parameter.
        optimizer: AdamW; its per-parameter state is stored by parameter name.
        generator: the generator of noise draws.
        state: JSON-serialisable rest (elapsed seconds, settings).
    """
    folder = Path(folder)
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"average.{k}": v for k, v in average.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors["generator"] = generator.get_state()
    part = folder / f".part-{_PREFIX}{step}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = {k: v.detach().clone().contiguous() for k, v in tensors.items()}
    save_file(tensors, part / "tensors.safetensors")
    (part / "state.json").write_text(json.dumps({"step": step, **state}, indent=2))
    done = folder / f"{_PREFIX}{step}"
    shutil.rmtree(done, ignore_errors=True)
    part.rename(done)
    for old in folder.iterdir():
        if old != done and old.name.removeprefix(".part-").startswith(_PREFIX):
            shutil.rmtree(old)
    return done


def latest_training(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    folder = Path(folder)
    found = [p for p in folder.glob(f"{_PREFIX}*") if (p / "state.json").exists()]
    return max(found, key=lambda p: int(p.name.removeprefix(_PREFIX)), default=None)


def load_training(
    checkpoint: str | Path,
    model: torch.nn.Module,
    average: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> dict:
    """Restore everything :func:`save_training` wrote, in place; returns ``state.json``.

    Raises ValueError naming the first tensors that the checkpoint lacks or has too many.
    """
    checkpoint = Path(checkpoint)
    tensors = load_file(checkpoint / "tensors.safetensors")
    generator.set_state(tensors.pop("generator"))
    weights = {k: tensors.pop(f"model.{k}", None) for k in model.state_dict()}
    averages = {k: tensors.pop(f"average.{k}", None) for k in average}
    missing = [k for group in (weights, averages) for k, v in group.items() if v is None]
    moments: dict[str, dict[str, Tensor]] = {}
    for key in list(tensors):
        if key.startswith("optimizer."):
            _, kind, name = key.split(".", 2)
            moments.setdefault(name, {})[kind] = tensors.pop(key)
    if missing or tensors:
        raise ValueError(
            f"{checkpoint}: of another network; missing {missing[:3]}, unknown {list(tensors)[:3]}"
        )
    model.load_state_dict(weights)
    for name, value in averages.items():
        average[name].copy_(value)
    for name, parameter in model.named_parameters():
        if name in moments:
            # In the parameter's own memory layout (channels last), as the fused kernel needs it.
            optimizer.state[parameter] = {
                kind: torch.empty_like(parameter).copy_(value) if value.ndim else value
                for kind, value in moments[name].items()
            }
    return json.loads((checkpoint / "state.json").read_text())
