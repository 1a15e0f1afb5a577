"""A draft decoder from its file: what it is called decides which latents it takes, for nothing inside it says so."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..errors import WeightsError
from ..models.tiny_decoder import PREFIX, TinyDecoder
from .files import open_file
from .folder import existing

# Beginning of the file's name -> whether latents are taken as the VAE's decoder does, not normalised. The first is how
# its author's examples feed taew2_1, the second how LightX2V feeds its own.
RAW = {"taew2_1": False, "lighttaew2_1": True}


def load_draft(path: str | Path, *, device: torch.device | str, dtype: torch.dtype) -> TinyDecoder:
    """Reads a .safetensors or .pth. Raises InputFileError, and WeightsError for any other model or name."""
    path = existing(path, "draft decoder")
    if path.is_dir():
        raise WeightsError(f"{path} is a folder; name the file of the draft decoder in it")
    raw = next((raw for name, raw in RAW.items() if path.stem.lower().startswith(name)), None)
    if raw is None:
        raise WeightsError(
            f"{path}: a draft decoder is told by its name, which must begin with {' or '.join(RAW)}; these files are "
            "alike inside, but take other latents"
        )
    file = open_file(path)
    decoder = TinyDecoder(path.stem, raw=raw, device="meta", dtype=dtype)
    for name, parameter in list(decoder.layers.named_parameters()):
        stored = PREFIX + name
        if stored not in file.entries or tuple(file.entries[stored].shape) != tuple(parameter.shape):
            found = list(file.entries[stored].shape) if stored in file.entries else "missing"
            raise WeightsError(
                f"{path} is no tiny decoder for Wan 2.1: tensor {stored} must be {list(parameter.shape)} and is {found}"
            )
        tensor = file.read(stored, dtype, device)
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{path}: tensor {stored} holds NaN or infinity; get the file again")
        owner, _, leaf = name.rpartition(".")
        setattr(decoder.layers.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    return decoder
