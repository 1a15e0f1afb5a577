"""Synthetic checkpoints: every name of the published files, with sizes small enough to write, or full-size and empty.

Names and shapes come from the golden checkpoint_layout.json. Small files keep all names (40 layers, 24 of umT5) and
shrink the widths; full-size files are sparse: the header and the length are real, the tensors are holes.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

LAYOUT_FILE = Path(__file__).parent.parent / "goldens" / "data" / "checkpoint_layout.json"
TOKENIZER = Path(__file__).parents[2] / "lingbot_core" / "assets" / "tiny" / "tokenizer"
ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
T5_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
VAE_FILE = "Wan2.1_VAE.pth"

# Published width -> small width. What is not listed stays: latent and control channels, kernels, heads of umT5.
SMALL_DIT = {5120: 80, 30720: 480, 13824: 96, 4096: 64, 256: 32}
SMALL_VAE = {96: 4, 192: 8, 384: 16, 768: 32, 1152: 48}
SMALL_TEXT = {256384: 300, 4096: 64, 10240: 48}
SMALL_CONFIG = {"dim": 80, "ffn_dim": 96, "text_dim": 64, "freq_dim": 32}

Shapes = Mapping[str, Sequence[int]]
State = dict[str, Tensor]


def small(shapes: Shapes, widths: Mapping[int, int], seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (0.1 * torch.randn([widths.get(n, n) for n in shape], generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def write_sparse(path: Path, shapes: Shapes, dtype: str = "F32", metadata: Mapping[str, str] | None = None) -> Path:
    """A safetensors file of zeros that takes no room on the disk."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def write_sparse_shards(folder: Path, shapes: Shapes, count: int, dtype: str = "F32") -> None:
    table = {}
    for number, names in enumerate(split(list(shapes), count), 1):
        file = f"diffusion_pytorch_model-{number:05}-of-{count:05}.safetensors"
        write_sparse(folder / file, {name: shapes[name] for name in names}, dtype)
        table.update(dict.fromkeys(names, file))
    write_json(folder / "diffusion_pytorch_model.safetensors.index.json", {"metadata": {}, "weight_map": table})


def write_shards(folder: Path, state: State, count: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = {}
    for number, names in enumerate(split(list(state), count), 1):
        file = f"diffusion_pytorch_model-{number:05}-of-{count:05}.safetensors"
        save_file({name: state[name] for name in names}, folder / file)
        table.update(dict.fromkeys(names, file))
    write_json(folder / "diffusion_pytorch_model.safetensors.index.json", {"metadata": {}, "weight_map": table})


def write_file(path: Path, state: State, metadata: Mapping[str, str] | None = None) -> Path:
    """By suffix: safetensors, or a .pth of a state dict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pth":
        torch.save(state, path)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata=metadata)
    return path


def write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def split(names: list[str], count: int) -> list[list[str]]:
    size = -(-len(names) // count)
    return [names[start : start + size] for start in range(0, len(names), size)]


@dataclass
class Checkpoints:
    """Small parts under their published names, and writers of the layouts they come in."""

    layout: dict[str, Any]
    dit: State = field(init=False)
    act: State = field(init=False)
    vae: State = field(init=False)
    text: State = field(init=False)

    # For the tests to call without an import.
    write_file = staticmethod(write_file)
    write_json = staticmethod(write_json)
    write_shards = staticmethod(write_shards)
    write_sparse = staticmethod(write_sparse)
    write_sparse_shards = staticmethod(write_sparse_shards)

    def __post_init__(self) -> None:
        self.dit = small(self.layout["lingbot_world_fast_cam"]["shapes"], SMALL_DIT, 1)
        self.act = small(self.layout["lingbot_world_act"]["shapes"], SMALL_DIT, 2)
        self.vae = small(self.layout["wan21_vae_pth"]["shapes"], SMALL_VAE, 3)
        self.text = small(self.layout["umt5_xxl_enc_pth"]["shapes"], SMALL_TEXT, 4, torch.bfloat16)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the small transformer, in v1's spelling."""
        return {**self.layout["lingbot_world_fast_cam"]["config"], **SMALL_CONFIG}

    @property
    def diffusers_vae(self) -> State:
        names = self.layout["diffusers_format"]["vae"]["from_pth"]
        return {names[name]: tensor for name, tensor in self.vae.items()}

    @property
    def hf_text(self) -> State:
        """Under transformers' names, with the tied embedding stored twice."""
        names = self.layout["diffusers_format"]["text_encoder"]["from_pth"]
        return {new: tensor.clone() for name, tensor in self.text.items() for new in names[name]}

    def write_parts(self, base: Path) -> None:
        """VAE, text encoder and tokenizer as in v1's base folder."""
        write_file(base / VAE_FILE, self.vae)
        write_file(base / T5_FILE, self.text)
        shutil.copytree(TOKENIZER, base / "google" / "umt5-xxl", dirs_exist_ok=True)

    def v1(self, root: Path, state: State | None = None) -> Path:
        """root/lingbot_world_fast with shards, the other parts beside it."""
        folder = root / "lingbot_world_fast"
        write_shards(folder, self.dit if state is None else state)
        write_json(folder / "config.json", self.config)
        self.write_parts(root)
        return root

    def v2(self, root: Path, folder: str = "transformers") -> Path:
        write_shards(root / folder, self.dit)
        write_json(root / folder / "config.json", self.config)
        self.write_parts(root)
        return root

    def diffusers(self, root: Path) -> Path:
        about = self.layout["diffusers_format"]
        config = {**about["transformer"]["config"], "ffn_dim": 96, "text_dim": 64, "freq_dim": 32}
        write_file(root / "transformer" / "diffusion_pytorch_model.safetensors", self.dit)
        write_json(root / "transformer" / "config.json", {"_class_name": about["transformer"]["class_name"], **config})
        write_file(root / "vae" / "diffusion_pytorch_model.safetensors", self.diffusers_vae)
        write_json(root / "vae" / "config.json", {"_class_name": about["vae"]["class_name"]})
        write_file(root / "text_encoder" / "model.safetensors", self.hf_text)
        write_json(root / "scheduler" / "scheduler_config.json", {"flow_shift": 5.0})
        write_json(root / "model_index.json", {"transformer": ["diffusers", about["transformer"]["class_name"]]})
        shutil.copytree(TOKENIZER, root / "tokenizer")
        return root

    def comfy(self, models: Path, name: str = "lingbot_world_fast_bf16.safetensors", prefix: str = "") -> Path:
        """ComfyUI's models folder; returns the transformer's file."""
        file = models / "diffusion_models" / name
        write_file(file, {prefix + key: tensor.to(torch.bfloat16) for key, tensor in self.dit.items()})
        write_file(models / "vae" / "wan_2.1_vae.safetensors", self.vae)
        write_file(models / "text_encoders" / "umt5_xxl_fp16.safetensors", self.hf_text)
        shutil.copytree(TOKENIZER, models / "text_encoders" / "umt5-xxl")
        return file


@pytest.fixture(scope="session")
def checkpoints() -> Checkpoints:
    return Checkpoints(json.loads(LAYOUT_FILE.read_text(encoding="utf-8")))
