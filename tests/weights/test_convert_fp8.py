"""``lingbot-world convert --dtype fp8``: half the size, and what every loader makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lingbot_core import World
from lingbot_core.cli import main
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.quantise import FP8, LARGEST, is_large, quantise

NAME = "diffusion_models/lingbot_world_tiny_fp8_e4m3fn_scaled.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    assert main(["convert", "tiny", str(folder), "--dtype", "fp8"]) == 0
    return folder


def test_a_weight_fills_the_range_of_its_numbers():
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)) * 0.02
    values, scale = quantise(weight)
    assert values.dtype == FP8
    assert scale.shape == ()
    assert values.float().abs().max() == LARGEST
    error = (values.float() * scale - weight).abs()
    # Three bits of mantissa: half a step is 1/16 of a number, and of the smallest ones 2**-10 of the unit of the scale.
    assert (error <= weight.abs() / 16 + 2**-10 * scale).all()
    values, scale = quantise(torch.zeros(4, 4))
    assert not values.float().any()
    assert math.isfinite(scale)


def test_only_the_matrices_of_the_blocks_become_fp8(made):
    layout = find_layout("tiny")
    source = layout.transformer.open()
    large = {name for name, shape in source.shapes().items() if is_large(name, len(shape))}
    tensors = load_file(made / NAME)
    assert {name for name, tensor in tensors.items() if tensor.dtype == FP8} == large
    scales = {name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")}
    assert scales == large
    assert {t.dtype for name, t in tensors.items() if name not in large and "scale" not in name.split(".")[-1]} == {
        torch.bfloat16
    }
    for name in sorted(large)[:20]:
        values, scale = quantise(source.read(name, dtype=torch.float32))
        assert torch.equal(tensors[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(tensors[f"{name}_scale"], scale)
    with safe_open(made / NAME, "pt") as file:
        about = json.loads(file.metadata()["_quantization_metadata"])
    assert about["layers"] == {name.removesuffix(".weight"): {"format": "float8_e4m3fn"} for name in large}


def test_text_encoder_and_vae_stay_as_they_are(made):
    assert [path.name for path in (made / "text_encoders").iterdir()] == ["tiny_text_encoder_bf16.safetensors"]
    assert {t.dtype for t in load_file(made / "text_encoders" / "tiny_text_encoder_bf16.safetensors").values()} == {
        torch.bfloat16,
        torch.uint8,
    }
    [vae] = (made / "vae").iterdir()
    assert {tensor.dtype for tensor in load_file(vae).values()} == {torch.float16}


def test_the_library_loads_it_near_the_source_and_says_what_it_is(made, capsys):
    assert find_layout(made).transformer.open().scaled
    small, whole = World.load(made, device="cpu"), World.load("tiny", device="cpu")
    for (name, mine), theirs in zip(small.dit.named_parameters(), whole.dit.parameters(), strict=True):
        step = 1 / 16 if is_large(name, theirs.ndim) else 2**-8
        assert (mine - theirs).abs().max() <= step * theirs.abs().max(), name
    assert main(["inspect", str(made)]) == 0
    assert "fp8" in capsys.readouterr().out.lower()


def test_a_file_of_it_becomes_the_same_file_again(made, tmp_path):
    assert main(["convert", str(made), str(tmp_path), "--dtype", "fp8", "--only", "dit"]) == 0
    [again] = (tmp_path / "diffusion_models").iterdir()
    first, second = load_file(made / NAME), load_file(again)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, torch.equal(tensor.float(), second[name].float())) == (second[name].dtype, True), name
