"""Which preset a checkpoint is for, by the order of evidence, and its licence."""

from __future__ import annotations

import shutil

import pytest

from lingbot_core.engine.world import World
from lingbot_core.errors import PresetError, WeightsError
from lingbot_core.presets import PRESETS
from lingbot_core.weights.layout import find_layout
from lingbot_core.weights.metadata import FileMetadata, read_metadata, write_metadata


def test_our_metadata_survives_being_written_and_read():
    about = FileMetadata("v2-diffusers", "act", {"num_heads": 40, "text_len": 512}, "a folder")
    entries = write_metadata(about)
    assert entries == {
        "lingbot_world.format": "1",
        "lingbot_world.preset": "v2-diffusers",
        "lingbot_world.control": "act",
        "lingbot_world.config": '{"num_heads": 40, "text_len": 512}',
        "lingbot_world.source": "a folder",
    }
    assert read_metadata(entries, "x") == about
    assert read_metadata({"format": "pt"}, "x") is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"lingbot_world.format": "2"}, "this version reads 1; update this package"),
        ({"lingbot_world.format": "1", "lingbot_world.config": "{"}, "config is not JSON"),
        ({"lingbot_world.format": "1", "lingbot_world.config": "[]"}, "must hold a JSON object"),
    ],
)
def test_metadata_that_cannot_be_understood_is_refused(entries, message):
    with pytest.raises(WeightsError, match=message):
        read_metadata(entries, "x.safetensors")


def test_metadata_outranks_the_name_and_brings_heads_and_text_length(checkpoints, tmp_path):
    about = FileMetadata("v2-causal-fast", "cam", {"num_heads": 20, "text_len": 64})
    file = tmp_path / "lingbot_world_fast.safetensors"
    checkpoints.write_file(file, checkpoints.dit, write_metadata(about))
    layout = find_layout(file)
    assert layout.require_preset().name == "v2-causal-fast"
    assert layout.preset_reason == "the file's metadata names v2-causal-fast"
    checkpoints.write_file(tmp_path / "Wan2.1_VAE.pth", checkpoints.vae)
    config = World.load(file, device="cpu").dit.config
    assert (config.num_heads, config.text_len) == (20, 64)


def test_metadata_of_an_unknown_preset_is_an_error_listing_those_that_exist(checkpoints, tmp_path):
    file = checkpoints.write_file(
        tmp_path / "a.safetensors", checkpoints.dit, write_metadata(FileMetadata("v3-fast", "cam"))
    )
    with pytest.raises(WeightsError, match="'v3-fast', which this version does not have; choose one of v1-fast, "):
        find_layout(file)


NAMES = {
    "lingbot_world_fast.safetensors": "v1-fast",
    "LingBot-World-Fast-14B_fp8_e4m3fn_scaled.safetensors": "v1-fast",
    "lingbot-world-v2-14b-causal-fast_bf16.safetensors": "v2-causal-fast",
    "lingbot-world-v2-1.3b-causal-fast.safetensors": "v2-causal-fast",
    "lingbot-world-v2-14b-causal-fast-diffusers.safetensors": "v2-diffusers",
    "lingbot-world-v2-14b-causal-pretrain.safetensors": "v2-causal-pretrain",
    "lingbot-world-faster.safetensors": None,
    "world.safetensors": None,
    "transformers.safetensors": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_is_evidence(name, checkpoints, tmp_path):
    shapes = {key: tuple(tensor.shape) for key, tensor in checkpoints.dit.items()}
    layout = find_layout(checkpoints.write_sparse(tmp_path / name, shapes, "BF16"))
    assert (layout.preset and layout.preset.name) == NAMES[name]
    if layout.preset is not None:
        assert layout.preset_reason == f"the file is called {name}"


def test_config_json_is_the_next_evidence(checkpoints, tmp_path):
    root = checkpoints.diffusers(tmp_path / "some model")
    (root / "model_index.json").unlink()
    layout = find_layout(root)
    assert layout.require_preset().name == "v2-diffusers"
    assert "config.json" in layout.preset_reason


@pytest.mark.parametrize(("shift", "preset"), [(5.0, "v2-diffusers"), (10.0, None)])
def test_model_index_with_the_scheduler_is_the_last(shift, preset, checkpoints, tmp_path):
    root = checkpoints.diffusers(tmp_path / "some model")
    (root / "transformer" / "config.json").unlink()
    checkpoints.write_json(root / "scheduler" / "scheduler_config.json", {"flow_shift": shift})
    layout = find_layout(root)
    assert (layout.preset and layout.preset.name) == preset


def test_without_evidence_every_preset_is_listed_and_one_can_be_chosen(checkpoints, tmp_path):
    checkpoints.write_file(tmp_path / "world.safetensors", checkpoints.dit)
    checkpoints.write_file(tmp_path / "Wan2.1_VAE.pth", checkpoints.vae)
    with pytest.raises(PresetError, match="choose a preset: " + ", ".join(PRESETS)):
        World.load(tmp_path / "world.safetensors", device="cpu")
    world = World.load(tmp_path / "world.safetensors", preset="v1-fast", device="cpu")
    assert (world.preset.name, world.preset_reason) == ("v1-fast", "chosen by the user")


def test_the_licence_follows_the_release(checkpoints, tmp_path):
    checkpoints.v1(tmp_path / "v1")
    assert find_layout(tmp_path / "v1").evidence.licence.startswith("Apache-2.0")
    (tmp_path / "v2").mkdir()
    shutil.move(tmp_path / "v1" / "lingbot_world_fast", tmp_path / "v2" / "transformers")
    assert "CC BY-NC-SA 4.0" in find_layout(tmp_path / "v2").evidence.licence
    shutil.move(tmp_path / "v2" / "transformers", tmp_path / "v2" / "weights")
    assert find_layout(tmp_path / "v2" / "weights").evidence.licence.startswith("unknown")
    assert find_layout("tiny").evidence.licence == "Apache-2.0 (part of this pack)"
