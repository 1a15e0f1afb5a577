"""Damaged files: whatever bits are flipped and wherever the file ends, it loads or is refused; nothing else happens."""

from __future__ import annotations

import random
import struct
import warnings

import pytest
import torch

from lingbot_core.errors import InputFileError, WeightsError
from lingbot_core.models.vae import VAEConfig, WanVAE
from lingbot_core.weights.checkpoint import Checkpoint
from lingbot_core.weights.files import SafetensorsFile
from lingbot_core.weights.keys import VAE
from lingbot_core.weights.load import fill, vae_config

ROUNDS = {"anywhere": 100, "structure": 300}


@pytest.fixture(scope="module")
def vae(checkpoints):
    """Few and small tensors, so that most bytes of the file are header; every part of the format is there."""
    model = WanVAE(VAEConfig(dim=2, num_res_blocks=1))
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator).half() for name, p in model.named_parameters()}


def attempt(path):
    """Loads everything; True when it was accepted, False when it was refused as it should be."""
    refusal = None
    try:
        checkpoint = Checkpoint(VAE, [path])
        module = WanVAE(vae_config(checkpoint), device="meta")
        fill(module, checkpoint, device="cpu", dtype=torch.float32)
    except (WeightsError, InputFileError) as error:
        refusal = str(error)
    if refusal is None:
        assert all(torch.isfinite(p).all() for p in module.parameters())
    else:
        assert str(path) in refusal
    return refusal is None


def header_length(data):
    return 8 + struct.unpack("<Q", data[:8])[0]


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("region", ["anywhere", "structure"])
def test_flipped_bits_never_do_anything_but_load_or_be_refused(suffix, region, vae, checkpoints, tmp_path):
    path = checkpoints.write_file(
        tmp_path / f"vae.{suffix}", vae, **({"metadata": {"a": "b"}} if suffix != "pth" else {})
    )
    data = path.read_bytes()
    # Structure: the header of safetensors; the pickle at the start and the directory at the end of a .pth.
    if region == "anywhere":
        places = range(len(data))
    elif suffix == "safetensors":
        places = range(header_length(data))
    else:
        end = data.index(b"PK\x01\x02")
        places = [*range(data.index(b"/data/0") if b"/data/0" in data else 20000), *range(end, len(data))]
    chance = random.Random(f"{suffix} {region}")
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(ROUNDS[region]):
            broken = bytearray(data)
            for _ in range(chance.choice((1, 1, 2, 8))):
                broken[chance.choice(places)] ^= 1 << chance.randrange(8)
            path.write_bytes(broken)
            outcomes.append(attempt(path))
    assert not all(outcomes)
    path.write_bytes(data)
    assert attempt(path)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_every_truncation_is_refused(suffix, vae, checkpoints, tmp_path):
    path = checkpoints.write_file(tmp_path / f"vae.{suffix}", vae)
    data = path.read_bytes()
    chance = random.Random(suffix)
    for length in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, *(chance.randrange(len(data)) for _ in range(60))):
        path.write_bytes(data[:length])
        with pytest.raises(WeightsError, match=rf"vae\.{suffix} cannot be read: it is truncated"):
            Checkpoint(VAE, [path])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}" + b"rest",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}     ' + b"1234",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}      ' + b"1234",
    ],
)
def test_headers_made_to_mislead_are_refused(data, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=r"a\.safetensors cannot be read"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_refused(vae, checkpoints, tmp_path):
    path = checkpoints.write_file(tmp_path / "vae.safetensors", vae)
    checkpoint = Checkpoint(VAE, [path])
    path.write_bytes(path.read_bytes()[: header_length(path.read_bytes())])
    with pytest.raises(WeightsError, match=r"reading encoder\.conv1\.weight failed: the file ends too early"):
        checkpoint.read("encoder.conv1.weight")
