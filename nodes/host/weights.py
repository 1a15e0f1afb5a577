"""Fills a transformer that is made of ComfyUI's operations, one tensor at a time.

ComfyUI's layers take their weights through ``load_state_dict``: some have no parameters before, and those for scaled
fp8 wrap what they are given. So every layer gets a state dict of its own, and no more than one layer is held twice.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from comfy.cli_args import PerformanceFeature, args
from torch import Tensor, nn

from ...lingbot_core.errors import WeightsError
from ...lingbot_core.models.dit import CausalWanDiT
from ...lingbot_core.weights.checkpoint import Checkpoint
from ...lingbot_core.weights.load import Progress, parameter_mark, problems
from ...lingbot_core.weights.quantise import FORMAT, is_large, quantise
from .precision import Precision


def fill_transformer(
    dit: CausalWanDiT,
    checkpoint: Checkpoint,
    precision: Precision,
    *,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, bytes]:
    """Gives every layer its weights, on ``device``. Returns each weight's mark for the model's fingerprint.

    Raises WeightsError naming missing, unexpected and misshapen tensors before anything is read.
    """
    plain = CausalWanDiT(dit.config, device="meta")
    if found := problems(plain, checkpoint):
        raise WeightsError(
            f"{checkpoint.where} is not the {checkpoint.part} it should be: {'; '.join(found)}. Get the files again, "
            "or check that they belong together"
        )
    marks: dict[str, bytes] = {}
    for path, twin in plain.named_modules():
        prefix = f"{path}." if path else ""
        layer = dit.get_submodule(path)
        tensors: dict[str, Tensor] = {}
        for leaf, parameter in twin.named_parameters(recurse=False):
            name = prefix + leaf
            found_tensors = _read(checkpoint, name, parameter.ndim, precision, device)
            marks[name] = parameter_mark(found_tensors["weight" if leaf == "weight" else leaf])
            tensors.update(found_tensors)
            if progress is not None:
                progress.add(checkpoint.entry(name).nbytes)
        _give(layer, tensors)
    dit.eval().requires_grad_(False)
    return marks


def _read(
    checkpoint: Checkpoint, name: str, dimensions: int, precision: Precision, device: torch.device
) -> dict[str, Tensor]:
    """A parameter under its leaf's name; with its scale and format beside it when it is to be scaled fp8."""
    leaf = name.rpartition(".")[2]
    if precision.scaled and is_large(name, dimensions):
        return _scaled(checkpoint, name, device)
    return {leaf: checkpoint.read(name, dtype=precision.stores(name, dimensions), device=device)}


def _scaled(checkpoint: Checkpoint, name: str, device: torch.device) -> dict[str, Tensor]:
    """Values, scale and ComfyUI's note on the format. What is stored otherwise is scaled to fill the range of e4m3."""
    stored = checkpoint.read_scaled(name)
    # ComfyUI's layers know one scale for a whole weight.
    if stored is not None and stored.scale.numel() == 1:
        values, scale, about = stored.values, stored.scale.reshape(()), {"format": stored.format}
        full_precision = stored.full_precision
    else:
        weight = checkpoint.read(name, dtype=torch.float32, device=device)
        (values, scale), about = quantise(weight), {"format": FORMAT}
        # Activations are rounded to fp8 as well only for those who ask ComfyUI for it.
        full_precision = PerformanceFeature.Fp8MatrixMultiplication not in args.fast
    note: dict[str, Any] = {**about, **({"full_precision_matrix_mult": True} if full_precision else {})}
    return {
        "weight": values.to(device),
        "weight_scale": scale.to(device),
        "comfy_quant": torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8),
    }


def _give(layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    if not tensors:
        return
    if hasattr(layer, "comfy_cast_weights"):
        layer.load_state_dict(tensors, strict=False, assign=True)
        return
    # Ours: loose parameters beside layers that have their own turn.
    for leaf, tensor in tensors.items():
        setattr(layer, leaf, nn.Parameter(tensor, requires_grad=False))
