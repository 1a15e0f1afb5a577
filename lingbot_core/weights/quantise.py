"""Which weights of a transformer may be fp8, and how they become it: one scale for a weight, as ComfyUI has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .scaled import METADATA_KEY
from .stream import StreamedTensor

FORMAT = "float8_e4m3fn"
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def is_large(name: str, dimensions: int) -> bool:
    """Whether a weight is one of the blocks' matrices. The rest is small, and some of it runs in float32."""
    return dimensions == 2 and name.startswith("blocks.") and name.endswith(".weight")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values in float8_e4m3fn and the scale to multiply them by, a float32 number, so that the range is filled.

    weight: float32.
    """
    scale = weight.abs().amax().clamp(min=1e-12) / LARGEST
    return (weight / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def streamed_fp8(
    checkpoint: Checkpoint, names: Sequence[str], rest: torch.dtype
) -> tuple[list[StreamedTensor], dict[str, str]]:
    """The tensors of a file whose large weights are fp8, and the entry of its metadata that says so.

    names: all of them in the order of the file. rest: dtype of what is not large. A weight that is stored with one
    scale for all of it is taken over as it is.
    """
    shapes = checkpoint.shapes()
    large = [name for name in names if is_large(name, len(shapes[name]))]
    others = [name for name in names if name not in set(large)]
    last: list[tuple[str, tuple[Tensor, Tensor]]] = []

    def both(name: str) -> tuple[Tensor, Tensor]:
        """A weight's values follow its scale in the file, so that it is read once."""
        if not last or last[0][0] != name:
            stored = checkpoint.read_scaled(name)
            if stored is not None and stored.scale.numel() == 1 and stored.values.dtype == FP8:
                found = stored.values, stored.scale.reshape(())
            else:
                found = quantise(checkpoint.read(name, dtype=torch.float32))
            last[:] = [(name, found)]
        return last[0][1]

    def reader(name: str, part: int) -> Callable[[], Tensor]:
        return lambda: both(name)[part]

    # The matrices' sides are even numbers, so that the scales between them stay aligned.
    tensors = [StreamedTensor(name, shapes[name], rest, _plain(checkpoint, name, rest)) for name in others]
    for name in large:
        tensors.append(StreamedTensor(f"{_layer(name)}.weight_scale", (), torch.float32, reader(name, 1)))
        tensors.append(StreamedTensor(name, shapes[name], FP8, reader(name, 0)))
    layers = {_layer(name): {"format": FORMAT} for name in large}
    return tensors, {METADATA_KEY: json.dumps({"format_version": "1.0", "layers": layers}, sort_keys=True)}


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _plain(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(name, dtype=dtype)
