"""Names and shapes of the published VAE and umT5 files."""

from __future__ import annotations

import json

import pytest

from lingbot_core.models.text import build_umt5, convert_umt5_keys, umt5_config_from_shapes
from lingbot_core.models.vae import VAEConfig, WanVAE

FILES = ("checkpoint_layout.json",)


@pytest.fixture(scope="module")
def layout(golden_dir):
    return json.loads((golden_dir / "checkpoint_layout.json").read_text())


def test_the_vae_has_the_names_and_shapes_of_the_published_file(layout):
    published = layout["wan21_vae_pth"]["shapes"]
    assert VAEConfig.from_state_dict(published) == VAEConfig()
    vae = WanVAE(device="meta")
    assert {name: list(tensor.shape) for name, tensor in vae.state_dict().items()} == published


def test_umt5_xxl_is_recognised_and_its_names_map_one_to_one(layout):
    published = layout["umt5_xxl_enc_pth"]["shapes"]
    diffusers = layout["diffusers_format"]["text_encoder"]
    for names in published, diffusers["shapes"]:
        config = umt5_config_from_shapes(names)
        assert (config["vocab_size"], config["d_model"], config["d_ff"]) == (256384, 4096, 10240)
        assert (config["num_layers"], config["num_heads"], config["d_kv"]) == (24, 64, 64)

    converted = convert_umt5_keys({name: name for name in published})
    expected = {new[0]: old for old, new in diffusers["from_pth"].items()}
    assert converted == expected

    model = build_umt5(config)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == diffusers["shapes"]
    tied = "encoder.embed_tokens.weight"
    assert convert_umt5_keys(published) == {name: shape for name, shape in shapes.items() if name != tied}
