"""In which dtype the transformer's weights are kept, and in which it computes."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.model_management
import torch

from ...lingbot_core.errors import WeightsError
from ...lingbot_core.weights.checkpoint import Checkpoint
from ...lingbot_core.weights.files import DTYPES
from ...lingbot_core.weights.quantise import is_large

AS_STORED, BF16, FP8 = "as stored", "bf16", "fp8_e4m3fn"
WEIGHT_DTYPES = (AS_STORED, BF16, FP8)

SUPPORTED = [torch.bfloat16, torch.float32]
"""What the model may compute in, the preferred first. Not float16: the residual stream outgrows it."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Precision:
    """storage: dtype of the weights. compute: of activations, caches, and of everything but the large matrices.

    scaled: the large matrices are fp8 with a scale.
    """

    storage: torch.dtype
    compute: torch.dtype
    scaled: bool

    def stores(self, name: str, dimensions: int) -> torch.dtype:
        """The dtype that a weight is kept in. Only the blocks' matrices are ever fp8; they are nearly all there is."""
        return self.compute if self.storage in FLOAT8 and not is_large(name, dimensions) else self.storage


def choose_precision(checkpoint: Checkpoint, weight_dtype: str, device: torch.device) -> Precision:
    """weight_dtype: one of WEIGHT_DTYPES. device: that will compute.

    'as stored' does what ComfyUI's own loader does with such a file: ComfyUI's flags for the precision of models count,
    and float32 files are kept in bfloat16 where the device computes in it. Raises WeightsError for an unknown name.
    """
    if weight_dtype not in WEIGHT_DTYPES:
        raise WeightsError(f"weight dtype {weight_dtype!r} is unknown; use {', '.join(WEIGHT_DTYPES)}")
    if weight_dtype == FP8 or (weight_dtype == AS_STORED and checkpoint.scaled):
        compute = comfy.model_management.unet_manual_cast(None, device, SUPPORTED)
        return Precision(compute, compute, scaled=True)
    storage = torch.bfloat16 if weight_dtype == BF16 else _stored(checkpoint, device)
    compute = comfy.model_management.unet_manual_cast(storage, device, SUPPORTED) or storage
    return Precision(storage, compute, scaled=False)


def _stored(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    main = next(iter(checkpoint.dtypes))
    parameters = sum(torch.Size(shape).numel() for shape in checkpoint.shapes().values())
    return comfy.model_management.unet_dtype(
        device=device, model_params=parameters, supported_dtypes=SUPPORTED, weight_dtype=DTYPES[main]
    )
