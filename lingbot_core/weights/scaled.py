"""Weights stored as fp8 with a scale, in ComfyUI's formats; they are multiplied out while loading.

Two spellings exist. The older one: a tensor ``scaled_fp8`` marks the file, a layer's scale is ``LAYER.scale_weight``.
The newer one: ``LAYER.weight_scale``, and the format as JSON, either in the metadata entry ``_quantization_metadata``
(``{"layers": {LAYER: {"format": "float8_e4m3fn"}}}``) or in a tensor of bytes ``LAYER.comfy_quant``. Scales of
activations (``scale_input``, ``input_scale``) serve fp8 arithmetic only and are left out.
Source: ComfyUI's QUANTIZATION.md, comfy/utils.py (convert_old_quants) and comfy/ops.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightsError

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
METADATA_KEY = "_quantization_metadata"
MARK = "scaled_fp8"
_SCALES = ("weight_scale", "scale_weight")
_LEFT_OUT = ("input_scale", "scale_input", "comfy_quant")


@dataclass(frozen=True)
class Quantisation:
    """Which weights are scaled. scales: weight -> its scale tensor. formats: weight -> format, where it is said.

    helpers: tensors that are no weights themselves. full_precision: weights whose file wants them multiplied in the
    dtype of the activations, also where the device could multiply in fp8.
    """

    scales: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    helpers: frozenset[str] = frozenset()
    full_precision: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Scaled:
    """A weight as it is stored: values (fp8) * scale (float32, one number or one for each row).

    format: of FORMATS. full_precision: see Quantisation.
    """

    values: Tensor
    scale: Tensor
    format: str
    full_precision: bool


def find_quantisation(
    names: Collection[str], metadata: Mapping[str, str], read: Callable[[str], Tensor], *, prefix: str, where: str
) -> Quantisation:
    """Looks for either spelling.

    names: without their prefix. read: gives a tensor by such a name. where: the file, for messages. Raises WeightsError
    for formats other than fp8, and for a scaled layer without a scale.
    """
    known = set(names)
    formats, full_precision = _formats(known, metadata, read, prefix=prefix, where=where)
    scales, helpers = {}, {MARK} & known
    for name in known:
        layer, _, leaf = name.rpartition(".")
        weight = f"{layer}.weight"
        if weight not in known:
            continue
        if leaf in _SCALES:
            scales[weight] = name
        if leaf in (*_SCALES, *_LEFT_OUT):
            helpers.add(name)
    for weight, format_ in sorted(formats.items()):
        if format_ not in FORMATS:
            raise WeightsError(
                f"{where}: {weight} is quantised as {format_!r}, which is not supported; use the bf16 file, or one "
                f"in {' or '.join(FORMATS)}"
            )
        if weight not in scales:
            raise WeightsError(
                f"{where}: {weight} is quantised, but {weight.removesuffix('weight')}weight_scale is missing"
            )
    if MARK in known and read(MARK).numel() == 2:
        # The older spelling says so with a mark of two elements.
        full_precision |= scales.keys()
    return Quantisation(scales, formats, frozenset(helpers), frozenset(full_precision))


def dequantise(stored: Tensor, scale: Tensor, *, format_: str | None, dtype: torch.dtype) -> Tensor:
    """stored * scale in float32, then ``dtype``.

    stored: fp8, or its bytes as uint8 where ``format_`` says which fp8 they are. scale: one number, or one for each
    row. Raises WeightsError for another scale, or bytes of no stated format.
    """
    stored = _viewed(stored, format_)
    for_rows = scale.ndim > 0 and scale.shape[0] == scale.numel() == stored.shape[0]
    if scale.numel() != 1 and not for_rows:
        raise WeightsError(
            f"has a scale of shape {list(scale.shape)} for a weight of shape {list(stored.shape)}; one number, or one "
            "for each row, is supported"
        )
    if scale.numel() > 1:
        scale = scale.reshape(-1, *([1] * (stored.ndim - 1)))
    return stored.float().mul_(scale.float()).to(dtype)


def as_scaled(stored: Tensor, scale: Tensor, *, format_: str | None, full_precision: bool) -> Scaled:
    """The parts of a stored weight without multiplying them out. stored, format_: as for `dequantise`.

    Raises WeightsError for what is no fp8.
    """
    stored = _viewed(stored, format_)
    name = next((name for name, dtype in FORMATS.items() if dtype == stored.dtype), None)
    if name is None:
        raise WeightsError(f"is {str(stored.dtype).removeprefix('torch.')} with a scale; fp8 is expected")
    if not torch.isfinite(stored.to(torch.bfloat16)).all() or not torch.isfinite(scale.float()).all():
        raise WeightsError("holds NaN or infinity; get the file again")
    return Scaled(stored, scale.float(), name, full_precision)


def _viewed(stored: Tensor, format_: str | None) -> Tensor:
    """Bytes as the fp8 numbers that they are."""
    if stored.dtype == torch.uint8:
        if format_ is None:
            raise WeightsError("holds bytes, and nothing says which format they are in")
        stored = stored.view(FORMATS[format_])
    if not stored.is_floating_point():
        raise WeightsError(
            f"is {str(stored.dtype).removeprefix('torch.')} with a scale; only fp8 with a scale is supported"
        )
    return stored


def _formats(
    known: set[str], metadata: Mapping[str, str], read: Callable[[str], Tensor], *, prefix: str, where: str
) -> tuple[dict[str, str], set[str]]:
    """Weight -> format, from the metadata and from tensors of bytes; and the weights that want full precision."""
    found: dict[str, Any] = {}
    if METADATA_KEY in metadata:
        layers = _json(metadata[METADATA_KEY], f"{where}: metadata {METADATA_KEY}").get("layers")
        if not isinstance(layers, dict):
            raise WeightsError(f"{where}: metadata {METADATA_KEY} has no table 'layers'")
        found = {layer.removeprefix(prefix): about for layer, about in layers.items()}
        # A whole checkpoint's table also lists the layers of other parts.
        found = {layer: about for layer, about in found.items() if f"{layer}.weight" in known}
    for name in sorted(known):
        layer, _, leaf = name.rpartition(".")
        if leaf == "comfy_quant" and f"{layer}.weight" in known:
            found[layer] = _json(bytes(read(name).view(torch.uint8).tolist()), f"{where}: {name}")
    formats = {}
    for layer, about in found.items():
        if not isinstance(about, dict) or not isinstance(about.get("format"), str):
            raise WeightsError(f"{where}: the quantisation of {layer} names no format")
        formats[f"{layer}.weight"] = about["format"]
    full = {f"{layer}.weight" for layer, about in found.items() if about.get("full_precision_matrix_mult")}
    return formats, full


def _json(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{what} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise WeightsError(f"{what} must hold a JSON object")
    return data
