"""Names and shapes of the published transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lingbot_core.models.dit import CausalWanDiT, DiTConfig

FILES = ("checkpoint_layout.json",)


@pytest.fixture(scope="module")
def layout(golden_dir: Path) -> dict[str, Any]:
    return json.loads((golden_dir / "checkpoint_layout.json").read_text())


@pytest.mark.parametrize(("entry", "control"), [("lingbot_world_fast_cam", "cam"), ("lingbot_world_act", "act")])
def test_the_transformer_has_the_names_and_shapes_of_the_published_file(layout, entry, control):
    published = layout[entry]["shapes"]
    config = DiTConfig.from_shapes(published, num_heads=40)
    assert config == DiTConfig(control=control)
    dit = CausalWanDiT(config, device="meta")
    assert {name: list(tensor.shape) for name, tensor in dit.state_dict().items()} == published
    assert sum(math.prod(shape) for shape in published.values()) == layout[entry]["n_params"]


def test_the_published_configuration_is_the_default(layout):
    published, ours = layout["lingbot_world_fast_cam"]["config"], DiTConfig()
    names = (
        "dim",
        "ffn_dim",
        "num_layers",
        "num_heads",
        "freq_dim",
        "text_dim",
        "text_len",
        "in_dim",
        "out_dim",
        "eps",
    )
    for name in names:
        assert published[name] == getattr(ours, name)
    assert published["control_type"] == ours.control
    assert tuple(published["patch_size"]) == ours.patch_size
