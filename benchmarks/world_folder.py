"""Writes a model's folder with random weights of any size, as LingBotLoadWorldFolder reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from .random_weights import randomise

FILE = "diffusion_pytorch_model.safetensors"


def write_world(folder: Path, transformer: nn.Module, vae: nn.Module, *, tiny: Path, preset: str, area: int) -> None:
    """Fills both modules at random and writes them, with the text encoder of the embedded model beside them.

    tiny: the embedded model's folder; the transformer must take text states of its width. area: pixels of a picture at
    the model's own size.
    """
    torch.manual_seed(0)
    for name, module in (("transformer", transformer), ("vae", vae)):
        randomise(module)
        (folder / name).mkdir(parents=True)
        save_file({key: value.data.contiguous() for key, value in module.named_parameters()}, folder / name / FILE)
    config = transformer.config
    about = {"num_heads": config.num_heads, "text_len": config.text_len, "control_type": config.control}
    (folder / "transformer" / "config.json").write_text(json.dumps(about))
    for name in ("text_encoder", "tokenizer"):
        shutil.copytree(tiny / name, folder / name)
    world = {"name": "random", "preset": preset, "native_area": area}
    (folder / "world.json").write_text(json.dumps(world))
