"""Matrix products in float8: weights with a scale for each output, activations with a scale for each row.

Half the memory of bfloat16, and about 1.8 times its speed on cards that multiply float8 (compute capability 8.9 and
later). Elsewhere the same numbers are multiplied in float32: correct, and slow.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import WeightsError

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 1e-12  # of the largest value of a row: rows of zeros have no scale
OLDEST = (8, 9)
"""Compute capability from which on the hardware multiplies float8."""

EXCLUDED = (
    "blocks.*.cam_*",
    "blocks.*.cross_attn.k",
    "blocks.*.cross_attn.v",
)
"""Linears of the blocks that stay as they are: those of the camera run once a chunk and steer it, those of the prompt
run once a prompt. All outside the blocks (embeddings, time, head) are never float8."""


@dataclass(frozen=True)
class Rows8:
    """Activations: values * scale. values: float8_e4m3fn [tokens, dim]; scale: float32 [tokens, 1]."""

    values: Tensor
    scale: Tensor

    def wide(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[tokens, dim] multiplied out."""
        return (self.values.float() * self.scale).to(dtype)


Activations = Tensor | Rows8


def quantise_rows(x: Tensor) -> Rows8:
    """x: [rows, n] of any float dtype. The largest value of each row becomes the largest of float8."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return Rows8((wide * (LARGEST / largest)).clamp(-LARGEST, LARGEST).to(FLOAT8), largest / LARGEST)


class Linear8(nn.Module):
    """A Linear whose weight is float8_e4m3fn [out, in] with a scale float32 [out, 1]; its bias stays as it was.

    Takes activations of any float dtype, which it quantises, or Rows8. Returns the dtype of its bias.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, layer: nn.Linear) -> Linear8:
        """The same layer, rounded."""
        weight = quantise_rows(layer.weight.detach())
        return cls(weight.values, weight.scale, layer.bias.detach())

    def forward(self, x: Activations) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        rows = x if isinstance(x, Rows8) else quantise_rows(x)
        if multiplies_float8(rows.values.device) and self.bias.dtype == torch.bfloat16:
            return torch._scaled_mm(
                rows.values,
                self.weight.t(),
                rows.scale,
                self.scale.t(),
                bias=self.bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        product = F.linear(rows.values.float(), self.weight.float()) * rows.scale * self.scale.t()
        return (product + self.bias.float()).to(self.bias.dtype)


def takes(dtype: torch.dtype, *layers: nn.Module) -> torch.dtype:
    """In which dtype an input is best given to layers: float8 where all of them are Linear8."""
    return FLOAT8 if all(isinstance(layer, Linear8) for layer in layers) else dtype


@functools.cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether a device multiplies float8 with a scale for each row and column; tried once."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    ones = torch.ones(16, 16, device=device).to(FLOAT8)
    scale = torch.ones(16, 1, device=device)
    try:
        product = torch._scaled_mm(ones, ones.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    except RuntimeError:  # a PyTorch that does not know scales for rows on this card
        return False
    return bool((product == 16).all())


def float8_names(names: Sequence[str], exclude: Sequence[str] = EXCLUDED) -> list[str]:
    """Which Linears of a transformer become float8. names: fully qualified, such as ``blocks.0.ffn.0``.

    exclude: patterns of names (``*`` stands for anything) that stay. Raises WeightsError for a pattern that fits none.
    """
    inside = [name for name in names if name.startswith("blocks.")]
    for pattern in exclude:
        if not fnmatch.filter(inside, pattern):
            raise WeightsError(
                f"float8 is to leave out {pattern!r}, but no Linear of the blocks is called so; names are such as "
                "blocks.0.self_attn.q, blocks.*.ffn.2"
            )
    return [name for name in inside if not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)]


def use_float8(model: nn.Module, exclude: Sequence[str] = EXCLUDED) -> list[str]:
    """Turns a transformer's Linears into Linear8, one after the other, in place. Returns the names of those it turned.

    Raises WeightsError for a pattern of ``exclude`` that fits no Linear, with nothing changed.
    """
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Linear8))}
    chosen = float8_names(list(linears), exclude)
    for name in chosen:
        owner, _, leaf = name.rpartition(".")
        layer = linears.pop(name)
        if type(layer) is nn.Linear:
            setattr(model.get_submodule(owner), leaf, Linear8.of(layer))
    return chosen
